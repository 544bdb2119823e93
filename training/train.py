"""Trains a model as a recipe says, scores it, and leaves a checkpoint folder that `from_pretrained` loads.

    python -m training.train training/recipes/demo.yaml
    python -m training.train training/recipes/multi30k_en_de.yaml --data_dir FOLDER --max_steps 500

The folder (`output_dir`) then holds the model and its tokenizer, `recipe.yaml` (every setting), `all_results.json`,
`samples.tsv` (source, reference, translation), `training_curve.png` and `attention_1.png`.
"""

import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, GenerationConfig, set_seed

from training.data import ParallelText, encode, read_corpus
from training.metrics import TranslationMetric
from training.pictures import plot_cross_attention, plot_training_curve
from training.recipe import Recipe, read_recipe
from training.tokenizer import train_tokenizer, vocabulary_sizes
from training.trainer import TokenBatchTrainer
from vanilla_transformer import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)

SAMPLES = 100  # of the test set, in samples.tsv
SHOWN = 10  # of them on the screen


def main() -> None:
    recipe = read_recipe()
    folder = Path(recipe.training.output_dir)
    if (folder / "all_results.json").exists():
        print(f"{folder} holds a finished run; remove it or give another --output_dir to train anew.\n")
        show(folder)
        return
    try:
        refuse_to_overwrite(folder)
        run(recipe, folder)
    except ValueError as error:
        print(f"training.train: {error}", file=sys.stderr)
        sys.exit(2)


def refuse_to_overwrite(folder: Path) -> None:
    """Raises ValueError where the folder holds a model that no finished run here has made."""
    if (folder / "config.json").exists() or list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} already holds a model: move it away, or give another --output_dir.")


def run(recipe: Recipe, folder: Path) -> None:
    """Every step from text to scored checkpoint."""
    set_seed(recipe.training.seed)
    corpus = read_corpus(recipe.data)
    print(", ".join(f"{name}: {len(text)} pairs" for name, text in corpus.items()))

    train_text = corpus["train"]
    tokenizer = train_tokenizer(
        train_text.sources, train_text.targets, recipe.tokenizer.tokenizer_size, recipe.tokenizer.shared_vocabulary
    )
    train_set = encode(train_text, tokenizer, recipe.data.max_length)
    validation_set = encode(corpus["validation"], tokenizer)

    model = build_model(recipe, tokenizer)
    print(f"{model.num_parameters():,} parameters, vocabulary {vocabulary_sizes(tokenizer)[1]:,}")
    metric = TranslationMetric(recipe.data.target_lang)
    trainer = TokenBatchTrainer(
        model=model,
        args=recipe.training,
        train_dataset=train_set,
        eval_dataset=validation_set,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=bleu_of_ids(metric, tokenizer) if recipe.training.predict_with_generate else None,
    )
    outcome = trainer.train()
    trainer.save_model()  # with the tokenizer

    if trainer.is_world_process_zero():
        (folder / "training_args.bin").unlink()  # a pickle; recipe.yaml says the same for everybody to read
        results = {**outcome.metrics, **facts(recipe, corpus, train_set, trainer), **trainer_losses(trainer)}
        (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        plot_training_curve(trainer.state.log_history, folder / "training_curve.png")
        if "test" in corpus:
            results |= translate_and_score(folder, corpus["test"], metric)
        (folder / "all_results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False), encoding="utf-8")
        show(folder)


def build_model(recipe: Recipe, tokenizer: Any) -> VanillaTransformerForConditionalGeneration:
    """A fresh model of the recipe's size, with the tokenizer's vocabularies and the recipe's way of decoding."""
    source_size, target_size = vocabulary_sizes(tokenizer)
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            vocab_size=source_size,
            decoder_vocab_size=target_size,
            share_encoder_decoder_embeddings=recipe.tokenizer.shared_vocabulary,
            **vars(recipe.model),
        )
    )
    decoding = vars(recipe.decoding).copy()
    if recipe.decoding.num_beams == 1:
        del decoding["length_penalty"]  # transformers refuses one that greedy decoding would ignore
    special_ids = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    decoding |= {name: getattr(model.config, name) for name in special_ids}
    model.generation_config = GenerationConfig(**decoding)
    return model


def bleu_of_ids(metric: TranslationMetric, tokenizer: Any):
    """What the Trainer calls on generated ids and labels, both padded with -100 or the pad token."""

    def compute_metrics(prediction) -> dict[str, float]:
        texts = [
            tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        ]
        return {"bleu": metric.compute(predictions=texts[0], references=texts[1])["bleu"]}

    return compute_metrics


def translate_and_score(folder: Path, test: ParallelText, metric: TranslationMetric) -> dict[str, Any]:
    """Loads the checkpoint back as a stranger would, translates the test set, and writes samples and heat map."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, batch_size=64)
    start = time.perf_counter()
    translations = [output["translation_text"] for output in translator(test.sources, progress=True)]
    seconds = time.perf_counter() - start
    rows = list(zip(test.sources, test.targets, translations, strict=True))[:SAMPLES]
    lines = ["source\treference\ttranslation", *("\t".join(field.replace("\t", " ") for field in row) for row in rows)]
    (folder / "samples.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    plot_cross_attention(model, tokenizer, rows[0][0], rows[0][2], folder / "attention_1.png")
    scores = metric.compute(predictions=translations, references=test.targets)
    return {f"test_{name}": value for name, value in scores.items()} | {"test_seconds": seconds}


def facts(recipe: Recipe, corpus: dict, train_set: Dataset, trainer: TokenBatchTrainer) -> dict[str, Any]:
    """What one must know to judge the scores: data, amount of training, hardware, versions."""
    epochs = trainer.state.epoch or 0
    return {
        "recipe": recipe.name,
        "train_pairs": len(train_set),
        "train_sha256": corpus["train"].digest(),
        "train_target_tokens": int(epochs * sum(map(len, train_set["labels"]))),
        "parameters": trainer.model.num_parameters(),
        "device": torch.cuda.get_device_name() if trainer.args.device.type == "cuda" else processor_name(),
        "processes": trainer.args.world_size,
        "threads": torch.get_num_threads(),
        "cpu_cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "sacrebleu")},
    }


def processor_name() -> str:
    """Such as "AMD EPYC", as the machine calls its processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def trainer_losses(trainer: TokenBatchTrainer) -> dict[str, float]:
    """The last losses and scores on the validation set."""
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return {
        name: evaluations[-1][name] for name in ("eval_loss", "eval_bleu") if evaluations and name in evaluations[-1]
    }


def show(folder: Path) -> None:
    """The result of a run on the screen."""
    results = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    if "test_bleu" in results:
        for line in (folder / "samples.tsv").read_text(encoding="utf-8").splitlines()[1 : SHOWN + 1]:
            for name, text in zip(("source", "reference", "translation"), line.split("\t"), strict=True):
                print(f"{name:>12}: {text}")
            print()
        print(f"BLEU {results['test_bleu']:.1f}   {results['test_bleu_signature']}")
        print(f"chrF {results['test_chrf']:.1f}   {results['test_chrf_signature']}")
        print(f"BLEU {results['test_bleu_tokenized_lc']:.1f}   normalised, lower-cased, Moses tokens")
    print(f"trained {results['train_runtime'] / 60:.1f} minutes; everything is in {folder}")
    print("\n".join(f"  {path.name}" for path in sorted(folder.glob("*.png"))))


if __name__ == "__main__":
    main()
