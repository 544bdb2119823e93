"""Trains a model as a recipe says, scores it, and leaves a checkpoint folder that `from_pretrained` loads.

    python -m training.train training/recipes/demo.yaml
    python -m training.train training/recipes/multi30k_en_de.yaml --data_dir FOLDER --max_steps 500
    accelerate launch -m training.train training/recipes/wmt14_en_de_base.yaml

The folder (`output_dir`) then holds the model and its tokenizer, `recipe.yaml` (every setting), `all_results.json`,
`samples.tsv` (source, reference, output), `training_curve.png` and `attention_1.png`. A run that was stopped, in
whatever way, goes on with the same command from its last whole checkpoint.
"""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from accelerate.utils import gather_object
from datasets.distributed import split_dataset_by_node
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    GenerationConfig,
    set_seed,
)

from training.batching import TokenBatchSampler
from training.checkpoints import last_whole
from training.data import ParallelText, read_corpus, stream_pairs
from training.encoding import TokenBatchStream, encode, sequence_lengths
from training.hardware import choose_precision_and_attention, describe, die_with_parent, keep_memory, launch
from training.metrics import likelihood, make_metric
from training.pictures import plot_cross_attention, plot_training_curve
from training.recipe import Recipe, read_recipe
from training.tokenizer import load_tokenizer, train_tokenizer, vocabulary_sizes
from training.trainer import TokenBatchTrainer
from vanilla_transformer import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)

SAMPLES = 100  # of the test set, in samples.tsv
SHOWN = 10  # of them on the screen
TRIED = 12  # batches, where precision and attention are chosen by measurement
RANK = int(os.environ.get("RANK", "0"))
FREE = {"output_dir", "data_dir", "processes", "report_to", "logging_steps", "attention_lines", "disable_tqdm"}
# keys that may differ between the command that began a run and the one that goes on with it


def main() -> None:
    keep_memory()
    die_with_parent()
    recipe = read_recipe()
    folder = Path(recipe.training.output_dir)
    if recipe.training.processes > 1 and "LOCAL_RANK" not in os.environ:
        sys.exit(launch(recipe.training.processes, sys.argv[1:]))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what was told stays told after a kill
    if recipe.training.world_size != int(os.environ.get("WORLD_SIZE", "1")):
        raise RuntimeError(f"this is process {RANK} of {os.environ['WORLD_SIZE']}, but it does not see the others.")
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # one process speaks
        disable_progress_bar()
    try:
        if (folder / "all_results.json").exists():
            compare(recipe, folder)
            print(f"{folder} holds this run, finished; remove it or give another --output_dir to train anew.\n")
            show(folder)
        else:
            run(recipe, folder)
    except (ValueError, OSError, FloatingPointError) as error:
        if RANK > 0:
            time.sleep(2)  # the first process mostly tells the same, and takes the others along
        print(f"training.train: {error}", file=sys.stderr)
        sys.exit(2)


def run(recipe: Recipe, folder: Path) -> None:
    """Every step from text to scored checkpoint."""
    args = recipe.training
    with args.main_process_first(local=False):
        checkpoint = claim(recipe, folder)
    set_seed(args.seed)
    corpus = read_corpus(recipe.data)
    print(", ".join(f"{name}: {len(text)} pairs" for name, text in corpus.items()))
    if checkpoint:
        refuse_other_data(corpus, folder)
    with args.main_process_first(local=False):  # the others read what the first has written
        tokenizer = make_tokenizer(recipe, corpus, folder)
        train_set = make_train_set(recipe, corpus, tokenizer)
        validation_set = encode(corpus["validation"], tokenizer) if "validation" in corpus else None
    if validation_set is not None:  # sentences of like length meet in a batch
        validation_set = validation_set.select(np.argsort(sequence_lengths(validation_set).max(1), kind="stable"))

    model = load_base(recipe) if args.base_model is not None else build_model(recipe, tokenizer)
    print(f"{model.num_parameters():,} parameters, vocabulary {vocabulary_sizes(tokenizer)[1]:,}")
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    settle_precision(recipe, model, train_set, collator, folder if checkpoint else None)
    if RANK == 0 and not checkpoint:
        write_recipe(recipe, folder, data_lines(corpus))
    metric = make_metric(recipe.decoding.metric, recipe.data.target_lang)
    trainer = TokenBatchTrainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=validation_set,
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=scores_of_ids(metric, tokenizer) if args.predict_with_generate else None,
        callbacks=[EarlyStoppingCallback(args.early_stopping_patience)] if args.early_stopping_patience else None,
    )
    outcome = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    if trainer.stop.received is not None:
        done = f"stopped at update {trainer.state.global_step} of {trainer.state.max_steps}, and saved"
        print(f"{done}; the same command goes on from there.")
        sys.exit(128 + trainer.stop.received)
    seconds = trainer.seconds
    trainer.save_final()
    plot_training_curve(trainer.state.log_history, folder / "training_curve.png")

    results = {**outcome.metrics, **facts(recipe, corpus, trainer), "train_runtime": seconds, **last_losses(trainer)}
    if "test" in corpus:
        results |= translate_and_score(recipe, folder, corpus["test"], trainer)
    if trainer.is_world_process_zero():
        (folder / "all_results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False), encoding="utf-8")
        show(folder)
        if args.push_to_hub:
            push(recipe, folder)
    if args.world_size > 1:
        trainer.accelerator.wait_for_everyone()
        sys.stdout.flush()
        os._exit(0)  # the destructors of gloo's groups now and then wait for a process that is gone


# --- The output folder -----------------------------------------------------------------------------------------------


def claim(recipe: Recipe, folder: Path) -> Path | None:
    """The checkpoint that this run goes on from, or None where it begins; the folder is this run's from then on.

    Raises:
        ValueError: the folder holds a model that this command did not make, or another run.
    """
    if not (folder / "recipe.yaml").exists():
        foreign = [path for name in ("*config.json", "*.safetensors", "checkpoint-*") for path in folder.glob(name)]
        if foreign:
            raise ValueError(
                f"{folder} already holds a model ({foreign[0].name}): move it away, or give another --output_dir."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, folder)
        return None
    compare(recipe, folder)
    checkpoint = last_whole(folder)
    if checkpoint:
        print(f"going on from {checkpoint}")
    return checkpoint


def compare(recipe: Recipe, folder: Path) -> None:
    """Raises ValueError where the folder's recipe is not this one; "auto" agrees with what was chosen then."""
    try:
        before = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{folder} holds another run, whose recipe.yaml cannot be read: {error}") from error
    now = yaml.safe_load(recipe.to_yaml())
    for name in sorted((before.keys() | now.keys()) - FREE):
        if before.get(name) != now.get(name) and now.get(name) != "auto" and name != "bf16":
            raise ValueError(
                f"{folder} holds another run: its {name} is {before.get(name)}, here it is {now.get(name)}. Give "
                f"another --output_dir, or the same settings to go on with it."
            )


def data_lines(corpus: dict[str, ParallelText]) -> str:
    """What the data were, as comments of YAML."""
    return "".join(f"# {name}: {len(text)} pairs, sha256 {text.digest()}\n" for name, text in corpus.items())


def refuse_other_data(corpus: dict[str, ParallelText], folder: Path) -> None:
    """Raises ValueError where the texts are not those that the run began with."""
    before = (folder / "recipe.yaml").read_text(encoding="utf-8")
    for line in data_lines(corpus).splitlines():
        if line not in before:
            raise ValueError(
                f"{folder} holds a run on other data: {line.removeprefix('# ')} is not in its recipe.yaml. Give "
                f"another --output_dir, or the data that it began with."
            )


def write_recipe(recipe: Recipe, folder: Path, head: str = "") -> None:
    """`recipe.yaml`: every setting, below what the data were."""
    (folder / "recipe.yaml").write_text(head + recipe.to_yaml(), encoding="utf-8")


# --- Data, tokenizer, model ------------------------------------------------------------------------------------------


def make_tokenizer(recipe: Recipe, corpus: dict[str, ParallelText], folder: Path) -> Any:
    """The run's tokenizer: from the output folder where it has one already, else trained or loaded, and saved there."""
    if (folder / "tokenizer_config.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    if recipe.training.base_model is not None:
        tokenizer = load_tokenizer(recipe.training.base_model, "base_model")
        tokenizer.save_pretrained(folder)
        return tokenizer
    if "train" in corpus:
        sources, targets = corpus["train"].sources, corpus["train"].targets
    else:
        rows = list(stream_pairs(recipe.data).take(recipe.tokenizer.tokenizer_pairs))
        sources, targets = [row["source"] for row in rows], [row["target"] for row in rows]
    if not sources:
        raise ValueError("the training set has no pairs.")
    tokenizer = train_tokenizer(sources, targets, recipe.tokenizer)
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_train_set(recipe: Recipe, corpus: dict[str, ParallelText], tokenizer: Any) -> Any:
    args = recipe.training
    if not recipe.data.streaming:
        return encode(corpus["train"], tokenizer, recipe.data, recipe.tokenizer.bpe_dropout)
    pairs = split_dataset_by_node(stream_pairs(recipe.data), args.process_index, args.world_size)
    return TokenBatchStream(pairs, tokenizer, recipe.data, args.max_tokens, args.data_seed or args.seed)


def build_model(recipe: Recipe, tokenizer: Any) -> VanillaTransformerForConditionalGeneration:
    """A fresh model of the recipe's size, with the tokenizer's vocabularies and the recipe's way of decoding."""
    multiple = recipe.tokenizer.vocabulary_multiple
    source_size, target_size = (-(-size // multiple) * multiple for size in vocabulary_sizes(tokenizer))
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.pad_token_id
    special_ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": start,
    }
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            vocab_size=source_size,
            decoder_vocab_size=target_size,
            share_encoder_decoder_embeddings=getattr(tokenizer, "target_tokenizer", None) is None,
            **special_ids,
            **vars(recipe.model),
        )
    )
    model.generation_config = GenerationConfig(**decoding_settings(recipe), **special_ids)
    return model


def decoding_settings(recipe: Recipe) -> dict[str, Any]:
    settings = {name: getattr(recipe.decoding, name) for name in ("num_beams", "length_penalty", "max_new_tokens")}
    if recipe.decoding.num_beams == 1:
        del settings["length_penalty"]  # transformers refuses one that greedy decoding would ignore
    return settings


def load_base(recipe: Recipe) -> Any:
    """The recipe's `base_model`, of whatever class, with its dropouts and way of decoding; for LoRA inside peft's."""
    args = recipe.training
    dropouts = {name: value for name, value in vars(recipe.model).items() if name in recipe.given}
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(args.base_model, **dropouts)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"base_model={args.base_model}: cannot be loaded ({reason}).") from error
    model.generation_config.update(max_length=None, **decoding_settings(recipe))
    if not args.lora_rank:
        return model
    lora = LoraConfig("SEQ_2_SEQ_LM", r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear")
    return get_peft_model(model, lora)


def settle_precision(recipe: Recipe, model: Any, train_set: Any, collator: Any, resumed: Path | None) -> None:
    """Resolves `precision` and `attention`: as a resumed run began, else by the first process's measurement."""
    args = recipe.training
    if resumed:
        before = yaml.safe_load((resumed / "recipe.yaml").read_text(encoding="utf-8"))
        args.precision, args.attention = before["precision"], before["attention"]
    else:
        model.to(args.device)
        if isinstance(train_set, TokenBatchStream):
            begin = train_set.state_at(0)
            picked = list(islice(train_set, TRIED))
            train_set.load_state(begin)
        else:
            sampler = TokenBatchSampler(sequence_lengths(train_set), args.max_tokens, args.seed)
            picked = [[train_set[i] for i in batch] for batch in islice(sampler, TRIED)]
        batches = [{name: each.to(args.device) for name, each in collator(rows).items()} for rows in picked]
        found = choose_precision_and_attention(model, batches, args.precision, args.attention)
        args.precision, args.attention, seconds = gather_object([found])[0]
        if seconds:
            told = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items())
            print(f"a training step takes: {told}; chosen: {args.precision}, {args.attention}")
    model.set_attn_implementation(args.attention)
    if args.precision == "bf16":
        args.bf16, args.mixed_precision = True, "bf16"


def push(recipe: Recipe, folder: Path) -> None:
    """Uploads what a finished run has made, by `hub.push`, which looks at it first and leaves pickles at home."""
    args = recipe.training
    command = [sys.executable, "-m", "hub.push", str(folder), args.hub_model_id or folder.resolve().name]
    command += ["--private"] if args.hub_private_repo else []
    command += ["--revision", args.hub_revision] if args.hub_revision else []
    environment = os.environ | ({"HF_TOKEN": args.hub_token} if args.hub_token else {})
    if subprocess.run(command, env=environment, check=False, cwd=Path(__file__).parents[1]).returncode:
        raise ValueError(f"the model was not uploaded; it is whole in {folder}: python -m hub.push {folder} USER/NAME")


# --- Scores ----------------------------------------------------------------------------------------------------------


def scores_of_ids(metric: Any, tokenizer: Any):
    """What the Trainer calls on generated ids and labels, both padded with -100 or the pad token."""

    def compute_metrics(prediction) -> dict[str, float]:
        texts = [
            tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        ]
        scores = metric.compute(predictions=texts[0], references=texts[1])
        return {name: value for name, value in scores.items() if not isinstance(value, str)}

    return compute_metrics


def translate_and_score(recipe: Recipe, folder: Path, test: ParallelText, trainer: TokenBatchTrainer) -> dict[str, Any]:
    """Loads the checkpoint back as a stranger would, translates the test set, and writes samples and heat maps.

    Every process translates its share; the first one scores.
    """
    args = trainer.args
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, batch_size=args.per_device_eval_batch_size)
    start = time.perf_counter()
    share = test.sources[args.process_index :: args.world_size]
    outputs = [output["translation_text"] for output in translator(share, progress=RANK == 0)]
    gathered = gather_object([(args.process_index + i * args.world_size, text) for i, text in enumerate(outputs)])
    if RANK > 0:
        return {}
    translations = [text for _, text in sorted(gathered)]
    seconds = time.perf_counter() - start
    rows = list(zip(test.sources, test.targets, translations, strict=True))
    lines = ["\t".join(cell.replace("\t", " ") for cell in row) for row in rows[:SAMPLES]]
    (folder / "samples.tsv").write_text("\n".join(["source\treference\ttranslation", *lines, ""]), encoding="utf-8")
    for number in recipe.decoding.attention_lines:
        if 1 <= number <= len(rows):
            source, _, translation = rows[number - 1]
            plot_cross_attention(model, tokenizer, source, translation, folder / f"attention_{number}.png")
    scores = make_metric(recipe.decoding.metric, recipe.data.target_lang).compute(
        predictions=translations, references=test.references or test.targets
    )
    nats, tokens = (sum(column) for column in zip(*likelihood(model, tokenizer, test, 64), strict=True))
    scores |= {"loss": nats / tokens, "seconds": seconds}
    return {f"test_{name}": value for name, value in scores.items()}


def facts(recipe: Recipe, corpus: dict[str, ParallelText], trainer: TokenBatchTrainer) -> dict[str, Any]:
    """What one must know to judge the scores: data, amount of training, hardware, versions."""
    found = {
        "recipe": recipe.name,
        "updates": trainer.state.global_step,
        "train_target_tokens": trainer.target_tokens,
        "parameters": trainer.model.num_parameters(),
        **describe(trainer.args.device),
        "processes": trainer.args.world_size,
        "precision": trainer.args.precision,
        "attention": trainer.args.attention,
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "sacrebleu")},
    }
    if "train" in corpus:
        dropped = corpus["train"].dropped
        found |= {"train_pairs": len(trainer.train_dataset), "train_sha256": corpus["train"].digest()}
        found["train_pairs_dropped"] = dict(dropped)
    else:
        stream = trainer.train_dataset
        found |= {"train_pairs_read": stream.pairs_read, "train_pairs_dropped": stream.pairs_dropped}
    return found


def last_losses(trainer: TokenBatchTrainer) -> dict[str, float]:
    """The last loss and scores on the validation set."""
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return {name: value for name, value in (evaluations or [{}])[-1].items() if name.startswith("eval_")}


def show(folder: Path) -> None:
    """The result of a run on the screen."""
    results = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    if (folder / "samples.tsv").exists():
        for line in (folder / "samples.tsv").read_text(encoding="utf-8").splitlines()[1 : SHOWN + 1]:
            for name, text in zip(("source", "reference", "translation"), line.split("\t"), strict=True):
                print(f"{name:>12}: {text}")
            print()
    if "test_bleu" in results:
        for name in ("bleu", "chrf", "ter"):
            label = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER"}[name]
            print(f"{label:>12} {results[f'test_{name}']:.1f}   {results[f'test_{name}_signature']}")
        print(f"{'BLEU':>12} {results['test_bleu_tokenized_lc']:.1f}   normalised, lower-cased, Moses tokens")
    elif "test_exact_match" in results:
        for name, label in (("exact_match", "exact match"), ("wer", "WER"), ("per", "PER")):
            print(f"{label:>12} {results[f'test_{name}']:.2f} %")
    print(
        f"trained {results['train_runtime'] / 60:.1f} minutes, {results['train_target_tokens']:,} target tokens; "
        f"everything is in {folder}"
    )
    print("\n".join(f"  {path.name}" for path in sorted(folder.glob("*.png"))))


if __name__ == "__main__":
    main()
