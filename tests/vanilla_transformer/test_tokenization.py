import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, TokenizersBackend

from vanilla_transformer import VanillaTransformerTokenizer


@pytest.fixture
def tokenizer(train_bpe, sentences, special_tokens):
    return VanillaTransformerTokenizer(
        source_tokenizer_object=train_bpe(sentences["en"], 60),
        target_tokenizer_object=train_bpe(sentences["de"], 70),
        **special_tokens,
    )


def test_source_and_target_vocabularies(tokenizer, train_bpe, sentences):
    batch = tokenizer("the dog runs", text_target="der Hund rennt")
    assert batch["input_ids"] == train_bpe(sentences["en"], 60).encode("the dog runs").ids
    assert batch["labels"] == train_bpe(sentences["de"], 70).encode("der Hund rennt").ids
    assert tokenizer("the dog runs")["input_ids"] == batch["input_ids"]  # back in source mode
    assert (len(tokenizer), tokenizer.target_tokenizer.get_vocab_size()) == (60, 70)


@pytest.mark.parametrize("bare", ["source", "target"])
def test_one_side_without_post_processor(train_bpe, sentences, special_tokens, tmp_path, bare):
    """A side without a post-processor adds no tokens. The other side keeps its own post-processor."""
    sides = {"source": train_bpe(sentences["en"], 60), "target": train_bpe(sentences["de"], 70)}
    sides[bare].post_processor = None
    text = {"source": "the dog runs", "target": "der Hund rennt"}
    expected = {side: tokenizer.encode(text[side]).ids for side, tokenizer in sides.items()}
    assert [ids[-1] == 2 for ids in expected.values()] == [bare == "target", bare == "source"]
    tokenizer = VanillaTransformerTokenizer(
        source_tokenizer_object=sides["source"], target_tokenizer_object=sides["target"], **special_tokens
    )
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        batch = each(text["source"], text_target=text["target"])
        assert {"source": batch["input_ids"], "target": batch["labels"]} == expected
        assert {side: each.stock(side)(text[side])["input_ids"] for side in sides} == expected


def test_ids_without_embedding_rows_are_unknown(tokenizer, special_tokens, sentences, tmp_path):
    """Checkpoints of earlier versions can have ids without an embedding row. Tokens added later keep their ids."""
    earlier = VanillaTransformerTokenizer(
        source_tokenizer_object=tokenizer.source_tokenizer, target_tokenizer_object=tokenizer.target_tokenizer,
        known=[40, 30], **special_tokens,
    )  # fmt: skip
    earlier.save_pretrained(tmp_path)
    earlier = AutoTokenizer.from_pretrained(tmp_path)
    for argument, rows, texts in (("text", 40, sentences["en"]), ("text_target", 30, sentences["de"])):
        expected = [[i if i < rows else 3 for i in ids] for ids in tokenizer(**{argument: texts})["input_ids"]]
        assert earlier(**{argument: texts})["input_ids"] == expected
        assert sum(expected, []) != sum(tokenizer(**{argument: texts})["input_ids"], [])
    assert len(earlier) == 40
    token_without_row = tokenizer.source_tokenizer.id_to_token(50)
    assert earlier.add_tokens(["newword"]) == 1
    assert len(earlier) == 61
    assert earlier("newword")["input_ids"] == [60, 2]
    assert earlier("the newword")["input_ids"][-2:] == [60, 2]
    earlier.add_tokens([token_without_row])
    assert earlier(token_without_row)["input_ids"] == [50, 2]


def test_decode_uses_target_vocabulary(tokenizer):
    ids = tokenizer(text_target="der Hund rennt")["input_ids"]
    assert tokenizer.decode(ids) == "der Hund rennt</s>"
    assert tokenizer.decode([0, 1, *ids, 0], skip_special_tokens=True) == "der Hund rennt"
    assert tokenizer.batch_decode([ids, ids], skip_special_tokens=True) == ["der Hund rennt"] * 2
    source = tokenizer("the dog runs")["input_ids"]
    assert tokenizer.decode(source, skip_special_tokens=True, use_source_tokenizer=True) == "the dog runs"


def test_pickle_and_save(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} == {
        "source_tokenizer.json",
        "target_tokenizer.json",
        "tokenizer_config.json",
    }
    for other in (pickle.loads(pickle.dumps(tokenizer)), VanillaTransformerTokenizer.from_pretrained(tmp_path)):
        for text in ("the old man reads", "zwei Vögel"):
            assert other(text, text_target=text).data == tokenizer(text, text_target=text).data
        ids = tokenizer(text_target="der Hund rennt")["input_ids"]
        assert other.decode(ids, skip_special_tokens=True) == "der Hund rennt"
        other.save_pretrained(tmp_path / "again")


def test_auto_tokenizer(tokenizer, make_config, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    make_config().save_pretrained(tmp_path)
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is VanillaTransformerTokenizer


def test_padding_and_collating(tokenizer, sentences):
    pairs = [tokenizer(en, text_target=de) for en, de in zip(sentences["en"], sentences["de"], strict=True)]
    batch = DataCollatorForSeq2Seq(tokenizer)(pairs)
    for row, pair in enumerate(pairs):
        length = len(pair["input_ids"])
        assert batch["input_ids"][row, :length].tolist() == pair["input_ids"]
        assert (batch["input_ids"][row, length:] == 0).all()
        assert batch["attention_mask"][row].sum() == length
        assert (batch["labels"][row, len(pair["labels"]) :] == -100).all()
    batch = tokenizer(sentences["en"], text_target=sentences["de"], padding=True, truncation=True, max_length=6)
    assert {len(ids) for ids in batch["labels"]} == {6}


def test_special_tokens_must_have_equal_ids(train_bpe, sentences, special_tokens):
    from tokenizers import Tokenizer

    target = Tokenizer.from_str(train_bpe(sentences["de"], 70).to_str().replace("</s>", "<end>"))
    with pytest.raises(ValueError, match="'</s>' has the id 2 in the source vocabulary and 70 in the target"):
        VanillaTransformerTokenizer(
            source_tokenizer_object=train_bpe(sentences["en"], 60), target_tokenizer_object=target, **special_tokens
        )


def test_special_tokens_are_added_to_both_sides(train_bpe, sentences, special_tokens):
    tokenizer = VanillaTransformerTokenizer(
        source_tokenizer_object=train_bpe(sentences["en"], 60),
        target_tokenizer_object=train_bpe(sentences["de"], 60),
        **special_tokens,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<de>"]})
    assert tokenizer.target_tokenizer.token_to_id("<de>") == tokenizer.convert_tokens_to_ids("<de>") == 60
    assert tokenizer.decode([60, 60], skip_special_tokens=True) == ""


def test_requires_both_tokenizers(train_bpe, sentences):
    with pytest.raises(ValueError, match="target tokenizer is missing"):
        VanillaTransformerTokenizer(source_tokenizer_object=train_bpe(sentences["en"], 60))


def test_does_not_modify_given_tokenizers(train_bpe, sentences, special_tokens):
    source, target = train_bpe(sentences["en"], 60), train_bpe(sentences["de"], 70)
    before = source.to_str(), target.to_str()
    VanillaTransformerTokenizer(source_tokenizer_object=source, target_tokenizer_object=target, **special_tokens)
    assert (source.to_str(), target.to_str()) == before


def test_rejected_special_token_changes_neither_side(tokenizer):
    before = tokenizer.source_tokenizer.to_str(), tokenizer.target_tokenizer.to_str()
    with pytest.raises(ValueError, match="'<de>' has the id 60 in the source vocabulary and 70"):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<de>"]})
    assert (tokenizer.source_tokenizer.to_str(), tokenizer.target_tokenizer.to_str()) == before
    assert "<de>" not in tokenizer.all_special_tokens


def test_target_mode_is_thread_safe(tokenizer):
    """Threads encode sources and decode targets, with a switch every few microseconds."""
    text, ids = "the old man reads", tokenizer(text_target="der alte Mann liest")["input_ids"]
    expected = tokenizer(text)["input_ids"], tokenizer.decode(ids)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            actual = list(pool.map(lambda _: (tokenizer(text)["input_ids"], tokenizer.decode(ids)), range(4000)))
    finally:
        sys.setswitchinterval(interval)
    assert sum(each != expected for each in actual) == 0


def test_error_resets_target_mode(tokenizer):
    texts = {"text": "the dog", "text_target": "der Hund"}
    expected = tokenizer.tokenize(texts["text"])
    with pytest.raises((TypeError, ValueError)):
        tokenizer(text_target=3)
    assert tokenizer.backend_tokenizer is tokenizer.source_tokenizer
    assert tokenizer.tokenize(texts["text"]) == expected


def test_new_tokenizer_is_in_source_mode(tokenizer):
    """An object may have the id() of a deleted one. Copies do not inherit the mode of the original."""
    for _ in range(50):
        copied = copy.copy(tokenizer)
        assert copied.backend_tokenizer is copied.source_tokenizer
        copied._switch_to_target_mode()
        assert copied.backend_tokenizer is copied.target_tokenizer
        assert copy.copy(copied).backend_tokenizer is tokenizer.source_tokenizer
        del copied


def test_one_side_as_fast_tokenizer(tokenizer):
    ids = tokenizer(text_target="der Hund rennt")["input_ids"]
    target = tokenizer.stock("target")
    assert type(target) is TokenizersBackend
    assert target("der Hund rennt")["input_ids"] == ids
    assert target.decode(ids, skip_special_tokens=True) == "der Hund rennt"
    assert (target.pad_token, target.eos_token_id, len(target)) == ("<pad>", 2, 70)
