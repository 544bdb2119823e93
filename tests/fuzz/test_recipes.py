"""Random recipes: valid and invalid keys, values of every type, invalid YAML."""

import os
import random
import sys

import pytest
import yaml

from tests.fuzz.contract import call, fingerprint, fuzz
from training.recipe.reading import make_parser, read_recipe
from vanilla_transformer.shared.command_line import exit_on_user_error

pytestmark = pytest.mark.slow

VALUES = [
    *("0", "1", "-1", "2", "7", "0.5", "1e-3", "-0.1", "1.0", "1.5", "1e30", "1e308", "1e999", "9" * 23, "9" * 5000),
    *(".nan", "nan", ".inf", "inf", "-inf", "-.inf", "0x10", "1_000", "1:30", "007", "1e400"),
    *("true", "false", "yes", "no", "on", "off", "null", "~", "", "None", "auto", "none", "all", "eager", "gelu"),
    *("[1]", "[]", "[0]", "[[1]]", "[a, b]", "[1, null]", "{a: 1}", "{}", "{1: 2}", "{a: {b: [1]}}", "{a: .nan}"),
    *("[--max-steps=1]", "2001-12-14", "2001-12-14t21:59:43.10-05:00", "{a: 2001-12-14}", "{? {a: 1} : 2}"),
    *("!!python/object/apply:os.system [ls]", "!!binary aGk=", "!!set {a, b}", "!!int x", "&a [*a]", "&a 5", "*b"),
    *(
        '"a\\0b"',
        '"\\ud800"',
        '"a\\nb"',
        '"-"',
        "--max-steps",
        "-x",
        "...",
        "---",
        "|\n  a\n  b",
        ">\n  a\n  b",
        "'",
        "%",
    ),
    *(
        "a" * 300,
        "ü",
        "🦜",
        "/",
        "..",
        ".",
        "~",
        "a b",
        "a\tb",
        "@",
        "`",
        "? x",
        "steps",
        "epoch",
        "best",
        "files",
        "demo",
    ),
    *("bpe", "word", "unigram", "char", "pre", "post", "learned", "adamw_torch", "adafactor", "sgd", "galore_adamw"),
    *(
        "lion_8bit",
        "cosine",
        "linear",
        "polynomial",
        "cosine_with_restarts",
        "reduce_lr_on_plateau",
        "greedy",
        "constant",
    ),
    *("wandb", "trackio", "tensorboard", "mlflow", "[tensorboard, wandb]", "bleu", "loss", "eval_loss", "per"),
    *("flash_attention_2", "flex_attention", "sdpa", "user/kernel", "fp32", "bf16", "sequence", "translation"),
]
BROKEN = [
    "\x00",
    "\xff",
    "\t",
    ":",
    "- ",
    "[",
    "{",
    "&a",
    "*a",
    "!",
    "%YAML 9\n",
    "\n---\n",
    "\n...\n",
    "'",
    '"',
    "\ufeff",
]
BROKEN += ["[" * 3000, "{a: " * 2000, "\u2028", "\x85", "\r", "<<: *a\n", "? ", "a: b: c\n", "#", "\x07"]
EXCLUDED = {  # they start launchers, or use other machines and files outside the recipe
    *("deepspeed", "ddp_backend", "local_rank", "resume_from_checkpoint", "parallelism_config", "debug", "hub_token"),
}


@pytest.fixture
def _environment():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def read_into(recipes: list) -> None:
    """Append the recipe of the command line to a list."""
    with exit_on_user_error("training.train"):
        recipes.append(read_recipe(sys.argv[1:]))


@pytest.mark.usefixtures("_environment")
def test_recipes(tmp_path):
    names = sorted({action.dest for action in make_parser()._actions} - EXCLUDED - {"help", "recipe"})
    own_names = sorted(name for part in make_parser().dataclass_types[:3] for name in part.__dataclass_fields__)
    own_names += [
        "num_beams",
        "length_penalty",
        "max_steps",
        "learning_rate",
        "optim",
        "lr_scheduler_kwargs",
        "eval_steps",
    ]

    def try_one(rng: random.Random, folder):
        keys = [rng.choice(own_names if rng.random() < 0.5 else names) for _ in range(rng.choice((1, 1, 2, 3)))]
        keys = [rng.choice((key, key.replace("_", "-"), key[:-1], "")) if rng.random() < 0.03 else key for key in keys]
        text = f"output_dir: {folder / 'out'}\n" * (rng.random() < 0.9) + "learning_rate: 0.1\n" * (rng.random() < 0.5)
        text += "".join(f"{key}: {rng.choice(VALUES)}\n" for key in keys)
        if rng.random() < 0.3:
            index = rng.randrange(len(text) + 1)
            text = text[:index] + rng.choice(BROKEN) + text[index + rng.choice((0, 0, 1)) :]
        path = folder / "mine.yaml"
        path.write_bytes(text.encode("latin-1" if rng.random() < 0.05 else "utf-8", "replace"))
        options = []
        for _ in range(rng.choice((0, 0, 1, 2))):
            name, value = rng.choice(names), rng.choice(VALUES)
            options += rng.choice(([f"--{name}={value}"], [f"--{name}", value], [f"--{name}"], [f"-{name[0]}", value]))
        before = fingerprint(folder)
        recipes = []
        status, stderr = call(lambda: read_into(recipes), "training.train", [str(path), *options])
        assert fingerprint(folder) == before, text
        assert not (folder / "out").exists(), text
        if status == 0 and recipes:
            path.write_text(recipes[0].to_yaml(), encoding="utf-8")
            if not options:  # a saved recipe can be read reread
                reread = []
                status, stderr = call(lambda reread=reread: read_into(reread), "training.train", [str(path)])
                assert status == 0, f"{text} is saved in a form that cannot be read: {stderr}"
                assert yaml.safe_load(reread[0].to_yaml()) == yaml.safe_load(recipes[0].to_yaml()), text

    fuzz("recipes", try_one, tmp_path)
