"""Training speed of a recipe, compared with `Seq2SeqTrainer` and the native class that fits the model.

Both train on the same text with the same tokenizer. The baseline runs in float32, with shuffled batches of a fixed
number of sentences and otherwise the defaults of Transformers. The runs alternate, each in a separate process. The
figures are target tokens (without padding) per second of wall time. They exclude the start and the set-up.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import to_transformers

from ..data.corpora import read_corpus
from ..recipe.reading import read_recipe
from ..run.results.evaluation import read_results

RECIPE, BASELINE = "training.train", "Seq2SeqTrainer"
ROUNDS, UPDATES = 3, 120  # runs of each, updates per run
SENTENCES = 64  # batch size of the baseline


class BaselineTrainer(Seq2SeqTrainer):
    """Counts the target tokens that it trains on."""

    target_tokens: Any = 0

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        self.target_tokens = self.target_tokens + (inputs["labels"] != -100).sum()
        return super().training_step(model, inputs, *args, **options)


def main() -> None:
    """Train the baseline of `compare`. The arguments are those of the run of the recipe."""
    print(json.dumps(train_baseline(sys.argv[1:])))


def compare(recipe: Path, data_dir: Path, show: Callable[[str], Any]) -> dict[str, list[float]]:
    """Return the target tokens per second of the recipe and the baseline, one figure per round."""
    speeds: dict[str, list[float]] = {RECIPE: [], BASELINE: []}
    with tempfile.TemporaryDirectory() as directory:
        for i in range(ROUNDS):
            arguments = make_arguments(recipe, data_dir, Path(directory, f"run{i}"))
            results = {RECIPE: train_recipe(arguments)}
            command = [sys.executable, "-m", f"{__package__}.recipe", *arguments]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results[BASELINE] = json.loads(output.splitlines()[-1])
            for name, each in results.items():
                speeds[name].append(each["train_target_tokens"] / each["train_runtime"])
            show(str({name: round(values[-1]) for name, values in speeds.items()}))
    return speeds


def make_arguments(recipe: Path, data_dir: Path, run: Path) -> list[str]:
    """Return the arguments of `training.train` to run the recipe without evaluation, checkpoints and test set."""
    keys = {"data_dir": data_dir, "output_dir": run, "max_steps": UPDATES, "minutes": "null", "disable_tqdm": True}
    keys |= {"test_file": "null", "test_references": "null", "test_size": 0, "eval_strategy": "no"}
    keys |= {"save_strategy": "no", "average_checkpoints": 1, "average_by": "last", "early_stopping_patience": "null"}
    return [str(recipe), *(f"--{name}={value}" for name, value in keys.items())]


def train_recipe(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", __package__.removesuffix("benchmarks") + "train", *arguments]
    if status := subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
        raise ValueError(f"training with {arguments[0]} ended with status {status}. See its message above.")
    return read_results(Path(read_recipe(arguments).training.output_dir))


def train_baseline(arguments: list[str]) -> dict[str, Any]:
    """Train a random native model on the data of a finished run with `Seq2SeqTrainer`, and return its results."""
    recipe = read_recipe(arguments)
    run = Path(recipe.training.output_dir)
    text = read_corpus(replace(recipe.data, streaming=False))["train"]
    tokenizer = AutoTokenizer.from_pretrained(run)
    config = VanillaTransformerConfig.from_pretrained(run)
    native = to_transformers(VanillaTransformerForConditionalGeneration(config))
    model = type(native)(native.config)  # random weights
    data = Dataset.from_dict(dict(tokenizer(text.sources, text_target=text.targets)))
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    training_arguments = Seq2SeqTrainingArguments(
        output_dir=str(run / "baseline"),
        per_device_train_batch_size=SENTENCES,
        max_steps=UPDATES,
        label_smoothing_factor=0.1,
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        use_cpu=recipe.training.use_cpu,
    )
    trainer = BaselineTrainer(model=model, args=training_arguments, train_dataset=data, data_collator=collator)
    runtime = trainer.train().metrics["train_runtime"]
    return {"train_target_tokens": int(trainer.target_tokens), "train_runtime": runtime}


if __name__ == "__main__":
    main()
