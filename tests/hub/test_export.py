import importlib
import json
import subprocess
import sys
from functools import partial

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel

from hub.export import main
from hub.exporting.exporter import load
from training.data.tokenizer import train_tokenizer
from training.recipe.arguments import TokenizerArguments
from vanilla_transformer.shared.transformers_conversion import to_marian


@pytest.fixture
def command(run_main):
    return partial(run_main, main)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_export_loads_without_package(save_checkpoint, command, tmp_path, shared, capsys):
    """Load native classes without trust_remote_code in a process that cannot import the package."""
    model, tokenizer, folder = save_checkpoint(shared=shared)
    command(folder, tmp_path / "marian", "--to", "transformers")
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


MARIAN_SCRIPT = """
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
CTRANSLATE2_SCRIPT = """
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
def test_trained_model_translates_the_same(demo_checkpoint, demo_sentences, command, tmp_path, capsys):
    """Translate 250 sentences without the package: Marian gives all, CTranslate2 at least 99 % the same texts."""
    for to in ("transformers", "ctranslate2"):
        command(demo_checkpoint, tmp_path / to, "--to", to)
    printed = "\n".join(line[4:] for line in capsys.readouterr().out.splitlines() if line.startswith("    "))
    model = AutoModelForSeq2SeqLM.from_pretrained(demo_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint)
    lines = [english for english, _ in demo_sentences[:250]]

    def generate(**options) -> list[str]:
        batch = tokenizer(lines, return_tensors="pt", padding=True)
        return tokenizer.batch_decode(model.generate(**batch, max_new_tokens=40, **options), skip_special_tokens=True)

    def run_script(code: str, *arguments) -> list[str]:
        process = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=tmp_path, input="\n".join(lines), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-2000:]
        return json.loads(process.stdout.splitlines()[-1])

    assert run_script(MARIAN_SCRIPT, tmp_path / "transformers") == generate(num_beams=5)
    expected = {1: generate(num_beams=1), 5: generate(num_beams=5, early_stopping=True)}  # as CTranslate2 stops
    assert len(set(expected[5])) > 150  # the model distinguishes sentences
    exec(printed.replace("a sentence", lines[0]), {**globals(), "ctranslate2": importlib.import_module("ctranslate2")})
    assert capsys.readouterr().out.splitlines() == [generate()[0], expected[5][0]]
    for beams, texts in expected.items():
        translations = run_script(CTRANSLATE2_SCRIPT, tmp_path / "ctranslate2", beams)
        assert sum(one == other for one, other in zip(translations, texts, strict=True)) >= 248


def test_exports_normalization_and_pretokenization(make_model, command, tmp_path):
    """All targets give the same ids of raw text, and the same text of generated ids."""
    texts = ["The dog\u2019s 1,000 cats \u2013 isn't it?", "Dr. M\u00fcller sieht z.B. \u201eHunde\u201c!"]
    tokenizer = train_tokenizer(texts, texts, TokenizerArguments(tokenizer_vocab_size=120, moses=True, lowercase=True))
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    model = make_model(vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "checkpoint")
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    ids = model.generate(**batch, max_new_tokens=12)
    for to in ("transformers", "ctranslate2", "onnx"):
        command(tmp_path / "checkpoint", tmp_path / to, "--to", to)
        exported = AutoTokenizer.from_pretrained(tmp_path / to)
        assert exported(texts)["input_ids"] == tokenizer(texts)["input_ids"]
        assert exported.batch_decode(ids) == tokenizer.batch_decode(ids)
    native = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "transformers")
    assert native.generate(**batch, max_new_tokens=12).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("transformers", ("--quantization", "int8"), "--quantization requires --to ctranslate2"),
        ("onnx", ("--quantization", "int16"), "--to onnx does not support --quantization int16. Use one of int8, fp16"),
        ("transformers", ("--source-lang", "en"), "--source-lang and --target-lang require --to argos"),
        ("marian", (), "--to transformers"),
    ],
)
def test_rejects_invalid_arguments(save_checkpoint, assert_rejected, tmp_path, to, options, message):
    _, _, folder = save_checkpoint()
    assert_rejected(main, folder, tmp_path / "out", "--to", to, *options, message=message)


def test_rejects_other_directories(make_model, assert_rejected, command, tmp_path, capsys):
    MarianMTModel(to_marian(make_model()).config).save_pretrained(tmp_path / "native")
    message = "has the model type marian, expected vanilla_transformer"
    assert_rejected(main, tmp_path / "native", tmp_path / "out", "--to", "transformers", message=message)
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "native"), MarianMTModel)
    command(tmp_path / "native", tmp_path, "--to", "transformers", status=2)
    assert "already exists" in capsys.readouterr().err
    command(tmp_path / "nothing", tmp_path / "out", "--to", "transformers", status=2)


@pytest.mark.parametrize("to", ["transformers", "ctranslate2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_reports_full_disk_and_removes_partial_output(save_checkpoint, command, tmp_path, capfd, full_disk, to):
    _, _, folder = save_checkpoint()
    with full_disk():
        command(folder, tmp_path / "out", "--to", to, status=2)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("hub.export: ")
    assert line.endswith("out could not be written: File too large. No partial output was kept.")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.slow
def test_kill_leaves_no_output(save_checkpoint, command, start_programs, tmp_path):
    """Kill an export that creates graphs. The next run removes its temporary directory."""
    _, _, folder = save_checkpoint(encoder_layers=1, decoder_layers=1)
    out = tmp_path / "out"
    with start_programs("hub.export", "hub.exporting.to_onnx") as programs:
        process = programs.start("hub.export", folder, out, "--to", "onnx")
        process.wait_for(lambda: list(tmp_path.glob("out.unfinished-*/result")))
        process.kill()
        assert process.status != 0
    assert not out.exists()
    assert list(tmp_path.glob("out.unfinished-*"))
    command(folder, out, "--to", "transformers")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"]


@pytest.mark.parametrize("to", ["transformers", "ctranslate2"])
def test_rejects_peft_adapter(save_checkpoint, tmp_path, to):
    peft = pytest.importorskip("peft")
    model, _, folder = save_checkpoint(shared=True)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    with pytest.raises(ValueError, match="merge_and_unload"):
        load(str(folder), to)
