"""What `--to onnx` writes, for transformers.js under Node and in a browser."""

import json
import subprocess
from functools import partial

import pytest

from hub.export import main
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
    """The folder of a trained model, 100 sentences, and the ids and the first text of our greedy translations."""
    partial(run_main, main)(demo_checkpoint, tmp_path / "page" / "model", "--to", "onnx")
    model, tokenizer = load_model(str(demo_checkpoint)), load_tokenizer(str(demo_checkpoint))
    lines = [english for english, _ in demo_sentences[:100]]
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    found = model.generate(**batch, num_beams=1, max_new_tokens=40)
    rows = [row[: row.index(2) + 1] if 2 in row else row for row in found.tolist()]
    assert len({tuple(row) for row in rows}) > 50  # it did learn to tell sentences apart
    return tmp_path / "page" / "model", lines, rows, tokenizer.decode(found[0], skip_special_tokens=True)


@pytest.mark.slow
def test_node_and_a_browser_generate_the_same_ids(exported, transformers_js, open_page):
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
    answer = page.evaluate("lines => answers.translate(lines)", lines)
    assert answer["rows"] == rows
    assert answer["text"] == text
