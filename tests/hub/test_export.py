import json
import subprocess
import sys
from functools import partial

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel

from hub.export import main
from training.arguments import TokenizerArguments
from training.data.tokenizer import train_tokenizer
from vanilla_transformer.shared.transformers_conversion import to_marian


@pytest.fixture
def command(run_main):
    return partial(run_main, main)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_strangers_load_the_export(save_checkpoint, command, tmp_path, shared, capsys):
    """In a process where our package cannot be imported, with stock classes and without trust."""
    model, tokenizer, folder = save_checkpoint(shared=shared)
    command(folder, tmp_path / "marian", "--to", "marian")
    assert "AutoModelForSeq2SeqLM.from_pretrained" in capsys.readouterr().out
    sentence = "the dog runs in the house"
    ids = model.generate(**tokenizer(sentence, return_tensors="pt"))[0]
    code = f"""
import json, sys
sys.modules["vanilla_transformer"] = None
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
folder = {str(tmp_path / "marian")!r}
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
sides = [folder] * 2 if {shared} else [folder + "/source_tokenizer", folder + "/target_tokenizer"]
source, target = (AutoTokenizer.from_pretrained(side) for side in sides)
ids = model.generate(**source({sentence!r}, return_tensors="pt"))[0]
print(json.dumps([type(model).__name__, target.decode(ids, skip_special_tokens=True)]))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-2000:]
    name, text = json.loads(process.stdout.splitlines()[-1])
    assert name == "MarianMTModel"
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


MARIAN_STRANGER = """
import json, sys
sys.modules["vanilla_transformer"] = None
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
folder = sys.argv[1]
model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
lines = sys.stdin.read().splitlines()
batch = tokenizer(lines, return_tensors="pt", padding=True)
ids = model.generate(**batch, num_beams=5, max_new_tokens=40)
print(json.dumps(tokenizer.batch_decode(ids, skip_special_tokens=True)))
"""
CTRANSLATE2_STRANGER = """
import json, sys
sys.modules["vanilla_transformer"] = None
import ctranslate2
from transformers import AutoTokenizer
folder, beams = sys.argv[1], int(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(sys.stdin.read().splitlines()).input_ids]
results = ctranslate2.Translator(folder).translate_batch(tokens, beam_size=beams, max_decoding_length=40)
best = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
print(json.dumps(tokenizer.batch_decode(best)))
"""


@pytest.mark.slow
def test_a_trained_model_translates_the_same_everywhere(demo_checkpoint, demo_sentences, command, tmp_path):
    """500 sentences: by Marian all the same, by CTranslate2 at least 99 of 100, where our code cannot be imported."""
    for to in ("marian", "ctranslate2"):
        command(demo_checkpoint, tmp_path / to, "--to", to)
    model = AutoModelForSeq2SeqLM.from_pretrained(demo_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint)
    lines = [english for english, _ in demo_sentences[:500]]

    def ours(**options) -> list[str]:
        batch = tokenizer(lines, return_tensors="pt", padding=True)
        return tokenizer.batch_decode(model.generate(**batch, max_new_tokens=40, **options), skip_special_tokens=True)

    def stranger(code: str, *arguments) -> list[str]:
        process = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=tmp_path, input="\n".join(lines), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-2000:]
        return json.loads(process.stdout.splitlines()[-1])

    assert stranger(MARIAN_STRANGER, tmp_path / "marian") == ours(num_beams=5)
    expected = {1: ours(num_beams=1), 5: ours(num_beams=5, early_stopping=True)}  # CTranslate2's own stop
    assert len(set(expected[5])) > 300  # it did learn to tell sentences apart
    for beams, wanted in expected.items():
        got = stranger(CTRANSLATE2_STRANGER, tmp_path / "ctranslate2", beams)
        assert sum(one == other for one, other in zip(got, wanted, strict=True)) >= 495


def test_lower_casing_and_splitting_go_along(make_model, command, tmp_path):
    """From raw text to the same ids, and from generated ids to the same text, whatever the export is for."""
    texts = ["The dog\u2019s 1,000 cats \u2013 isn't it?", "Dr. M\u00fcller sieht z.B. \u201eHunde\u201c!"]
    tokenizer = train_tokenizer(texts, texts, TokenizerArguments(tokenizer_vocab_size=120, moses=True, lowercase=True))
    tokenizer.save_pretrained(tmp_path / "ours")
    model = make_model(vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "ours")
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    ids = model.generate(**batch, max_new_tokens=12)
    for to in ("transformers", "ctranslate2", "onnx"):
        command(tmp_path / "ours", tmp_path / to, "--to", to)
        exported = AutoTokenizer.from_pretrained(tmp_path / to)
        assert exported(texts)["input_ids"] == tokenizer(texts)["input_ids"]
        assert exported.batch_decode(ids) == tokenizer.batch_decode(ids)
    stock = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "transformers")
    assert stock.generate(**batch, max_new_tokens=12).tolist() == ids.tolist()


def test_other_folders_are_refused(save_checkpoint, command, tmp_path, capsys):
    model, _, folder = save_checkpoint()
    command(tmp_path / "nothing", tmp_path / "out", "--to", "marian", status=2)
    command(folder, tmp_path, "--to", "marian", status=2)
    assert "exists already" in capsys.readouterr().err
    command(folder, tmp_path / "out", "--to", "marian", "--quantization", "int8", status=2)
    assert "--quantization is for --to ctranslate2" in capsys.readouterr().err
    MarianMTModel(to_marian(model).config).save_pretrained(tmp_path / "stock")
    command(tmp_path / "stock", tmp_path / "out", "--to", "marian", status=2)
    assert "is a marian, not a model of ours" in capsys.readouterr().err
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "stock"), MarianMTModel)


@pytest.mark.parametrize("to", ["marian", "ctranslate2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line_and_leaves_nothing(save_checkpoint, command, tmp_path, capfd, full_disk, to):
    _, _, folder = save_checkpoint()
    with full_disk():
        command(folder, tmp_path / "out", "--to", to, status=2)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("hub.export: ")
    assert line.endswith("out could not be written: File too large. Nothing of it is left.")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.slow
def test_a_kill_leaves_nothing_that_looks_whole(save_checkpoint, command, start_programs, tmp_path):
    """While graphs are made; the next run removes what the killed one left."""
    _, _, folder = save_checkpoint(encoder_layers=1, decoder_layers=1)
    out = tmp_path / "out"
    with start_programs("hub.export", "hub.exporting.to_onnx") as programs:
        process = programs.start("hub.export", folder, out, "--to", "onnx")
        process.wait_for(lambda: list(tmp_path.glob("out.unfinished-*/result")))
        process.kill()
        assert process.status != 0
    assert not out.exists()
    assert list(tmp_path.glob("out.unfinished-*"))
    command(folder, out, "--to", "marian")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "out"]


def test_languages_are_only_for_argos(save_checkpoint, command, tmp_path, capsys):
    _, _, folder = save_checkpoint()
    command(folder, tmp_path / "out", "--to", "transformers", "--source_lang", "en", status=2)
    assert "--source_lang and --target_lang are for --to argos" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
