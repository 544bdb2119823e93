import json

import pytest

from hub.private import find_private

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
