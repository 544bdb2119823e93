"""Randomly damaged checkpoints as input of every command that reads one."""

import copy
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from hub import export
from tests.fuzz.contract import call, fingerprint, fuzz
from training import average, diversify, score, translate
from training.data.tokenizer import train_tokenizer
from training.recipe.arguments import TokenizerArguments
from training.recipe.reading import read_recipe
from training.run.factories import load_base_model, make_tokenizer
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.command_line import exit_on_user_error

MEMORY = 16 * 2**30  # bytes; limits the effect of settings such as 10**9
SENTENCES = {"en": ["the dog runs", "a cat sleeps"], "de": ["der Hund rennt", "eine Katze schläft"]}
VALUES = [
    *(None, True, False, 0, 1, -1, 3, 64, 10**6, 10**9, 2**63, 10**30, 0.5, -0.5, 1e308, math.nan, math.inf),
    *("", "x", "float16", "../../etc/passwd", "\u2028", "a" * 10_000, [], [1], ["x"], {}, {"x": 1}, [[[[]]]]),
]
REPLACEMENTS = [
    b"",
    b"\0" * 64,
    b"<!DOCTYPE html><html>404</html>",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
]
REPLACEMENTS += [
    b"\x89PNG\r\n\x1a\n",
    b"[" * 100_000,
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe{\0}\0",
    b"PK\3\4",
    b"\x80\x04.",
]
JSONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    """Directories with texts and a checkpoint, one with a shared and one with separate vocabularies."""
    return make_tiny(tmp_path_factory.mktemp("one"), True), make_tiny(tmp_path_factory.mktemp("two"), False)


def make_tiny(folder: Path, shared: bool) -> Path:
    arguments = TokenizerArguments(tokenizer_vocab_size=60, shared_vocabulary=shared)
    tokenizer = train_tokenizer(SENTENCES["en"], SENTENCES["de"], arguments)
    sizes = {"vocab_size": len(tokenizer)}
    if not shared:
        sizes |= {"decoder_vocab_size": tokenizer.target_tokenizer.get_vocab_size()}
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=16, decoder_ffn_dim=16, share_encoder_decoder_embeddings=shared, **sizes,
        )
    )  # fmt: skip
    model.generation_config.update(num_beams=2, max_new_tokens=4)
    checkpoint = folder / "checkpoint"
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    (checkpoint / "recipe.yaml").write_text(yaml.safe_dump({"metric": "translation", "target_lang": "de"}))
    for language, lines in SENTENCES.items():
        (folder / f"text.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def json_items(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [item for key, inner in list(items) for item in [(value, key), *json_items(inner)]]


def damage_json(rng: random.Random, path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(rng.choice((1, 1, 1, 2, 5)) if isinstance(content, dict | list) else 0):
        items = json_items(content)
        shallow = [item for item in items if item[0] is content]
        container, key = rng.choice(shallow if rng.random() < 0.5 else items) if items else (content, "x")
        kind = rng.random()
        if kind < 0.7:
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind < 0.85:
            container.pop(key, None) if isinstance(container, dict) else container.pop()
        elif isinstance(container, dict):
            container[
                rng.choice(("x", "auto_map", "quantization_config", "torch_dtype", "num_beams", "suppress_tokens"))
            ] = copy.deepcopy(rng.choice(VALUES))
    if rng.random() < 0.03:
        content = rng.choice(VALUES)
    path.write_text(json.dumps(content), encoding="utf-8")


def damage_weights(rng: random.Random, path: Path) -> None:
    state = load_file(path)
    name = rng.choice(sorted(state))
    kind = rng.randrange(7)
    if kind == 0:
        del state[name]
    elif kind == 1:
        state[name] = state[name][..., :-1].contiguous()
    elif kind == 2:
        state[name] = state[name].to(
            rng.choice((torch.int8, torch.bool, torch.float16, torch.float64, torch.complex64))
        )
    elif kind == 3:
        state[rng.choice(("x", "model.encoder.layers.7.x", ""))] = torch.ones(3)
    elif kind == 4:
        state[name] = state[name] * rng.choice((math.nan, math.inf, 1e38, 0.0, -1.0))
    elif kind == 5:
        state = {f"module.{key}": value for key, value in state.items()}
    else:
        state[name] = torch.zeros(())
    save_file(state, path, metadata=rng.choice(({"format": "pt"}, {"format": "tf"}, None)))


def damage_bytes(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    kind = rng.randrange(7) if content else 1
    if kind == 0:
        del content[rng.randrange(len(content)) :]
    elif kind == 1:
        content = rng.choice(REPLACEMENTS)
    elif kind == 2:
        for _ in range(rng.choice((1, 3, 30))):
            content[rng.randrange(min(len(content), rng.choice((64, 4096, 10**9))))] = rng.randrange(256)
    elif kind == 3:
        content[:] = rng.randbytes(rng.choice((7, 8, 100, 10_000)))
    elif kind == 4:
        content += rng.randbytes(9)
    path.unlink()
    if kind == 5:
        path.mkdir()
    elif kind != 6:
        path.write_bytes(content)


def damage(rng: random.Random, checkpoint: Path) -> None:
    """Change one or two files of a checkpoint."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        files = sorted(path for path in checkpoint.iterdir() if path.is_file() and path.suffix != ".py")
        path = rng.choice(files)
        if rng.random() < 0.3:
            damage_bytes(rng, path)
        elif path.suffix == ".json":
            try:
                damage_json(rng, path)
            except (ValueError, RecursionError):  # the file is already damaged
                damage_bytes(rng, path)
        elif path.suffix == ".safetensors":
            try:
                damage_weights(rng, path)
            except Exception:  # the file is already damaged
                damage_bytes(rng, path)
        else:
            path.write_text(
                rng.choice(("metric: 3", "[1, 2]", "a: b: c", "metric: [x]", "target_lang: 7", "&a [*a]", "\x00"))
            )


def make_base_model_command(recipe_path: Path, base: Path) -> Callable[[], None]:
    """Return a command that loads a base model as `training.train` does."""

    def main() -> None:
        with exit_on_user_error("training.train"):
            recipe = read_recipe([str(recipe_path), "--base-model", str(base)])
            make_tokenizer(recipe, {}, recipe_path.parent / "run", None)
            load_base_model(recipe)

    return main


def make_command(rng: random.Random, name: str, tiny: Path, folder: Path) -> tuple[Callable[[], None], str, list]:
    """Return a command that reads a damaged checkpoint, and a valid one if it reads two."""
    bad, good, out = folder / "checkpoint", tiny / "checkpoint", folder / "out.tsv"
    source, target = tiny / "text.en", tiny / "text.de"
    both = rng.choice(([bad, good], [good, bad]))
    if name == "translate":
        more = rng.choice(([], ["--nbest", "2"], ["--num-beams", "1"], ["--scores"]))
        return translate.main, "training.translate", [bad, "--input", source, "--output", out, *more]
    if name == "score":
        more = rng.choice(([], ["--nll"], ["--nll", "--per-pair-output", folder / "lines.tsv"], ["--compare", good]))
        arguments = [
            bad,
            "--source",
            source,
            "--reference",
            target,
            "--output",
            out,
            "--num-bootstrap-samples",
            "2",
            *more,
        ]
        return score.main, "training.score", arguments
    if name == "average":
        return average.main, "training.average", [*both, "--output", out]
    if name == "diversify":
        arguments = [*both, "--source", source, "--target", target, "--output", out]
        return diversify.main, "training.diversify", arguments
    if name == "export":
        return export.main, "hub.export", [bad, out, "--to", "marian"]
    (folder / "recipe.yaml").write_text("learning_rate: 0.001\noutput_dir: run\n")
    return make_base_model_command(folder / "recipe.yaml", bad), "training.train", []


@pytest.fixture
def memory_limit():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["translate", "score", "average", "diversify", "export", "base_model"])
def test_damaged_checkpoint_gives_one_line_error(name, tiny, tmp_path, memory_limit):
    originals = [fingerprint(folder) for folder in tiny]

    def try_one(rng: random.Random, folder: Path) -> None:
        source = rng.choice(tiny)
        shutil.copytree(source / "checkpoint", folder / "checkpoint")
        damage(rng, folder / "checkpoint")
        before = fingerprint(folder / "checkpoint")
        main, prog, arguments = make_command(rng, name, source, folder)
        status, stderr = call(main, prog, arguments)
        assert fingerprint(folder / "checkpoint") == before, "the checkpoint was changed"
        outputs = {path.name for path in folder.iterdir()} - {"checkpoint", "recipe.yaml", "run"}
        assert status == 0 or not outputs, f"{outputs} remain after {stderr}"
        assert not [output for output in outputs if "unfinished" in output], outputs

    fuzz(f"checkpoints, {name}", try_one, tmp_path)
    assert [fingerprint(folder) for folder in tiny] == originals
