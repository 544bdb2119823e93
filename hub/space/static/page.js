// Translation in the browser. `page.json` contains the directories of the tokenizers and the limits of the model.
import { AutoModelForSeq2SeqLM, AutoTokenizer, env } from "https://cdn.jsdelivr.net/npm/@huggingface/transformers@4.3.1";

const HUE = "31, 119, 180";
const UNKNOWN_TEXT = "\ue000 \ue000. \ue000, \ue000! \ue000?"; // an unknown character, and marks of all languages
const MEAN = "mean of all";
const element = (id) => document.getElementById(id);
const setStatus = (text) => { element("status").textContent = text; };

Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "./" });
Object.assign(env, { useBrowserCache: false, useWasmCache: false }); // the HTTP cache detects changed files

let page, source, target, model;
let attention; // of the last translation: its tokens, the source tokens, and the weights by step and layer

async function load() {
  page = await (await fetch("page.json")).json();
  element("name").textContent = page.name;
  document.title = `${page.name}: translate and inspect attention`;
  const loaded = new Map();
  const progress_callback = ({ file, loaded: bytes }) => {
    if (!page.file_sizes[file] || !bytes) return;
    loaded.set(file, bytes);
    const sum = (values) => [...values].reduce((one, other) => one + other, 0);
    element("progress").value = Math.min(1, sum(loaded.values()) / sum(Object.values(page.file_sizes)));
  };
  [source, target, model] = await Promise.all([
    AutoTokenizer.from_pretrained(page.source),
    AutoTokenizer.from_pretrained(page.target),
    AutoModelForSeq2SeqLM.from_pretrained("model", { device: "wasm", progress_callback }),
  ]);
  const forward = model.forward.bind(model);
  model.forward = async (inputs) => {
    await new Promise((resolve) => setTimeout(resolve)); // lets the browser repaint between two tokens
    return forward(inputs);
  };
  options("layer", Array.from({ length: model.config.decoder_layers }, (_, i) => `${i + 1}`), model.config.decoder_layers);
  options("head", [MEAN, ...Array.from({ length: model.config.decoder_attention_heads }, (_, i) => `${i + 1}`)], MEAN);
  element("progress").hidden = true;
  element("button").disabled = false;
  setStatus("Ready.");
}

function options(id, names, chosen) {
  element(id).replaceChildren(...names.map((name) => new Option(name, name, false, name === `${chosen}`)));
}

// Returns the ids of a sentence, or an error message.
function encode(text) {
  const words = text.split(/\s+/).filter(Boolean);
  if (!words.length) return "Type a sentence first.";
  const inputs = source(words.join(" "));
  const length = inputs.input_ids.dims.at(-1);
  if (length > page.max_source_tokens)
    return `The text has ${length} tokens, the maximum is ${page.max_source_tokens}. Split it into sentences.`;
  const [ids, others] = [words.join(" "), UNKNOWN_TEXT].map((each) =>
    source(each, { add_special_tokens: false }).input_ids.tolist()[0].map(Number),
  );
  const isUnknown = (id) => page.unknown_ids.includes(id);
  if (ids.some(isUnknown) && ids.every((id) => isUnknown(id) || others.includes(id)))
    return "The vocabulary does not contain any of these words. Is this the source language of the model?";
  return inputs;
}

// Returns the words that contain an unknown token.
function unknownWords(words) {
  return words.filter((word) => source(word).input_ids.tolist()[0].some((id) => page.unknown_ids.includes(Number(id))));
}

async function translate(text) {
  const inputs = encode(text);
  element("translation").value = "";
  attention = undefined;
  showAttention();
  if (typeof inputs === "string") return setStatus(inputs);
  setStatus("Translating ...");
  const start = performance.now();
  const ids = [];
  const streamer = {
    put: ([row]) => {
      ids.push(...row.map(Number));
      element("translation").value = target.decode(ids, { skip_special_tokens: true });
    },
    end: () => {},
  };
  const max_new_tokens = Math.min(inputs.input_ids.dims.at(-1) + page.extra_tokens, page.max_new_tokens);
  const outputs = await model.generate({
    ...inputs, num_beams: 1, do_sample: false, max_new_tokens, streamer,
    return_dict_in_generate: true, output_attentions: true,
  });
  const unknown = unknownWords(text.split(/\s+/).filter(Boolean));
  const seconds = ((performance.now() - start) / 1000).toFixed(2);
  setStatus(`Done in ${seconds} s, greedy decoding${unknown.length ? `. Unknown words: ${unknown.join(", ")}` : ""}.`);
  const sourceIds = inputs.input_ids.tolist()[0].map(Number);
  attention = { rows: names(target, ids.slice(1)), columns: names(source, sourceIds), weights: outputs.cross_attentions };
  showAttention();
}

// Returns the tokens as the vocabulary writes them.
function names(tokenizer, ids) {
  const tokens = new Map([...tokenizer.get_vocab()].map(([token, id]) => [id, token]));
  return ids.map((id) => tokens.get(id) ?? `<${id}>`);
}

// Shows the cross-attention weights as a table: one row per target token, one column per source token.
function showAttention() {
  const heat = element("heat");
  if (!attention) return heat.replaceChildren();
  const layer = Number(element("layer").value) - 1;
  const head = element("head").value;
  const table = document.createElement("table");
  table.className = "heat";
  table.createCaption().textContent = "a stronger color is a higher weight; the weights of a row sum to 1";
  const top = table.createTHead().insertRow();
  top.insertCell();
  for (const name of attention.columns) top.append(heading(name, "col"));
  const body = table.createTBody();
  attention.rows.forEach((name, step) => {
    const row = body.insertRow();
    row.append(heading(name, "row"));
    const heads = attention.weights[step][layer].tolist()[0].map((each) => each.at(-1)); // (H, S)
    const chosen = head === MEAN ? heads : [heads[Number(head) - 1]];
    attention.columns.forEach((column, i) => {
      const weight = chosen.reduce((sum, each) => sum + each[i], 0) / chosen.length;
      const cell = row.insertCell();
      cell.style.background = `rgba(${HUE}, ${weight.toFixed(3)})`;
      cell.title = `${name} to ${column}: ${weight.toFixed(2)}`;
    });
  });
  heat.replaceChildren(table);
}

function heading(text, scope) {
  const cell = document.createElement("th");
  cell.scope = scope;
  cell.textContent = text;
  return cell;
}

element("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (element("button").disabled) return;
  element("button").disabled = true;
  try {
    await translate(element("sentence").value);
  } catch (error) {
    setStatus(`The translation failed: ${error.message}`);
  } finally {
    element("button").disabled = false;
  }
});
for (const id of ["layer", "head"]) element(id).addEventListener("change", showAttention);
load().catch((error) => setStatus(`The model cannot be loaded: ${error.message}`));
