"""Training of tokenizers with one shared vocabulary (section 5.1: byte-pair tokens), or one per language."""

import copy
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.shared import loading
from vanilla_transformer.shared.vocabularies import backend_tokenizers, vocabularies

from ..recipe.arguments import TokenizerArguments
from .moses_pretokenization import moses_normalizer, moses_splits

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # ids 0 to 3


def train_backend(texts: Sequence[str], arguments: TokenizerArguments) -> Tokenizer:
    """Train a tokenizer that ends every sequence with `</s>`.

    The types are "bpe" (Sennrich et al. 2016), "unigram" (Kudo 2018), "char" (one token per character) and "word" (one
    token per run of characters between spaces). "bpe" and "unigram" first split words, punctuation and single digits,
    or words as Moses does. They keep spaces as "▁", so that decoding is exact. White space is normalized to single
    spaces first. The most frequent tokens are kept.
    """
    tokenizer_type, vocab_size = arguments.tokenizer_type, arguments.tokenizer_vocab_size
    unk, special = SPECIAL_TOKENS["unk_token"], list(SPECIAL_TOKENS.values())
    options: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": special, "show_progress": False}
    mark = pre_tokenizers.Metaspace()
    subwords = [mark, pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    if arguments.moses:
        subwords = [pre_tokenizers.Metaspace(split=False), moses_splits()]
    splits: Any = pre_tokenizers.Sequence(subwords)
    if tokenizer_type == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token=unk))
        trainer: Any = trainers.BpeTrainer(**options, limit_alphabet=max(1, vocab_size - len(special)))
    elif tokenizer_type == "unigram":
        characters = set().union("▁", *("".join(unicodedata.normalize("NFC", text).split()) for text in texts))
        if vocab_size < len(characters) + len(special):  # the library exceeds the size or hangs
            raise ValueError(
                f"tokenizer_vocab_size={vocab_size} is too small for unigram: it must be at least {len(characters)} "
                f"characters plus {len(special)} special tokens."
            )
        tokenizer, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(**options, unk_token=unk)
    else:
        tokenizer, trainer = Tokenizer(models.WordLevel(unk_token=unk)), trainers.WordLevelTrainer(**options)
        single = pre_tokenizers.Sequence([mark, pre_tokenizers.Split("", "isolated")])
        splits = single if tokenizer_type == "char" else pre_tokenizers.WhitespaceSplit()
    steps: list[Any] = [normalizers.NFC(), *([moses_normalizer()] if arguments.moses else [])]
    steps += [normalizers.Replace(Regex(r"\s+"), " ")]  # such as tabs and no-break spaces
    # Not at the end of a text before an added token, such as "are <num> men". Training and translation strip the end
    steps += [normalizers.Strip(right=arguments.moses)]
    steps += [normalizers.Lowercase()] if arguments.lowercase else []
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = splits
    if tokenizer_type == "word":  # without a decoder, words are joined by spaces
        # special tokens in the text would get a second id
        special_words = pre_tokenizers.Split(Regex(f"^({'|'.join(special)})$"), "removed")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splits, special_words])
    else:
        tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = splits
    eos = SPECIAL_TOKENS["eos_token"]
    template = {"single": f"$A {eos}", "special_tokens": [(eos, special.index(eos))]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    return tokenizer


def train_tokenizer(
    sources: list[str], targets: list[str], arguments: TokenizerArguments
) -> PreTrainedTokenizerFast | VanillaTransformerTokenizer:
    """Train a tokenizer for both languages with one vocabulary or two, or load the one of `tokenizer_path`."""
    if arguments.tokenizer_path is not None:
        return load_training_tokenizer(arguments.tokenizer_path, "tokenizer_path")
    if arguments.shared_vocabulary:
        return PreTrainedTokenizerFast(tokenizer_object=train_backend(sources + targets, arguments), **SPECIAL_TOKENS)
    return VanillaTransformerTokenizer(
        source_tokenizer_object=train_backend(sources, arguments),
        target_tokenizer_object=train_backend(targets, arguments),
        **SPECIAL_TOKENS,
    )


def load_training_tokenizer(path: str, key: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer with pad and EOS tokens. Raises ValueError if it cannot be used."""
    tokenizer = loading.load_tokenizer(path, f"{key}={path}:")
    for name in ("pad_token", "eos_token"):
        if getattr(tokenizer, name) is None:
            raise ValueError(f"{key}={path}: the tokenizer has no {name}. Add one and save it.")
    if getattr(tokenizer, "tgt_lang", "") is None:  # its class would mark targets with the source language
        raise ValueError(
            f"{key}={path}: the tokenizer has no tgt_lang, the language of the targets. Load it with src_lang=... and "
            f"tgt_lang=..., and save it again."
        )
    for model in (backend.model for backend in backend_tokenizers(tokenizer)):
        is_word_model = isinstance(model, models.WordLevel | models.WordPiece)
        if is_word_model and model.token_to_id(model.unk_token) is None:
            raise ValueError(f"{key}={path}: the vocabulary lacks {model.unk_token!r}, for unknown words. Add it.")
    if tokenizer(text_target="a")["input_ids"][-1:] != [tokenizer.eos_token_id]:
        raise ValueError(
            f"{key}={path}: the tokenizer must end targets with {tokenizer.eos_token!r}, or decoding would never stop. "
            f"Add it in a post-processor."
        )
    return tokenizer


def saved_files(tokenizer: Any) -> dict[str, bytes]:
    """Return the files that `save_pretrained` writes, such as settings and SentencePiece models, by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def add_bpe_dropout(tokenizer: PreTrainedTokenizerFast, probability: float) -> PreTrainedTokenizerFast:
    """Return a copy that skips merges with the given probability. Raises ValueError if it is not a BPE tokenizer."""
    tokenizer = copy.deepcopy(tokenizer)
    bpe_models = [each.model for each in backend_tokenizers(tokenizer)]
    if not bpe_models or not all(isinstance(model, models.BPE) for model in bpe_models):
        raise ValueError(f"bpe_dropout={probability} requires a fast BPE tokenizer. Set bpe_dropout to 0.")
    for model in bpe_models:
        model.dropout = probability
    return tokenizer


def vocabulary_sizes(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Return the sizes of source and target vocabulary."""
    source, target = (max(vocabulary.values()) + 1 for vocabulary in vocabularies(tokenizer))
    return source, target


def validate_embedding_rows(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ValueError if the tokenizer of the checkpoint `name` has more tokens than the model has embeddings."""
    rows = model.get_input_embeddings().num_embeddings
    if (size := vocabulary_sizes(tokenizer)[0]) > rows:
        remedy = "Use the tokenizer of the model, or save the model after resize_token_embeddings()."
        raise ValueError(f"{name}: the tokenizer has {size} tokens, but the model only {rows}. {remedy}")
