"""`--to onnx` with transformers.js under Node and in a browser."""

import json
import subprocess
from functools import partial

import pytest

from hub.export import main
from hub.exporting.tokenizer import convert_to_fast, save_tokenizer
from training.data.tokenizer import train_tokenizer
from training.recipe.arguments import TokenizerArguments
from vanilla_transformer.shared.loading import load_model, load_tokenizer

TRANSLATE = """
async function translate({ AutoTokenizer, AutoModelForSeq2SeqLM, pipeline }, folder, lines) {
    const tokenizer = await AutoTokenizer.from_pretrained(folder);
    const model = await AutoModelForSeq2SeqLM.from_pretrained(folder);
    const rows = [];
    for (const line of lines) {
        const ids = await model.generate({ ...tokenizer(line), num_beams: 1, max_new_tokens: 40 });
        rows.push(ids.tolist()[0].map(Number));
    }
    const translator = await pipeline("translation", folder);
    return { rows, text: (await translator(lines[0], { num_beams: 1, max_new_tokens: 40 }))[0].translation_text };
}
"""
NODE = """
import * as library from "@huggingface/transformers";
import { readFileSync } from "node:fs";
Object.assign(library.env, { allowRemoteModels: false, useFSCache: false, useWasmCache: false });
console.log(JSON.stringify(await translate(library, process.argv[2], JSON.parse(readFileSync(0)))));
"""
PAGE = """<script type="module">
import * as library from "https://cdn.jsdelivr.net/npm/%s";
const options = { allowRemoteModels: false, allowLocalModels: true, localModelPath: "./", useBrowserCache: false };
Object.assign(library.env, options);
const answers = { translate: (lines) => translate(library, "model", lines) };
window.answers = answers;
%s
</script>"""


@pytest.fixture
def exported(demo_checkpoint, demo_sentences, run_main, tmp_path):
    """Exported model, 100 sentences, the ids of their greedy translations, and the first translation."""
    partial(run_main, main)(demo_checkpoint, tmp_path / "page" / "model", "--to", "onnx")
    model, tokenizer = load_model(str(demo_checkpoint)), load_tokenizer(str(demo_checkpoint))
    lines = [english for english, _ in demo_sentences[:100]]
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    ids = model.generate(**batch, num_beams=1, max_new_tokens=40)
    rows = [row[: row.index(2) + 1] if 2 in row else row for row in ids.tolist()]
    assert len({tuple(row) for row in rows}) > 50  # the model distinguishes sentences
    return tmp_path / "page" / "model", lines, rows, tokenizer.decode(ids[0], skip_special_tokens=True)


@pytest.mark.slow
def test_node_and_browser_generate_same_ids(exported, transformers_js, open_page):
    folder, lines, rows, text = exported
    program = transformers_js.parent / "translate.mjs"
    program.write_text(TRANSLATE + NODE)
    process = subprocess.run(
        ["node", program, folder], input=json.dumps(lines), capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    answer = json.loads(process.stdout.splitlines()[-1])
    assert answer["rows"] == rows
    assert answer["text"] == text

    version = json.loads((transformers_js / "@huggingface/transformers/package.json").read_text())["version"]
    (folder.parent / "index.html").write_text(PAGE % (f"@huggingface/transformers@{version}", TRANSLATE))
    page = open_page(folder.parent)
    page.wait_for_function("() => window.answers", timeout=120_000)
    answer = page.evaluate("lines => answers.translate(lines)", lines[:25])  # slower than in Node
    assert answer["rows"] == rows[:25]
    assert answer["text"] == text


TOKENIZE = """
import { AutoTokenizer, env } from "@huggingface/transformers";
import { readFileSync } from "node:fs";
Object.assign(env, { allowRemoteModels: false, useFSCache: false });
const tokenizer = await AutoTokenizer.from_pretrained(process.argv[2]);
const rows = JSON.parse(readFileSync(0)).map((line) => Array.from(tokenizer(line).input_ids.data, Number));
console.log(JSON.stringify([rows, rows.map((row) => tokenizer.decode(row, { skip_special_tokens: true }))]));
"""
MARKS = [
    "Dr. Smith's 3.5 kg dog -- it's l'homme, QU'IL z.B. usw. 1,000.5 N.Y. \u201cquoted\u201d \u2026end",
    "The dogs' U.S. team; No. 5 a-b L\u2019eau Jusqu'\u00e0 10 h. environ -", " two  spaces ", "tab\there",
    "\u65e5\u672c\u8a9e \U0001f600 \u00bd \u00b2 e\u0301 a <s> b </s> $1 & \u0130",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"moses": True}, {"lowercase": True, "moses": True}], ids=str)
def test_node_gives_same_tokens(keys, demo_sentences, transformers_js, tmp_path):
    """Check ids and decoded text for all tokenizer types. Its unigram model merges unknown neighbors."""
    program = transformers_js.parent / "tokenize.mjs"
    program.write_text(TOKENIZE)
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    known = [text for pair in demo_sentences[:300] for text in pair] + MARKS[:2]
    for kind in ("bpe", "unigram", "word", "char"):
        arguments = TokenizerArguments(tokenizer_vocab_size=400, tokenizer_type=kind, **keys)
        tokenizer = train_tokenizer(known, known, arguments)
        save_tokenizer(tokenizer, tmp_path)
        process = subprocess.run(
            ["node", program, tmp_path], input=json.dumps(known + MARKS), capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr[-2000:]
        rows, texts = json.loads(process.stdout.splitlines()[-1])
        assert rows == tokenizer(known + MARKS)["input_ids"], kind
        assert texts == tokenizer.batch_decode(rows, skip_special_tokens=True), kind


@pytest.mark.slow
def test_node_supports_opus_mt_tokenizer(opus_folder, transformers_js, demo_sentences, tmp_path):
    """The converted tokenizers have the ids of the SentencePiece models."""
    program = transformers_js.parent / "tokenize.mjs"
    program.write_text(TOKENIZE)
    tokenizer = load_tokenizer(str(opus_folder()))
    save_tokenizer(convert_to_fast(tokenizer), tmp_path)
    lines = [text for pair in demo_sentences[:100] for text in pair] + MARKS[1:4]
    for side, argument in (("source", "text"), ("target", "text_target")):
        folder = tmp_path / f"{side}_tokenizer"
        (folder / "config.json").write_text('{"model_type": "marian"}')
        process = subprocess.run(
            ["node", program, folder], input=json.dumps(lines), capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr[-2000:]
        rows, texts = json.loads(process.stdout.splitlines()[-1])
        assert rows == tokenizer(**{argument: lines})["input_ids"]
        assert [text.strip() for text in texts] == tokenizer.batch_decode(rows, skip_special_tokens=True)
