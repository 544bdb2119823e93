"""End-to-end runs of training.train: processes, kills, full disks."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from training.inference.translators import load_translator

FILES = {
    *("config.json", "generation_config.json", "model.safetensors", "recipe.yaml", "all_results.json"),
    *("samples.tsv", "training_curve.png", "attention_1.png", "tokenizer_config.json"),
}


@pytest.fixture
def train(programs, recipe):
    def train(*arguments: str | Path, **options):
        return programs.run("training.train", recipe, *arguments, **options)

    return train


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["true", "false"])
def test_trains_and_scores_a_checkpoint(train, tmp_path, shared):
    process = train("--shared-vocabulary", shared)
    folder = tmp_path / "out"
    names = {path.name for path in folder.iterdir()}
    assert names >= FILES
    assert not list(folder.rglob("training_args.bin"))
    results = json.loads((folder / "all_results.json").read_text())
    assert results["test_bleu_signature"] in process.stdout
    assert process.stderr.count("the model ignores the source") == 2  # once for updates 3 and 6, once for the test
    names = {
        "test_bleu",
        "test_chrf",
        "test_ter",
        "test_bleu_tokenized_lc",
        "train_runtime",
        "train_loss",
        "eval_loss",
        "eval_source_gain",
    }
    assert names <= set(results)
    assert (results["train_pairs"], results["recipe"], results["updates"]) == (120, "small", 6)
    rows = (folder / "samples.tsv").read_text().splitlines()
    assert rows[0] == "source\treference\ttranslation"
    assert len(rows) == 11
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["max_new_tokens"]) == (2, 12)
    assert "max_length" not in generation

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    source, _, translation = rows[1].split("\t")
    ids = model.generate(**tokenizer(source, return_tensors="pt"))
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == translation

    before = (folder / "model.safetensors").read_bytes()
    again = train("--shared-vocabulary", shared)
    assert "contains the finished run" in again.stderr
    assert results["test_bleu_signature"] in again.stdout
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--bpe-dropout", "0.1", "--max-length-ratio", "3", "--report-to", "tensorboard"],
        ["--streaming", "true", "--buffer-size", "25", "--gradient-accumulation-steps", "2"],
        ["--rdrop-alpha", "1", "--ema-decay", "0.9", "--average-checkpoints", "2", "--average-by", "best"],
        ["--tokenizer-type", "char", "--metric", "sequence", "--lr-scheduler-type", "reduce_lr_on_plateau"]
        + ["--metric-for-best-model", "loss", "--pad-vocab-to-multiple-of", "8", "--early-stopping-patience", "1"],
        ["--precision", "bf16", "--attn-implementation", "auto", "--eval-strategy", "no", "--learning-rate", "None"],
    ],
)
def test_settings_of_a_recipe(train, tmp_path, arguments):
    if "None" in arguments:
        arguments = arguments[:-2]
    train(*arguments)
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    if "--metric" in arguments:
        assert {"test_exact_match", "test_token_error_rate", "test_character_error_rate"} <= set(results)
        assert model.config.vocab_size % 8 == 0
    if "--streaming" in arguments:
        assert results["train_pairs_read"] == 50  # six updates from two buffers
    if "bf16" in arguments:
        assert (results["precision"], results["attention"]) == ("bf16", "eager")
    if "tensorboard" in arguments:
        assert list((tmp_path / "out").rglob("events.out.tfevents.*"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    return (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


KILL = """
from pathlib import Path
def replace(self, target, os=os, original=Path.replace):  # writes the manifest of a checkpoint
    result = original(self, target)
    os.kill(os.getpid(), 9) if str(target).endswith("{}/files.json") else None
    return result
Path.replace = replace
"""
SIGNAL = """
def write(text, os=os, original=sys.stderr.write):
    os.kill(os.getpid(), {:d}) if "'loss'" in text else None
    return original(text)
sys.stderr.write = write
"""
KILLS = int(os.environ.get("VT_KILLS", "4"))
LONG = ("--max-steps", "40", "--save-steps", "4", "--eval-steps", "10", "--ema-decay", "0.9")


@pytest.fixture(scope="module")
def uninterrupted(programs, make_recipe, tmp_path_factory) -> Path:
    """Output directory of a run with the settings `LONG`."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    programs.run("training.train", make_recipe(folder), *LONG)
    return folder / "out"


@pytest.mark.slow
def test_resumes_bit_for_bit_after_kills_at_random_times(programs, recipe, uninterrupted, tmp_path):
    rng, resumed, kills = random.Random(0), 0, 0
    out = tmp_path / "killed"
    while kills < 5 * KILLS or resumed < 2 * KILLS:  # on a fast machine many runs finish before the kill
        kills += 1
        assert kills < 100, f"of {kills} programs only {resumed} resumed from a checkpoint"
        process = programs.start("training.train", recipe, *LONG, "--output-dir", out)
        checkpoints_before = set(out.glob("checkpoint-*"))
        if rng.random() < 0.3:  # at the start or in the first steps
            process.wait_for(lambda process=process: process.stderr)
        else:  # while a new checkpoint is written, or shortly after
            process.wait_for(lambda out=out, known=checkpoints_before: has_new_checkpoint(out, known))
        time.sleep(rng.random() * 0.3)
        process.kill()
        assert process.status == -signal.SIGKILL or (out / "all_results.json").exists()
        resumed += "resuming from" in process.stderr
        if (out / "all_results.json").exists():
            assert same(uninterrupted, out)
            out = tmp_path / f"killed_{kills}"
    programs.run("training.train", recipe, *LONG, "--output-dir", out)
    assert same(uninterrupted, out)
    first, second = (json.loads((folder / "all_results.json").read_text()) for folder in (uninterrupted, out))
    assert first["train_target_tokens"] == second["train_target_tokens"]
    assert first["test_bleu"] == second["test_bleu"]


def has_new_checkpoint(out: Path, known: set[Path]) -> bool:
    return bool(set(out.glob("checkpoint-*")) - known) or (out / "all_results.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_stops(programs, recipe, uninterrupted, tmp_path, number):
    arguments = (recipe, *LONG, "--save-strategy", "no")
    process = programs.run("training.train", *arguments, setup_code=SIGNAL.format(number), status=128 + number)
    assert "The same command resumes from checkpoint-" in process.stderr
    assert "Traceback" not in process.stderr
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    process = programs.run("training.train", recipe, *LONG, "--save-strategy", "no")
    assert f"resuming from {checkpoint}" in process.stderr
    assert same(uninterrupted, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncate", "delete", "unfinished", "flip"])
def test_skips_invalid_checkpoints(programs, recipe, uninterrupted, tmp_path, damage):
    out = tmp_path / "out"
    programs.run("training.train", recipe, *LONG, setup_code=KILL.format("checkpoint-20"), status=-signal.SIGKILL)
    last = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    victim = last / "optimizer.pt"
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-100])
    elif damage == "flip":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage == "delete":
        victim.unlink()
    else:
        (last / "files.json").unlink(missing_ok=True)
    process = programs.run("training.train", recipe, *LONG)
    assert f"skipping {last}: " in process.stderr
    assert "resuming from" in process.stderr
    assert same(uninterrupted, out)


@pytest.mark.slow
def test_full_disk_keeps_the_last_checkpoint(programs, recipe, uninterrupted, tmp_path):
    """A limit on the file size simulates a full disk."""
    out = tmp_path / "out"
    programs.run("training.train", recipe, *LONG, setup_code=KILL.format("checkpoint-8"), status=-signal.SIGKILL)
    kept = max(out.glob("checkpoint-*/files.json"), key=lambda path: int(path.parent.name.split("-")[1])).parent
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))"
    process = programs.run("training.train", recipe, *LONG, setup_code=limit, status=2)
    assert "could not be written" in process.stderr
    assert "MiB are free" in process.stderr
    assert "Traceback" not in process.stderr
    assert [path.name for path in sorted(out.glob("checkpoint-*"))][-1:] <= [kept.name]
    process = programs.run("training.train", recipe, *LONG)
    assert f"resuming from {kept}" in process.stderr
    assert same(uninterrupted, out)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_loader_workers_start_without_fork(train, tmp_path, method):
    """Windows and macOS use spawn, Linux forkserver since Python 3.14. BPE-dropout tokenizes in the workers."""
    code = f"import multiprocessing; multiprocessing.set_start_method('{method}')"
    train("--dataloader-num-workers", "2", "--bpe-dropout", "0.1", "--eval-strategy", "no", setup_code=code)
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert results["updates"] == 6


@pytest.mark.slow
def test_learning_curve(programs, recipe, tmp_path):
    """Four runs in one time. The same command only prints the result again."""
    data = (recipe.parent / "data").resolve()
    size = ("--d-model", "32", "--encoder-layers", "1", "--decoder-layers", "1", "--tokenizer-vocab-size", "300")
    command = ("--data-dir", data, "--output-dir", tmp_path / "curve", "--minutes", "0.7", *size, "--json")
    command += ("--num-processes", "1")
    process = programs.run("training.train", *command, "--learning-curve")
    results = json.loads(process.stdout)
    points = results["learning_curve"]
    assert [point["minutes"] for point in points] == [0.2, 0.2, 0.2, 0.1]
    assert results["train_pairs"] == points[0]["train_pairs"] == points[3]["train_pairs"] > points[2]["train_pairs"]
    assert results["test_bleu"] == points[0]["score"]
    assert json.loads(programs.run("training.train", *command, "--learning-curve").stdout) == results


@pytest.mark.slow
def test_nonfinite_loss_ends_the_run(programs, recipe, tmp_path):
    arguments = ("--learning-rate", "1e30", "--max-grad-norm", "0", "--max-steps", "50", "--save-steps", "1")
    process = programs.run("training.train", recipe, *arguments, "--eval-strategy", "no", status=2)
    assert "the loss is not finite" in process.stderr
    assert "Traceback" not in process.stderr
    for folder in (tmp_path / "out").glob("checkpoint-*"):
        assert all(tensor.isfinite().all() for tensor in weights(folder).values())


SGD = ("--optim", "sgd", "--learning-rate", "0.1", "--dropout", "0", "--max-steps", "20", "--eval-strategy", "no")


def launch_successfully(recipe: Path) -> None:
    """Run the program in new processes, without the server of the fixture `programs`."""
    process = subprocess.run(
        [sys.executable, "-m", "training.train", str(recipe)], cwd=Path(__file__).parents[2],
        env=os.environ | {"HF_HOME": str(recipe.parent / "home")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "single_process"), [(1, 2), (2, 4)])
def test_multiple_processes_equal_one_process(programs, run_ranks, recipe, tmp_path, accumulation, single_process):
    """After 20 updates of SGD, weights and evaluation equal those of one process with the same global batch.

    The 10 validation sentences do not fill the batches of two processes.
    """
    both, one = tmp_path / "both", tmp_path / "one"
    keys = (*SGD, "--eval-strategy", "steps", "--eval-steps", "20", "--per-device-eval-batch-size", "4")
    keys = (*keys, "--logging-steps", "7")  # the last updates are not logged
    run_ranks(recipe, *keys, "--gradient-accumulation-steps", accumulation, "--output-dir", both)
    programs.run("training.train", recipe, *keys, "--gradient-accumulation-steps", single_process, "--output-dir", one)
    results = [json.loads((folder / "all_results.json").read_text()) for folder in (both, one)]
    assert [result["processes"] for result in results] == [2, 1]
    assert results[0]["train_target_tokens"] == results[1]["train_target_tokens"]
    for name in ("train_loss", "eval_loss", "eval_bleu"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5), name
    first, second = weights(both), weights(one)
    start = weights(tmp_path / "one" / "checkpoint-18")
    assert max(float((first[name] - start[name]).abs().max()) for name in first) > 1e-4  # training changed the weights
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=1e-6, rtol=0)


@pytest.mark.slow
def test_validation_with_multiple_references_equals_test(finished, tmp_path):
    """Two processes, constant weights, and 15 sentences, which do not fill the batches."""
    translator = load_translator(str(finished))
    sources = (finished.parent / "data" / "train.en").read_text().splitlines()[:15]
    rows = []
    for i, output in enumerate(translator(sources, num_beams=1, length_penalty=None, max_new_tokens=20)):
        right, wrong = f"{output['translation_text']} .", f"Nicht {i} ."
        rows.append([sources[i], *([wrong, right], [right, wrong], [wrong])[i % 3]])
    (tmp_path / "several.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(
        f"data_dir: {tmp_path}\noutput_dir: {tmp_path / 'out'}\nbase_model: {finished}\nlearning_rate: 1.0e-12\n"
        f"train_file: {finished.parent / 'data' / 'train'}\nvalidation_file: several.tsv\ntest_file: several.tsv\n"
        "tokens_per_update: 256\nmax_steps: 1\neval_strategy: steps\neval_steps: 1\nnum_beams: 1\nmax_new_tokens: 20\n"
        "num_processes: 2\nper_device_eval_batch_size: 4\nprecision: fp32\nattn_implementation: sdpa\nuse_cpu: true\n"
    )
    launch_successfully(recipe)
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert 50 < results["test_chrf"] < 90
    for name in ("bleu", "chrf", "ter", "bleu_tokenized_lc", "loss", "source_gain"):
        assert results[f"eval_{name}"] == pytest.approx(results[f"test_{name}"], rel=1e-5, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_run_without_validation_data(train, tmp_path, streaming):
    """It can also be resumed after training."""
    recipe = tmp_path / "small.yaml"
    recipe.write_text(recipe.read_text().replace("eval_strategy: steps", "validation_file: null"))
    keys = ("--streaming", streaming, "--buffer-size", "50")
    train(*keys)
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} >= FILES
    results = json.loads((out / "all_results.json").read_text())
    assert "test_bleu" in results
    before = (out / "model.safetensors").read_bytes()
    (out / "all_results.json").unlink()
    assert "resuming from" in train(*keys).stderr
    assert json.loads((out / "all_results.json").read_text())["test_loss"] == results["test_loss"]
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_notebook_recipe(programs, repository, tmp_path):
    keys = ("--output-dir", tmp_path / "out", "--max-steps", "2", "--d-model", "16", "--encoder-ffn-dim", "16")
    keys += ("--decoder-ffn-dim", "16", "--encoder-layers", "1", "--decoder-layers", "1", "--tokens-per-update", "800")
    programs.run("training.train", repository / "training" / "recipes" / "notebook.yaml", *keys)
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["updates"] == 2
    assert (tmp_path / "out" / "training_curve.png").exists()


TRACED = "from training.run import compilation; compilation.BACKEND = 'eager'"


@pytest.mark.slow
def test_two_processes_train_a_compiled_step_on_a_stream(run_ranks, recipe, tmp_path):
    """The graphs are traced, but not compiled to machine code."""
    keys = ("--step-mode", "compiled", "--streaming", "true", "--max-steps", "4", "--eval-strategy", "no")
    run_ranks(recipe, *keys, "--encoder-layers", "1", "--decoder-layers", "1", setup_code=TRACED)
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert results["processes"] == 2
    assert results["train_target_tokens"] > 0


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(start_ranks, run_ranks, recipe, tmp_path):
    run_ranks(recipe, *LONG, "--output-dir", tmp_path / "uninterrupted")
    ranks = start_ranks(recipe, *LONG)
    ranks[0].wait_for(lambda: list((tmp_path / "out").glob("checkpoint-*/files.json")))
    for rank in ranks:
        rank.kill()
    assert [rank.status for rank in ranks] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "out" / "all_results.json").exists()
    run_ranks(recipe, *LONG)
    assert same(tmp_path / "uninterrupted", tmp_path / "out")


FSDP_ON_CPUS = """
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
def begin(self, *args, fsdp_plugin=None, original=AcceleratorState.__init__, fsdp=DistributedType.FSDP, **kwargs):
    original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    self.fsdp_plugin = fsdp_plugin or getattr(self, "fsdp_plugin", None)
    self.distributed_type = fsdp  # Accelerate restricts FSDP to accelerators
AcceleratorState.__init__ = begin
"""


@pytest.mark.slow
def test_fsdp(programs, run_ranks, recipe, tmp_path):
    """Two processes with half of the weights each: results equal one process, checkpoints resume bit for bit."""

    def train(out: Path, *arguments: str, status: int = 0) -> str:
        keys = ("--fsdp", "true", "--output-dir", out, *arguments)
        return run_ranks(recipe, *keys, setup_code=FSDP_ON_CPUS, status=status)[0].stderr

    message = "ema_decay and lora_rank require unsharded weights"
    assert message in train(tmp_path / "none", "--ema-decay", "0.9", status=2)
    keys = (*SGD, "--eval-strategy", "steps", "--eval-steps", "20", "--per-device-eval-batch-size", "4")
    train(tmp_path / "split", *keys)
    programs.run(
        "training.train", recipe, *keys, "--gradient-accumulation-steps", "2", "--output-dir", tmp_path / "one"
    )
    first, second = weights(tmp_path / "split"), weights(tmp_path / "one")
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("split", "one")]
    for name in ("eval_loss", "eval_source_gain", "eval_chrf"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5, abs=1e-5), name
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=1e-6, rtol=0)
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "split")
    assert (tmp_path / "split" / "modeling_vanilla_transformer.py").exists()

    train(tmp_path / "uninterrupted", "--max-steps", "12", "--save-steps", "6")
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "uninterrupted", again)
    shutil.rmtree(again / "checkpoint-12")
    for name in ("all_results.json", "model.safetensors"):
        (again / name).unlink()
    train(again, "--max-steps", "12", "--save-steps", "6")
    assert same(tmp_path / "uninterrupted", again)


@pytest.mark.slow
@pytest.mark.skipif("VT_DATA" not in os.environ, reason="VT_DATA is not set to the directory of the real corpora")
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("multi30k_en_de", "multi30k"),
        ("tatoeba_en_de", "tatoeba_en_de"),
        ("cmudict_g2p", "cmudict"),
        ("scan_simple", "scan"),
    ],
)
def test_recipes_on_real_corpora(programs, tmp_path, repository, name, folder):
    data = Path(os.environ["VT_DATA"]) / folder
    arguments = ["--data-dir", data, "--output-dir", tmp_path / "out", "--max-steps", "4", "--num-beams", "1"]
    arguments += ["--max-new-tokens", "4", "--eval-strategy", "no", "--save-strategy", "no", "--num-processes", "1"]
    arguments += ["--average-checkpoints", "1", "--average-by", "last", "--warmup-steps", "2"]
    programs.run("training.train", repository / "training" / "recipes" / f"{name}.yaml", *arguments)
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert results["updates"] == 4
    assert {"test_bleu", "test_exact_match"} & set(results)


def losses_of(folder: Path) -> dict[int, float]:
    history = json.loads((folder / "checkpoint-60" / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


@pytest.mark.slow
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_run_moves_to_another_machine(programs, run_ranks, recipe, tmp_path, streaming):
    """Two processes for 25 updates, then one process with two micro-batches. The 60 updates take several epochs."""
    options = "--max-steps 60 --dropout 0 --logging-steps 1 --eval-strategy no --save-steps 25 --save-total-limit 9"
    keys = (*options.split(), "--streaming", streaming, "--buffer-size", "50")
    run_ranks(recipe, *keys)
    expected = losses_of(tmp_path / "out")
    for name in ("checkpoint-50", "checkpoint-60"):
        shutil.rmtree(tmp_path / "out" / name)
    for name in ("all_results.json", "model.safetensors"):
        (tmp_path / "out" / name).unlink()
    machine = ("--num-processes", "1", "--gradient-accumulation-steps", "2")
    output = programs.run("training.train", recipe, *keys, *machine).stderr
    assert "resuming from" in output
    assert "1 process x 2 batches of 128 tokens = 256 tokens per update (CPU, " in output
    losses = losses_of(tmp_path / "out")
    assert list(losses) == list(expected) == list(range(1, 61))
    if streaming == "false":  # else the pairs of an update depend on the number of processes
        assert losses == pytest.approx(expected, abs=1e-4)
    assert losses[60] < losses[1] - 0.1


@pytest.mark.slow
def test_epochs_continue_with_more_processes(programs, run_ranks, recipe, tmp_path):
    """One process with two micro-batches for 25 of 45 updates, then two processes."""
    keys = ("--max-steps", "-1", "--num-train-epochs", "3", "--dropout", "0", "--eval-strategy", "no")
    keys = (*keys, "--save-steps", "25", "--save-total-limit", "9")
    programs.run("training.train", recipe, *keys, "--gradient-accumulation-steps", "2")
    out = tmp_path / "out"
    expected, before = json.loads((out / "all_results.json").read_text()), weights(out)
    for path in out.glob("checkpoint-*"):
        if path.name != "checkpoint-25":
            shutil.rmtree(path)
    for name in ("all_results.json", "model.safetensors"):
        (out / name).unlink()
    assert "resuming from" in run_ranks(recipe, *keys)[0].stderr
    found = json.loads((out / "all_results.json").read_text())
    assert (found["processes"], found["updates"]) == (2, expected["updates"])
    assert expected["updates"] > 25
    assert found["train_target_tokens"] == expected["train_target_tokens"]
    for name, tensor in weights(out).items():
        torch.testing.assert_close(tensor, before[name], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_two_processes_train_on_one_pair(run_ranks, recipe, tmp_path, streaming):
    """One of them has no pairs. Only the main process plots."""
    for path in (tmp_path / "data").glob("train.*"):
        path.write_text(path.read_text().splitlines(keepends=True)[0])
    keys = ("--max-steps", "4", "--tokenizer-vocab-size", "60", "--eval-strategy", "no", "--streaming", streaming)
    ranks = run_ranks(recipe, *keys, setup_code=COUNTED)
    assert [rank.stdout.count("plotted") for rank in ranks] == [1, 0]
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["updates"] == 4


COUNTED = """
from training.run import training
def plot(*args, original=training.plot_training_curve, **keys):
    print("plotted", flush=True)
    return original(*args, **keys)
training.plot_training_curve = plot
"""
