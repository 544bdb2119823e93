import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from hub.run_files import local_paths
from hub.sensitive_data import find_sensitive_text, strip_metadata

SECRETS = (
    *("hf_" + "a" * 34, "sk-proj-" + "a1" * 20, "ghp_" + "a" * 36, "github_pat_" + "a1" * 20, "AKIA" + "A1" * 8),
    *("glpat-" + "a" * 20, "xoxb-" + "1" * 12, "AIza" + "a" * 35, "ya29." + "a" * 30, "https://me:secret@there/x"),
    *("npm_" + "a" * 36, "redis://:secret@host:6379/0", "postgres://me:se:cret@host/db", "HTTPS://me:secret@there"),
    *("https://h/x?token=abcdefgh12345", "https://h/x?a=1&api_key=abcdefgh"),
    *("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijkl", "-----BEGIN RSA PRIVATE KEY-----"),
)
KEYS = ("api_key", "wandb_api_key", "password", "passphrase", "hub_token", "refresh_token", "AWS_SECRET_ACCESS_KEY")


@pytest.mark.parametrize("secret", SECRETS)
def test_finds_all_kinds_of_credentials(secret):
    table = "\u2028".join(["source\treference\ttranslation", *["a\tb\tc\r"] * 200]) + f"\na\t{secret}\tb\n"
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in secret)
    for name, text in (
        ("samples.tsv", table),
        ("all_results.json", json.dumps({"deep": [{"x": f"see {secret} there"}]})),
        ("all_results.json", json.dumps({secret: 1})),
        ("tokenizer.json", f'{{"vocab": {{"{escaped}": 1}}}}'),
        ("modeling_vanilla_transformer.py", f"# {secret}"),
        ("recipe.yaml", f"new_key: >-\n  {secret}"),
    ):
        assert "contains a credential" in (find_sensitive_text(name, text.encode()) or ""), (name, text[:100])


@pytest.mark.parametrize("key", KEYS)
def test_finds_secrets_by_key(key):
    assert "contains a credential" in find_sensitive_text("all_results.json", json.dumps({"x": {key: "0123"}}).encode())
    assert "contains a credential" in find_sensitive_text("recipe.yaml", f"db.{key}: 12345678\n".encode())
    assert find_sensitive_text("tokenizer_config.json", json.dumps({"bos_token": "<s>", key: ""}).encode()) is None


@pytest.mark.parametrize("key", ["token", "wandb_key", "clientSecret", "hubToken", "myApiKey", "openai_key"])
def test_finds_credentials_by_key_and_value(key):
    assert "contains a credential" in find_sensitive_text("recipe.yaml", f"{key}: abcdefgh12345678\n".encode())


@pytest.mark.parametrize("name", ["vocab.json", "target_vocab.json", "source_tokenizer.json", "added_tokens.json"])
@pytest.mark.parametrize("word", ["secret", "password", "credentials", "passphrase", "api_key"])
def test_accepts_words_of_vocabularies(name, word):
    assert find_sensitive_text(name, json.dumps({"model": {"vocab": {word: 57}}, word: 12345678}).encode()) is None


@pytest.mark.parametrize("name", ["recipe.yaml", "tokenizer.json", "tokenizer_config.json", "config.json"])
def test_accepts_keys_of_recipes_and_tokenizers(name):
    keys = ["pad_token", "eos_token", "tokens_per_update", "bos_token_id", "tokenizer_type", "key_head_dim"]
    keys += ["max_tokens", "max_new_tokens", "tokens", "key", "secrets", "padToken", "sort_key"]
    content = dict.fromkeys(keys, "abcdefgh12345678") | {"token": "word", "token_type": "char"}
    assert find_sensitive_text(name, json.dumps(content).encode()) is None
    assert find_sensitive_text("samples.tsv", "Besuche https://x.org:80，请联系a@b.com".encode()) is None
    assert find_sensitive_text(name, json.dumps({"x": "https://h/x?tokens=abcdefgh12345&page=3"}).encode()) is None


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/home/me/x",
            "/srv/x",
            "/scratch/x",
            "D:/x",
            "d:\\x",
            "C:\\Users\\me and you\\x",
            "~/x",
            "~me/x",
            "file:///x",
        ),
        *("../../x", "..\\x", "\\\\server\\share", "/lustre/me/x", "/Volumes/x/y", "/odd/path"),
    ],
)
@pytest.mark.parametrize("text", ["{}", "see {} there", "({})", "a={}"])
def test_finds_all_kinds_of_paths(path, text):
    if path == "/odd/path" and text != "{}":
        return  # within text, only unambiguous paths are found
    for value in ({"deep": [{"x": text.format(path)}]}, {text.format(path): 1}):
        assert "contains a local path" in (find_sensitive_text("all_results.json", json.dumps(value).encode()) or ""), (
            value
        )


@pytest.mark.parametrize(
    "text",
    [
        *("and/or", "km/h", "https://huggingface.co/home/x", "user/name", "10:/", "a:b", "v1.0/x", "<a/home/x>", "..."),
        *("hf_device_map_of_encoder_and_decoder_layers", "sk-" + "so-" * 12, "hf_short"),
        *("1/2/3", "~5", "x ~ y", "s/home", "nrefs:1|case:mixed", "[^\\w]", "</s>", "//", "tok:13a", "C:", "9:30"),
    ],
)
def test_accepts_text_that_resembles_paths(text):
    assert find_sensitive_text("all_results.json", json.dumps({"x": text}).encode()) is None


def test_finds_exact_paths_in_sentences():
    paths = ("/very/own",)
    assert "contains a local path" in find_sensitive_text("samples.tsv", b"a\nin /very/own it is\tb\tc\n", paths)
    assert find_sensitive_text("samples.tsv", b"a\nin /home/you it is\tb\tc\n", paths) is None  # a sentence


@pytest.mark.parametrize("path", ["/models", "/root", "/a", "C:\\x"])
def test_finds_short_paths_except_within_names(path):
    """URLs and longer names are not local paths."""
    for name in ("README.md", "samples.tsv", "tokenizer.json", "merges.txt"):
        for text in ("see {} there", "({})", "file://{}/x", "'{}/x'", "{}.", "{}"):
            content = json.dumps({"x": text.format(path)}) if name.endswith("json") else text.format(path)
            assert "contains a local path" in (find_sensitive_text(name, content.encode(), (path,)) or ""), (name, text)
        for text in ("https://huggingface.co{}", "x{}/y", "{}2/y", "{}-old", "{}_x", "..{}"):
            content = json.dumps({"x": text.format(path)}) if name.endswith("json") else text.format(path)
            assert find_sensitive_text(name, content.encode(), (path,)) is None, (name, text)
    assert (
        find_sensitive_text("a.spm", f"x {path} y".encode(), ("/a", "/root")) is None
    )  # short byte strings occur by chance


def test_root_is_not_local_path(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/root")
    paths = local_paths(tmp_path)
    assert "/root" in paths
    assert "/" not in paths


def test_training_plots_have_no_metadata(tmp_path):
    """Therefore, images are uploaded as they are."""
    from training.run.results.plots import plot_training_curve

    history = [{"loss": 2.0, "step": 1}, {"loss": 1.0, "step": 2}, {"eval_loss": 1.0, "step": 2}]
    plot_training_curve(history, tmp_path / "training_curve.png")
    image = Image.open(tmp_path / "training_curve.png")
    assert image.info.keys() == {"dpi"}
    assert not image.getexif()


LOCAL_PATHS = ("/srv/somewhere/corpus",)
LINES = ["the dog runs", "a cat sleeps in the house", "two birds sing"] * 20


@pytest.fixture(params=["unigram", "bpe", "char"])
def pieces(request, tmp_path):
    """Bytes of a SentencePiece model that was trained on a local file."""
    import sentencepiece

    (tmp_path / "corpus.txt").write_text("\n".join(LINES))
    (tmp_path / "rules.tsv").write_text("41\t61\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "trained"), vocab_size=30,
        hard_vocab_limit=False, model_type=request.param, normalization_rule_tsv=str(tmp_path / "rules.tsv"),
        user_defined_symbols=["<x>"], minloglevel=2,
    )  # fmt: skip
    content = (tmp_path / "trained.model").read_bytes()
    assert str(tmp_path).encode() in content
    return content


@pytest.mark.parametrize("name", ["source.spm", "spiece.model", "sentencepiece.bpe.model"])
def test_removes_paths_from_sentencepiece_model(tmp_path, pieces, name):
    from sentencepiece import SentencePieceProcessor

    stripped = strip_metadata(name, pieces)
    assert str(tmp_path).encode() not in stripped
    assert find_sensitive_text(name, stripped, (str(tmp_path),)) is None
    assert "contains a local path" in find_sensitive_text(name, pieces, (str(tmp_path),))
    assert strip_metadata(name, stripped) == stripped
    before, after = (SentencePieceProcessor(model_proto=each) for each in (pieces, stripped))
    assert before.serialized_model_proto() != after.serialized_model_proto()
    for text in (*LINES[:3], "A DOG <x> unknown", "zwei Vögel", ""):
        assert before.encode(text) == after.encode(text)
        assert before.encode(text, out_type=str) == after.encode(text, out_type=str)
        assert before.decode(before.encode(text)) == after.decode(after.encode(text))


def test_finds_path_in_sentencepiece_pieces():
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = ModelProto()
    model.pieces.add(piece=f"x{LOCAL_PATHS[0]}/x")
    content = strip_metadata("source.spm", model.SerializeToString())
    assert (
        find_sensitive_text("source.spm", content, LOCAL_PATHS)
        == f"source.spm contains a local path ({LOCAL_PATHS[0]})"
    )
    assert find_sensitive_text("source.spm", content) is None  # a word with slashes may not be a path


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\x80\x02}q\x00.", b"PK\x03\x04", b"{}", b"\x00" * 40, bytes(range(256))]
)
@pytest.mark.parametrize("name", ["source.spm", "my.model", "attention_1.png"])
def test_rejects_unknown_binary_files(name, content):
    what = "is not a PNG image" if name.endswith("png") else "is not a SentencePiece model"
    with pytest.raises(ValueError, match=f"{name} {what}. Remove it. Nothing was uploaded"):
        strip_metadata(name, content)


def test_recipe_paths_are_local_paths(tmp_path):
    """The corpus path of a run on another machine is found in a file of sentences."""
    (tmp_path / "recipe.yaml").write_text("data_dir: /lustre/me/corpora\ntrain: [data/x, /scratch7/y.en]\nname: a/b\n")
    paths = local_paths(tmp_path)
    assert {"/lustre/me/corpora", "/scratch7/y.en", str(tmp_path), str(Path.cwd())} <= set(paths)
    assert not {"data/x", "a/b"} & set(paths)
    assert "contains a local path" in find_sensitive_text("samples.tsv", b"a\tb\t/lustre/me/corpora/train.en\n", paths)


@pytest.mark.parametrize(
    ("tensor", "metadata", "message"),
    [
        ("a", {"format": "pt", "trained_in": "/home/me/x"}, "w.safetensors, trained_in, contains a local path"),
        ("a", {"format": "pt", "note": "hf_" + "a" * 34}, "w.safetensors, note, contains a credential"),
        ("a", {"format": "pt", "api_key": "0123"}, "w.safetensors, api_key, contains a credential (012...)"),
        ("a", {"/home/me": "x"}, "w.safetensors contains a local path (/home/me)"),
        ("/home/me/a", {"format": "pt"}, "w.safetensors contains a local path (/home/me/a)"),
    ],
)
def test_checks_safetensors_header(tmp_path, tensor, metadata, message):
    save_file({tensor: torch.zeros(2)}, tmp_path / "w.safetensors", metadata)
    assert find_sensitive_text("w.safetensors", tmp_path / "w.safetensors").startswith(message)


def test_accepts_saved_weights(tmp_path, make_model):
    make_model().save_pretrained(tmp_path)
    assert find_sensitive_text("model.safetensors", tmp_path / "model.safetensors", (str(tmp_path),)) is None


def test_rejects_invalid_safetensors(tmp_path):
    for content in (b"", b"x", b"\xff" * 9, b"\x02" + b"\0" * 7 + b"[]", b"\x05" + b"\0" * 7 + b"[[[[["):
        (tmp_path / "w.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"w\.safetensors is not a valid safetensors file"):
            find_sensitive_text("w.safetensors", tmp_path / "w.safetensors")
