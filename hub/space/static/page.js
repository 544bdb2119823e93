// Translates in the browser. `page.json` says which model and tokenizers stand beside this file, and their limits.
import { AutoModelForSeq2SeqLM, AutoTokenizer, env } from "https://cdn.jsdelivr.net/npm/@huggingface/transformers@4.3.1";

const HUE = "31, 119, 180";
const MEAN = "mean of all";
const element = (id) => document.getElementById(id);
const tell = (text) => { element("status").textContent = text; };

Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "./" });
Object.assign(env, { useBrowserCache: false, useWasmCache: false }); // the browser's own cache knows what has changed

let page, source, target, model;
let drawn; // the last translation: its tokens, those of the source, and the weights by step and layer

async function load() {
  page = await (await fetch("page.json")).json();
  element("name").textContent = page.name;
  document.title = `${page.name}: translate, and look inside`;
  const loaded = new Map();
  const progress_callback = ({ file, loaded: bytes }) => {
    if (!page.bytes[file] || !bytes) return;
    loaded.set(file, bytes);
    const sum = (values) => [...values].reduce((one, other) => one + other, 0);
    element("progress").value = Math.min(1, sum(loaded.values()) / sum(Object.values(page.bytes)));
  };
  [source, target, model] = await Promise.all([
    AutoTokenizer.from_pretrained(page.source),
    AutoTokenizer.from_pretrained(page.target),
    AutoModelForSeq2SeqLM.from_pretrained("model", { device: "wasm", progress_callback }),
  ]);
  const forward = model.forward.bind(model);
  model.forward = async (inputs) => { // between two tokens the page is painted
    await new Promise((go) => setTimeout(go));
    return forward(inputs);
  };
  options("layer", Array.from({ length: model.config.decoder_layers }, (_, i) => `${i + 1}`), model.config.decoder_layers);
  options("head", [MEAN, ...Array.from({ length: model.config.decoder_attention_heads }, (_, i) => `${i + 1}`)], MEAN);
  element("progress").hidden = true;
  element("button").disabled = false;
  tell("Ready.");
}

function options(id, names, chosen) {
  element(id).replaceChildren(...names.map((name) => new Option(name, name, false, name === `${chosen}`)));
}

// The ids of a sentence, or a string that says why it cannot be translated.
function encode(text) {
  const words = text.split(/\s+/).filter(Boolean);
  if (!words.length) return "Type a sentence first.";
  const inputs = source(words.join(" "));
  const length = inputs.input_ids.dims.at(-1);
  if (length > page.longest) return `That is ${length} tokens, and this page takes ${page.longest}: split it into sentences.`;
  if (unknown(words).length === words.length)
    return "The model has never seen any of these words or letters: is this its source language?";
  return inputs;
}

// The words of which something is unknown to the vocabulary.
function unknown(words) {
  return words.filter((word) => source(word).input_ids.tolist()[0].some((id) => page.unknown.includes(Number(id))));
}

async function translate(text) {
  const inputs = encode(text);
  element("translation").value = "";
  drawn = undefined;
  draw();
  if (typeof inputs === "string") return tell(inputs);
  tell("Translating ...");
  const start = performance.now();
  const ids = [];
  const streamer = {
    put: ([row]) => {
      ids.push(...row.map(Number));
      element("translation").value = target.decode(ids, { skip_special_tokens: true });
    },
    end: () => {},
  };
  const most = Math.min(inputs.input_ids.dims.at(-1) + page.extra, page.most);
  const found = await model.generate({
    ...inputs, num_beams: 1, do_sample: false, max_new_tokens: most, streamer,
    return_dict_in_generate: true, output_attentions: true,
  });
  const strange = unknown(text.split(/\s+/).filter(Boolean));
  const seconds = ((performance.now() - start) / 1000).toFixed(2);
  tell(`Done in ${seconds} s, greedily${strange.length ? `. Never seen in training: ${strange.join(", ")}` : ""}.`);
  const sourceIds = inputs.input_ids.tolist()[0].map(Number);
  drawn = { rows: names(target, ids.slice(1)), columns: names(source, sourceIds), weights: found.cross_attentions, ids };
  draw();
}

const names = (tokenizer, ids) => ids.map((id) => tokenizer.decode([id]) || `<${id}>`);

// What each token of the translation attended to, as a table: translation down, source across.
function draw() {
  const heat = element("heat");
  if (!drawn) return heat.replaceChildren();
  const layer = Number(element("layer").value) - 1;
  const head = element("head").value;
  const table = document.createElement("table");
  table.className = "heat";
  table.createCaption().textContent = "the stronger the colour, the more weight; a row adds up to 1";
  const top = table.createTHead().insertRow();
  top.insertCell();
  for (const name of drawn.columns) top.append(heading(name, "col"));
  const body = table.createTBody();
  drawn.rows.forEach((name, step) => {
    const row = body.insertRow();
    row.append(heading(name, "row"));
    const heads = drawn.weights[step][layer].tolist()[0].map((each) => each.at(-1)); // (H, S)
    const chosen = head === MEAN ? heads : [heads[Number(head) - 1]];
    drawn.columns.forEach((column, i) => {
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
    tell(`It could not be translated: ${error.message}`);
  } finally {
    element("button").disabled = false;
  }
});
for (const id of ["layer", "head"]) element(id).addEventListener("change", draw);
load().catch((error) => tell(`The model cannot be loaded: ${error.message}`));
