"""Rules that choose the settings of a run from its data and its time.

Comments name the runs on which the values are based. The rules prefer settings whose training never failed over
slightly better ones: pre-norm, except in long runs, and a moderate learning rate. docs/results.md has the scores.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import Any, NamedTuple

DEFAULT_MINUTES = 30.0
MAX_MINUTES = 366 * 24 * 60
MAX_TOKENS = 1e18  # of an estimate, so that it remains finite
SHORT_MINUTES = 5  # runs up to this time do not decode validation data: 1,000 sentences take 16 s on a core
TRAINING_FRACTION = 0.8  # of the time; the rest is for evaluations and the test
TOKENS_PER_SECOND = {"cpu": 3000, "mps": 10_000, "cuda": 100_000}  # target tokens per CPU core or GPU, with d_model 128
MIN_CORE_TOKENS = 512  # minimum tokens of an update per CPU core
MAX_SYMBOLS = 200  # distinct words per side, or characters of both sides; with more, they are not symbols
MIN_REPETITIONS = 20  # minimum of the mean number of occurrences per symbol
MAX_MEAN_WORDS = 1.5  # maximum mean number of words per target, if the targets are single words
MAX_MEAN_CHARACTERS = 20  # the same for characters; sentences of languages without spaces have more
MAX_HELD_OUT, HELD_OUT_FRACTION = 500, 0.1  # training pairs that become validation or test data, if there is none
NUM_SAMPLED_PAIRS = 20_000  # to find the type of the data
MAX_NEW_TOKENS = 256  # limits the decoding time of a model that never generates EOS
FINE_TUNING_RATE = 0.0005  # as in finetune.yaml

# type of the data: tokenizer type, target tokens per word, metric, label smoothing
# Measured: word tokens on CMUdict and SCAN (99.4 % exact match without label smoothing), characters on dates
TYPES = {
    "sentences": ("bpe", 1.4, "translation", 0.1),
    "symbols": ("word", 1.0, "sequence", 0.0),
    "words": ("char", 1.0, "sequence", 0.0),
}
# maximum number of pairs -> vocabulary size. Multi30k, 29,000 pairs: 8,000 is better than 4,000 (BLEU 39.9 and 38.9).
# Multi30k, 4,800 pairs, with 3,000, 5,000 and 8,000 in equal time: 21.2, 22.2 and 21.1 (validation 20.2, 20.5, 19.6).
# Tatoeba, 5,000 pairs: 16.4, 16.4 and 15.2 (validation 14.9, 15.5, 15.2). Multi30k, 1,000 pairs, with 1,500, 3,000 and
# 4,000, means of three, three and two seeds: 13.7, 14.5 and 14.1 (validation 13.1, 13.6, 12.7)
VOCABULARY_SIZES = {2_000: 3_000, 25_000: 5_000, 500_000: 8_000, 2_000_000: 16_000, math.inf: 32_000}
# maximum number of target tokens of the run -> maximum size for sentences, because the output projection is slow.
# 10 minutes of two cores, 8,000 and 5,000: Tatoeba, 80,000 pairs: BLEU 26.6 and 28.1 (validation 24.4, 25.6);
# Multi30k English-French, 29,000 pairs: 49.8 and 51.7 (validation 46.7, 48.9). 5,000 and 3,000: Multi30k, 29,000 pairs,
# 2 minutes of two cores, two seeds: 24.3, 25.0 and 23.0, 27.4; of one core: 22.4 and 23.8; 5 minutes: 32.9 and 31.7
MAX_VOCABULARY_SIZES = {600_000: 3_000, 4_000_000: 5_000, math.inf: 32_000}
# Minimum size per distinct character, so that languages with many characters have tokens of several. Untried.
TOKENS_PER_CHARACTER = 2
# maximum number of pairs and of epochs without R-Drop -> dropout, and weight of R-Drop. Multi30k, 29,000 pairs: 0.1 for
# 5 epochs, 0.15 for 12 to 14, 0.2 for 27 and 58, 0.3 for more; 4,800 pairs: 0.3 for 36 planned epochs.
# Without and with R-Drop, which doubles the time of an update, on one core, with validation and test data together:
# 5,000 pairs, 35 planned epochs (in fact 84 and 44): BLEU 28.2 and 29.4; 21 (45 and 24): 27.8 and 28.3; 1,000 pairs,
# 104 (318 and 154): 16.4 and 17.3; 10,000 pairs, 10 (22 and 13): 31.8 and 31.1. Tatoeba, 5,000 pairs, 34 (83 and 44):
# 15.6 and 16.3
REGULARIZATION = {
    (math.inf, 8): (0.1, 0.0),
    (math.inf, 16): (0.15, 0.0),
    (math.inf, 30): (0.2, 0.0),
    (20_000, math.inf): (0.3, 2.0),
    (math.inf, 60): (0.2, 0.0),
    (math.inf, math.inf): (0.3, 0.0),
}
# SCAN: 0.1 for 56 epochs; CMUdict: 0.1 for 8; dates: 0.1 for 5
SYMBOL_DROPOUTS = {(math.inf, 60): 0.1, (math.inf, math.inf): 0.2}
# maximum number of updates, with `MIN_UPDATE_TOKENS` -> maximum dropout.
# Multi30k, 1,000 pairs, 500 updates: validation loss 4.25 with 0.3, 4.21 with 0.1
MAX_DROPOUTS = {1000: 0.1, math.inf: 0.3}
# maximum number of pairs and of target tokens of the run -> size. 10 minutes of one core with 1, 2 and 4 layers:
# Multi30k, 29,000 pairs: BLEU 32.1, 32.4 and 25.3; Tatoeba, 162,000 pairs: 20.2, 6.5 and 6.5.
# With 2 and 4 layers: Multi30k, 4,800 pairs: BLEU 20.8 and 20.0; CMUdict: exact match 57.9 and 53.6 %; SCAN, on the
# validation data: 79 and 61 %. Multi30k, 29,000 pairs: d_model 256 was not better than 128
SIZES = {
    # d_model, layers per side, heads, feed-forward dimension, position of the norms for sentences
    (math.inf, 1_500_000): (128, 1, 4, 256, "pre"),
    (math.inf, 4_000_000): (128, 2, 4, 256, "pre"),
    (20_000, math.inf): (128, 4, 4, 256, "pre"),
    (50_000, math.inf): (128, 4, 4, 256, "post"),
    (math.inf, 150_000_000): (128, 4, 4, 256, "post"),
    (200_000, math.inf): (256, 4, 4, 1024, "pre"),
    (math.inf, 1_500_000_000): (512, 6, 8, 1024, "pre"),
    (math.inf, math.inf): (512, 6, 8, 2048, "pre"),
}
MIN_SYMBOL_LAYERS = 2  # for symbols and words; one layer was only tried on sentences
SIZE_KEYS = (
    *("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim"),
)
FINE_TUNING_KEYS = {
    *("minutes", "logging_steps", "tokens_per_update", "lr_scheduler_type", "warmup_steps", "metric"),
    *("label_smoothing_factor", "length_penalty", "max_new_tokens"),
}
# position of the norms -> learning rate for d_model 128, and warm-up. Post-norm is better, but in short runs it may
# learn to ignore the source; it was only tried with d_model 128. Multi30k, 4,800 pairs, 10 minutes: BLEU 1.3 with
# post-norm, 20.7 with pre-norm. 29,000 pairs, 3.0 million target tokens with 4 layers: 37.4 and 35.5 (validation 35.3,
# 34.8). With 2 layers and pre-norm, 0.003 and 0.006 were equally good (35.7 and 35.9; validation 34.1, 33.6)
NORMS = {"pre": (0.003, 0.1), "post": (0.005, 0.2)}
# Learning rate and warm-up of short runs on sentences. Multi30k, 29,000 pairs, 2 minutes of two cores: BLEU 24.3 with
# 0.003 and 0.1, 27.0 with 0.0045 and 0.3 (validation loss 2.90, 2.66); of one core, with 0.006: 12.0 with 0.1, 21.9
# with 0.3; with 0.0045, vocabulary 3,000, two seeds: 8.5, 17.7 with 0.2, 25.0, 23.3 with 0.3
SHORT_SCHEDULE = (0.0045, 0.3)
MIN_POST_NORM_UPDATES = 2500  # planned. 1,424 updates, 800 of them warm-up, were too few; 2,107 (2,600 planned) enough
# Keys that may conflict with post-norm and `SHORT_SCHEDULE`, which were not tried with them. The runs of a learning
# curve have a train_fraction, and need the same norms and schedule.
UNTRIED_KEYS = {
    *("norm_position", "base_model", "train_fraction", "tokens_per_update", "learning_rate", "warmup_steps", "optim"),
    *("initialization", "rdrop_alpha", "simcut_alpha", *SIZE_KEYS),
}
# Multi30k: 1,024 for 2.4 M target tokens, 3,072 for 6.5 M and 12 M (17 M planned), 8,192 for 24 M. An hour of
# two cores, 29,000 pairs: BLEU 37.5 with 6,656, pre-norm and dropout 0.3, 39.9 with 3,072, post-norm and dropout 0.2
# (validation 36.1, 38.8)
MIN_UPDATE_TOKENS, MAX_UPDATE_TOKENS = 1024, 8192
MIN_NUM_UPDATES = 5000  # if an update has more than `MIN_UPDATE_TOKENS`
# A short run would have fewer updates of `MIN_UPDATE_TOKENS`. Its updates have `MIN_CORE_TOKENS` per core. Multi30k,
# 4,800 pairs, 3 minutes of one core: validation loss 4.31 with 512 tokens, 4.44 with 1,024; 1,000 pairs, 0.5 M target
# tokens: validation BLEU 4.6 and 2.0
SHORT_NUM_UPDATES = 1000


class Choice(NamedTuple):
    """Value of a key, and the reason for it."""

    value: Any
    reason: str


@dataclass(frozen=True)
class DataSummary:
    """Summary of the training data. The unit of lengths is words, or characters if there are no spaces."""

    type: str  # a key of TYPES
    pairs: int
    mean_length: float  # of the targets
    long_length: int  # of the targets: 99 % are not longer
    characters: int  # distinct ones of both sides, in the normalization form NFC, as in the tokenizer


def summarize_data(sources: Sequence[str], targets: Sequence[str], tokenizer_type: str | None = None) -> DataSummary:
    """Return a summary of the training pairs. If `tokenizer_type` is given, it determines the type of the data."""
    step = max(1, len(sources) // NUM_SAMPLED_PAIRS)
    sample = sources[::step], targets[::step]
    words = [Counter(word for text in side for word in text.split()) for side in sample]
    texts = (unicodedata.normalize("NFC", text) for side in sample for text in side)
    characters = Counter(character for text in texts for character in text)
    words_per_target = words[1].total() / len(sample[1])
    if all(map(are_symbols, words)) and words_per_target > MAX_MEAN_WORDS:
        data_type = "symbols"
    else:
        max_characters = MAX_MEAN_CHARACTERS * len(sample[1])
        is_word = words_per_target <= MAX_MEAN_WORDS and sum(map(len, sample[1])) <= max_characters
        is_short = is_word or are_symbols(words[1])
        data_type = "words" if is_short and are_symbols(characters) else "sentences"
    if tokenizer_type is not None:
        data_type = {"word": "symbols", "char": "words"}.get(tokenizer_type, "sentences")
    has_spaces = data_type == "symbols" or (data_type == "sentences" and words_per_target > MAX_MEAN_WORDS)
    lengths = sorted(len(text.split()) if has_spaces else len(text) for text in sample[1])
    long_length = lengths[len(lengths) * 99 // 100]
    return DataSummary(data_type, len(sources), sum(lengths) / len(lengths), long_length, len(characters))


def are_symbols(counts: Counter) -> bool:
    """Return whether the counted words or characters are few, and often repeated."""
    return len(counts) <= MAX_SYMBOLS and counts.total() >= MIN_REPETITIONS * len(counts)


def choose_settings(summary: DataSummary, device: str, num_devices: int, given: Mapping[str, Any]) -> dict[str, Choice]:
    """Choose the values of recipe keys, except for keys of the data and the keys `given` by the user.

    `device` is "cpu", "cuda" or "mps", and `num_devices` the number of CPU cores or GPUs.
    """
    tokenizer_type, tokens_per_word, metric, smoothing = TYPES[summary.type]
    data_tokens = summary.pairs * (tokens_per_word * summary.mean_length + 1)
    choices = choose_duration(given)
    keys = {name: choice.value for name, choice in choices.items()} | dict(given)
    tokens = estimate_tokens(keys, data_tokens, device, num_devices)
    dropout, rdrop_alpha = choose_regularization(summary, tokens, tokens / data_tokens, given)
    method = "R-Drop" if given.get("rdrop_alpha", rdrop_alpha) else "SimCut" if given.get("simcut_alpha") else ""
    halved = f" (half as many with {method})" if method and "minutes" in keys else ""
    update = given.get("tokens_per_update") or choose_update_tokens(keys, tokens, device, num_devices, bool(halved))
    d_model, layers, heads, ffn_dim, norm = look_up(SIZES, summary.pairs, tokens)
    d_model = given.get("d_model", d_model)
    if summary.type != "sentences":
        layers = max(layers, MIN_SYMBOL_LAYERS)
    is_linear = given.get("lr_scheduler_type", "linear") == "linear"
    is_tried = summary.type == "sentences" and is_linear and not given.keys() & UNTRIED_KEYS
    norm = norm if is_tried and tokens / update >= MIN_POST_NORM_UPDATES else "pre"
    rate, warmup = SHORT_SCHEDULE if is_tried and is_short_run(tokens) else NORMS[norm]
    longest = 10 * math.ceil(tokens_per_word * summary.long_length / 5)
    data = f"{summary.pairs:,} pairs of {summary.type}"
    alphabet = f"{data} with {summary.characters:,} characters"
    epochs = f"about {max(1, round(tokens / data_tokens)):,} epochs of {summary.type}"
    estimate = f"an estimated {tokens / 1e6:.3g} million target tokens of training{halved}"
    reasons: dict[str, dict[str, Any]] = {
        f"{data}: the mean target has {summary.mean_length:.1f} words or characters": {
            "tokenizer_type": tokenizer_type,
            "shared_vocabulary": tokenizer_type == "bpe",
            "label_smoothing_factor": smoothing,
            "metric": metric,
            "length_penalty": 0.0 if given.get("metric", metric) == "sequence" else 1.0,
        },
        f"{alphabet}, {estimate}: a larger vocabulary would be slow, or contain rare tokens": {
            "tokenizer_vocab_size": choose_vocabulary_size(summary, tokens)
        },
        f"{estimate}, {summary.pairs:,} pairs": dict(
            zip(SIZE_KEYS, (d_model, layers, layers, heads, heads, ffn_dim, ffn_dim), strict=True)
        ),
        "post-norm is only for long runs on many sentences": {"norm_position": norm, "initialization": "normal"},
        f"{epochs}, {round(tokens / update):,} updates{halved}": {"dropout": dropout},
        "R-Drop is only for long runs on few sentences, without SimCut": {"rdrop_alpha": rdrop_alpha},
        f"{estimate}, in many updates": {"tokens_per_update": update},
        f"d_model {d_model}, {given.get('norm_position', norm)}-norm, {estimate}": {
            "learning_rate": rate * 128 / max(1, d_model),
            "warmup_steps": warmup,
        },
        "linear decay to 0, and the mean of the last weights": {"lr_scheduler_type": "linear", "ema_decay": 0.998},
        f"99 % of the targets have at most {summary.long_length} words or characters": {
            "max_new_tokens": max(20, min(MAX_NEW_TOKENS, longest))
        },
    }
    choices |= {name: Choice(value, reason) for reason, values in reasons.items() for name, value in values.items()}
    if "base_model" in given:  # it determines architecture and tokenizer
        choices = {name: choice for name, choice in choices.items() if name in FINE_TUNING_KEYS}
        choices["learning_rate"] = Choice(FINE_TUNING_RATE, "for a trained model")
    return {name: choice for name, choice in choices.items() if name not in given}


def choose_regularization(
    summary: DataSummary, tokens: float, epochs: float, given: Mapping[str, Any]
) -> tuple[float, float]:
    """Return dropout and weight of R-Drop, for a run with `tokens` target tokens, or `epochs`, without R-Drop."""
    if summary.type != "sentences":
        dropout, rdrop_alpha = look_up(SYMBOL_DROPOUTS, summary.pairs, epochs), 0.0
    else:
        dropout, rdrop_alpha = look_up(REGULARIZATION, summary.pairs, epochs)
    if is_short_run(tokens) or given.get("simcut_alpha") or given.get("dropout") == 0 or "base_model" in given:
        rdrop_alpha = 0.0
    return min(dropout, look_up(MAX_DROPOUTS, tokens / MIN_UPDATE_TOKENS)), rdrop_alpha


def choose_vocabulary_size(summary: DataSummary, tokens: float) -> int:
    """Return the size of the vocabulary, for a run with `tokens` target tokens."""
    size = look_up(VOCABULARY_SIZES, summary.pairs)
    if summary.type == "sentences":
        size = min(size, look_up(MAX_VOCABULARY_SIZES, tokens))
    return max(size, min(TOKENS_PER_CHARACTER * summary.characters, MAX_VOCABULARY_SIZES[math.inf]))


def choose_update_tokens(
    keys: Mapping[str, Any], tokens: float, device: str, num_devices: int, has_two_passes: bool = False
) -> int:
    """Return the number of target tokens per update, for a run with `tokens` target tokens in single passes."""
    if (max_steps := keys.get("max_steps", -1)) > 0:
        tokens = max_steps * MIN_UPDATE_TOKENS
    smallest = MIN_CORE_TOKENS * (num_devices if device == "cpu" else 1)
    if not is_short_run(tokens):
        smallest = max(smallest, MIN_UPDATE_TOKENS)
    update = int(tokens / (2 if has_two_passes else 1) / MIN_NUM_UPDATES) // MIN_CORE_TOKENS * MIN_CORE_TOKENS
    return min(MAX_UPDATE_TOKENS, max(smallest, update))


def is_short_run(tokens: float) -> bool:
    """Return whether a run with this number of target tokens would have few updates of `MIN_UPDATE_TOKENS`."""
    return tokens / MIN_UPDATE_TOKENS < SHORT_NUM_UPDATES


def estimate_tokens(keys: Mapping[str, Any], data_tokens: float, device: str, num_devices: int) -> float:
    """Return the target tokens of a training run with these keys, from those of an epoch and the number of devices."""
    if keys.get("minutes") is not None:
        speed = TOKENS_PER_SECOND.get(device, TOKENS_PER_SECOND["mps"]) * num_devices
        return TRAINING_FRACTION * 60 * min(keys["minutes"], MAX_MINUTES) * speed
    if (max_steps := keys.get("max_steps", -1)) > 0:
        return max_steps * (keys.get("tokens_per_update") or choose_update_tokens(keys, 0, device, num_devices))
    return min(keys.get("num_train_epochs", 1) * data_tokens, MAX_TOKENS)


def choose_duration(given: Mapping[str, Any]) -> dict[str, Choice]:
    """Choose the duration of the run, unless the user has set it, and the settings of logging and evaluation."""
    choices = {"logging_steps": Choice(100, "")}
    if not {"minutes", "max_steps", "num_train_epochs"} & given.keys():
        choices["minutes"] = Choice(DEFAULT_MINUTES, "the default; --minutes changes it")
    if given.get("minutes", SHORT_MINUTES + 1) <= SHORT_MINUTES:
        choices["predict_with_generate"] = Choice(
            False, f"at most {SHORT_MINUTES} minutes: evaluations compute only the loss"
        )
    return choices


def choose_held_out(num_pairs: int, splits: Iterable[str]) -> dict[str, Choice]:
    """Return the numbers of training pairs that become validation and test data, for splits without files."""
    size = min(MAX_HELD_OUT, int(HELD_OUT_FRACTION * num_pairs))
    return {f"{split}_size": Choice(size, f"there is no file of {split} data") for split in splits}


def look_up(table: Mapping[Any, Any], *numbers: float) -> Any:
    """Return the first value whose limit, or tuple of limits, the numbers do not exceed."""
    rows = ((limits if isinstance(limits, tuple) else (limits,), value) for limits, value in table.items())
    return next(value for limits, value in rows if all(map(le, numbers, limits)))
