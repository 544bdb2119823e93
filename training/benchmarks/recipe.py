"""Training speed of a recipe, compared with `Seq2SeqTrainer` and a `MarianMTModel` of the same size.

    python -m training.benchmarks.recipe training/recipes/multi30k_en_de.yaml --data_dir DIRECTORY

Both train on the same text with the same tokenizer. The baseline runs in float32, with shuffled batches of a fixed
number of sentences and otherwise the defaults of Transformers. The runs alternate, each in a separate process. The
figures are medians of target tokens (without padding) per second of wall time. They exclude the start and the set-up.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, MarianMTModel, Seq2SeqTrainer, Seq2SeqTrainingArguments

from training.data.files import read_pair
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error
from vanilla_transformer.shared.transformers_conversion import to_marian

RECIPE, BASELINE = "training.train", "Seq2SeqTrainer"


def main() -> None:
    parser = CommandLineParser("training.benchmarks.recipe", __doc__)
    parser.add_argument("recipe", type=Path, help="Path to a recipe with text files.")
    parser.add_argument("--data_dir", type=Path, required=True, help="The directory of the text files.")
    parser.add_argument("--updates", type=int, default=120, help="The number of updates per run.")
    parser.add_argument("--rounds", type=int, default=3, help="The number of runs of each.")
    parser.add_argument("--sentences", type=int, default=64, help="The batch size of the baseline, in sentences.")
    # trains only the baseline; the value is the output directory of a finished recipe run
    parser.add_argument("--baseline", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with exit_on_user_error(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    if arguments.baseline:
        print(json.dumps(train_baseline(arguments)))
        return
    speeds = compare(arguments.recipe, arguments.data_dir, arguments.updates, arguments.rounds, arguments.sentences)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        print(f"{name:16} {medians[name]:9,.0f} target tokens/s   ({min(values):,.0f} to {max(values):,.0f})")
    print(f"{'ratio':16} {medians[RECIPE] / medians[BASELINE]:9.2f}")


def compare(
    recipe: Path, data_dir: Path, updates: int = 120, rounds: int = 3, sentences: int = 64
) -> dict[str, list[float]]:
    """Return the target tokens per second of the recipe and the baseline, one figure per round."""
    speeds: dict[str, list[float]] = {RECIPE: [], BASELINE: []}
    options = [str(recipe), "--data_dir", str(data_dir), "--updates", str(updates), "--sentences", str(sentences)]
    with tempfile.TemporaryDirectory() as directory:
        for i in range(rounds):
            run = Path(directory, f"run{i}")
            speeds[RECIPE].append(tokens_per_second(train_recipe(recipe, data_dir, updates, run)))
            command = [sys.executable, "-m", "training.benchmarks.recipe", *options, "--baseline", str(run)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            speeds[BASELINE].append(tokens_per_second(json.loads(output.splitlines()[-1])))
            print({name: round(values[-1]) for name, values in speeds.items()}, flush=True)
    return speeds


def tokens_per_second(results: dict[str, Any]) -> float:
    return results["train_target_tokens"] / results["train_runtime"]


def train_recipe(recipe: Path, data_dir: Path, updates: int, run: Path) -> dict[str, Any]:
    """Run the recipe without evaluation, checkpoints and test set, and return its results."""
    keys = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    keys |= {"data_dir": str(data_dir), "output_dir": str(run), "max_steps": updates, "disable_tqdm": True}
    keys |= {"test_file": None, "test_references": None, "eval_strategy": "no", "save_strategy": "no"}
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "training.train", str(path)], check=True, stdout=subprocess.DEVNULL)
    return json.loads((run / "all_results.json").read_text(encoding="utf-8"))


def train_baseline(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a random `MarianMTModel` with `Seq2SeqTrainer`, and return its results."""
    keys = yaml.safe_load(arguments.recipe.read_text(encoding="utf-8"))
    languages = [keys.get("source_lang", "en"), keys.get("target_lang", "de")]
    name = keys.get("train_file", "train")
    source, target = (arguments.data_dir / f"{name}.{language}" for language in languages)
    text = read_pair(source, target, "drop")
    tokenizer = AutoTokenizer.from_pretrained(arguments.baseline)
    config = VanillaTransformerConfig.from_pretrained(arguments.baseline)
    model = MarianMTModel(to_marian(VanillaTransformerForConditionalGeneration(config)).config)  # random weights
    columns = {"source": text.sources, "target": text.targets}
    data = Dataset.from_dict(columns).map(
        lambda rows: tokenizer(rows["source"], text_target=rows["target"]), batched=True, remove_columns=list(columns)
    )
    collator, tokens = DataCollatorForSeq2Seq(tokenizer, model=model), 0

    def collate(rows: list) -> dict[str, Any]:
        nonlocal tokens
        batch = collator(rows)
        tokens += int((batch["labels"] != -100).sum())
        return batch

    training_arguments = Seq2SeqTrainingArguments(
        output_dir=str(arguments.baseline / "baseline"),
        per_device_train_batch_size=arguments.sentences,
        max_steps=arguments.updates,
        label_smoothing_factor=0.1,
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        use_cpu=True,
    )
    outcome = Seq2SeqTrainer(model=model, args=training_arguments, train_dataset=data, data_collator=collate).train()
    return {"train_target_tokens": tokens, "train_runtime": outcome.metrics["train_runtime"]}


if __name__ == "__main__":
    main()
