import json
import struct
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import save_file

from hub.private import find_private, find_private_in_binary

SECRETS = (
    *("hf_" + "a" * 34, "sk-proj-" + "a1" * 20, "ghp_" + "a" * 36, "github_pat_" + "a1" * 20, "AKIA" + "A1" * 8),
    *("glpat-" + "a" * 20, "xoxb-" + "1" * 12, "AIza" + "a" * 35, "npm_" + "a" * 36, "https://me:secret@there/x"),
    *("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijkl", "-----BEGIN RSA PRIVATE KEY-----"),
)


@pytest.mark.parametrize("secret", SECRETS)
def test_tokens_of_every_kind_are_found_anywhere(secret):
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
        assert "holds a token" in (find_private(name, text.encode()) or ""), (name, text[:100])


@pytest.mark.parametrize("key", ["api_key", "wandb_api_key", "password", "hub_token", "AWS_SECRET_ACCESS_KEY"])
def test_what_a_key_calls_secret_is_one(key):
    assert "holds a token" in find_private("all_results.json", json.dumps({"x": {key: "0123"}}).encode())
    assert find_private("tokenizer_config.json", json.dumps({"bos_token": "<s>", key: ""}).encode()) is None


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
        *("../../x", "..\\x", "\\\\server\\share", "/lustre/me/x", "/Volumes/x/y", "/odd/place"),
    ],
)
@pytest.mark.parametrize("text", ["{}", "see {} there", "({})", "a={}"])
def test_paths_of_every_kind_are_found(path, text):
    if path == "/odd/place" and text != "{}":
        return  # only what is nothing else than a path may begin anywhere
    for value in ({"deep": [{"x": text.format(path)}]}, {text.format(path): 1}):
        assert "holds a path" in (find_private("all_results.json", json.dumps(value).encode()) or ""), value


@pytest.mark.parametrize(
    "text",
    [
        *("and/or", "km/h", "https://huggingface.co/home/x", "user/name", "10:/", "a:b", "v1.0/x", "<a/home/x>", "..."),
        *("hf_device_map_of_encoder_and_decoder_layers", "sk-" + "so-" * 12, "hf_short"),
        *("1/2/3", "~5", "x ~ y", "s/home", "nrefs:1|case:mixed", "[^\\w]", "</s>", "//", "tok:13a", "C:", "9:30"),
    ],
)
def test_what_is_no_path_is_not_taken_for_one(text):
    assert find_private("all_results.json", json.dumps({"x": text}).encode()) is None


def test_this_machine_is_known_by_its_own_places():
    there = ("/very/own",)
    assert "holds a path" in find_private("samples.tsv", b"a\nin /very/own it is\tb\tc\n", there)
    assert find_private("samples.tsv", b"a\nin /home/you it is\tb\tc\n", there) is None  # a sentence


def picture(path: Path, how: str = "", text: str = "") -> Path:
    """A PNG file as Pillow writes it, which says something."""
    told, exif = PngInfo(), Image.Exif()
    if how == "tEXt":
        told.add_text("Comment", text)
    elif how == "zTXt":
        told.add_text("Comment", text, zip=True)
    elif how in ("iTXt", "packed iTXt"):
        told.add_itxt("XML:com.adobe.xmp", f"<x>{text}</x>", "de", "Worte", zip="packed" in how)
    elif how == "EXIF":
        exif[0x010E] = text  # description
    elif how == "unknown":
        told.add(b"prVt", text.encode())
    Image.new("RGB", (300, 300)).save(path, pnginfo=told, exif=exif if how == "EXIF" else None)
    if how == "behind":
        path.write_bytes(path.read_bytes() + text.encode())
    return path


@pytest.mark.parametrize("text", ["/home/me/run 1/x", "see hf_" + "a" * 34, "in /very/own folder"])
@pytest.mark.parametrize("how", ["tEXt", "zTXt", "iTXt", "packed iTXt", "EXIF", "unknown", "behind"])
def test_what_a_picture_says_is_read(tmp_path, how, text):
    found = find_private_in_binary(picture(tmp_path / "a.png", how, text), ("/very/own",))
    assert found.startswith("a.png holds a " + ("token" if "hf_" in text else "path of this machine"))


@pytest.mark.parametrize(
    ("tensor", "metadata", "message"),
    [
        ("a", {"format": "pt", "trained_in": "/home/me/x"}, "w.safetensors, trained_in, holds a path of this machine"),
        ("a", {"format": "pt", "note": "hf_" + "a" * 34}, "w.safetensors, note, holds a token"),
        ("a", {"format": "pt", "api_key": "0123"}, "w.safetensors, api_key, holds a token (012...)"),
        ("a", {"/home/me": "x"}, "w.safetensors holds a path of this machine (/home/me)"),
        ("/home/me/a", {"format": "pt"}, "w.safetensors holds a path of this machine (/home/me/a)"),
    ],
)
def test_the_head_of_weights_is_read(tmp_path, tensor, metadata, message):
    save_file({tensor: torch.zeros(2)}, tmp_path / "w.safetensors", metadata)
    assert find_private_in_binary(tmp_path / "w.safetensors").startswith(message)


def test_weights_and_pictures_as_runs_leave_them_go_up(tmp_path, make_model):
    from training.run.pictures import plot_training_curve

    make_model().save_pretrained(tmp_path)
    history = [{"loss": 2.0, "step": 1}, {"loss": 1.0, "step": 2}, {"eval_loss": 1.0, "step": 2}]
    plot_training_curve(history, tmp_path / "training_curve.png")
    picture(tmp_path / "attention_1.png")
    for path in (*tmp_path.glob("*.png"), *tmp_path.glob("*.safetensors")):
        assert find_private_in_binary(path, (str(tmp_path),)) is None


def test_what_cannot_be_read_is_not_uploaded(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a\.png is no PNG picture"):
        find_private_in_binary(tmp_path / "a.png")
    for content in (b"", b"x", b"\xff" * 9, b"\x02" + b"\0" * 7 + b"[]", b"\x05" + b"\0" * 7 + b"[[[[["):
        (tmp_path / "w.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"w\.safetensors is no safetensors file"):
            find_private_in_binary(tmp_path / "w.safetensors")


def test_a_text_that_unpacks_to_much_is_not_unpacked(tmp_path):
    """A megabyte of it is looked at, of twenty."""
    path = picture(tmp_path / "a.png")
    text = b"Comment\0\0" + zlib.compress(bytes(2 * 10**7) + b" hf_" + b"a" * 34)
    whole = path.read_bytes()
    path.write_bytes(whole[:33] + struct.pack(">I4s", len(text), b"zTXt") + text + bytes(4) + whole[33:])
    assert find_private_in_binary(path) is None
