import argparse
import json
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hub.import_checkpoint import convert, find_layout, main, parity, read
from hub.layouts import LAYOUTS

SHARED = {"proj_share_weight": True}
CASES = {  # name: (class of the reference, its arguments, layout, what the file or the user tells)
    "hkproj A": ("Hkproj", {"era": "A"}, "hkproj", {}),
    "hkproj B": ("Hkproj", {"era": "B"}, "hkproj", {}),
    "hkproj C": ("Hkproj", {"era": "C"}, "hkproj", {}),
    "article": ("BuildTransformer", {}, "build_transformer", {}),
    "article repaired": ("BuildTransformerRepaired", {}, "build_transformer_repaired", {}),
    "notebook": ("Notebook", {}, "notebook", {}),
    "separate heads": ("SeparateHeads", {}, "separate_heads", {}),
    "separate heads, biases": ("SeparateHeads", {"bias": True}, "separate_heads", {}),
    "annotated": ("Annotated", {}, "annotated", {}),
    "jadore, logits scaled": ("Jadore", {}, "jadore801120", SHARED),
    "jadore, embeddings scaled": ("Jadore", {"scale": "emb"}, "jadore801120", SHARED | {"scale_emb_or_prj": "emb"}),
    "jadore, not shared": ("Jadore", {"shared": False, "dk": 6}, "jadore801120", {}),
    "gordicaleksa": ("Gordic", {}, "gordicaleksa", {}),
    "hyunwoongko": ("Hyunwoongko", {}, "hyunwoongko", {}),
    "bentrevett": ("Bentrevett", {}, "bentrevett", {}),
    "bentrevett, older": ("Bentrevett", {"separate": False}, "bentrevett_2019", {}),
    "aladdin": ("AladdinPersson", {}, "aladdin_persson", {}),
    "aladdin, nn.Transformer": ("AroundTorch", {}, "aladdin_persson_seq2seq", {}),
    "torch tutorial": ("TorchTutorial", {}, "torch_tutorial", {}),
    "joeynmt, pre": ("JoeyNMT", {}, "joeynmt", {"scale_embedding": True}),
    "joeynmt, post": ("JoeyNMT", {"pre": False, "scale": False}, "joeynmt", {"scale_embedding": False}),
    "joeynmt, tied": ("JoeyNMT", {"tied": True}, "joeynmt", {"scale_embedding": True}),
}
PAD = {"jadore801120": 1, "hyunwoongko": 1, "bentrevett": 1, "bentrevett_2019": 1}


@pytest.fixture
def make(references):
    """(name of a case, width) -> reference model, its state, layout, metadata, heads."""

    def make(name: str, d: int = 16, **more):
        class_name, arguments, layout, metadata = CASES[name]
        torch.manual_seed(0)
        model = references.randomize(getattr(references, class_name)(d=d, **(arguments | more)))
        state = {key: value.clone() for key, value in model.state_dict().items()}
        return model, state, LAYOUTS[layout], metadata, getattr(model, "heads", 4)

    return make


def ids_of(layout) -> dict[str, int]:
    return {"pad_token_id": PAD.get(layout.name, 0), "bos_token_id": 2, "eos_token_id": 3}


@pytest.mark.parametrize("name", CASES)
def test_an_import_computes_what_the_tutorials_model_does(make, name):
    """Log-probabilities of random batches with padding, within 1e-4, at a small width and a larger one."""
    for d in (16, 64):
        model, state, layout, metadata, heads = make(name, d=d)
        imported = convert(state, layout, dict(metadata), heads, ids_of(layout))
        assert parity(layout.run, model, imported.model) <= 1e-4
        assert set(imported.used) | set(imported.left_out) == set(state)
        assert all(imported.left_out.values())


@pytest.mark.parametrize("name", CASES)
def test_the_layout_is_found_by_its_keys(make, name):
    _, state, layout, _, _ = make(name)
    if layout.name.startswith("build_transformer"):
        with pytest.raises(ValueError, match="--layout build_transformer .*--layout build_transformer_repaired"):
            find_layout(state)
        assert find_layout(state, layout.name)[0] is layout
    else:
        found, evidence = find_layout(state)
        assert found is layout
        assert f"all of its {len(state)} keys" in evidence


def mutations(state):
    """Ten files with one mistake each, and the key that must be named."""
    keys = [key for key in state if state[key].ndim > 1 and "pos" not in key and key.split(".")[-1] != "pe"]
    middle, last = keys[len(keys) // 2], keys[-1]
    yield {(k + "x" if k == middle else k): v for k, v in state.items()}, middle + "x"
    yield {(k.replace(".", "_", 1) if k == last else k): v for k, v in state.items()}, last.replace(".", "_", 1)
    for key in (keys[0], middle, last):
        yield {k: v for k, v in state.items() if k != key}, key
    yield state | {"something.else.weight": torch.zeros(2)}, "something.else.weight"
    yield state | {middle + ".extra": torch.zeros(2)}, middle + ".extra"
    for key in (middle, last):
        yield state | {key: torch.cat([state[key], state[key][:1]])}, key
    yield state | {middle: state[middle].flatten()[:-1]}, middle


@pytest.mark.parametrize(
    "name", ["hkproj A", "notebook", "jadore, not shared", "aladdin", "torch tutorial", "bentrevett"]
)
@pytest.mark.parametrize("number", range(10))
def test_files_with_a_mistake_are_refused_by_the_keys_name(make, name, number):
    _, state, layout, metadata, heads = make(name)
    mutant, key = list(mutations(state))[number]

    def attempt():
        found, _ = find_layout(mutant)
        convert(mutant, found, dict(metadata), heads, ids_of(layout))

    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is looked at below
        attempt()
    told = str(error.value)
    assert key in told or any(part in told for part in named_like(key, layout)), told


def named_like(key: str, layout) -> list[str]:
    """A layout's key with variables, where all of a kind are missing."""
    from hub.layouts.layout import pattern

    return [each for each in layout.keys if pattern(each).fullmatch(key)]


def test_a_table_of_other_positions_is_refused(make):
    _, state, layout, metadata, heads = make("notebook")
    state["positional_encoding.pe"] = state["positional_encoding.pe"].roll(1, dims=-1)
    with pytest.raises(ValueError, match=r"positional_encoding.pe.*differs from sin / cos"):
        convert(state, layout, metadata, heads, ids_of(layout))


def test_heads_that_do_not_fit_are_refused(make):
    _, state, layout, metadata, _ = make("notebook")
    with pytest.raises(ValueError, match="cannot be read off a file: give it with --num-heads"):
        convert(state, layout, metadata, None, {})
    with pytest.raises(ValueError, match="5 heads do not divide the 16 rows of encoder_layers.0.self_attn.W_q.weight"):
        convert(state, layout, metadata, 5, {})


# --- Files ---


def save_as(kind: str, state, path: Path) -> Path:
    path = path / ("model.safetensors" if kind == "safetensors" else "model.pt")
    wrapped = {
        "bare": state,
        "hkproj": {"epoch": 3, "model_state_dict": state, "optimizer_state_dict": {"state": {}}, "global_step": 7},
        "state_dict": {"state_dict": state, "optimizer": {}},
        "lightning": {"state_dict": {f"model.{key}": value for key, value in state.items()}, "epoch": 1},
        "ddp": {f"module.{key}": value for key, value in state.items()},
        "compiled": {f"_orig_mod.{key}": value for key, value in state.items()},
        "jadore": {"epoch": 1, "settings": argparse.Namespace(n_head=4, src_pad_idx=1), "model": state},
    }
    if kind == "safetensors":
        save_file({key: value.contiguous() for key, value in state.items()}, path)
    else:
        torch.save(wrapped[kind], path)
    return path


KINDS = ["bare", "hkproj", "state_dict", "lightning", "ddp", "compiled", "jadore", "safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_wrappers_are_opened(make, tmp_path, kind):
    _, state, _, _, _ = make("notebook")
    found, metadata = read(save_as(kind, state, tmp_path))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)
    if kind == "jadore":
        assert metadata == {"epoch": 1, "n_head": 4, "src_pad_idx": 1}


class Payload:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_a_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path, protocol):
    victim, path = tmp_path / "victim", tmp_path / "model.pt"
    content = {"model": {"weight": torch.zeros(2)}, "settings": Payload(victim)}
    if protocol == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content["settings"]))
    with pytest.raises(ValueError, match="is refused: to read it, Python would have to run"):
        read(path)
    assert not victim.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no checkpoint", "refused|no checkpoint that torch can read"),
        (b"", "no checkpoint that torch can read"),
        (None, "does not exist"),
        ({"a": 1, "b": "c"}, "holds no tensors under"),
        ([1, 2], "holds a list"),
    ],
)
def test_files_that_are_no_checkpoints(tmp_path, content, message):
    path = tmp_path / "model.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        read(path)


# --- The command ---


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
def test_from_file_to_translation(make, command, tmp_path, capsys, moved):
    """hkproj with its two tokenizers; where their special tokens have different ids, rows move with them."""
    model, state, layout, _, _ = make("hkproj C")
    source = [*SPECIAL, *(f"w{i}" for i in range(27))]
    target = [*(f"z{i}" for i in range(33)), *SPECIAL] if moved else [*SPECIAL, *(f"z{i}" for i in range(33))]
    files = word_level(source, tmp_path / "en.json"), word_level(target, tmp_path / "it.json")
    path = save_as("hkproj", state, tmp_path)
    command(
        *(path, tmp_path / "out", "--num-heads", 4, "--source-tokenizer", files[0], "--target-tokenizer", files[1]),
        *("--set", "source_begins=true"),
    )
    told = capsys.readouterr().out
    assert "looks like Umar Jamil" in told
    assert "folded: alpha / unbiased std" in told
    report = json.loads((tmp_path / "out" / "import_report.json").read_text())
    assert report["layout"] == "hkproj"
    assert set(report["used"]) | set(report["left_out"]) == set(state)

    ours, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    batch = tokenizer("w3 w5 w7", text_target="z1 z2", return_tensors="pt")
    assert tokenizer.decode(batch["input_ids"][0], use_source_tokenizer=True) == "[SOS] w3 w5 w7 [EOS]"
    assert tokenizer.batch_decode(batch["labels"], skip_special_tokens=True) == ["z1 z2"]
    theirs = torch.tensor([[2, 7, 9, 11, 3]])
    begin = torch.tensor([[target.index("[SOS]"), target.index("z1"), target.index("z2")]])
    everything = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    expected = layout.run(model, theirs, everything, begin, causal)[0].log_softmax(-1)
    found = ours(**batch).logits[0].log_softmax(-1)
    vocabulary = tokenizer.target_tokenizer
    for token in ("z0", "z9", "[EOS]", "z32"):
        torch.testing.assert_close(
            found[:, vocabulary.token_to_id(token)], expected[:, target.index(token)], atol=1e-4, rtol=0
        )
    ids = ours.generate(**tokenizer("w3 w5 w7", return_tensors="pt"), max_new_tokens=5)
    assert isinstance(tokenizer.decode(ids[0], skip_special_tokens=True), str)


def test_a_list_of_tokens_is_a_tokenizer(make, command, tmp_path):
    _, state, _, _, _ = make("annotated")
    (tmp_path / "en.txt").write_text(
        "\n".join(["<s>", "</s>", "<blank>", "<unk>", *(f"w{i}" for i in range(27))]) + "\n"
    )
    (tmp_path / "de.txt").write_text(
        "\n".join(["<s>", "</s>", "<blank>", "<unk>", *(f"z{i}" for i in range(33))]) + "\n"
    )
    path = save_as("bare", state, tmp_path)
    tokenizers = ("--source-tokenizer", tmp_path / "en.txt", "--target-tokenizer", tmp_path / "de.txt")
    command(path, tmp_path / "out", "--num-heads", 4, *tokenizers)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (2, 0, 1)
    assert tokenizer("w1 w2")["input_ids"] == [5, 6, 1]
    command(path, tmp_path / "more", "--num-heads", 4, "--source-tokenizer", tmp_path / "de.txt", status=2)


def test_what_the_file_cannot_tell_is_asked_for(make, command, tmp_path, capsys):
    _, state, _, _, _ = make("notebook")
    path = save_as("bare", state, tmp_path)
    command(path, tmp_path / "out", "--num-heads", 4)
    assert "The file does not tell bos_token_id, eos_token_id" in capsys.readouterr().out
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        model.generate(torch.tensor([[4, 5]]), max_new_tokens=3)
    command(path, tmp_path / "out", "--num-heads", 4, status=2)
    assert "exists already" in capsys.readouterr().err
    command(path, tmp_path / "other", status=2)
    assert "give it with --num-heads" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_joeynmt_asks_for_its_scale(make, command, tmp_path, capsys):
    _, state, _, _, _ = make("joeynmt, pre")
    path = save_as("bare", state, tmp_path)
    command(path, tmp_path / "out", "--num-heads", 4, status=2)
    assert "--set scale_embedding=true" in capsys.readouterr().err
    command(path, tmp_path / "out", "--num-heads", 4, "--set", "scale_embedding=true")


@pytest.mark.parametrize("right", [True, False])
def test_comparing_with_ones_own_code(make, command, tmp_path, capsys, right, references):
    _, state, _, _, _ = make("notebook")
    path = save_as("bare", state, tmp_path)
    heads = 4 if right else 2
    (tmp_path / f"mine_{right}.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(references.__file__).parent)!r})\n"
        f"from references import Notebook\ndef build(): return Notebook(heads={heads})\n"
    )
    command(path, tmp_path / "out", "--num-heads", 4, "--compare-with", f"mine_{right}:build", status=0 if right else 2)
    told = capsys.readouterr()
    if right:
        assert "your own model agrees" in told.out
        parity_ = json.loads((tmp_path / "out" / "import_report.json").read_text())["parity"]
        assert parity_["largest_difference_of_log_probabilities"] <= 1e-4
    else:
        assert "differ by" in told.err
        assert not (tmp_path / "out").exists()
