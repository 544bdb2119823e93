"""Validation scores equal test scores, for any number of processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSeq2SeqLM, TrainerControl, TrainerState

from training.data.parallel_text import ParallelText
from training.inference import metrics
from training.inference.metrics import SequenceMetric, TranslationMetric, translate_and_score
from training.recipe.arguments import TrainingArguments
from training.run.callbacks import IgnoredSourceWarning, StopOnIgnoredSource

METRICS = {
    "bleu",
    "chrf",
    "ter",
    "bleu_tokenized_lc",
    "exact_match",
    "token_error_rate",
    "character_error_rate",
    "loss",
    "source_gain",
}


@pytest.mark.slow
def test_scores_do_not_depend_on_number_of_processes(tmp_path):
    """Sets of 1 to 40 sentences, mostly with incomplete batches; each process has the scores of all sentences."""
    program = Path(__file__).with_name("evaluate_in_processes.py")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "HF_HOME": str(tmp_path / "home")}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.run(
        [sys.executable, program, tmp_path], env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert process.returncode == 0, process.stderr[-4000:]
    expected = json.loads((tmp_path / "expected.json").read_text())
    assert len(expected) == 40
    for path in (tmp_path / f"{processes}_{rank}.json" for processes in (1, 2, 3) for rank in range(processes)):
        found = json.loads(path.read_text())
        for size, scores in expected.items():
            names = {name for name, value in scores.items() if not isinstance(value, str)}
            assert names == METRICS - ({"source_gain"} if size == "1" else set())
            assert found[size].keys() >= {"eval_runtime", *(f"eval_{name}" for name in names)}
            assert ("eval_source_gain" in found[size]) == (size != "1")
            for name in names:
                assert found[size][f"eval_{name}"] == pytest.approx(scores[name], abs=1e-5), (path.name, size, name)
    assert 60 < expected["40"]["exact_match"] < 70  # the second references count


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_work(make_trainer, sentences, monkeypatch, processes):
    """Each pair is scored in one process."""
    trainer, compute, scored = make_trainer(), metrics.compute_pair_nll, []
    text = ParallelText(sentences["en"], sentences["de"])

    def record(model, tokenizer, pairs, *args, **kwargs):
        scored.append(list(pairs.sources))
        return compute(model, tokenizer, pairs, *args, **kwargs)

    monkeypatch.setattr(metrics, "compute_pair_nll", record)
    monkeypatch.setattr(metrics, "broadcast_object_list", lambda rows: rows)
    for rank in range(processes):
        args = SimpleNamespace(process_index=rank, world_size=processes, device=trainer.args.device)
        args.per_device_eval_batch_size = 1
        translate_and_score(trainer.model, trainer.processing_class, text, None, args)
    shares = scored[::2]  # the others are losses with swapped sources
    assert sorted(sum(shares, [])) == sorted(text.sources)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def both_metrics(predictions: list, references: list) -> dict:
    both = (TranslationMetric("de"), SequenceMetric())
    found = [metric.compute(predictions=predictions, references=references) for metric in both]
    return found[0] | found[1]


@pytest.mark.parametrize("kind", ["default", "bf16", "average", "adapter"])
def test_validation_scores_equal_test_scores(make_trainer, sentences, tmp_path, kind):
    """Training compiles, wraps or averages the model. The test loads the checkpoint."""
    keys = {"eval_strategy": "steps", "eval_steps": 3, "dropout": 0.4}
    keys |= {"bf16": {"bf16": True}, "average": {"ema_decay": 0.3}}.get(kind, {})
    trainer = make_trainer(**keys)
    if kind == "adapter":
        lora = LoraConfig("SEQ_2_SEQ_LM", r=2, target_modules="all-linear")
        trainer = make_trainer(**keys, model=get_peft_model(trainer.model.train(), lora))
    trainer.compute_metrics = both_metrics
    trainer.model.generation_config.max_new_tokens = 9
    if trainer.ema_model is not None:
        trainer.ema_model.generation_config.max_new_tokens = 9
    references = [[text, "ein Hund"] for text in sentences["de"]]
    trainer.eval_dataset = ParallelText(sentences["en"], sentences["de"], references=references)
    trainer.train()
    validation = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    trainer.save_final()
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    tokenizer = trainer.processing_class
    test, translations = translate_and_score(model, tokenizer, trainer.eval_dataset, both_metrics, trainer.args)
    assert len(translations) == 4
    for name in METRICS:
        assert validation[f"eval_{name}"] == pytest.approx(test[name], rel=1e-6), name


def test_evaluation_does_not_change_training(make_trainer):
    trainer = make_trainer(dropout=0.4)
    trainer.compute_metrics = both_metrics
    model = trainer.model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, state = model.generation_config.to_dict(), torch.get_rng_state()
    trainer.evaluate()
    assert model.training
    assert model.generation_config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_source_gain_is_zero_without_cross_attention(make_trainer):
    trainer = make_trainer()
    assert abs(trainer.evaluate()["eval_source_gain"]) > 1e-3
    with torch.no_grad():
        for layer in trainer.model.model.decoder.layers:
            layer.cross_attn.out_proj.weight.zero_()
    assert abs(trainer.evaluate()["eval_source_gain"]) < 1e-6


def test_source_gain_shuffles_distinct_sources(make_trainer):
    """Otherwise a set with one line per reference would show no gain."""
    trainer = make_trainer()
    once = trainer.eval_dataset.select([0, 1])
    thrice = trainer.eval_dataset.select([0, 0, 0, 1, 1, 1])
    gains = [trainer.evaluate(text)["eval_source_gain"] for text in (once, thrice)]
    assert gains[0] == pytest.approx(gains[1], rel=1e-5)
    assert "eval_source_gain" not in trainer.evaluate(trainer.eval_dataset.select([0, 0]))


@pytest.mark.parametrize(
    ("gains", "warnings"), [([0.0, 0.0, 0.01, 0.02], [2]), ([0.0, 0.5, 0.6, 0.7], []), ([0.0, 0.5, 0.6, 0.01], [3])]
)
def test_source_gain_warning(read_messages, gains, warnings):
    """Evaluations after 10, 20, ... of 90 updates: the third is the first that counts."""
    state, warned = TrainerState(max_steps=90), []
    for i, gain in enumerate(gains):
        state.global_step = 10 * (i + 1)
        state.log_history += [{"step": state.global_step, "loss": 1.0}]
        state.log_history += [{"step": state.global_step, "eval_loss": 1.0, "eval_source_gain": gain}]
        IgnoredSourceWarning().on_evaluate(None, state, TrainerControl())
        if text := read_messages():
            warned.append(i)
            assert "norm_position: pre" in text
            assert "learning_rate" in text
            assert "warmup_steps" in text
    assert warned == warnings


@pytest.mark.parametrize(
    ("update", "gain", "stops"),
    [(19, 0.01, False), (20, 0.01, True), (20, 0.2, False), (20, None, False), (99, 0.01, True), (100, 0.01, False)],
)
def test_stop_on_ignored_source(update, gain, stops):
    """Only after warm-up, and not after the last update. With a single pair, there is no gain."""
    callback, control = StopOnIgnoredSource(), TrainerControl()
    args = TrainingArguments(output_dir="out", warmup_steps=0.2)
    state = TrainerState(global_step=update, max_steps=100, log_history=[{"step": update, "loss": 1.0}])
    state.log_history += [{"step": update} | ({} if gain is None else {"eval_source_gain": gain})]
    callback.on_evaluate(args, state, control)
    assert (callback.has_stopped, control.should_training_stop) == (stops, stops)
