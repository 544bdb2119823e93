"""Model and training data of a run."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from training.data.parallel_text import ParallelText
from training.data.tokenizer import load_training_tokenizer
from training.recipe.reading import read_recipe
from training.run.factories import (
    count_positions,
    create_model,
    decoding_settings,
    load_base_model,
    make_train_set,
    match_forced_bos,
    new_tokenizer,
    report_unknown_text,
)
from training.run.factories import (
    make_model as make_training_model,
)

SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 12}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def make_marian():
    return MarianMTModel(MarianConfig(vocab_size=40, **SIZES, **(IDS | {"decoder_start_token_id": 0})))


def accepts_length(model, length: int) -> bool:
    ids = torch.full((1, length), 5)
    try:
        model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    except (IndexError, ValueError):
        return False
    return True


@pytest.mark.parametrize(
    ("model_class", "config", "is_limited"),
    [
        (MarianMTModel, MarianConfig(vocab_size=40, **SIZES, **IDS), True),
        (BartForConditionalGeneration, BartConfig(vocab_size=40, **SIZES, **IDS), True),
        (M2M100ForConditionalGeneration, M2M100Config(vocab_size=40, **SIZES, **IDS), False),
        (FSMTForConditionalGeneration, FSMTConfig(src_vocab_size=40, tgt_vocab_size=40, **SIZES, **IDS), True),
        (
            T5ForConditionalGeneration,
            T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, **IDS),
            False,
        ),
    ],
)
def test_count_positions_of_transformers_models(model_class, config, is_limited):
    model = model_class(config)
    assert (count_positions(model) == 12) == is_limited
    assert accepts_length(model, 12)
    if model_class is not FSMTForConditionalGeneration:  # it extends its table, but cannot load the longer one
        assert accepts_length(model, 13) != is_limited


def test_count_positions_of_vanilla_transformer(make_model):
    assert count_positions(make_model(max_position_embeddings=12)) > 2**31
    model = make_model(position_embedding_type="learned", max_position_embeddings=12)
    lora = LoraConfig("SEQ_2_SEQ_LM", r=2, target_modules="all-linear")
    for each in (model, get_peft_model(model, lora)):
        assert count_positions(each) == 12
    assert not accepts_length(model, 13)


@pytest.fixture
def make_settings(tmp_path):
    def make(**keys):
        path = tmp_path / "recipe.yaml"
        keys = {"output_dir": tmp_path / "out", "learning_rate": 0.001, "max_steps": 2, "tokens_per_update": 256} | keys
        path.write_text("".join(f"{name}: {value}\n" for name, value in keys.items()))
        return read_recipe([str(path)])

    return make


def test_model_of_marian_tokenizer_has_two_vocabularies(make_settings, marian_files):
    model = create_model(make_settings(), load_training_tokenizer(str(marian_files), "tokenizer_path"))
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (37, 29)
    assert not model.config.share_encoder_decoder_embeddings


def test_beam_search_ends_early_only_for_translations(make_settings):
    """For sequences, the first hypotheses that end are often too short."""
    for keys, expected in (({}, True), ({"metric": "sequence"}, False), ({"num_beams": 1}, None)):
        assert decoding_settings(make_settings(**keys)).get("early_stopping") == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_drops_pairs_beyond_the_positions(make_settings, tmp_path, tokenizer, monkeypatch, streaming):
    monkeypatch.setattr("training.data.tokenization.HF_DATASETS_CACHE", str(tmp_path))
    text = ParallelText(["a", "a b", "a " * 40], ["b", "b " * 40, "b"])
    for language, lines in (("en", text.sources), ("de", text.targets)):
        (tmp_path / f"train.{language}").write_text("".join(f"{line}\n" for line in lines))
    recipe = make_settings(data_dir=tmp_path, streaming=str(streaming).lower())
    corpus = {} if streaming else {"train": text}
    for positions, expected in ((20, 1), (100, 3)):
        rows = make_train_set(recipe, corpus, tokenizer, positions)
        assert (sum(map(len, islice(rows, 2))) if streaming else len(rows)) == expected
    assert recipe.data.max_length == 256


def test_warns_about_text_that_the_base_model_does_not_know(make_settings, tokenizer, tmp_path, caplog):
    tokenizer.save_pretrained(tmp_path / "base")
    recipe = make_settings(base_model=tmp_path / "base")
    new_tokenizer(recipe, {"train": ParallelText(["a dog", "Ж dog"], ["the", "dog"])})
    (message,) = caplog.messages
    expected = "does not know characters or words of 1 of 2 source sentences, such as 'Ж dog'."
    assert message.startswith(f"The tokenizer {expected}")
    assert message.endswith("remove base_model.")
    caplog.clear()
    new_tokenizer(recipe, {"train": ParallelText(["the dog"], ["the"])})
    assert not caplog.messages


def test_warns_about_characters_beyond_the_vocabulary(make_settings, caplog):
    letters = ParallelText(["abcdefgh"] * 2, ["ijklmnop", "ijklmnopq"])
    new_tokenizer(make_settings(tokenizer_vocab_size=21), {"train": letters})
    (message,) = caplog.messages
    assert "does not know characters or words of 1 of 2 target sentences, such as 'ijklmnopq'." in message
    assert message.endswith("A larger tokenizer_vocab_size may include them.")
    caplog.clear()
    tokenizer = new_tokenizer(make_settings(tokenizer_vocab_size=30), {"train": letters})
    assert not caplog.messages
    report_unknown_text(tokenizer, ParallelText(["abc <unk>"], ["ijk"]), "")  # as in tokenized corpora
    tokenizer.unk_token = tokenizer.eos_token  # in every sequence
    report_unknown_text(tokenizer, letters, "")
    assert not caplog.messages


def test_remedy_for_text_that_a_given_tokenizer_does_not_know(make_settings, tokenizer, tmp_path, caplog):
    tokenizer.save_pretrained(tmp_path / "other")
    new_tokenizer(
        make_settings(tokenizer_path=tmp_path / "other"), {"train": ParallelText(["a dog Ж", "Ж"], ["a", "a"])}
    )
    (message,) = caplog.messages
    assert "2 of 2 source sentences, such as 'Ж'." in message
    assert message.endswith("Another tokenizer may include them.")


@pytest.mark.parametrize(("prefix", "forced", "expected"), [([7], 8, 7), ([7], 7, 7), ([], 8, None), ([7], None, None)])
def test_forced_token_is_that_of_the_labels(prefix, forced, expected):
    """Otherwise a model tuned for one target language would translate into that of its base model."""
    config = GenerationConfig(forced_bos_token_id=forced)
    match_forced_bos(config, lambda text_target: {"input_ids": [*prefix, 2]})
    assert config.forced_bos_token_id == expected


def test_rejects_tokenizer_with_more_tokens_than_embeddings(make_settings, make_model, make_tokenizer, tmp_path):
    tokenizer, sizes = make_tokenizer(True)
    make_model(**sizes).save_pretrained(tmp_path)
    tokenizer.add_tokens(["Mann"])
    with pytest.raises(ValueError, match=f"base_model={tmp_path}: the tokenizer has {len(tokenizer)} tokens"):
        make_training_model(make_settings(base_model=tmp_path), tokenizer)


def test_rejects_dropout_rates_that_the_base_model_does_not_have(make_settings, tmp_path):
    sizes = {"vocab_size": 12, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "base")  # its key is `dropout_rate`
    with pytest.raises(ValueError, match=r"has no setting dropout. Remove dropout."):
        load_base_model(make_settings(base_model=tmp_path / "base", dropout=0.3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_vanilla", [True, False])
def test_half_precision_base_model_is_trained_in_float32(make_settings, make_model, tmp_path, dtype, is_vanilla):
    """Small updates would be lost in half precision. Sinusoidal positions keep their precision."""
    folder = Path(tmp_path / "base")
    base = make_model() if is_vanilla else make_marian()
    base.to(dtype).save_pretrained(folder)
    model = load_base_model(make_settings(base_model=folder))
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.float32}
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor.float())
    if not is_vanilla:
        assert torch.equal(
            model.get_encoder().embed_positions.weight, make_marian().get_encoder().embed_positions.weight
        )
    model.save_pretrained(tmp_path / "tuned")
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "tuned").dtype == torch.float32


@pytest.mark.parametrize(
    ("model_class", "config_class", "frozen"),
    [
        (MarianMTModel, MarianConfig, ["decoder", "encoder"]),
        (PegasusForConditionalGeneration, PegasusConfig, ["decoder", "encoder"]),
        (FSMTForConditionalGeneration, FSMTConfig, ["decoder", "encoder"]),
        (M2M100ForConditionalGeneration, M2M100Config, []),
        (BartForConditionalGeneration, BartConfig, []),
    ],
)
def test_sinusoids_of_the_base_model_are_frozen(make_settings, tmp_path, model_class, config_class, frozen):
    sizes = {"src_vocab_size": 40, "tgt_vocab_size": 40} if config_class is FSMTConfig else {"vocab_size": 40}
    model_class(config_class(**sizes, **SIZES, **IDS)).save_pretrained(tmp_path / "base")
    parameters = load_base_model(make_settings(base_model=tmp_path / "base")).named_parameters()
    names = sorted(name for name, parameter in parameters if not parameter.requires_grad)
    assert names == [f"model.{side}.embed_positions.weight" for side in frozen]
