"""What a training begins with: tokenizer, training set, model, and the precision that it trains in."""

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from training.arguments import TrainingArguments
from training.data.batching import TokenBatchSampler
from training.data.parallel_text import ParallelText
from training.data.streaming import TokenBatchStream, stream_pairs
from training.data.tokenization import sequence_lengths, tokenize_corpus
from training.data.tokenizer import load_training_tokenizer, train_tokenizer, vocabulary_sizes
from training.recipe import Recipe
from training.run.hardware import choose_precision_and_attention
from training.run.losses import supports_fused_loss, training_loss
from training.translators import GREEDY_OVERRIDES, read_run_recipe
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.atomic_io import remove, wrap_write_errors
from vanilla_transformer.shared.loading import load_model, load_tokenizer

NUM_TIMING_BATCHES = 12  # batches, where precision and attention are chosen by measurement


def make_tokenizer(recipe: Recipe, corpus: dict[str, ParallelText], folder: Path, checkpoint: Path | None) -> Any:
    """Return the tokenizer of the checkpoint; in a new run the first process trains or loads it, and saves it."""
    if checkpoint is None and recipe.training.process_index == 0:
        save_tokenizer(new_tokenizer(recipe, corpus), folder)
    return load_tokenizer(checkpoint or folder)


def new_tokenizer(recipe: Recipe, corpus: dict[str, ParallelText]) -> Any:
    """Return that of the `base_model`, or train one on the training pairs."""
    if recipe.training.base_model is not None:
        return load_training_tokenizer(recipe.training.base_model, "base_model")
    if "train" in corpus:
        sources, targets = corpus["train"].sources, corpus["train"].targets
    else:
        rows = list(stream_training_pairs(recipe, corpus).take(recipe.tokenizer.tokenizer_max_train_pairs))
        sources, targets = [row["source"] for row in rows], [row["target"] for row in rows]
    if not sources:
        raise ValueError("the training set has no pairs.")
    return train_tokenizer(sources, targets, recipe.tokenizer)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Into the run's folder; the file that says it is there comes last, since a kill may come before."""
    unfinished = folder / "tokenizer.unfinished"
    with wrap_write_errors(folder):
        remove(unfinished)
        tokenizer.save_pretrained(unfinished)
        for path in sorted(unfinished.iterdir(), key=lambda path: path.name == "tokenizer_config.json"):
            path.replace(folder / path.name)
        unfinished.rmdir()


def make_train_set(recipe: Recipe, corpus: dict[str, ParallelText], tokenizer: Any, limit: int = sys.maxsize) -> Any:
    """The training pairs as token ids: a `Dataset` of all, or, streaming, a `TokenBatchStream` of this process's.
    Pairs with a side of more than `limit` tokens, the positions of the model, are dropped."""
    args, data = recipe.training, replace(recipe.data, max_length=min(recipe.data.max_length, limit))
    if data.both_directions and getattr(tokenizer, "target_tokenizer", None) is not None:
        raise ValueError("both_directions needs one vocabulary for both languages, and this tokenizer has two.")
    if not data.streaming:
        return tokenize_corpus(corpus["train"], tokenizer, data, recipe.tokenizer.bpe_dropout)
    seed = args.seed if args.data_seed is None else args.data_seed
    pairs = split_dataset_by_node(stream_training_pairs(recipe, corpus), args.process_index, args.world_size)
    return TokenBatchStream(pairs, tokenizer, data, args.max_tokens, seed)


def stream_training_pairs(recipe: Recipe, corpus: dict[str, ParallelText]) -> IterableDataset:
    """Return the stream of training pairs. on_eval_overlap=drop filters out sources of the validation and test data."""
    drops = recipe.data.on_eval_overlap == "drop"
    return stream_pairs(recipe.data, {source for text in corpus.values() for source in text.sources if drops})


def validate_shares(train_set: Any, args: TrainingArguments) -> None:
    """Raise ValueError in all processes if one of them has no pair of a stream."""
    if isinstance(train_set, TokenBatchStream) and any(empty := gather_object([train_set.is_empty()])):
        raise ValueError(
            f"no pair of the training data is left for process {empty.index(True) + 1} of {args.world_size}: see "
            f"max_length, max_length_ratio and on_bad_lines, or use fewer processes."
        )


def make_model(recipe: Recipe, tokenizer: Any) -> Any:
    """The recipe's `base_model`, or a fresh one."""
    return create_model(recipe, tokenizer) if recipe.training.base_model is None else load_base_model(recipe)


def count_positions(model: Any) -> int:
    """Return the length of the model's table of positions, or `sys.maxsize` if the positions have no limit."""
    table = getattr(model.get_encoder(), "embed_positions", None)
    has_limit = isinstance(table, torch.nn.Embedding) and not hasattr(table, "make_weight")  # FSMT extends its table
    return getattr(model.config, "max_position_embeddings", sys.maxsize) if has_limit else sys.maxsize


def create_model(recipe: Recipe, tokenizer: Any) -> VanillaTransformerForConditionalGeneration:
    """A fresh model of the recipe's size, with the tokenizer's vocabularies and the recipe's way of decoding."""
    multiple = recipe.tokenizer.pad_vocab_to_multiple_of
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


def load_base_model(recipe: Recipe) -> Any:
    """The recipe's `base_model`, of whatever class, with its dropouts and way of decoding; for LoRA inside peft's."""
    args = recipe.training
    dropouts = {name: value for name, value in vars(recipe.model).items() if name in recipe.given}
    model = load_model(str(args.base_model), f"base_model={args.base_model}:", dtype=torch.float32, **dropouts)
    unset: dict[str, Any] = {"max_length": None}  # those of the checkpoint's own
    if recipe.decoding.num_beams == 1:
        unset |= GREEDY_OVERRIDES
    model.generation_config.update(**(unset | decoding_settings(recipe)))
    if not args.lora_rank:
        return model
    lora = LoraConfig("SEQ_2_SEQ_LM", r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear")
    return get_peft_model(model, lora)


def resolve_precision_and_attention(recipe: Recipe, model: Any, train_set: Any, collator: Any, folder: Path) -> None:
    """Resolves `precision` and `attention`: as in the run's `recipe.yaml`, else by the first process's measurement."""
    args = recipe.training
    validate_shares(train_set, args)  # else a process without batches would let the others wait
    if before := read_run_recipe(folder):
        args.precision, args.attn_implementation = (
            before.get("precision", "fp32"),
            before.get("attn_implementation", "sdpa"),
        )
    if "auto" in (args.precision, args.attn_implementation):
        model.to(args.device)
        picked, steps = first_batches(train_set, args)
        batches = [{name: each.to(args.device) for name, each in collator(rows).items()} for rows in picked]

        def loss_of(batch: dict[str, Any]) -> Any:
            weights = args.rdrop_alpha, supports_fused_loss(model), args.simcut_alpha
            return training_loss(model, batch, args.label_smoothing_factor, *weights)[0]

        found = choose_precision_and_attention(model, batches, args.precision, args.attn_implementation, loss_of, steps)
        args.precision, args.attn_implementation, seconds = gather_object([found])[0]
        if seconds:
            told = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items())
            print(f"a training step takes: {told}; chosen: {args.precision}, {args.attn_implementation}")
    model.set_attn_implementation(args.attn_implementation)
    if args.precision == "bf16":
        args.bf16, args.mixed_precision = True, "bf16"


def first_batches(train_set: Any, args: TrainingArguments) -> tuple[list[Any], float]:
    """The first batches of this process, and how many training steps it will do."""
    steps = float(args.max_steps * args.gradient_accumulation_steps)
    if isinstance(train_set, TokenBatchStream):
        begin = train_set.state_dict_at(0)
        picked = list(islice(train_set, NUM_TIMING_BATCHES))
        train_set.load_state_dict(begin)
        return picked, steps
    sampler = TokenBatchSampler(sequence_lengths(train_set), args.max_tokens, args.seed)
    picked = [[train_set[i] for i in batch] for batch in islice(sampler, NUM_TIMING_BATCHES)]
    return picked, steps if args.max_steps > 0 else args.num_train_epochs * len(sampler) / args.world_size
