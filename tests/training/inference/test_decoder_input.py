"""Decoder input of models of other classes, which shift labels in different ways or not at all."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from training.data.parallel_text import ParallelText
from training.inference.decoder_input import add_decoder_input_ids
from training.inference.metrics import compute_pair_nll
from training.run.losses import training_loss

SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
FSMT_SIZES = SIZES | {"src_vocab_size": 60, "tgt_vocab_size": 60}
T5_SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
CLASSES = {
    BartForConditionalGeneration: (BartConfig, SIZES),
    BlenderbotForConditionalGeneration: (BlenderbotConfig, SIZES),
    FSMTForConditionalGeneration: (FSMTConfig, FSMT_SIZES),
    M2M100ForConditionalGeneration: (M2M100Config, SIZES),
    MarianMTModel: (MarianConfig, SIZES),
    MBartForConditionalGeneration: (MBartConfig, SIZES),
    T5ForConditionalGeneration: (T5Config, T5_SIZES),
}


@pytest.fixture(params=CLASSES, ids=lambda each: each.__name__)
def model(request):
    torch.manual_seed(0)
    config_class, sizes = CLASSES[request.param]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    vocabulary = {} if config_class is FSMTConfig else {"vocab_size": 60}
    return request.param(config_class(**sizes, **ids, **vocabulary)).eval()


@torch.no_grad()
def compute_loss(model, sources, labels) -> float:
    ids = torch.tensor(sources)
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor(labels)}
    inputs = add_decoder_input_ids(model, inputs)
    assert inputs["labels"].tolist() == labels
    return float(training_loss(model, inputs, 0.0, 0.0, False)[0])


def test_loss_does_not_depend_on_padding(model):
    first, second = ([5, 6, 7, 2], [5, 6, 7, 2]), ([8, 9, 2], [8, 2])
    separate = [compute_loss(model, [source], [target]) for source, target in (first, second)]
    padded = compute_loss(model, [first[0], [*second[0], 0]], [first[1], [*second[1], -100, -100]])
    assert padded == pytest.approx(sum(separate), rel=1e-5)
    if not isinstance(model, FSMTForConditionalGeneration):  # computes its own decoder input from the source
        expected = model(input_ids=torch.tensor([first[0]]), labels=torch.tensor([first[1]])).loss.item() * 4
        assert separate[0] == pytest.approx(expected, rel=1e-5)


def test_rows_without_target_have_no_loss(model):
    """A process can have an empty micro-batch, and a batch of fixed shape can have missing rows."""
    expected = compute_loss(model, [[5, 2]], [[6, 2]])
    assert compute_loss(model, [[0]], [[-100]]) == 0
    assert compute_loss(model, [[5, 2], [0, 0]], [[6, 2], [-100, -100]]) == pytest.approx(expected, rel=1e-5)


def test_likelihood_does_not_depend_on_padding(model, train_bpe, sentences, special_tokens):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bpe(sentences["en"], 60), **special_tokens)
    text = ParallelText(["a dog", "the cat sleeps on the green bench"], ["the cat sleeps on the bench", "a dog"])
    single, padded = (compute_pair_nll(model, tokenizer, text, size, show=False) for size in (1, 2))
    for (nats, tokens), (other, count) in zip(single, padded, strict=True):
        assert (nats, tokens) == (pytest.approx(other, rel=1e-4), count)
    tokenizer.padding_side = "left"
    assert compute_pair_nll(model, tokenizer, text, 2, show=False) == padded
