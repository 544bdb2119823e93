"""Trains tokenizers: one shared vocabulary of byte-pair tokens (section 5.1), or one for each language."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerTokenizer

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # ids 0 to 3


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-pair tokenizer (Sennrich et al. 2016) that ends every sequence with `</s>`.

    Words and punctuation are split before merging; a space is kept as the mark "▁", so that decoding is exact.

    Args:
        texts: sentences.
        size: tokens, the four special ones included.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Metaspace()
    special_tokens = list(SPECIAL_TOKENS.values())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special_tokens, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    end = SPECIAL_TOKENS["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, special_tokens.index(end))]
    )
    return tokenizer


def train_tokenizer(
    sources: list[str], targets: list[str], size: int, shared: bool
) -> PreTrainedTokenizerFast | VanillaTransformerTokenizer:
    """A tokenizer for both languages; with `shared=False` two vocabularies of at most `size` tokens each."""
    if shared:
        return PreTrainedTokenizerFast(tokenizer_object=train_bpe(sources + targets, size), **SPECIAL_TOKENS)
    return VanillaTransformerTokenizer(
        source_tokenizer_object=train_bpe(sources, size),
        target_tokenizer_object=train_bpe(targets, size),
        **SPECIAL_TOKENS,
    )


def vocabulary_sizes(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Tokens of the source and of the target."""
    target = getattr(tokenizer, "target_tokenizer", None)
    return len(tokenizer), target.get_vocab_size() if target else len(tokenizer)
