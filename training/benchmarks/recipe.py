"""Speed of a whole recipe beside what one would write today: stock `Seq2SeqTrainer` and `MarianMTModel` of equal size.

    python -m training.benchmarks.recipe training/recipes/multi30k_en_de.yaml --data_dir FOLDER

Both train on the same text with the same tokenizer, ours as the recipe says, the stock one in float32 with shuffled
batches of a fixed number of sentences and otherwise the library's defaults. They take turns, each in processes of its
own; compared are the medians of real target tokens (no padding) a second of wall time, start and set-up not counted.
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
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from training.data.files import read_pair
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error
from vanilla_transformer.shared.transformers_conversion import to_marian

STOCK = "Seq2SeqTrainer"


def main() -> None:
    parser = CommandLineParser("training.benchmarks.recipe", __doc__)
    parser.add_argument("recipe", type=Path, help="a recipe with text files")
    parser.add_argument("--data_dir", type=Path, required=True, help="folder of its files")
    parser.add_argument("--updates", type=int, default=120, help="of each in a round")
    parser.add_argument("--rounds", type=int, default=3, help="each takes so many turns")
    parser.add_argument("--sentences", type=int, default=64, help="sentences a batch of the stock one")
    parser.add_argument("--stock", type=Path, help=argparse.SUPPRESS)  # one turn of the stock one, in its own process
    arguments = parser.parse_args()
    with exit_on_user_error(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    if arguments.stock:
        print(json.dumps(stock(arguments)))
        return
    speeds = compare(arguments.recipe, arguments.data_dir, arguments.updates, arguments.rounds, arguments.sentences)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        print(f"{name:16} {medians[name]:9,.0f} target tokens/s   ({min(values):,.0f} to {max(values):,.0f})")
    print(f"{'ratio':16} {medians['ours'] / medians[STOCK]:9.2f}")


def compare(
    recipe: Path, data_dir: Path, updates: int = 120, rounds: int = 3, sentences: int = 64
) -> dict[str, list[float]]:
    """Target tokens a second of the recipe and of the stock one, a figure a round. Arguments as the command's."""
    speeds: dict[str, list[float]] = {"ours": [], STOCK: []}
    own = [str(recipe), "--data_dir", str(data_dir), "--updates", str(updates), "--sentences", str(sentences)]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            run = Path(folder, f"run{turn}")
            speeds["ours"].append(speed(ours(recipe, data_dir, updates, run)))
            command = [sys.executable, "-m", "training.benchmarks.recipe", *own, "--stock", str(run)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            speeds[STOCK].append(speed(json.loads(output.splitlines()[-1])))
            print({name: round(values[-1]) for name, values in speeds.items()}, flush=True)
    return speeds


def speed(results: dict[str, Any]) -> float:
    return results["train_target_tokens"] / results["train_runtime"]


def ours(recipe: Path, data_dir: Path, updates: int, run: Path) -> dict[str, Any]:
    """The recipe, without evaluation, checkpoints and test set."""
    keys = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    keys |= {"data_dir": str(data_dir), "output_dir": str(run), "max_steps": updates, "disable_tqdm": True}
    keys |= {"test_file": None, "test_references": None, "eval_strategy": "no", "save_strategy": "no"}
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "training.train", str(path)], check=True, stdout=subprocess.DEVNULL)
    return json.loads((run / "all_results.json").read_text(encoding="utf-8"))


def stock(arguments: argparse.Namespace) -> dict[str, Any]:
    """As a user of transformers would write it."""
    keys = yaml.safe_load(arguments.recipe.read_text(encoding="utf-8"))
    languages = [keys.get("source_lang", "en"), keys.get("target_lang", "de")]
    name = keys.get("train_file", "train")
    source, target = (arguments.data_dir / f"{name}.{language}" for language in languages)
    text = read_pair(source, target, "drop")
    tokenizer = AutoTokenizer.from_pretrained(arguments.stock)
    config = VanillaTransformerConfig.from_pretrained(arguments.stock)
    model = MarianMTModel(to_marian(VanillaTransformerForConditionalGeneration(config)).config)  # with new weights
    data = Dataset.from_dict({"source": text.sources, "target": text.targets}).map(
        lambda row: tokenizer(row["source"], text_target=row["target"]),
        batched=True,
        remove_columns=["source", "target"],
    )
    collator, tokens = DataCollatorForSeq2Seq(tokenizer, model=model), 0

    def collate(rows: list) -> dict[str, Any]:
        nonlocal tokens
        batch = collator(rows)
        tokens += int((batch["labels"] != -100).sum())
        return batch

    training = Seq2SeqTrainingArguments(
        output_dir=str(arguments.stock / "stock"),
        per_device_train_batch_size=arguments.sentences,
        max_steps=arguments.updates,
        label_smoothing_factor=0.1,
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        use_cpu=True,
    )
    outcome = Seq2SeqTrainer(model=model, args=training, train_dataset=data, data_collator=collate).train()
    return {"train_target_tokens": tokens, "train_runtime": outcome.metrics["train_runtime"]}


if __name__ == "__main__":
    main()
