import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hub.import_checkpoint import main
from hub.importing.tokenizer import read_tokenizers


@pytest.fixture
def command(run_main):
    return partial(run_main, main)


def word_level(tokens: list[str], path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


SPECIAL = ["[UNK]", "[PAD]", "[SOS]", "[EOS]"]


@pytest.mark.parametrize("moved", [False, True])
def test_imports_file_and_translates(make_reference, save_as, command, tmp_path, capsys, moved):
    """Import hkproj with two tokenizers. If the ids of their special tokens differ, rows are permuted."""
    model, state, layout, _, _ = make_reference("hkproj C")
    source = [*SPECIAL, *(f"w{i}" for i in range(27))]
    target = [*(f"z{i}" for i in range(33)), *SPECIAL] if moved else [*SPECIAL, *(f"z{i}" for i in range(33))]
    files = word_level(source, tmp_path / "en.json"), word_level(target, tmp_path / "it.json")
    path = save_as("hkproj", state, tmp_path)
    command(
        *(path, tmp_path / "out", "--num-heads", 4, "--source-tokenizer", files[0], "--target-tokenizer", files[1]),
        *("--set", "source_begins=true"),
    )
    output = capsys.readouterr().out
    assert "Detected layout: hkproj" in output
    assert "folded: alpha / unbiased std" in output
    report = json.loads((tmp_path / "out" / "import_report.json").read_text())
    assert report["layout"] == "hkproj"
    assert set(report["used"]) | set(report["left_out"]) == set(state)

    imported, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    batch = tokenizer("w3 w5 w7", text_target="z1 z2", return_tensors="pt")
    assert tokenizer.decode(batch["input_ids"][0], use_source_tokenizer=True) == "[SOS] w3 w5 w7 [EOS]"
    assert tokenizer.batch_decode(batch["labels"], skip_special_tokens=True) == ["z1 z2"]
    source_ids = torch.tensor([[2, 7, 9, 11, 3]])
    prompt = torch.tensor([[target.index("[SOS]"), target.index("z1"), target.index("z2")]])
    everything = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    expected = layout.forward(model, source_ids, everything, prompt, causal)[0].log_softmax(-1)
    log_probs = imported(**batch).logits[0].log_softmax(-1)
    vocabulary = tokenizer.target_tokenizer
    for token in ("z0", "z9", "[EOS]", "z32"):
        torch.testing.assert_close(
            log_probs[:, vocabulary.token_to_id(token)], expected[:, target.index(token)], atol=1e-4, rtol=0
        )
    ids = imported.generate(**tokenizer("w3 w5 w7", return_tensors="pt"), max_new_tokens=5)
    assert isinstance(tokenizer.decode(ids[0], skip_special_tokens=True), str)


@pytest.fixture(scope="module")
def toolkits(load_tests_module):
    return load_tests_module("importing/toolkit_references.py")


FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>"]


@pytest.mark.parametrize("name", ["fairseq iwslt_de_en", "fairseq base"])
def test_permutes_tied_rows_once(toolkits, command, tmp_path, name):
    """With different special token ids in two tokenizers, logits are those of the original model."""
    reference = toolkits.make(name)
    source = [*FAIRSEQ, *(f"w{i}" for i in range(27))]
    target = [*(f"z{i}" for i in range(20)), "</s>", "<pad>", "<s>", "<unk>", *(f"z{i}" for i in range(20, 33))]
    files = [tmp_path / "source.txt", tmp_path / "target.txt"]
    for file, tokens in zip(files, (source, target), strict=True):
        file.write_text("\n".join(tokens))
    path = toolkits.save(reference.content(), tmp_path / "model.pt")
    command(path, tmp_path / "out", "--source-tokenizer", files[0], "--target-tokenizer", files[1])
    imported, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    vocabulary = tokenizer.target_tokenizer.get_vocab()
    prompt = ["<s>", "z0", "z3", "z30"]
    batch = tokenizer("w3 w5", return_tensors="pt")
    with torch.no_grad():
        prompt_ids = torch.tensor([[target.index(token) for token in prompt]])
        expected = reference(torch.tensor([[7, 9, 2]]), None, prompt_ids)[0]
        logits = imported(**batch, decoder_input_ids=torch.tensor([[vocabulary[token] for token in prompt]])).logits
    torch.testing.assert_close(logits[..., [vocabulary[token] for token in target]], expected, atol=1e-4, rtol=0)


def test_rejects_two_orders_of_one_matrix(toolkits, command, tmp_path, capsys):
    path = toolkits.save(toolkits.make("fairseq wmt_en_de").content(), tmp_path / "model.pt")
    tokens = [*FAIRSEQ, *(f"w{i}" for i in range(33))]
    (tmp_path / "source.txt").write_text("\n".join(tokens))
    (tmp_path / "target.txt").write_text("\n".join(tokens[::-1]))
    options = ("--source-tokenizer", tmp_path / "source.txt", "--target-tokenizer", tmp_path / "target.txt")
    command(path, tmp_path / "out", *options, status=2)
    assert "source and target share one matrix" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_reads_token_list_as_tokenizer(save_reference, command, tmp_path, capsys):
    for name, letter, count in (("en.txt", "w", 27), ("de.txt", "z", 33)):
        tokens = ["<s>", "</s>", "<blank>", "<unk>", *(f"{letter}{i}" for i in range(count))]
        (tmp_path / name).write_text("\n".join(tokens) + "\n")
    path = save_reference("annotated")
    tokenizers = ("--source-tokenizer", tmp_path / "en.txt", "--target-tokenizer", tmp_path / "de.txt")
    command(path, tmp_path / "out", "--num-heads", 4, *tokenizers)
    assert "_token_id" not in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (2, 0, 1)
    assert tokenizer("w1 w2")["input_ids"] == [5, 6, 1]
    command(path, tmp_path / "more", "--num-heads", 4, "--source-tokenizer", tmp_path / "de.txt", status=2)


def test_rejects_token_ids_that_contradict_the_tokenizer(save_reference, command, tmp_path, capsys):
    """The ids are rows of the file, also if the import moves the special tokens."""
    special = ["<s>", "</s>", "<pad>", "<unk>"]
    for name, tokens in (("en.txt", [*special, "w"]), ("de.txt", ["z", *special])):
        (tmp_path / name).write_text("\n".join(tokens) + "\n")
    path = save_reference("annotated")
    tokenizers = ("--source-tokenizer", tmp_path / "en.txt", "--target-tokenizer", tmp_path / "de.txt")
    command(path, tmp_path / "out", "--num-heads", 4, *tokenizers, "--eos-token-id", 5, status=2)
    assert "--eos-token-id 5 contradicts the tokenizer, which has 2." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    command(path, tmp_path / "out", "--num-heads", 4, *tokenizers, "--eos-token-id", 2)


def test_requires_options_that_file_does_not_specify(save_reference, command, tmp_path, capsys):
    path = save_reference("notebook")
    command(path, tmp_path / "out", "--num-heads", 4)
    assert "The file does not specify bos_token_id, eos_token_id" in capsys.readouterr().out
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        model.generate(torch.tensor([[4, 5]]), max_new_tokens=3)
    command(path, tmp_path / "out", "--num-heads", 4, status=2)
    assert "already exists" in capsys.readouterr().err
    command(path, tmp_path / "other", status=2)
    output = capsys.readouterr().err
    assert "Set --num-heads" in output
    assert output.startswith(f"hub.import_checkpoint: {path}: ")
    assert not (tmp_path / "other").exists()


def test_accepts_options_with_underscores(save_reference, command, tmp_path):
    path = save_reference("notebook")
    command(path, tmp_path / "out", "--num_heads", 4, "--pad_token_id=5")
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config
    assert (config.encoder_attention_heads, config.pad_token_id) == (4, 5)


def test_report_contains_architecture(save_reference, command, tmp_path, capsys):
    command(save_reference("torch tutorial"), tmp_path / "out", "--num-heads", 4)
    shapes = json.loads((tmp_path / "out" / "import_report.json").read_text())["shapes"]
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config
    assert shapes == {name: getattr(config, name) for name in shapes}
    output = capsys.readouterr().out
    assert {"decoder_vocab_size", "key_head_dim", "norm_position", "position_embedding_type"} <= shapes.keys()
    assert all(f"{name} {value}" in output for name, value in shapes.items())


def test_joeynmt_requires_scale_embedding(save_reference, command, tmp_path, capsys):
    path = save_reference("joeynmt, pre")
    command(path, tmp_path / "out", "--num-heads", 4, status=2)
    assert "--set scale_embedding=true" in capsys.readouterr().err
    command(path, tmp_path / "out", "--num-heads", 4, "--set", "scale_embedding=true")


@pytest.mark.parametrize("is_equal", [True, False])
def test_compares_with_original_code(save_reference, command, tmp_path, capsys, is_equal, references):
    path = save_reference("notebook")
    heads = 4 if is_equal else 2
    (tmp_path / f"original_{is_equal}.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(references.__file__).parent)!r})\n"
        f"from references import Notebook\ndef build(): return Notebook(heads={heads})\n"
    )
    options = ("--num-heads", 4, "--compare-with", f"original_{is_equal}:build")
    command(path, tmp_path / "out", *options, status=0 if is_equal else 2)
    output = capsys.readouterr()
    if is_equal:
        assert "agrees: log-probabilities differ by at most" in output.out
        parity = json.loads((tmp_path / "out" / "import_report.json").read_text())["parity"]
        assert parity["largest_difference_of_log_probabilities"] <= 1e-4
    else:
        assert "differ by" in output.err
        assert not (tmp_path / "out").exists()


def test_merges_repeated_set_options(save_reference, command, tmp_path, capsys):
    path = save_reference("jadore, embeddings scaled")
    options = ("--num-heads", 4, "--set", "proj_share_weight=true", "--set", "scale_emb_or_prj=emb")
    command(path, tmp_path / "out", *options)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config.scale_embedding
    output = json.loads((tmp_path / "out" / "import_report.json").read_text())["settings"]
    assert output == {"proj_share_weight": True, "scale_emb_or_prj": "emb"}
    assert "does not specify" not in capsys.readouterr().out.replace("The file does not specify pad_token_id", "")
    command(path, tmp_path / "more", "--num-heads", 4, "--set", "proj_share_weigth=true", status=2)
    assert "did you mean proj_share_weight?" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_reports_assumed_settings(save_reference, command, tmp_path, capsys):
    path = save_reference("torch tutorial")
    command(path, tmp_path / "out", "--num-heads", 4)
    assert "The file does not specify norm_first, activation" in capsys.readouterr().out
    command(path, tmp_path / "pre", "--num-heads", 4, "--set", "norm_first=true", "activation=gelu")
    assert "norm_first" not in capsys.readouterr().out
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "pre").config
    assert (config.norm_position, config.activation_function) == ("pre", "gelu")


def test_source_bos_requires_a_tokenizer(save_reference, command, tmp_path, capsys):
    path, file = (
        save_reference("hkproj C", sizes=(37, 37)),
        word_level([*SPECIAL, *(f"w{i}" for i in range(33))], tmp_path / "t"),
    )
    options = ("--num-heads", 4, "--set", "source_begins=true")
    command(path, tmp_path / "out", *options, status=2)
    assert "--set source_begins=true requires a tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    line = "check: Sources do not begin with the BOS token"
    for name, target in (("one", ()), ("two", ("--target-tokenizer", file))):
        command(path, tmp_path / name, *options, "--source-tokenizer", file, *target)
        assert line not in capsys.readouterr().out
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer("w3")["input_ids"] == [2, 7, 3]
        assert tokenizer(text_target="w3")["input_ids"] == [7, 3]
    command(path, tmp_path / "bare", *options, "source_ends=false", "--source-tokenizer", file)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bare")
    assert tokenizer("w3")["input_ids"] == [2, 7]
    assert tokenizer(text_target="w3")["input_ids"] == [7, 3]
    command(path, tmp_path / "default", "--num-heads", 4, "--source-tokenizer", file)
    assert line in capsys.readouterr().out


def test_comparison_uses_original_row_order(save_reference, command, tmp_path, references):
    """The comparison uses the rows of the file and the pad token of each side."""
    files = (
        word_level([*SPECIAL, *(f"w{i}" for i in range(27))], tmp_path / "en.json"),
        word_level([*(f"z{i}" for i in range(33)), *SPECIAL], tmp_path / "it.json"),
    )
    (tmp_path / "original_moved.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(references.__file__).parent)!r})\n"
        "from references import Hkproj\ndef build(): return Hkproj()\n"
    )
    options = ("--num-heads", 4, "--source-tokenizer", files[0], "--target-tokenizer", files[1])
    command(save_reference("hkproj C"), tmp_path / "out", *options, "--compare-with", "original_moved:build")
    report = json.loads((tmp_path / "out" / "import_report.json").read_text())
    assert report["parity"]["largest_difference_of_log_probabilities"] <= 1e-4


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (4 * 10**9, "has a token with the id 4000000000, which must be below"),
        (2, "has several tokens with the id 2"),
    ],
)
def test_rejects_invalid_token_ids(save_reference, command, tmp_path, capsys, number, message):
    content = json.loads(word_level([*SPECIAL, "a", "b"], tmp_path / "t.json").read_text())
    content["model"]["vocab"]["b"] = number
    (tmp_path / "t.json").write_text(json.dumps(content))
    options = ("--num-heads", 4, "--source-tokenizer", tmp_path / "t.json")
    command(save_reference("hkproj C"), tmp_path / "out", *options, status=2)
    assert message in capsys.readouterr().err


def test_reports_tokenizer_panic_in_one_line(save_reference, command, tmp_path, capfd):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    model["continuing_subword_prefix"] = "much longer than any token"
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    options = ("--num-heads", 4, "--source-tokenizer", tmp_path / "t.json")
    command(save_reference("hkproj C"), tmp_path / "out", *options, status=2)
    (line,) = capfd.readouterr().err.splitlines()
    assert "t.json is not a file of the library tokenizers" in line


def test_reports_full_disk_and_removes_partial_output(save_reference, command, tmp_path, capfd, full_disk):
    path = save_reference("notebook")
    with full_disk():
        command(path, tmp_path / "out", "--num-heads", 4, status=2)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("hub.import_checkpoint: ")
    assert line.endswith("out could not be written: File too large. No partial output was kept.")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("two", [True, False])
def test_opennmt_sources_have_no_eos_token_with_other_tokenizers(toolkits, command, tmp_path, two):
    """The result is the same as with the vocabulary of the file."""
    reference = toolkits.make("opennmt 3", sizes=(31, 31))
    tokens = ["<unk>", "<blank>", "<s>", "</s>", *(f"w{i}" for i in range(27))]
    reference.tokens = lambda: [tokens, tokens]
    path = toolkits.save(reference.content(), tmp_path / "model.pt")
    (tmp_path / "vocabulary.txt").write_text("\n".join(tokens))
    target = ("--target-tokenizer", tmp_path / "vocabulary.txt") if two else ()
    command(path, tmp_path / "own")
    command(path, tmp_path / "given", "--source-tokenizer", tmp_path / "vocabulary.txt", *target)
    own, given = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("own", "given"))
    assert own("w1 w2")["input_ids"] == given("w1 w2")["input_ids"] == [5, 6]
    assert own(text_target="w1 w2")["input_ids"] == given(text_target="w1 w2")["input_ids"] == [5, 6, 3]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("opennmt 3", "source_begins=true"), ("opennmt 3", "source_ends=true")),
        *(("fairseq base", "source_begins=true"), ("fairseq base", "source_ends=false")),
    ],
)
def test_toolkit_rejects_other_affixes(toolkits, command, tmp_path, capsys, name, setting):
    """Without tokenizers, the sources start and end as in the toolkit."""
    reference = toolkits.make(name)
    for side, size in zip(("de", "en"), (31, 37), strict=True):
        (tmp_path / f"dict.{side}.txt").write_text("".join(f"{side}{i} 1\n" for i in range(size - 4)))
    path = toolkits.save(reference.content(), tmp_path / "model.pt")
    command(path, tmp_path / "out", "--set", setting, status=2)
    assert f"--set {setting} requires a tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("json_file", [False, True])
def test_ignores_byte_order_mark(tmp_path, json_file):
    path = tmp_path / "tokens"
    path.write_text("<unk>\n<pad>\n<s>\n</s>\na\nb\n", encoding="utf-8-sig")
    if json_file:
        word_level([*SPECIAL, "a", "b"], path)
        path.write_text(path.read_text(), encoding="utf-8-sig")
    tokenizer = read_tokenizers(path, None).tokenizer
    assert tokenizer("a zzz b")["input_ids"] == [4, 0, 5, 3]


def test_disables_bpe_dropout(tmp_path, make_tokenizer):
    backend = make_tokenizer(True)[0].backend_tokenizer
    backend.model.dropout = 0.5
    backend.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizers(tmp_path / "tokenizer.json", None).tokenizer.backend_tokenizer.model.dropout is None


def test_maps_unknown_words_to_padding_without_unk_token(tmp_path):
    """The list of a character-level tutorial contains only letters."""
    path = tmp_path / "tokens.txt"
    path.write_text("<START>\na\nb\n<PAD>\n<END>\n")
    tokenizer = read_tokenizers(path, None).tokenizer
    assert tokenizer("a zzz b")["input_ids"] == [1, 3, 2, 4]
