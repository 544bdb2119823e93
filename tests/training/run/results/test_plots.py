"""Plots of a run."""

import struct

import pytest
from matplotlib.axes import Axes
from transformers import AutoTokenizer, FSMTConfig, FSMTForConditionalGeneration, PreTrainedTokenizerFast

from training.data.tokenizer import train_tokenizer
from training.recipe.arguments import TokenizerArguments
from training.run.results.plots import plot_cross_attention, plot_training_curve

HISTORY = [{"step": step, "loss": 3.0 / step, "eval_loss": 2.0 / step} for step in (1, 2)]


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({}, ["loss, training", "loss, validation"]),
        ({"smoothing": 0.1}, ["loss with label smoothing 0.1, training", "cross-entropy, validation"]),
        (
            {"smoothing": 0.1, "rdrop_alpha": 5},
            ["loss with label smoothing 0.1 and R-Drop 5, training", "cross-entropy, validation"],
        ),
        ({"simcut_alpha": 3.0}, ["loss with SimCut 3, training", "cross-entropy, validation"]),
    ],
)
def test_legend_distinguishes_training_and_validation_loss(tmp_path, settings, labels):
    """Otherwise their difference could be read as overfitting."""
    figure = plot_training_curve(HISTORY, tmp_path / "curve.png", **settings)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == labels
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_source_gain_is_plotted(tmp_path):
    history = [entry | {"eval_source_gain": 0.5 * entry["step"]} for entry in HISTORY]
    figure = plot_training_curve(history, tmp_path / "curve.png")
    line = figure.axes[0].get_lines()[2]
    assert line.get_label() == "loss increase with shuffled sources, validation"
    assert line.get_ydata().tolist() == [0.5, 1.0]


@pytest.mark.parametrize(("source", "inches"), [("a $^_$ b", 2 + 4 * 0.45), ("a " * 300, 60)])
def test_cross_attention_plot(make_model, tmp_path, source, inches):
    """Text between dollars is not a formula. A side has at most 60 inches."""
    arguments = TokenizerArguments(tokenizer_type="word", tokenizer_vocab_size=60)
    tokenizer = train_tokenizer(["a $^_$ b"], ["c"], arguments)
    plot_cross_attention(make_model(), tokenizer, source, "c", tmp_path / "attention.png")
    width, _ = struct.unpack(">II", (tmp_path / "attention.png").read_bytes()[16:24])
    assert width == pytest.approx(120 * inches, abs=1)


def test_cross_attention_plot_of_characters_without_font(make_model, tmp_path, recwarn):
    arguments = TokenizerArguments(tokenizer_type="char", tokenizer_vocab_size=60)
    tokenizer = train_tokenizer(["\U000133ec"], ["c"], arguments)
    plot_cross_attention(make_model(), tokenizer, "\U000133ec", "c", tmp_path / "attention.png")
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_cross_attention_plot_of_fsmt(train_bpe, sentences, special_tokens, tmp_path, monkeypatch):
    """Its forward() without decoder_input_ids decodes the source."""
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "src_vocab_size": 60, "tgt_vocab_size": 60}
    model = FSMTForConditionalGeneration(FSMTConfig(pad_token_id=0, eos_token_id=2, decoder_start_token_id=2, **sizes))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bpe(sentences["en"], 60), **special_tokens)
    images = []
    show = Axes.imshow

    def imshow(self, weights, **options):
        images.append(weights)
        return show(self, weights, **options)

    monkeypatch.setattr(Axes, "imshow", imshow)
    plot_cross_attention(model, tokenizer, "the dog", "a cat sleeps in the house", tmp_path / "a.png")
    lengths = [len(tokenizer(text)["input_ids"]) for text in ("a cat sleeps in the house", "the dog")]
    assert [*images[0].shape] == lengths


def test_cross_attention_plot_of_marian_tokenizer(make_model, marian_files, tmp_path, monkeypatch):
    """Its method `convert_ids_to_tokens` supports only the target vocabulary, which is smaller here."""
    tokenizer = AutoTokenizer.from_pretrained(marian_files)
    sizes = {"vocab_size": 37, "decoder_vocab_size": 29, "share_encoder_decoder_embeddings": False}
    labels = []
    for name in ("set_xticks", "set_yticks"):
        monkeypatch.setattr(Axes, name, lambda self, ticks, texts, **options: labels.append(texts))
    plot_cross_attention(make_model(**sizes, pad_token_id=2), tokenizer, "der Hund", "the dog", tmp_path / "a.png")
    for texts, vocabulary, ids in zip(
        labels,
        (tokenizer.encoder, tokenizer.target_encoder),
        (tokenizer("der Hund")["input_ids"], tokenizer(text_target="the dog")["input_ids"]),
        strict=True,
    ):
        assert [vocabulary[text] for text in texts] == ids
