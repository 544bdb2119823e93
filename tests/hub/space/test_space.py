"""Gradio page: functions of the translator, and the page in a browser."""

import hashlib
import inspect
import json
import re
import socket

import pytest
import torch
from huggingface_hub import RepoCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.hub.hub_server import Repository
from vanilla_transformer import TranslationPipeline
from vanilla_transformer.shared.transformers_conversion import to_transformers


@pytest.fixture(scope="module")
def app():
    from hub.space import app

    return app


@pytest.fixture
def make_translator(app, tmp_path, make_model, make_tokenizer):
    def make(shared: bool = True, **overrides):
        tokenizer, sizes = make_tokenizer(shared)
        make_model(**(sizes | overrides)).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return app.Translator(str(tmp_path / "model"))

    return make


@pytest.mark.parametrize("shared", [True, False])
def test_attention_matches_axis_tokens(app, make_translator, shared):
    """Check the weights of all layers and heads. The label of a decoder row is the token that it predicts."""
    translator = make_translator(shared, encoder_layers=3)
    batch = translator.encode("the dog runs")
    (ids, score), *_ = translator.candidates(batch, 5)
    attention = translator.attention(batch, ids)
    source = translator.tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    weights, rows, columns = attention["cross"]
    assert weights.shape == (2, 4, len(rows), len(source))
    assert columns == source
    assert attention["encoder"][0].shape == (3, 4, len(source), len(source))
    assert attention["decoder"][1] == rows
    assert attention["decoder"][2] == ["<s>", *rows[:-1]]
    vocabulary = translator.target.get_vocab()
    assert [vocabulary[row] for row in rows] == ids.tolist()[1 : len(rows) + 1]
    torch.testing.assert_close(torch.tensor(weights.sum(-1)), torch.ones(weights.shape[:-1]))
    first = app.heat_map(attention, "cross", "1", "2")
    assert first.count("<td style") == len(rows) * len(source)
    assert f"{weights[0, 1, 0, 0]:.3f})" in first
    assert first != app.heat_map(attention, "cross", "2", "2")
    assert app.heat_map(attention, "cross", "3", "1") == app.heat_map(
        attention, "cross", "2", "1"
    )  # the decoder has only 2 layers
    with torch.no_grad():
        labels = torch.where(ids[1:] == 0, -100, ids[1:])[None]
        loss = translator.model(**batch, labels=labels).loss
    assert score == pytest.approx(-loss.item(), abs=1e-4)


def test_shows_id_of_row_without_token(app, make_translator):
    """A model may have more rows than its tokenizer has tokens."""
    translator = make_translator(vocab_size=600)
    attention = translator.attention(translator.encode("the dog runs"), torch.tensor([1, 5, 599, 2]))
    assert attention["cross"][1][1] == "<599>"
    assert "&lt;599&gt;" in app.heat_map(attention, "cross", "1", "1")


def test_attention_ends_at_eos_of_generation_config(make_translator):
    translator = make_translator()
    translator.model.generation_config.eos_token_id = [2, 6]
    attention = translator.attention(translator.encode("the dog runs"), torch.tensor([1, 5, 6, 0]))
    assert len(attention["cross"][1]) == 2


def test_loads_moving_average(app, make_translator, make_model, tmp_path):
    """The page shows the same weights as the commands."""
    config = make_translator().model.config
    average = make_model(seed=1, vocab_size=config.vocab_size)
    average.save_pretrained(tmp_path / "model" / "ema")
    translator = app.Translator(str(tmp_path / "model"))
    assert torch.equal(translator.model.lm_head.weight, average.lm_head.weight)


@pytest.mark.parametrize("content", [b"x", b"\xff" * 100, b""])
def test_page_reports_corrupt_checkpoint(app, make_translator, tmp_path, content):
    make_translator()
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    load = next(each.fn for each in app.make_page(str(tmp_path / "model")).fns.values() if each.name == "load")
    *_, (status, *_) = load()
    assert "cannot be loaded: " in status


def test_page_reports_code_for_earlier_transformers(app, make_translator, tmp_path, monkeypatch):
    model_class = type(make_translator().model)  # that of the installed package, not the code in the checkpoint
    monkeypatch.setattr(model_class.forward, "__signature__", inspect.signature(lambda self, past_key_values: None))
    load = next(each.fn for each in app.make_page(str(tmp_path / "model")).fns.values() if each.name == "load")
    *_, (status, *_) = load()
    assert "cannot be loaded: its code is for transformers before 5.24." in status


def test_page_reports_model_of_other_class(app, make_translator, tmp_path):
    model = to_transformers(make_translator(lm_head_bias=False).model)
    model.save_pretrained(tmp_path / "model")
    load = next(each.fn for each in app.make_page(str(tmp_path / "model")).fns.values() if each.name == "load")
    *_, (status, *_) = load()
    assert f"it is a {type(model).__name__}. Convert it with: vanilla-transformer import {tmp_path}" in status


def test_stream_ends_with_greedy_translation(make_translator):
    translator = make_translator()
    batch = translator.encode("the dog runs")
    seen = list(translator.stream(batch))
    ids = translator.model.generate(**batch, max_new_tokens=batch["input_ids"].shape[1] + 50)[0]
    assert seen[-1] == translator.decode(ids)
    assert len(seen) == len(ids)
    assert all(later.startswith(earlier) for earlier, later in zip(seen, seen[1:], strict=False))


def test_stop_strings_of_generation_config_end_translations(make_translator):
    translator = make_translator()
    batch = translator.encode("the dog runs")
    complete = list(translator.stream(batch))[-1]
    translator.model.generation_config.stop_strings = [complete[3:5]]
    stopped = list(translator.stream(batch))[-1]
    assert complete.startswith(stopped)
    assert len(stopped) < len(complete)
    ((ids, _),) = translator.candidates(batch, 1)
    assert translator.decode(ids) == stopped


@pytest.mark.parametrize("method", ["encode", "stream", "candidates"])
def test_page_reports_errors_of_transformers(app, make_translator, tmp_path, monkeypatch, method):
    """Errors such as that of stop strings, if the vocabulary lacks Latin letters."""

    def fail(*args):
        raise ValueError("substring not found")

    make_translator()
    monkeypatch.setattr(app.Translator, method, fail)
    events = app.PageEvents(str(tmp_path / "model"))
    *_, (status, text, candidates, attention, _) = events.translate("the dog runs", 2, "cross", "1", app.MEAN)
    assert "substring not found" in status
    assert (text, candidates, attention) == ("", "", None)


def test_stream_raises_errors_of_generate(make_translator):
    translator = make_translator()
    batch = translator.encode("the dog runs") | {"input_ids": torch.tensor([[999]])}
    with pytest.raises(ValueError, match="outside the vocabulary"):
        list(translator.stream(batch))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "Type a sentence"),
        ("  \n", "Type a sentence"),
        ("the dog " * 200, "the maximum is 200"),
        ("собака бежит", "does not contain any of these words"),
    ],
)
def test_reports_invalid_input(make_translator, text, answer):
    with pytest.raises(ValueError, match=answer):
        make_translator().encode(text)


@pytest.mark.parametrize("text", ["thehousedogsingsж", "dog☃", "a☃ a☃"])
def test_accepts_words_with_an_unknown_character(make_translator, text):
    translator = make_translator()
    assert translator.unknown_words(text) == text.split()
    assert translator.encode(text)["input_ids"].shape[1] > 2


def test_learned_positions_limit_length(make_translator):
    translator = make_translator(position_embedding_type="learned", max_position_embeddings=12)
    with pytest.raises(ValueError, match="the maximum is 12"):
        translator.encode("the dog runs in the house and sings")
    batch = translator.encode("the dog")
    assert len(list(translator.stream(batch))) <= 12


def test_length_penalty_of_the_checkpoint_applies(make_translator):
    translator = make_translator(lm_head_bias=True)
    translator.model.lm_head.bias.data[translator.model.config.eos_token_id] += 4  # so that lengths differ
    pipeline = TranslationPipeline(model=translator.model, tokenizer=translator.tokenizer)
    found = []
    for penalty in (-3.0, 1.0, 3.0):
        translator.model.generation_config.update(num_beams=3, max_new_tokens=8, length_penalty=penalty)
        best, _ = translator.candidates(translator.encode("the dog runs"), 3)[0]
        found.append(translator.decode(best))
        assert found[-1] == pipeline("the dog runs")[0]["translation_text"]
    assert len(set(found)) > 1


@pytest.mark.parametrize("limits", [{"max_new_tokens": 4}, {"max_length": 4}, {}])
def test_limits_equal_those_of_pipeline(make_translator, limits):
    translator = make_translator()
    config = translator.model.generation_config
    config.update(**({"max_new_tokens": None, "max_length": None, "num_beams": 1} | limits))
    pipeline = TranslationPipeline(model=translator.model, tokenizer=translator.tokenizer)
    batch = translator.encode("the dog runs in the house")
    assert list(translator.stream(batch))[-1] == pipeline("the dog runs in the house")[0]["translation_text"]
    best, _ = translator.candidates(batch, 2)[0]
    assert translator.decode(best) == pipeline("the dog runs in the house", num_beams=2)[0]["translation_text"]


def test_scores_of_processed_beams_are_not_named_log_probabilities(app, make_translator):
    """A repetition penalty changes the scores of beam search."""
    translator = make_translator()
    translator.model.generation_config.repetition_penalty = 1.8
    batch = translator.encode("the dog runs")
    (ids, score), *_ = translator.candidates(batch, 2)
    with torch.no_grad():
        labels = torch.where(ids[1:] == 0, -100, ids[1:])[None]
        loss = translator.model(**batch, labels=labels).loss
    assert abs(score + loss.item()) > 0.01
    assert "<p>Best translations of beam search with their scores</p>" in app.nbest_list(
        [(translator.decode(ids), score)]
    )


def test_finds_unknown_words(make_translator):
    assert make_translator().unknown_words("the собака runs") == ["собака"]


def test_tokens_with_embedding_of_unk_are_unknown(make_translator, app, tmp_path):
    """Imports copy the row of <unk> for tokens outside a toolkit's dictionary."""
    translator = make_translator()
    ids, unknown = translator.tokenizer("dog")["input_ids"], translator.tokenizer.unk_token_id
    table = translator.model.get_input_embeddings().weight
    table.data[ids[:-1]] = table.data[unknown].clone()
    translator.model.save_pretrained(tmp_path / "model")
    translator = app.Translator(str(tmp_path / "model"))
    assert translator.unknown_words("dog") == ["dog"]
    with pytest.raises(ValueError, match="does not contain any of these words"):
        translator.encode("dog")


def test_one_beam_gives_greedy_translation(make_translator):
    """The score is the mean log-probability of its tokens."""
    for seed in range(6):
        torch.manual_seed(seed)
        translator = make_translator()
        torch.nn.init.normal_(translator.model.lm_head.weight)
        translator.model.generation_config.update(num_beams=3, num_return_sequences=2)
        batch = translator.encode("the dog runs in the house")
        *_, greedy = translator.stream(batch)
        ((ids, score),) = translator.candidates(batch, 1)
        assert translator.decode(ids) == greedy
        with torch.no_grad():
            loss = translator.model(**batch, labels=ids[None, 1:]).loss
        assert score == pytest.approx(-loss.item(), abs=1e-4)


# --- The page in a browser ---


@pytest.fixture(scope="module")
def programs(start_programs, hub):
    with start_programs("hub.space.__main__", "hub.push", **hub.environment) as programs:
        yield programs


@pytest.fixture(scope="module")
def address(programs, demo_checkpoint, app) -> str:
    """URL of the page with the demo checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = programs.start("hub.space.__main__", demo_checkpoint, "--port", port)
    process.wait_for(lambda: "Running on local URL" in process.stdout)
    yield f"http://127.0.0.1:{port}"
    process.kill()


FIRST_TOKEN = """() => new Promise(done => {
    const box = document.querySelector("#translation textarea");
    let start = 0;
    document.addEventListener("keydown", event => { if (event.key === "Enter") start = performance.now(); }, true);
    const check = () => box.value ? done(performance.now() - start) : requestAnimationFrame(check);
    requestAnimationFrame(check);
})"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_page_in_browser(browser, address, demo_checkpoint, demo_sentences, tmp_path, width):
    """Use the page by keyboard: translation, n-best list, heat map, other layers. Nothing overflows the window."""
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)  # slow machines
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(120_000)
    page.goto(address)
    page.get_by_text(re.compile("Ready: 2 \\+ 2 layers")).wait_for()
    expect(page.get_by_label("Sentence")).to_be_focused()
    sentence = demo_sentences[0][0]
    page.keyboard.type(sentence)
    waiting = page.evaluate_handle(f"() => ({{time: ({FIRST_TOKEN})()}})")
    page.keyboard.press("Enter")
    milliseconds = waiting.evaluate("each => each.time")
    page.get_by_text("Done in").wait_for()
    print(f"{width} pixels: {milliseconds:.0f} ms from the key to the first token")

    model = AutoModelForSeq2SeqLM.from_pretrained(demo_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint)
    batch = tokenizer(sentence, return_tensors="pt")
    nbest_ids = model.generate(**batch, num_beams=5, num_return_sequences=5, max_new_tokens=60)
    expected = tokenizer.batch_decode(nbest_ids, skip_special_tokens=True)
    expect(page.locator("#translation textarea")).to_have_value(expected[0])
    scored = [re.compile(rf"^{re.escape(text)} -\d+\.\d+$") for text in expected]
    expect(page.locator("ol li")).to_have_text(scored)

    def colors() -> list[str]:
        return page.locator(".heat tbody td").evaluate_all("cells => cells.map(cell => cell.style.background)")

    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    expect(page.locator(".heat thead th")).to_have_text(tokens)
    before = colors()
    assert len(set(before)) > 3
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    page.get_by_label("within the source").focus()
    page.keyboard.press("Space")
    expect(page.locator(".heat tbody th")).to_have_text(tokens)
    before = colors()  # before the keys, because the page may update at once
    page.get_by_label("Layer").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "before => [...document.querySelectorAll('.heat tbody td')].map(c => c.style.background).join() !== before",
        arg=",".join(before),
    )
    after = colors()
    assert after != before
    assert len(after) == len(before)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for bad, answer in (
        ("", "Type a sentence first"),
        ("собака", "does not contain any of these"),
        ("a " * 300, "the maximum is 200"),
    ):
        page.get_by_label("Sentence").fill(bad)
        page.get_by_role("button", name="Translate").press("Enter")
        page.get_by_text(answer).wait_for()
        expect(page.locator("#translation textarea")).to_have_value("")
    page.close()


@pytest.mark.slow
def test_publishes_space(programs, hub, demo_checkpoint, repository):
    """Upload the page, requirements and README with the model. A checkpoint that is not on the Hub is rejected."""
    process = programs.run("hub.space.__main__", demo_checkpoint, "--push", "user/page", status=2)
    assert "Run vanilla-transformer push first" in process.stderr
    process = programs.run("hub.space.__main__", "user/nothing", "--push", "user/page", status=2)
    assert "user/nothing does not exist" in process.stderr
    hub.repositories["user/opus"] = Repository(branches={"main": [{"config.json": b'{"model_type": "marian"}'}]})
    process = programs.run("hub.space.__main__", "user/opus", "--push", "user/page", status=2)
    message = "user/opus has model_type=marian. Convert it with vanilla-transformer import user/opus OUTPUT"
    assert message in process.stderr
    assert "spaces/user/page" not in hub.repositories
    programs.run("hub.push", demo_checkpoint, "user/shown", "--license", "mit")
    programs.run("hub.space.__main__", "user/shown", "--push", "user/page")
    files = hub.repositories["spaces/user/page"].files("main")
    assert sorted(files) == ["README.md", "app.py", "pushed_files.json", "requirements.txt"]
    data = RepoCard(files["README.md"].decode()).data
    assert data.models == ["user/shown"]
    assert data.sdk == "gradio"
    assert data.app_file == "app.py"
    assert files["app.py"] == (repository / "hub" / "space" / "app.py").read_bytes()
    hub.fault("commit", "500")  # the Hub has created the Space with a README
    programs.run("hub.space.__main__", "user/shown", "--push", "user/again", status=2)
    again = hub.repositories["spaces/user/again"]
    mine, initial = {"README.md": b"mine"}, again.branches["main"].copy()
    again.branches["main"].append(mine)  # of another user
    process = programs.run("hub.space.__main__", "user/shown", "--push", "user/again", status=2)
    assert "user/again contains README.md that this program did not write" in process.stderr
    assert "--card" not in process.stderr
    assert again.files("main") == mine
    again.branches["main"] = initial
    programs.run("hub.space.__main__", "user/shown", "--push", "user/again")
    assert again.files("main").keys() == files.keys()
    hashes = [hashlib.sha1(b"blob 1\0x").hexdigest(), hashlib.sha256(b"x").hexdigest()]
    static = {"index.html": b"x", "pushed_files.json": json.dumps({"index.html": hashes}).encode()}
    again.branches["main"].append(static)  # an earlier push of a page of the other kind
    process = programs.run("hub.space.__main__", "user/shown", "--push", "user/again", status=2)
    assert "user/again contains an earlier push of something else, with index.html" in process.stderr
    assert again.files("main") == static
    programs.run("hub.space.__main__", "user/shown", "--push", "user/again", "--replace")
    assert again.files("main").keys() == files.keys()
