"""Collators: padding, missing rows, and small pickles."""

import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq

from training.data.batch_shapes import Shape, ShapedPairs, choose_shapes
from training.data.collators import PaddingCollator
from training.data.parallel_text import ParallelText
from training.data.tokenization import tokenize_corpus
from training.inference.decoder_input import add_decoder_input_ids
from training.recipe.arguments import DataArguments

MAX_PICKLE = 100_000  # bytes


def test_pads_to_shape_and_ignores_missing_rows(make_model):
    model = make_model(vocab_size=30)
    rows = [([4, 5, 2], [6, 2]), ([7, 2], [8, 9, 2])]
    data = Dataset.from_dict({"input_ids": [source for source, _ in rows], "labels": [target for _, target in rows]})
    shapes = choose_shapes(np.array([[3, 2], [2, 3]] * 2), 12)
    collate = PaddingCollator(model.config.pad_token_id, shapes)
    pairs = ShapedPairs(data)
    batch = add_decoder_input_ids(model, collate(pairs.__getitems__([0, 1, 0])))
    assert batch["input_ids"].shape == (4, 3)
    assert batch["input_ids"][:2].tolist() == [[7, 2, model.config.pad_token_id], [4, 5, 2]]
    assert batch["attention_mask"].sum(1).tolist() == [2, 3, 1, 1]
    assert batch["labels"].tolist() == [[8, 9, 2], [6, 2, -100], [-100] * 3, [-100] * 3]
    start = model.config.decoder_start_token_id
    assert batch["decoder_input_ids"][0].tolist() == [start, 8, 9]
    empty = collate(pairs.__getitems__([0]))
    assert (empty["labels"] == -100).all()
    model.eval()
    loss = model(**batch).loss
    torch.testing.assert_close(model(**{name: each[:2] for name, each in batch.items()}).loss, loss)


def test_batches_equal_those_of_transformers(make_model, make_tokenizer):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    rows = [{"input_ids": [5, 6, 7, 2], "labels": [9, 2]}, {"input_ids": [8, 2], "labels": [4, 3, 2]}]
    batch = add_decoder_input_ids(model, PaddingCollator(tokenizer.pad_token_id)(rows))
    expected = DataCollatorForSeq2Seq(tokenizer, model=model)(rows)
    assert batch.keys() == expected.keys()
    for name, tensor in batch.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.equal(expected[name])


def test_batch_without_pairs_has_no_target(make_model):
    model = make_model()
    batch = PaddingCollator(model.config.pad_token_id)([])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[model.config.pad_token_id]],
        "attention_mask": [[1]],
        "labels": [[-100]],
    }
    assert model(**batch, num_items_in_batch=1).loss.item() == 0


@pytest.mark.parametrize("is_shaped", [False, True])
def test_pickles_contain_neither_model_nor_tokenizer(make_trainer, is_shaped):
    """Worker processes receive the collator as a pickle if the start method is forkserver or spawn."""
    trainer = make_trainer(dataloader_num_workers=2)
    if is_shaped:
        trainer.compiled_loss = lambda *arguments: None
    collator = trainer.get_train_dataloader().collate_fn
    assert isinstance(collator, PaddingCollator)
    assert bool(collator.shapes) == is_shaped
    assert len(pickle.dumps(collator)) < MAX_PICKLE
    assert len(pickle.dumps(PaddingCollator(0, [Shape(64, i, i) for i in range(12)]))) < MAX_PICKLE


@pytest.mark.parametrize("shared", [True, False])
def test_data_with_bpe_dropout_can_be_pickled(make_tokenizer, sentences, tmp_path, monkeypatch, shared):
    monkeypatch.setattr("training.data.tokenization.HF_DATASETS_CACHE", str(tmp_path))
    tokenizer, _ = make_tokenizer(shared)
    text = ParallelText(sentences["en"], sentences["de"])
    data = pickle.loads(pickle.dumps(tokenize_corpus(text, tokenizer, DataArguments(), dropout=1.0)))
    expected = tokenize_corpus(text, tokenizer)
    assert len(data[0]["labels"]) > len(expected[0]["labels"])  # single characters
