"""The demo on a simulated MPS device: one process, float32 only, and the model and translations of the CPU.

`test_simulated_devices.py` runs these tests in a process with the simulated device.
"""

import sys
from pathlib import Path

import pytest
import simulated_mps
import torch

from training import translate


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (lambda: torch.ones(2, device="mps").double(), "rejects the dtype Double"),
        (lambda: torch.ones(2, device="mps").bfloat16(), "rejects the dtype BFloat16"),
        (lambda: torch.linalg.eigvals(torch.eye(2, device="mps")), "_linalg_eigvals is not implemented"),
        (lambda: torch.ones(2, device="mps") + torch.ones(2), "Expected all tensors to be on the same device"),
        (lambda: torch.ones(2).pin_memory(), "getPinnedMemoryAllocator"),
    ],
)
def test_device_rejects_what_mps_lacks(operation, error):
    with pytest.raises((RuntimeError, TypeError), match=error):
        operation()


def test_demo_is_complete_in_one_process(run_train, losses, monkeypatch, capsys, read_messages):
    """Dropout is off, because a CPU samples it in another way."""
    keys = {"max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "num_beams": 4, "dropout": 0}
    trainer, results = run_train(**keys)
    assert trainer.args.device == torch.device("mps")
    assert (trainer.args.precision, trainer.args.attn_implementation) == ("fp32", "sdpa")
    assert "1 process x 2 batches of 512 tokens = 1,024 tokens per update (MPS, fp32)" in read_messages()
    assert trainer.accelerator.mixed_precision == "no"
    assert trainer.accelerator.scaler is None
    assert not trainer.args.dataloader_pin_memory
    expected, expected_results = run_train(use_cpu="true", num_processes=1, precision="fp32", **keys)
    assert expected.args.device == torch.device("cpu")
    assert losses(trainer) == pytest.approx(losses(expected), rel=1e-4)
    assert results["test_chrf"] == expected_results["test_chrf"]
    folders = [Path(each.args.output_dir) for each in (trainer, expected)]
    assert len({(folder / "samples.tsv").read_text(encoding="utf-8") for folder in folders}) == 1
    capsys.readouterr()
    outputs = []
    for device in ("mps", "cpu"):
        arguments = ["--input", str(folders[0] / "samples.tsv"), "--num-beams", "3", "--scores", "--device", device]
        monkeypatch.setattr(sys, "argv", ["training.translate", str(folders[0]), *arguments])
        translate.main()
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""


def test_all_losses_and_averages_are_computed_on_the_device(run_train, losses):
    keys = {"ema_decay": 0.9, "simcut_alpha": 1, "gradient_accumulation_steps": 2}
    trainer, results = run_train(max_steps=10, logging_steps=5, **keys)
    assert trainer.ema_model.device.type == "mps"
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert results["test_loss"] > 0


def test_a_second_process_is_rejected(run_train, capsys):
    with pytest.raises(SystemExit):
        run_train(max_steps=6, num_processes=2)
    assert "num_processes=2 requires 2 devices, but mps has 1" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_used_on_request(run_train, losses, precision):
    simulated_mps.restrict(["Double", "ComplexDouble"])
    try:
        trainer, _ = run_train(max_steps=10, logging_steps=5, precision=precision)
    finally:
        simulated_mps.restrict()
    assert (trainer.accelerator.scaler is not None) == (precision == "fp16")
    assert losses(trainer)[-1] < losses(trainer)[0]
