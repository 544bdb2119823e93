"""Trains tokenizers: one shared vocabulary (section 5.1: byte-pair tokens), or one for each language."""

import copy
import unicodedata
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from training.arguments import TokenizerArguments
from training.data.moses_pretokenization import moses_normalizer, moses_splits
from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.shared import loading

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # ids 0 to 3


def train_backend(
    texts: Sequence[str], tokenizer_type: str, vocab_size: int, lowercase: bool = False, moses: bool = False
) -> Tokenizer:
    """A tokenizer that ends every sequence with `</s>`.

    Args:
        texts: sentences.
        tokenizer_type: "bpe" (Sennrich et al. 2016) and "unigram" (Kudo 2018) split words and punctuation first, digits
            one by one, and keep a space as the mark "▁", so that decoding is exact; "char" has a token for each
            character, "word" for each run of characters between spaces.
        vocab_size: tokens at most, the four special ones included; the most frequent ones are kept.
        lowercase: all text becomes lower case.
        moses: "bpe" and "unigram" split words where Moses does instead, see `training.data.moses_pretokenization`.
    """
    unk, special = SPECIAL_TOKENS["unk_token"], list(SPECIAL_TOKENS.values())
    options: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": special, "show_progress": False}
    mark = pre_tokenizers.Metaspace()
    subwords = [mark, pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    if moses:
        subwords = [pre_tokenizers.Metaspace(split=False), moses_splits()]
    if tokenizer_type == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token=unk))
        trainer: Any = trainers.BpeTrainer(**options, limit_alphabet=max(1, vocab_size - len(special)))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(subwords)
    elif tokenizer_type == "unigram":
        characters = set().union("▁", *(unicodedata.normalize("NFC", text) for text in texts)) - {" "}
        if vocab_size < len(characters) + len(special):  # the library would make more, or never end
            raise ValueError(
                f"tokenizer_vocab_size={vocab_size} is too small for unigram: {len(characters)} characters and "
                f"{len(special)} special tokens have to be in it."
            )
        tokenizer, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(**options, unk_token=unk)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(subwords)
    else:
        tokenizer, trainer = Tokenizer(models.WordLevel(unk_token=unk)), trainers.WordLevelTrainer(**options)
        single = pre_tokenizers.Sequence([mark, pre_tokenizers.Split("", "isolated")])
        tokenizer.pre_tokenizer = single if tokenizer_type == "char" else pre_tokenizers.WhitespaceSplit()
    normal: list[Any] = [normalizers.NFC()]
    normal += [moses_normalizer(), normalizers.Strip()] if moses else []
    normal += [normalizers.Lowercase()] if lowercase else []
    tokenizer.normalizer = normalizers.Sequence(normal) if len(normal) > 1 else normal[0]
    if tokenizer_type != "word":  # words are joined by spaces
        tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(texts, trainer)
    end = SPECIAL_TOKENS["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, special.index(end))]
    )
    return tokenizer


def train_tokenizer(
    sources: list[str], targets: list[str], arguments: TokenizerArguments
) -> PreTrainedTokenizerFast | VanillaTransformerTokenizer:
    """A tokenizer for both languages, with one vocabulary or two; or the given one.

    Raises:
        ValueError: the given one cannot be loaded, lacks a padding or end token, or is for one language alone.
    """
    if arguments.tokenizer_path is not None:
        return load_training_tokenizer(arguments.tokenizer_path, "tokenizer_path")
    settings = arguments.tokenizer_type, arguments.tokenizer_vocab_size, arguments.lowercase, arguments.moses
    if arguments.shared_vocabulary:
        return PreTrainedTokenizerFast(tokenizer_object=train_backend(sources + targets, *settings), **SPECIAL_TOKENS)
    return VanillaTransformerTokenizer(
        source_tokenizer_object=train_backend(sources, *settings),
        target_tokenizer_object=train_backend(targets, *settings),
        **SPECIAL_TOKENS,
    )


def load_training_tokenizer(path: str, key: str) -> PreTrainedTokenizerFast:
    """A tokenizer from a folder or the Hub that ends its sequences; raises ValueError where it cannot be used.

    Args:
        key: of the recipe, which the message names.
    """
    tokenizer = loading.load_tokenizer(path, f"{key}={path}:")
    for name in ("pad_token", "eos_token"):
        if getattr(tokenizer, name) is None:
            raise ValueError(f"{key}={path}: it has no {name}, which every target needs. Add one and save it.")
    if tokenizer(text_target="a")["input_ids"][-1:] != [tokenizer.eos_token_id]:
        raise ValueError(
            f"{key}={path}: it does not end targets with {tokenizer.eos_token!r}; a decoder "
            f"trained on them would never stop. Give it a post-processor that adds it."
        )
    return tokenizer


def add_bpe_dropout(tokenizer: PreTrainedTokenizerFast, probability: float) -> PreTrainedTokenizerFast:
    """A copy that leaves out merges at random, so that a sentence is split in another way each time."""
    tokenizer = copy.deepcopy(tokenizer)
    sides = [getattr(tokenizer, name, None) for name in ("backend_tokenizer", "target_tokenizer")]
    found = [side.model for side in sides if side is not None]
    if not found or not all(isinstance(model, models.BPE) for model in found):
        raise ValueError(
            f"bpe_dropout={probability} needs a fast tokenizer with BPE, and this is another: leave it out."
        )
    for model in found:
        model.dropout = probability
    return tokenizer


def vocabulary_sizes(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Tokens of the source and of the target."""
    target = getattr(tokenizer, "target_tokenizer", None)
    return len(tokenizer), target.get_vocab_size() if target else len(tokenizer)
