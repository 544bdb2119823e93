"""Settings that rules choose: the type of the data, valid and monotone values, keys of the user."""

import itertools
import random
import unicodedata

import pytest

from training.demo.corpus import generate
from training.recipe.reading import read_options, read_recipe
from training.recipe.rules import TYPES, UNTRIED_KEYS, DataSummary, choose_settings, summarize_data

DURATIONS = ({"minutes": 2}, {"minutes": 10}, {"minutes": 60}, {"minutes": 1000}, {}, {"max_steps": 300})
DEVICES = (("cpu", 1), ("cpu", 2), ("cpu", 64), ("mps", 1), ("cuda", 1), ("cuda", 8))
PAIRS = (1, 500, 5_000, 30_000, 160_000, 1_000_000, 50_000_000)


def spelled_pairs(count: int) -> list[tuple[str, str]]:
    rng = random.Random(0)
    chosen = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(count)]
    return [(" ".join(word), " ".join(word.upper())) for word in chosen]


TWO_PASSES = "rdrop_alpha", "simcut_alpha"
DATES = [
    (f"{i % 28 + 1}.{i % 12 + 1}.{1900 + i}", f"{1900 + i}-{i % 12 + 1:02}-{i % 28 + 1:02}") for i in range(99)
] * 3
CHINESE = [(f"line {i}", "".join(chr(0x4E00 + (i * 37 + j * j * 11) % 900) for j in range(9))) for i in range(2000)]

THAI_LETTERS = [chr(0x0E01 + i) for i in range(46)]
THAI = [(f"line {i}", "".join(random.Random(i).choices(THAI_LETTERS, k=35))) for i in range(2000)]


@pytest.mark.parametrize(
    ("pairs", "data_type", "mean_length"),
    [
        (generate(train=500, validation=1, test=1)["train"], "sentences", 8),
        (spelled_pairs(300), "symbols", 7),
        ([(letters.replace(" ", ""), phonemes) for letters, phonemes in spelled_pairs(300)], "words", 13),
        (DATES, "words", 10),
        (THAI, "sentences", 35),
        (CHINESE, "sentences", 9),  # without spaces, with more characters than an alphabet
    ],
)
def test_type_of_the_data(pairs, data_type, mean_length):
    summary = summarize_data(*zip(*pairs, strict=True))
    assert (summary.type, summary.pairs) == (data_type, len(pairs))
    assert summary.mean_length == pytest.approx(mean_length, abs=1)
    assert summary.mean_length <= summary.long_length + 1
    assert summary.characters == len(set().union(*itertools.chain.from_iterable(pairs)))
    assert summarize_data(*zip(*pairs, strict=True), tokenizer_type="unigram").type == "sentences"


@pytest.mark.parametrize("data_type", TYPES)
def test_all_choices_are_valid_recipes(tmp_path, data_type):
    """Also for extreme data, times and machines. Each key has a reason."""
    for pairs, duration, device in itertools.product((1, 5_000, 50_000_000), DURATIONS, DEVICES):
        for length in (0.5, 300):
            choices = choose_settings(DataSummary(data_type, pairs, length, int(2 * length), 60), *device, duration)
            values = {name: choice.value for name, choice in choices.items()} | {"output_dir": str(tmp_path / "out")}
            recipe = read_recipe([], duration, values)
            assert recipe.training.minutes == duration.get("minutes", None if "max_steps" in duration else 30)
            assert all(choice.reason for name, choice in choices.items() if name != "logging_steps")
            assert recipe.training.predict_with_generate == (duration != {"minutes": 2})


def test_choices_are_monotone():
    """More time never means a smaller model or weaker regularization; more pairs never a smaller vocabulary."""

    def choose(pairs, duration):
        choices = choose_settings(DataSummary("sentences", pairs, 12, 25, 60), "cpu", 2, duration)
        return {name: choice.value for name, choice in choices.items()}

    for pairs in PAIRS:
        times = [choose(pairs, {"minutes": minutes}) for minutes in (1, 2, 5, 10, 30, 60, 600, 6000, 60_000)]
        growing = "d_model", "encoder_layers", "dropout", "tokens_per_update", "encoder_ffn_dim", "tokenizer_vocab_size"
        for name in growing:
            values = [choice[name] for choice in times]
            assert values == sorted(values), name
        for norm in ("pre", "post"):
            rates = [choice["learning_rate"] for choice in times if choice["norm_position"] == norm]
            assert rates == sorted(rates, reverse=True)
    for minutes in (2, 10, 60):
        sizes = [choose(pairs, {"minutes": minutes}) for pairs in PAIRS]
        vocabularies = [choice["tokenizer_vocab_size"] for choice in sizes]
        assert vocabularies == sorted(vocabularies)
        dropouts = [choice["dropout"] for choice in sizes]
        assert dropouts == sorted(dropouts, reverse=True)


@pytest.mark.parametrize(
    ("cores", "minutes", "tokens"), [(1, 3, 512), (1, 10, 1024), (2, 1, 1024), (2, 60, 3072), (1, 1e308, 8192)]
)
def test_short_runs_have_small_updates(cores, minutes, tokens):
    """With R-Drop, a run has half as many tokens, and smaller updates, too."""
    choices = choose_settings(DataSummary("sentences", 29_000, 12, 25, 60), "cpu", cores, {"minutes": minutes})
    assert choices["tokens_per_update"].value == tokens
    choices = choose_settings(DataSummary("sentences", 5_000, 12, 25, 60), "cpu", cores, {"minutes": minutes})
    assert choices["tokens_per_update"].value == {3072: 1536}.get(tokens, tokens)


@pytest.mark.parametrize(
    ("data_type", "minutes", "schedule"),
    [("sentences", 2, (0.0045, 0.3)), ("sentences", 10, (0.003, 0.1)), ("symbols", 2, (0.003, 0.1))],
)
def test_short_runs_on_sentences_have_a_long_warmup(data_type, minutes, schedule):
    choices = choose_settings(DataSummary(data_type, 29_000, 12, 25, 60), "cpu", 2, {"minutes": minutes})
    assert (choices["learning_rate"].value, choices["warmup_steps"].value) == schedule


@pytest.mark.parametrize("name", [*sorted(UNTRIED_KEYS), "lr_scheduler_type"])
def test_untried_keys_have_the_usual_schedule(name):
    """A given rate has the usual warm-up, and a given warm-up the usual rate, also if the run is short."""
    value = {"norm_position": "post", "base_model": "user/name", "lr_scheduler_type": "cosine"}.get(name, 128)
    given = {"minutes": 2, name: value}
    choices = choose_settings(DataSummary("sentences", 29_000, 12, 25, 60), "cpu", 2, given)
    usual = {"learning_rate": 0.0005 if name == "base_model" else 0.003, "warmup_steps": 0.1}
    assert {key: choices[key].value for key in usual if key != name} == {k: v for k, v in usual.items() if k != name}


@pytest.mark.parametrize(
    ("data_type", "cores", "minutes", "layers"),
    [("sentences", 1, 10, 1), ("sentences", 2, 10, 2), ("sentences", 2, 30, 4), ("symbols", 1, 3, 2)],
)
def test_short_runs_have_few_layers(data_type, cores, minutes, layers):
    choices = choose_settings(DataSummary(data_type, 5_000, 12, 25, 60), "cpu", cores, {"minutes": minutes})
    assert choices["encoder_layers"].value == choices["decoder_layers"].value == layers


@pytest.mark.parametrize(
    ("data_type", "pairs", "given", "norm"),
    [("sentences", 29_000, {"minutes": 30}, "post"), ("sentences", 29_000, {"minutes": 10}, "pre")]
    + [("sentences", 5_000, {"minutes": 60}, "pre"), ("words", 100_000, {"minutes": 60}, "pre")]
    + [("sentences", 29_000, {"minutes": 60, "encoder_layers": 12}, "pre")]
    + [("sentences", 29_000, {"minutes": 60, "tokens_per_update": 25_000}, "pre")]
    + [("sentences", 29_000, {"minutes": 60, "train_fraction": 1.0}, "pre")],
)
def test_only_long_runs_on_many_sentences_use_post_norm(data_type, pairs, given, norm):
    """And only models whose sizes the rules have chosen."""
    choices = choose_settings(DataSummary(data_type, pairs, 12, 25, 60), "cpu", 2, given)
    rate, warmup = {"pre": (0.003, 0.1), "post": (0.005, 0.2)}[norm]
    values = [choices[name].value for name in ("norm_position", "learning_rate", "warmup_steps")]
    assert values == [norm, rate, warmup]
    choices = choose_settings(DataSummary(data_type, pairs, 12, 25, 60), "cpu", 2, given | {"norm_position": "post"})
    assert choices["learning_rate"].value == 0.003


@pytest.mark.parametrize(("cores", "minutes"), [(2, 14), (4, 7), (8, 5), (16, 2), (64, 0.5)])
def test_post_norm_has_many_updates(cores, minutes):
    """Also if many cores have large updates."""
    for factor in (1, 2, 3, 6):
        choices = choose_settings(
            DataSummary("sentences", 29_000, 12, 25, 60), "cpu", cores, {"minutes": factor * minutes}
        )
        tokens = 0.8 * 60 * factor * minutes * cores * 3000
        has_many_updates = tokens / choices["tokens_per_update"].value >= 2500
        assert choices["norm_position"].value == ("post" if has_many_updates and tokens > 4e6 else "pre")


@pytest.mark.parametrize(
    ("pairs", "minutes", "dropout"), [(29_000, 10, 0.1), (29_000, 60, 0.2), (4_800, 10, 0.3), (4_800, 60, 0.3)]
)
def test_dropout(pairs, minutes, dropout):
    choices = choose_settings(DataSummary("sentences", pairs, 11.1, 23, 60), "cpu", 2, {"minutes": minutes})
    assert choices["dropout"].value == dropout


@pytest.mark.parametrize(
    ("data_type", "pairs", "given", "alpha"),
    [("sentences", 5_000, {"minutes": 10}, 2), ("sentences", 1_000, {"minutes": 10}, 2)]
    + [("sentences", 20_001, {"minutes": 1_000}, 0), ("sentences", 10_000, {"minutes": 10}, 0)]
    + [("sentences", 1_000, {"minutes": 3}, 0), ("words", 5_000, {"minutes": 60}, 0)]
    + [("sentences", 5_000, {"minutes": 10, "simcut_alpha": 3.0}, 0)]
    + [("sentences", 5_000, {"minutes": 10, "dropout": 0.0}, 0)],
)
def test_long_runs_on_few_sentences_use_rdrop(data_type, pairs, given, alpha):
    choices = choose_settings(DataSummary(data_type, pairs, 11.1, 23, 60), "cpu", 2, given)
    assert choices["rdrop_alpha"].value == alpha


@pytest.mark.parametrize(
    ("data_type", "pairs", "minutes", "size"),
    [("sentences", 80_000, 10, 5_000), ("sentences", 80_000, 30, 8_000), ("sentences", 1_000, 30, 3_000)]
    + [("sentences", 80_000, 2, 3_000)]
    + [("symbols", 80_000, 10, 8_000)],
)
def test_vocabulary_size(data_type, pairs, minutes, size):
    """Short runs have a small vocabulary, except for words: rare words would become unknown."""
    choices = choose_settings(DataSummary(data_type, pairs, 12, 25, 60), "cpu", 2, {"minutes": minutes})
    assert choices["tokenizer_vocab_size"].value == size


@pytest.mark.parametrize(("characters", "size"), [(60, 3_000), (4_000, 8_000), (30_000, 32_000)])
def test_vocabulary_is_larger_than_the_alphabet(characters, size):
    """Else the tokens of an alphabetic language would be single letters, and rare characters unknown."""
    for data_type in ("sentences", "words"):
        choices = choose_settings(DataSummary(data_type, 1_000, 12, 25, characters), "cpu", 1, {"minutes": 2})
        assert choices["tokenizer_vocab_size"].value == size
        assert f"{characters:,} characters" in choices["tokenizer_vocab_size"].reason


def test_letters_with_combining_marks_are_single_characters():
    """The tokenizer also normalizes its text."""
    syllables = [chr(0xAC00 + 7 * i) for i in range(500)]
    decomposed = [unicodedata.normalize("NFD", f"{a} {b}") for a, b in zip(syllables, syllables[1:], strict=False)]
    assert summarize_data(decomposed, decomposed).characters == 501


@pytest.mark.parametrize(
    ("given", "updates"),
    [({"max_steps": 900}, "900"), ({"max_steps": 5_000, "tokens_per_update": 128}, "5,000")]
    + [({"max_steps": 300, "tokens_per_update": 8192}, "300"), ({"minutes": 2}, "562")]
    + [({"minutes": 30, "rdrop_alpha": 1.0}, "8,438"), ({"minutes": 30, "simcut_alpha": 1.0}, "8,438")],
)
def test_reason_has_the_number_of_updates(given, updates):
    for cores in (2, 64) if "max_steps" in given else (2,):
        choices = choose_settings(DataSummary("sentences", 29_000, 12, 25, 60), "cpu", cores, given)
        assert f", {updates} updates" in choices["dropout"].reason
        assert ("half as many" in choices["dropout"].reason) == (not given.keys().isdisjoint(TWO_PASSES))


@pytest.mark.parametrize(("given", "penalty"), [({}, 0.0), ({"metric": "translation"}, 1.0)])
def test_length_penalty_follows_the_metric(given, penalty):
    choices = choose_settings(DataSummary("symbols", 5_000, 12, 25, 60), "cpu", 1, given)
    assert choices["length_penalty"].value == penalty


def test_estimate_of_any_number_of_epochs_is_finite():
    choices = choose_settings(DataSummary("sentences", 5_000, 12, 25, 60), "cpu", 1, {"num_train_epochs": 1e308})
    assert choices["tokens_per_update"].value == 8192


def test_keys_of_the_user_are_not_chosen():
    summary = DataSummary("sentences", 5_000, 12, 25, 60)
    options = [
        "--dropout",
        "0.1",
        "--minutes=5",
        "--tokenizer-type=unigram",
        "--test-file=null",
        "--metric",
        "sequence",
    ]
    given = read_options(options, {"d_model": 64, "seed": 3, "lowercase": True})
    assert given == {
        **{"dropout": 0.1, "minutes": 5.0, "tokenizer_type": "unigram", "test_file": None, "metric": "sequence"},
        **{"d_model": 64, "seed": 3, "lowercase": True},
    }
    assert not choose_settings(summary, "cpu", 2, given).keys() & given.keys()


def test_base_model_determines_architecture_and_tokenizer(tmp_path):
    given = {"base_model": "user/name", "minutes": 30}
    choices = choose_settings(DataSummary("sentences", 5_000, 12, 25, 60), "cpu", 2, given)
    assert choices["warmup_steps"].value == 0.1
    assert "half" not in choices["tokens_per_update"].reason  # without R-Drop
    values = {name: choice.value for name, choice in choices.items()} | {"output_dir": str(tmp_path / "out")}
    assert read_recipe([], given, values).training.learning_rate == 0.0005
