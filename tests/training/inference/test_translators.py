"""Loading of checkpoints and ensembles."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer, GenerationConfig

from hub.publishing.upload import gather_files
from training import score, translate
from training.inference.translators import load_translator, validate_same_tokenizer
from vanilla_transformer.shared.vocabularies import backend_tokenizers


@pytest.fixture
def save(make_model, make_tokenizer, tmp_path):
    def make(name: str, seed: int = 0, change=None, shared: bool = True, **overrides) -> str:
        tokenizer, sizes = make_tokenizer(shared)
        if change is not None:
            change(tokenizer)
        model = make_model(seed=seed, **(sizes | overrides))
        model.generation_config.update(max_new_tokens=8, num_beams=3)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize("shared", [True, False])
def test_translates_without_bpe_dropout_of_the_tokenizer(save, sentences, shared):
    def add_dropout(tokenizer):
        for backend in backend_tokenizers(tokenizer):
            backend.model.dropout = 0.9

    one, noisy = save("one", shared=shared), save("noisy", change=add_dropout, shared=shared)
    assert '"dropout": 0.9' in "".join(path.read_text() for path in Path(noisy).glob("*tokenizer.json"))
    assert load_translator(noisy, "cpu")(sentences["en"]) == load_translator(one, "cpu")(sentences["en"])


@pytest.mark.parametrize("shared", [True, False])
def test_ensembles_checkpoints(save, sentences, shared):
    """The result equals that of `beam_search` with `ensemble`. One checkpoint twice equals one checkpoint."""
    one, two = save("one", 1, shared=shared), save("two", 2, shared=shared, encoder_layers=1)
    texts = sentences["en"]
    single, both = load_translator(one, "cpu"), load_translator([one, two], "cpu")
    assert load_translator([one, one], "cpu")(texts) == single(texts)
    expected = single(texts, ensemble=[load_translator(two, "cpu").model], num_return_sequences=2, return_scores=True)
    assert both(texts, num_return_sequences=2, return_scores=True) == expected
    assert expected != single(texts, num_return_sequences=2, return_scores=True)
    assert load_translator([two, one], "cpu")(texts, num_beams=1) == both(texts, num_beams=1)


def test_checkpoint_of_a_run_has_the_moving_average_of_its_weights(save, sentences, tmp_path):
    """Its evaluation and `training.average` use these weights too."""
    folder, average = Path(save("checkpoint-4", 1)), Path(save("average", 2))
    last = load_translator(str(folder), "cpu")(sentences["en"], return_scores=True)
    shutil.copytree(average, folder / "ema", ignore=shutil.ignore_patterns("tokenizer*"))
    expected = load_translator(str(average), "cpu")(sentences["en"], return_scores=True)
    assert load_translator(str(folder), "cpu")(sentences["en"], return_scores=True) == expected != last
    with pytest.raises(ValueError, match="cannot be published: .* vanilla-transformer average .* --output OUT"):
        gather_files(folder)


@pytest.mark.parametrize("options", [[], ["--scores"], ["--nbest", "2"], ["--num-beams", "1"]])
def test_commands_return_one_translation_if_the_config_has_several(save, tmp_path, monkeypatch, capsys, options):
    """Otherwise line i of the output would not be the translation of line i."""
    folder, source = save("one"), tmp_path / "source.en"
    source.write_text("the dog runs\n\na cat sleeps\n")
    expected = None
    for number in (None, 3):
        config = GenerationConfig.from_pretrained(folder)
        config.update(num_return_sequences=number)
        config.save_pretrained(folder)
        monkeypatch.setattr("sys.argv", ["translate", folder, "--input", str(source), *options])
        translate.main()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == (5 if "--nbest" in options else 3)  # an empty line has one translation
        assert lines == (expected := expected or lines)
    source.write_text("the dog runs\na cat sleeps\n")
    arguments = ["--source", str(source), "--reference", str(source), "--num-bootstrap-samples", "2", "--json"]
    monkeypatch.setattr("sys.argv", ["score", folder, *arguments])
    score.main()
    assert "bleu" in json.loads(capsys.readouterr().out)


def test_rejects_different_tokenizers(save, tmp_path):
    one = save("one")

    def other_tokens(tokenizer):
        tokenizer.add_tokens(["xyz"])

    def lower(tokenizer):
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()

    more = save("more", change=other_tokens, vocab_size=61)
    with pytest.raises(
        ValueError, match=r"more has another tokenizer than .*one \(its source vocabulary: 61 tokens instead of 60"
    ):
        load_translator([one, more], "cpu")
    with pytest.raises(ValueError, match="the same vocabulary, but it splits text differently"):
        load_translator([one, save("lower", change=lower)], "cpu")
    with pytest.raises(ValueError, match="its target vocabulary"):
        load_translator([save("two", shared=False), save("shared", decoder_vocab_size=60)], "cpu")


def test_ignores_saved_padding_and_truncation(save):
    """Truncation and padding are set by a call and can be saved."""

    def padded(tokenizer):
        tokenizer.backend_tokenizer.enable_padding()
        tokenizer.backend_tokenizer.enable_truncation(9)

    load_translator([save("one"), save("two", change=padded)], "cpu")
    file = json.loads(Path(save("three", change=padded), "tokenizer.json").read_text())
    assert file["truncation"] is not None


def test_rejects_marian_tokenizers_of_other_targets(marian_files, tmp_path):
    shutil.copytree(marian_files, tmp_path / "names")
    vocabulary = json.loads((marian_files / "target_vocab.json").read_text())
    names = dict(zip(vocabulary, [*range(9), *reversed(range(9, 29))], strict=True))
    (tmp_path / "names" / "target_vocab.json").write_text(json.dumps(names))
    shutil.copytree(marian_files, tmp_path / "order")
    (tmp_path / "order" / "target_vocab.json").write_text(json.dumps(dict(reversed(vocabulary.items()))))
    shutil.copytree(marian_files, tmp_path / "pieces")
    shutil.copy(marian_files / "source.spm", tmp_path / "pieces" / "target.spm")
    first, same, other_names, other_pieces = (
        AutoTokenizer.from_pretrained(path)
        for path in (marian_files, tmp_path / "order", tmp_path / "names", tmp_path / "pieces")
    )
    validate_same_tokenizer("a", first, "b", same)
    with pytest.raises(ValueError, match="its target vocabulary: 29 tokens instead of 29, 9 in common"):
        validate_same_tokenizer("a", first, "b", other_names)
    with pytest.raises(ValueError, match="it splits text differently"):
        validate_same_tokenizer("a", first, "b", other_pieces)
