"""Tokenizer, training data and model of a run, and the choice of precision and attention."""

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.atomic_io import remove, wrap_write_errors
from vanilla_transformer.shared.command_line import logger
from vanilla_transformer.shared.loading import load_model, load_tokenizer, sinusoid_tables
from vanilla_transformer.shared.transformers_conversion import validate_no_adapter

from ..data.batching import TokenBatchSampler
from ..data.parallel_text import ParallelText
from ..data.streaming import TokenBatchStream, stream_pairs
from ..data.tokenization import sequence_lengths, tokenize_corpus, tokenize_rows
from ..data.tokenizer import load_training_tokenizer, train_tokenizer, validate_embedding_rows, vocabulary_sizes
from ..inference.decoder_input import add_decoder_input_ids
from ..inference.translators import GREEDY_OVERRIDES, read_run_recipe
from ..recipe.arguments import Recipe, TrainingArguments
from .hardware import choose_precision_and_attention
from .losses import supports_fused_loss, training_loss

NUM_CHECKED_PAIRS = 10_000  # whose characters or words the tokenizer should know
NUM_TIMING_BATCHES = 12  # to choose precision and attention by their speed


def make_tokenizer(recipe: Recipe, corpus: dict[str, ParallelText], folder: Path, checkpoint: Path | None) -> Any:
    """Return the tokenizer of the checkpoint. In a new run, the main process creates and saves it first."""
    if checkpoint is None and recipe.training.process_index == 0:
        save_tokenizer(new_tokenizer(recipe, corpus), folder)
    return load_tokenizer(checkpoint or folder)


def new_tokenizer(recipe: Recipe, corpus: dict[str, ParallelText]) -> Any:
    if recipe.training.base_model is not None:
        tokenizer = load_training_tokenizer(recipe.training.base_model, "base_model")
        remedy = "To train a new tokenizer and model, remove base_model."
        report_unknown_text(tokenizer, corpus.get("train", ParallelText([], [])), remedy)
        return tokenizer
    if "train" in corpus:
        sources, targets = corpus["train"].sources, corpus["train"].targets
    else:
        rows = list(stream_training_pairs(recipe, corpus).take(recipe.tokenizer.tokenizer_max_train_pairs))
        sources, targets = [row["source"] for row in rows], [row["target"] for row in rows]
    if not sources:
        raise ValueError("the training set has no pairs.")
    tokenizer = train_tokenizer(sources, targets, recipe.tokenizer)
    remedy = "Another tokenizer" if recipe.tokenizer.tokenizer_path else "A larger tokenizer_vocab_size"
    report_unknown_text(tokenizer, ParallelText(sources, targets), f"{remedy} may include them.")
    return tokenizer


def report_unknown_text(tokenizer: Any, text: ParallelText, remedy: str) -> None:
    """Warn if the tokenizer does not know characters or words of the first training pairs."""
    if tokenizer.unk_token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id):  # GPT-2 has no other token
        return
    first = text.sources[:NUM_CHECKED_PAIRS], text.targets[:NUM_CHECKED_PAIRS]
    for side, sentences, rows in zip(
        ("source", "target"), first, tokenize_rows(tokenizer, *first).values(), strict=True
    ):
        unknown = [text for text, ids in zip(sentences, rows, strict=True) if tokenizer.unk_token_id in ids]
        if found := [text for text in unknown if str(tokenizer.unk_token) not in text]:
            logger.warning(
                f"The tokenizer does not know characters or words of {len(found):,} of {len(rows):,} {side} sentences, "
                f"such as {min(found, key=len)[:80]!r}. The model cannot learn them. {remedy}"
            )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save the tokenizer in the output directory. Its last file is `tokenizer_config.json`, which marks it complete."""
    unfinished = folder / "tokenizer.unfinished"
    with wrap_write_errors(folder):
        remove(unfinished)
        tokenizer.save_pretrained(unfinished)
        for path in sorted(unfinished.iterdir(), key=lambda path: path.name == "tokenizer_config.json"):
            path.replace(folder / path.name)
        unfinished.rmdir()


def make_train_set(recipe: Recipe, corpus: dict[str, ParallelText], tokenizer: Any, limit: int = sys.maxsize) -> Any:
    """Return a `Dataset` of the tokenized training pairs, or with streaming a `TokenBatchStream` of this process.

    Pairs with more than `limit` tokens, the number of positions of the model, are dropped.
    """
    args, data = recipe.training, replace(recipe.data, max_length=min(recipe.data.max_length, limit))
    if data.both_directions:
        sides = tokenize_rows(tokenizer, *[corpus["train"].sources[:100]] * 2)
        if sides["input_ids"] != sides["labels"]:  # two vocabularies, two SentencePiece models, or language tokens
            raise ValueError("Remove both_directions: this tokenizer has different tokens for source and target.")
    if not data.streaming:
        return tokenize_corpus(corpus["train"], tokenizer, data, recipe.tokenizer.bpe_dropout)
    seed = args.seed if args.data_seed is None else args.data_seed
    return TokenBatchStream(
        stream_training_pairs(recipe, corpus),
        tokenizer,
        data,
        args.tokens_per_update,
        seed,
        micro_batches=args.gradient_accumulation_steps,
        rank=args.process_index,
        processes=args.world_size,
        exchange=lambda value: gather_object([value]),
    )


def stream_training_pairs(recipe: Recipe, corpus: dict[str, ParallelText]) -> IterableDataset:
    """Return the stream of training pairs. `on_eval_overlap=drop` omits pairs with a source of the evaluation data."""
    drops = recipe.data.on_eval_overlap == "drop"
    return stream_pairs(recipe.data, {source for text in corpus.values() for source in text.sources if drops})


def make_model(recipe: Recipe, tokenizer: Any) -> Any:
    if recipe.training.base_model is None:
        return create_model(recipe, tokenizer)
    model = load_base_model(recipe)
    validate_embedding_rows(f"base_model={recipe.training.base_model}", model, tokenizer)
    match_forced_bos(model.generation_config, tokenizer)
    return model


def match_forced_bos(config: GenerationConfig, tokenizer: Any) -> None:
    """Replace the token that a model forces at the start by that of the labels, such as the target language."""
    prefix = tokenizer(text_target="")["input_ids"][:-1]  # without EOS
    if (forced := config.forced_bos_token_id) is not None and [forced] != prefix[:1]:
        config.forced_bos_token_id = prefix[0] if prefix else None
        logger.info(f"forced_bos_token_id: {config.forced_bos_token_id}, as in the labels, instead of {forced}")


def count_positions(model: Any) -> int:
    """Return the number of positions in the table of a model, or `sys.maxsize` if there is no limit."""
    table = getattr(model.get_encoder(), "embed_positions", None)
    has_limit = isinstance(table, torch.nn.Embedding)  # FSMT would extend it, but cannot load the longer table
    return getattr(model.config, "max_position_embeddings", sys.maxsize) if has_limit else sys.maxsize


def create_model(recipe: Recipe, tokenizer: Any) -> VanillaTransformerForConditionalGeneration:
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
            share_encoder_decoder_embeddings=not {"target_tokenizer", "target_encoder"} & vars(tokenizer).keys(),
            **special_ids,
            **vars(recipe.model),
        )
    )
    model.generation_config = GenerationConfig(**decoding_settings(recipe), **special_ids)
    return model


def decoding_settings(recipe: Recipe) -> dict[str, Any]:
    settings = {name: getattr(recipe.decoding, name) for name in ("num_beams", "length_penalty", "max_new_tokens")}
    if recipe.decoding.num_beams == 1:
        del settings["length_penalty"]  # transformers rejects it for greedy decoding
        return settings
    # True as in fairseq and CTranslate2. On SCAN, exact match is 41 % with it and 65 % without it;
    # on Multi30k, BLEU is 32.4 and 32.2
    return settings | {"early_stopping": recipe.decoding.metric == "translation"}


def load_base_model(recipe: Recipe) -> Any:
    """Load `base_model` with the dropout rates and generation config of the recipe; with LoRA as a `PeftModel`."""
    args = recipe.training
    dropouts = {name: value for name, value in vars(recipe.model).items() if name in recipe.explicit_keys}
    model = load_model(str(args.base_model), f"base_model={args.base_model}:", dtype=torch.float32, **dropouts)
    validate_no_adapter(model, f"base_model={args.base_model}")
    for table in sinusoid_tables(model).values():
        table.requires_grad_(False)
    if args.push_to_hub and model.config.model_type != VanillaTransformerConfig.model_type:  # see hub.push
        raise ValueError(
            f"push_to_hub does not support the {model.config.model_type} model base_model={args.base_model}. Remove "
            f"push_to_hub, and upload the final model with its own method push_to_hub."
        )
    if unused := [name for name, value in dropouts.items() if getattr(model.config, name, None) != value]:
        raise ValueError(f"base_model={args.base_model} has no setting {unused[0]}. Remove {unused[0]}.")
    overrides: dict[str, Any] = {"max_length": None}  # removes the value of the checkpoint
    if recipe.decoding.num_beams == 1:
        overrides |= GREEDY_OVERRIDES
    model.generation_config.update(**(overrides | decoding_settings(recipe)))
    if not args.lora_rank:
        return model
    lora = LoraConfig("SEQ_2_SEQ_LM", r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear")
    return get_peft_model(model, lora)


def resolve_precision_and_attention(recipe: Recipe, model: Any, train_set: Any, collator: Any, folder: Path) -> None:
    """Resolve `precision` and `attn_implementation`, from the `recipe.yaml` of a resumed run or by timing.

    A resumed run also keeps its `step_mode`.
    """
    args = recipe.training
    if args.precision == "fp16" and args.device.type == "cpu":
        raise ValueError("precision=fp16 is not supported on a CPU. Set precision to bf16 or fp32.")
    if saved := read_run_recipe(folder):
        args.precision = saved.get("precision", "fp32")
        args.attn_implementation = saved.get("attn_implementation", "sdpa")
        args.step_mode = saved.get("step_mode", "auto")
    if "auto" in (args.precision, args.attn_implementation):
        model.to(args.device)
        examples, steps = first_batches(train_set, args)
        batches = [{name: each.to(args.device) for name, each in collator(rows).items()} for rows in examples]
        batches = [add_decoder_input_ids(model, batch) for batch in batches]

        def compute_loss(batch: dict[str, Any]) -> Any:
            settings = args.rdrop_alpha, supports_fused_loss(model), args.simcut_alpha
            return training_loss(model, batch, args.label_smoothing_factor, *settings)[0]

        requested = args.precision, args.attn_implementation
        choice = choose_precision_and_attention(model, batches, *requested, compute_loss, steps)
        args.precision, args.attn_implementation, seconds = gather_object([choice])[0]
        if seconds:
            timings = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items())
            logger.info(f"time per training step: {timings}. Chosen: {args.precision}, {args.attn_implementation}.")
    model.set_attn_implementation(args.attn_implementation)
    args.bf16, args.fp16 = args.precision == "bf16", args.precision == "fp16"
    args.mixed_precision = "no" if args.precision == "fp32" else args.precision  # not that of `accelerate launch`


def first_batches(train_set: Any, args: TrainingArguments) -> tuple[list[Any], float]:
    """Return the first micro-batch of the first updates, and the number of micro-batches that a process trains on."""
    accumulation_steps = args.gradient_accumulation_steps
    micro_batches = float(args.max_steps * accumulation_steps)
    if isinstance(train_set, TokenBatchStream):
        start = train_set.state_dict_at(0)
        batches = list(islice(train_set, 0, NUM_TIMING_BATCHES * accumulation_steps, accumulation_steps))
        train_set.load_state_dict(start)
        return batches, micro_batches
    parts = args.world_size * accumulation_steps
    sampler = TokenBatchSampler(sequence_lengths(train_set), args.tokens_per_update, args.seed, parts)
    first = islice(sampler, 0, NUM_TIMING_BATCHES * parts, parts)  # never empty
    batches = [[train_set[i] for i in batch] for batch in first]
    return batches, micro_batches if args.max_steps > 0 else args.num_train_epochs * len(sampler) / args.world_size
