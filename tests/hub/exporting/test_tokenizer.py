"""Tokenizers of exports: every id has an embedding row, for all kinds of imported checkpoints."""

import json
import random
import sys
from pathlib import Path

import ctranslate2
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hub.export import main
from hub.exporting import to_onnx
from hub.exporting.exporter import export, load
from hub.importing.checkpoint_file import read_checkpoint
from hub.importing.importer import import_checkpoint
from vanilla_transformer import VanillaTransformerTokenizer, beam_search

LETTERS, SPECIAL = "abcde", ["<s>", "<pad>", "</s>", "<unk>"]
DICTIONARY = ["<s>", "<pad>", "</s>", "<unk>", "a@@", "b@@", "c", "a", "b"]


@pytest.fixture(scope="module")
def toolkits(load_tests_module):
    return load_tests_module("importing/toolkit_references.py")


@pytest.fixture
def save_tokenizers(monkeypatch, tmp_path):
    """Function that exports a checkpoint to ONNX without graphs and returns its source and target tokenizers."""
    monkeypatch.setattr(to_onnx, "convert", lambda *arguments: lambda folder: None)

    def save(checkpoint: Path) -> list[Tokenizer]:
        out = tmp_path / f"exported-{checkpoint.name}"
        export(checkpoint, out, to="onnx")
        sides = ["source_tokenizer", "target_tokenizer"] if (out / "source_tokenizer").exists() else [".", "."]
        return [Tokenizer.from_file(str(out / side / "tokenizer.json")) for side in sides]

    return save


def random_text(rng: random.Random, letters: str = LETTERS) -> str:
    return " ".join("".join(rng.choices(letters, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 5)))


def check_ids(checkpoint: Path, exported: list[Tokenizer], texts: list[str]) -> dict[str, list[list[int]]]:
    """Check that exported ids equal those of the tokenizer and have rows in the model. Return them by side."""
    model, tokenizer = (auto.from_pretrained(checkpoint) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    sizes = (model.get_encoder().embed_tokens.num_embeddings, model.lm_head.out_features)
    ids_by_side = {}
    for side, own, argument, size in zip(("source", "target"), exported, ("text", "text_target"), sizes, strict=True):
        ids_by_side[side] = [each.ids for each in own.encode_batch(texts)]
        assert ids_by_side[side] == tokenizer(**{argument: texts})["input_ids"]
        assert max(max(ids) for ids in ids_by_side[side] if ids) < size
        assert max(own.get_vocab().values()) < size
    return ids_by_side


@pytest.mark.parametrize("shared", [True, False])
def test_exports_do_not_truncate(make_tokenizer, make_model, save_tokenizers, tmp_path, shared):
    """The file of a tokenizer contains the settings of its last call."""
    tokenizer, sizes = make_tokenizer(shared)
    for argument in ("text", "text_target"):
        tokenizer(**{argument: ["the dog"]}, truncation=True, max_length=2, padding="max_length")
    for each in (tokenizer, make_model(**sizes)):
        each.save_pretrained(tmp_path / "mine")
    for each in save_tokenizers(tmp_path / "mine"):
        assert (each.truncation, each.padding) == (None, None)


@pytest.mark.parametrize("two", [False, True], ids=["one vocabulary", "two"])
def test_tokens_outside_dictionary_get_rows(toolkits, save_tokenizers, tmp_path, two):
    """The BPE codes form "abc", which the dictionary lacks: it is read as <unk> and never generated."""
    (tmp_path / "code").write_text("#version: 0.2\na b\nab c</w>\n")
    dictionaries = [DICTIONARY[4:], [*DICTIONARY[4:], "d"]] if two else [DICTIONARY[4:]] * 2
    for language, tokens in zip(("de", "en"), dictionaries, strict=True):
        (tmp_path / f"dict.{language}.txt").write_text("".join(f"{token} 1\n" for token in tokens))
    reference = toolkits.make("fairseq base", sizes=tuple(len(tokens) + 4 for tokens in dictionaries))
    reference.decoder.output_projection.weight.data[3] *= 5  # <unk> is likely
    import_checkpoint(toolkits.save(reference.content(), tmp_path / "model.pt"), tmp_path / "checkpoint")
    ids = check_ids(tmp_path / "checkpoint", save_tokenizers(tmp_path / "checkpoint"), ["abc", "ab c", "b"])
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "checkpoint")
    assert ids["source"][0][0] > 8
    source = torch.tensor([ids["source"][0]])
    with torch.no_grad():
        expected = reference(torch.tensor([[3, 2]]), None, torch.tensor([[2, 4, 3]]))[0].log_softmax(-1)
        target = torch.tensor([[2, 4, ids["target"][0][0]]])
        log_probs = model(input_ids=source, decoder_input_ids=target).logits.log_softmax(-1)
    torch.testing.assert_close(log_probs[..., : expected.shape[-1]], expected, atol=1e-5, rtol=0)
    for beams in (1, 5):
        for search in (None, beam_search):
            generated = model.generate(source, num_beams=beams, max_new_tokens=12, custom_generate=search)
            assert generated.max() < expected.shape[-1]
    report = json.loads((tmp_path / "checkpoint" / "import_report.json").read_text())
    assert report["shapes"]["decoder_vocab_size"] == model.config.decoder_vocab_size
    assert any("rows of <unk> for" in fold for fold in report["folds"])


@pytest.mark.parametrize("to", ["ctranslate2", "transformers", pytest.param("onnx", marks=pytest.mark.slow)])
def test_all_targets_support_tokens_outside_dictionary(toolkits, tmp_path, onnx_translator, to):
    """Greedy decoding gives the ids of `generate()` with a model for which <unk> is likely."""
    (tmp_path / "code").write_text("#version: 0.2\na b\nab c</w>\n")
    (tmp_path / "dict.txt").write_text("".join(f"{token} 1\n" for token in DICTIONARY[4:]))
    shape = {"layernorm_embedding": True, "share_all_embeddings": True, "sizes": (9, 9)}
    reference = toolkits.make("fairseq base", **shape)
    reference.decoder.embed_tokens.weight.data[3] *= 2
    import_checkpoint(toolkits.save(reference.content(), tmp_path / "model.pt"), tmp_path / "checkpoint")
    model, tokenizer = (
        auto.from_pretrained(tmp_path / "checkpoint") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    export(tmp_path / "checkpoint", tmp_path / "out", to=to)
    seen = set()
    for text in ("abc", "ab c abc", "b", "abc abc b a"):
        batch = tokenizer(text, return_tensors="pt")
        options = {"num_beams": 1, "max_new_tokens": 8, "suppress_tokens": None, "min_new_tokens": None}
        expected = model.generate(**batch, **options)[0].tolist()
        if to == "ctranslate2":
            expected = model.generate(**batch, num_beams=1, max_new_tokens=8)[0].tolist()  # the pad token is banned
            tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
            (result,) = ctranslate2.Translator(str(tmp_path / "out")).translate_batch(
                [tokens], beam_size=1, max_decoding_length=8
            )
            ids, expected = result.hypotheses[0], tokenizer.convert_ids_to_tokens([i for i in expected[1:] if i != 2])
        elif to == "transformers":
            reference = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
            assert type(reference).__name__ == "BartForConditionalGeneration"
            ids = reference.generate(**batch, **options)[0].tolist()
        else:
            translate = onnx_translator(str(tmp_path / "out"))
            ids = translate.generate(batch["input_ids"].numpy(), batch["attention_mask"].numpy(), 8)[0].tolist()
        assert ids == expected
        seen |= set(expected)
    assert seen & {3, "<unk>"}


@pytest.fixture
def earlier_checkpoint(make_model, save_checkpoint, special_tokens, tmp_path):
    """Function that saves a checkpoint of an earlier version: source ids from 40 and target ids from 30 lack rows."""

    def make():
        _, tokenizer, folder = save_checkpoint(shared=False)
        sizes = {"vocab_size": 40, "decoder_vocab_size": 30, "share_encoder_decoder_embeddings": False}
        make_model(**sizes).save_pretrained(folder)
        VanillaTransformerTokenizer(
            source_tokenizer_object=tokenizer.source_tokenizer,
            target_tokenizer_object=tokenizer.target_tokenizer,
            known=[40, 30],
            **special_tokens,
        ).save_pretrained(folder)
        return folder, tokenizer

    return make


def test_exports_rows_for_all_ids_of_earlier_versions(earlier_checkpoint, save_tokenizers, sentences):
    folder, raw_tokenizer = earlier_checkpoint()
    model, tokenizer = (auto.from_pretrained(folder) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    exported = save_tokenizers(folder)
    prepared, _ = load(str(folder), "onnx")
    for side, own, argument, size in zip(
        ("source", "target"), exported, ("text", "text_target"), (40, 30), strict=True
    ):
        raw = raw_tokenizer(**{argument: sentences["en" if side == "source" else "de"]})["input_ids"]
        read = tokenizer(**{argument: sentences["en" if side == "source" else "de"]})["input_ids"]
        assert read == [[each if each < size else 3 for each in ids] for ids in raw]
        assert read != raw
        assert [each.ids for each in own.encode_batch(sentences["en" if side == "source" else "de"])] == raw
        rows = prepared.config.vocab_size if side == "source" else prepared.lm_head.out_features
        assert max(own.get_vocab().values()) < rows
    source = [torch.tensor([each(sentences["en"][0])["input_ids"]]) for each in (tokenizer, raw_tokenizer)]
    target = [torch.tensor([each(text_target=sentences["de"][0])["input_ids"]]) for each in (tokenizer, raw_tokenizer)]
    with torch.no_grad():
        expected = model(input_ids=source[0], decoder_input_ids=target[0]).logits.log_softmax(-1)
        log_probs = prepared(input_ids=source[1], decoder_input_ids=target[1]).logits.log_softmax(-1)
    torch.testing.assert_close(log_probs[..., :30], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("to", ["transformers", "ctranslate2", "onnx", "argos"])
def test_all_targets_reject_ids_without_embedding(save_checkpoint, assert_rejected, tmp_path, to):
    """The tokenizer has fewer tokens than the model has rows, but gaps in its ids."""
    _, _, folder = save_checkpoint()
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    removed = [token for token, i in vocabulary.items() if 20 <= i < 30]
    content["model"]["merges"] = [
        pair for pair in content["model"]["merges"] if not {*pair, "".join(pair)} & set(removed)
    ]
    kept = {token: i for token, i in vocabulary.items() if token not in removed}
    last = max(kept, key=kept.__getitem__)
    content["model"]["vocab"] = kept | {last: 64}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    options = ("--source-lang", "en", "--target-lang", "de") if to == "argos" else ()
    message = "The source tokenizer has the id 64, but the model has only 60 embedding rows"
    assert_rejected(main, folder, tmp_path / "out", "--to", to, *options, message=message)


def test_accepts_gaps_in_ids(save_checkpoint, run_main, tmp_path):
    _, _, folder = save_checkpoint(vocab_size=70)
    run_main(main, folder, tmp_path / "out", "--to", "ctranslate2")
    names = json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text())
    assert names[-1] == "<unused_69>"


# --- Random checkpoints of all layouts ---


def random_dictionary(rng: random.Random, lacking: float) -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens and merges of subword-nmt's BPE, where the tokens lack some results of merges."""
    parts = [letter + end for letter in LETTERS for end in ("", "</w>")]
    merges: list[tuple[str, str]] = []
    while len(merges) < 25:
        pair = rng.choice([part for part in parts if not part.endswith("</w>")]), rng.choice(parts)
        if pair not in merges:
            merges.append(pair)
            parts.append("".join(pair))
    names = [part.removesuffix("</w>") if part.endswith("</w>") else f"{part}@@" for part in dict.fromkeys(parts)]
    kept = [name for name in names if rng.random() > lacking]
    return rng.sample(kept, len(kept)), merges


def write_codes(path: Path, merges: list[tuple[str, str]]) -> Path:
    path.write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_toolkit_checkpoints(toolkits, save_tokenizers, tmp_path, seed):
    """Check ids and log-probabilities of fairseq and OpenNMT-py models with one or two vocabularies and codes."""
    surplus = 0
    for number, name in enumerate(toolkits.CASES):
        rng = random.Random(f"{seed}{name}")
        folder = tmp_path / str(number)
        folder.mkdir()
        joint = toolkits.CASES[name][1].get("sizes") == (37, 37)
        dictionaries = [random_dictionary(rng, lacking=rng.choice([0.0, 0.3])) for _ in range(2)]
        tokens = [dictionaries[0][0], dictionaries[not joint and rng.random() < 0.7][0]]
        codes = [write_codes(folder / "0.codes", dictionaries[0][1])]
        codes += [write_codes(folder / "1.codes", dictionaries[1][1])] if rng.random() < 0.7 else []
        special = SPECIAL if name.startswith("fairseq") else ["<unk>", "<blank>", "<s>", "</s>"]
        first = special[:2] if name == "opennmt 2" else special  # its sources lack <s> and </s>
        if name == "opennmt 2" and tokens[0] is tokens[1]:
            tokens[0] = [*tokens[0], "other"]
        vocabularies = [[*first, *tokens[0]], [*special, *tokens[1]]]
        reference = toolkits.make(name, sizes=tuple(map(len, vocabularies)))
        if name.startswith("fairseq"):
            for language, own in zip(("de", "en"), tokens, strict=True):
                (folder / f"dict.{language}.txt").write_text("".join(f"{token} 1\n" for token in own))
        else:
            reference.tokens = lambda tokens=vocabularies: tokens
        file = toolkits.save(reference.content(), folder / "model.pt")
        import_checkpoint(file, folder / f"checkpoint{number}", bpe_codes=codes)
        texts = [random_text(rng, f"{LETTERS}x") for _ in range(100)]
        ids = check_ids(folder / f"checkpoint{number}", save_tokenizers(folder / f"checkpoint{number}"), texts)

        if not name.startswith("fairseq"):
            _, metadata = read_checkpoint(file)
            vocabularies = [metadata["vocabularies"][side] for side in ("source", "target")]
        unk, pad, start = (special.index(each) for each in ("<unk>", special[1], "<s>"))
        source, target = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(each[:12]) for each in side[:30]], True, pad)
            for side in ids.values()
        )
        target = torch.cat([torch.full((30, 1), start), target[:, :6]], 1)
        surplus += int((source >= len(vocabularies[0])).sum() + (target >= len(vocabularies[1])).sum())
        own = [torch.where(each < len(v), each, unk) for each, v in zip((source, target), vocabularies, strict=True)]
        shift = len(vocabularies[0]) - reference.sizes[0] if hasattr(reference, "sizes") else 0
        own[0] = torch.where(own[0] > 3, own[0] - shift, own[0]) if shift else own[0]
        mask = (source != pad).long()
        model = AutoModelForSeq2SeqLM.from_pretrained(folder / f"checkpoint{number}")
        with torch.no_grad():
            expected = reference(own[0], mask, own[1])
            expected = (expected[0] if isinstance(expected, tuple) else expected).log_softmax(-1)
            logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
        difference = (logits.log_softmax(-1)[..., : expected.shape[-1]] - expected)[target != pad].abs().max()
        assert difference < 1e-4, name
    assert surplus > 100


@pytest.mark.slow
@pytest.mark.parametrize("two", [False, True], ids=["one tokenizer", "two"])
def test_random_tutorial_checkpoints(make_reference, references, save_tokenizers, tmp_path, monkeypatch, capsys, two):
    """Import token lists in random order. The models are compared after their rows are permuted."""
    for number, name in enumerate(references.CASES):
        rng = random.Random(number)
        model, state, layout, metadata, heads = make_reference(name)
        sizes = [len(state[key]) for key in embeddings(layout)]
        pad = {"jadore801120": 1, "hyunwoongko": 1, "bentrevett": 1, "bentrevett_2019": 1}.get(layout.name, 0)
        files = []
        shared = "jadore" in name and "not" not in name
        for side, size in enumerate(sizes if two else [min(sizes)]):
            tokens = ["<s>", "</s>", "<unk>", *(f"{letter}{i}" for i in range(10) for letter in LETTERS)][: size - 1]
            if not (shared and side):
                order = rng.sample(tokens, len(tokens))
            order = [token for token in order if token in tokens]
            files.append(tmp_path / f"{number}{side}.txt")
            files[-1].write_text("\n".join([*order[:pad], "<pad>", *order[pad:]]))
        module = type("module", (), {"build": staticmethod(lambda m=model: m)})
        monkeypatch.setitem(sys.modules, "reference_model", module)
        torch.save(state, tmp_path / f"{number}.pt")
        options = {"source_tokenizer": files[0], "target_tokenizer": files[-1] if two else None}
        options["settings"] = [f"{key}={str(value).lower()}" for key, value in metadata.items()]
        options |= {"num_heads": heads, "layout": layout.name, "compare_with": "reference_model:build"}
        import_checkpoint(tmp_path / f"{number}.pt", tmp_path / f"checkpoint{number}", **options)
        texts = [" ".join(f"{rng.choice(LETTERS)}{rng.randrange(12)}" for _ in range(4)) for _ in range(50)]
        check_ids(tmp_path / f"checkpoint{number}", save_tokenizers(tmp_path / f"checkpoint{number}"), texts)


def embeddings(layout) -> list[str]:
    """Return the keys of the source and target embeddings."""
    rules = layout.rules().items()
    names = [f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    return [next(key for key, rule in rules if name in rule.targets) for name in names]
