"""Losses, moving average, evaluation and resuming of the trainer."""

import logging
import math
import os
import signal
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from datasets import IterableDataset
from safetensors.torch import load_file
from transformers import M2M100Config, M2M100ForConditionalGeneration, TrainerCallback

from training.data.streaming import TokenBatchStream
from training.inference.metrics import SequenceMetric
from training.recipe.arguments import DataArguments
from training.run.callbacks import StopOnSignal
from training.run.compilation import masked_training_loss
from training.run.factories import resolve_precision_and_attention
from training.run.losses import TOKEN_CUTOFF_RATE, cross_entropy, symmetric_kl_divergence, token_cutoff, training_loss
from training.run.trainer import TokenBatchTrainer
from vanilla_transformer.shared.command_line import logger


def batch_of(trainer) -> dict:
    return trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[i] for i in range(4)]))


def logits_of(trainer, batch) -> torch.Tensor:
    return trainer.model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def test_finds_unused_parameters_of_other_classes(make_trainer):
    """DDP would otherwise raise RuntimeError: global attention of LED, layers that layerdrop skips."""
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
    config = M2M100Config(vocab_size=60, encoder_attention_heads=2, decoder_attention_heads=2, **sizes)
    assert make_trainer(model=M2M100ForConditionalGeneration(config)).args.ddp_find_unused_parameters is True
    assert make_trainer().args.ddp_find_unused_parameters is False


def test_label_smoothed_loss(make_trainer):
    """(1 - e) * nll + e * mean over the vocabulary of -log p, per target token without padding."""
    trainer = make_trainer(label_smoothing_factor=0.2)
    batch, model = batch_of(trainer), trainer.model.train()
    real = batch["labels"] != -100
    log_p = logits_of(trainer, batch).log_softmax(-1)
    nll = -log_p.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    expected = ((0.8 * nll - 0.2 * log_p.mean(-1)) * real).sum() / real.sum()
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), expected)
    half = trainer.compute_loss(model, dict(batch), num_items_in_batch=real.sum() * 2)
    torch.testing.assert_close(half, expected / 2)


def test_rdrop_adds_divergence_of_two_passes(make_trainer):
    single, double = make_trainer(label_smoothing_factor=0.1), make_trainer(label_smoothing_factor=0.1, rdrop_alpha=5.0)
    batch = batch_of(single)
    losses = [trainer.compute_loss(trainer.model.train(), dict(batch)) for trainer in (single, double)]
    torch.testing.assert_close(*losses)  # without dropout both passes are equal
    noisy = make_trainer(dropout=0.3, rdrop_alpha=5.0), make_trainer(dropout=0.3, rdrop_alpha=1e-9)
    values = []
    for trainer in noisy:
        torch.manual_seed(3)
        values.append(trainer.compute_loss(trainer.model.train(), dict(batch)))
    assert values[0] > values[1] * 1.01


@pytest.mark.parametrize("overrides", [{}, {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 50}])
def test_simcut_adds_divergence_of_a_pass_with_token_cutoff(make_model, overrides, monkeypatch):
    """Reference implementation: `inputs_embeds` with zero rows. Loss and gradients are equal."""
    monkeypatch.setattr("training.run.losses.TOKEN_CUTOFF_RATE", 0.4)
    size = overrides.get("decoder_vocab_size", 60)
    model = make_model(**overrides).train()  # without dropout
    batch = {"input_ids": torch.randint(3, 60, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
    batch["attention_mask"][1, 5:] = 0
    batch["labels"] = torch.randint(3, size, (3, 6))
    batch["labels"][2, 4:] = -100
    decoder_ids = batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    torch.manual_seed(5)
    loss, _ = training_loss(model, dict(batch), 0.1, 0.0, True, simcut_alpha=3.0)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    torch.manual_seed(5)
    kept = [torch.rand(6, length)[3:] >= 0.4 for length in (7, 6)]
    assert 0 < sum(int((~each).sum()) for each in kept) < 39
    cut = model(
        inputs_embeds=model.get_encoder().embed_tokens(batch["input_ids"]) * kept[0][..., None],
        attention_mask=batch["attention_mask"],
        decoder_inputs_embeds=model.get_decoder().embed_tokens(decoder_ids) * kept[1][..., None],
    ).logits.log_softmax(-1)
    uncut = model(**{name: value for name, value in batch.items() if name != "labels"})
    uncut, real = uncut.logits.log_softmax(-1), batch["labels"] != -100
    expected = cross_entropy(uncut[real], batch["labels"][real], 0.1)
    expected = expected + 3 * (uncut.exp() * (uncut - cut)).sum(-1)[real].sum()
    torch.testing.assert_close(loss, expected)
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_token_cutoff_rate_and_hook_removal(make_trainer):
    trainer = make_trainer(simcut_alpha=3.0, label_smoothing_factor=0.1)
    embedding = trainer.model.get_input_embeddings()
    with token_cutoff(trainer.model, 100):
        embedded = embedding(torch.full((400, 50), 5))
    cut = (embedded == 0).all(-1)
    assert not cut[:100].any()
    assert abs(float(cut[100:].float().mean()) - TOKEN_CUTOFF_RATE) < 0.01
    assert not embedding._forward_hooks
    torch.manual_seed(1)
    loss = trainer.compute_loss(trainer.model.train(), dict(batch_of(trainer)))
    torch.manual_seed(2)  # other tokens are cut
    assert not loss.isclose(trainer.compute_loss(trainer.model, dict(batch_of(trainer))), rtol=1e-6)


def test_symmetric_kl_divergence():
    first, second = torch.randn(2, 5, 7).log_softmax(-1)
    p, q = first.exp(), second.exp()
    both = [(a * (a / b).log()).sum() for a, b in ((p, q), (q, p))]
    torch.testing.assert_close(symmetric_kl_divergence(first, second), sum(both) / 2)
    assert symmetric_kl_divergence(first, first) == 0


@pytest.mark.parametrize("generate", [False, True])
def test_evaluation_loss_is_unsmoothed_and_per_token(make_trainer, generate):
    trainer = make_trainer(per_device_eval_batch_size=3, label_smoothing_factor=0.2)
    # the batches of 3 sentences have different numbers of target tokens
    trainer.compute_metrics = SequenceMetric().compute if generate else None
    batch = batch_of(trainer)
    labels = batch["labels"]
    with torch.no_grad():
        logits = logits_of(trainer, batch)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_polynomial_schedule_rejects_warmup_to_the_last_update(make_trainer):
    for warmup in (2, 4):
        make_trainer(lr_scheduler_type="polynomial", warmup_steps=warmup).train()
    with pytest.raises(ValueError, match="does not support warmup_steps=3, the number of updates"):
        make_trainer(lr_scheduler_type="polynomial", warmup_steps=3).train()


def test_moving_average_is_evaluated_and_saved(make_trainer, tmp_path):
    # without warm-up the updates are large, so a wrong decay changes the result
    trainer = make_trainer(ema_decay=0.25, lr_scheduler_type="constant", warmup_steps=0)
    name, weights = "model.encoder.layers.0.feed_forward.fc1.weight", []
    parameter = dict(trainer.model.named_parameters())[name]
    expected = parameter.detach().clone()
    original = trainer.callback_handler.on_step_end

    def record_weights(*args):
        weights.append(parameter.detach().clone())
        return original(*args)

    trainer.callback_handler.on_step_end = record_weights
    trainer.train()
    for later, decay in zip(weights, (2 / 11, 0.25, 0.25), strict=True):  # at most (1 + n) / (10 + n)
        expected = decay * expected + (1 - decay) * later
    averages = dict(trainer.ema_model.named_parameters())
    torch.testing.assert_close(averages[name], expected)
    batch = batch_of(trainer)
    with torch.no_grad():
        loss = trainer.ema_model(**batch).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(loss), rel=1e-5)
    torch.testing.assert_close(parameter, weights[-1], rtol=0, atol=0)
    trainer.save_final()
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors")[name], expected)


def test_counts_target_tokens_without_padding(make_trainer):
    trainer = make_trainer(max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
    trainer.train()
    assert trainer.target_tokens == 2 * sum(map(len, trainer.train_dataset["labels"]))
    logged = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry]
    assert all(math.isfinite(entry["tokens_per_second"]) for entry in logged)


@pytest.mark.parametrize("rdrop_alpha", [0.0, 1.0])
def test_timing_uses_the_training_loss(make_trainer, monkeypatch, tmp_path, rdrop_alpha):
    """The timed steps compute the chunked loss, or R-Drop with two passes per batch."""
    monkeypatch.setattr("training.run.hardware.has_bf16", lambda: True)
    keys = {"label_smoothing_factor": 0.1, "rdrop_alpha": rdrop_alpha}
    trainer = make_trainer(tokens_per_update=1000, max_steps=1000, **keys)
    calls, forward = [], trainer.model.forward

    def record_call(**inputs):
        calls.append((len(inputs["input_ids"]), inputs.get("smoothing")))
        return forward(**inputs)

    monkeypatch.setattr(trainer.model, "forward", record_call)
    resolve_precision_and_attention(
        SimpleNamespace(training=trainer.args), trainer.model, trainer.train_dataset, trainer.data_collator, tmp_path
    )
    measured = calls.copy()
    assert len(measured) >= 3
    for _ in range(len(measured)):
        trainer.compute_loss(trainer.model.train(), dict(batch_of(trainer)))
    rows, smoothing = (2 * 4, None) if rdrop_alpha else (4, 0.1)
    assert set(calls[len(measured) :]) == {(rows, smoothing)}
    assert set(measured) == {(rows // 2, smoothing)}  # a micro-batch is half of an update


@pytest.mark.parametrize(("data_seed", "same_as"), [(None, 42), (0, 0), (3, 3)])
def test_data_seed_may_be_0(make_trainer, data_seed, same_as):
    trainer = make_trainer(data_seed=data_seed, tokens_per_update=9)
    trainer.get_train_dataloader()
    assert trainer.sampler.seed == same_as


@pytest.mark.parametrize("has_shapes", [False, True])
def test_gradients_do_not_depend_on_accumulation(make_trainer, has_shapes):
    """One update of four pairs, in at most 8 micro-batches: four of them are then empty."""
    gradients, losses = [], []
    for steps in (1, 2, 8):
        trainer = make_trainer(
            tokens_per_update=1000,
            gradient_accumulation_steps=steps,
            step_mode="compiled" if has_shapes else "eager",
            label_smoothing_factor=0.1,
            max_grad_norm=0.0,
            max_steps=1,
            logging_steps=1,
        )
        if has_shapes:
            trainer.compiled_loss.compiled = masked_training_loss

        class RecordGradients(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                gradients.append([each.grad.clone() for each in model.parameters()])

        trainer.add_callback(RecordGradients)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert max(float(each.abs().max()) for each in gradients[0]) > 1e-3
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)
    for other in gradients[1:]:
        for first, second in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def generate_pairs(n):
    for i in range(n):
        yield {"source": "the dog runs " * (1 + i % 3), "target": f"der Hund rennt {'ein' * (i % 5)}"}


@pytest.mark.slow
def test_stream_resumes_at_each_update(make_trainer, tokenizer, tmp_path):
    """Batches, counts of pairs, weights and epochs equal those of the uninterrupted run."""

    def train(resumed=None):
        base = make_trainer(
            max_steps=7, gradient_accumulation_steps=2, logging_steps=1, save_strategy="steps", save_steps=1, seed=3
        )
        base.args.save_total_limit = 20
        pairs = IterableDataset.from_generator(generate_pairs, gen_kwargs={"n": 60})
        stream = TokenBatchStream(
            pairs, tokenizer, DataArguments(buffer_size=25, max_length=12), 64, 1, micro_batches=2
        )
        keys = {"processing_class": tokenizer, "data_collator": base.data_collator}
        trainer = TokenBatchTrainer(model=base.model, args=base.args, train_dataset=stream, **keys)
        seen, step = [], trainer.training_step

        def record_batch(model, inputs, *args, **kwargs):
            seen.append(inputs["labels"].tolist())
            return step(model, inputs, *args, **kwargs)

        trainer.training_step = record_batch
        trainer.train(resume_from_checkpoint=resumed)
        weights = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
        epochs = [entry["epoch"] for entry in trainer.state.log_history]
        return seen, (stream.pairs_read, stream.pairs_dropped), weights, [*epochs, trainer.state.epoch]

    batches, counts, weights, epochs = train()
    assert len(batches) == 14
    assert counts[1] > 0
    for update in range(1, 7):
        again = train(str(tmp_path / "out" / f"checkpoint-{update}"))
        assert again[0] == batches[2 * update :]
        assert again[1] == counts
        assert again[3] == epochs
        for name, tensor in weights.items():
            torch.testing.assert_close(again[2][name], tensor, rtol=0, atol=0)


def test_resuming_does_not_warn_about_tied_weights(make_trainer, tmp_path, monkeypatch):
    """A checkpoint contains shared weights once, also after a run was resumed."""
    warnings, names = [], []
    monkeypatch.setattr("transformers.trainer.logger.warning", lambda text, *_: warnings.append(str(text)))
    for resumed in (None, 1, 2):
        trainer = make_trainer(max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=3)
        trainer.train(resume_from_checkpoint=resumed and str(tmp_path / "out" / f"checkpoint-{resumed}"))
        names.append(load_file(tmp_path / "out" / "checkpoint-3" / "model.safetensors").keys())
    assert "lm_head.weight" in trainer.model.state_dict().keys() - names[0]
    assert names[0] == names[1] == names[2]
    assert not [text for text in warnings if "missing keys" in text]


@pytest.mark.parametrize(("requested", "groups"), [(1, 1), (2, 2)])
def test_shapes_of_a_stream_become_smaller_with_more_micro_batches(make_trainer, tokenizer, requested, groups):
    """If memory is too small, the number of micro-batches is doubled after the stream was created."""
    base = make_trainer(gradient_accumulation_steps=2 * requested)
    pairs = IterableDataset.from_generator(generate_pairs, gen_kwargs={"n": 60})
    stream = TokenBatchStream(pairs, tokenizer, DataArguments(max_length=12), 64, 1, micro_batches=requested)
    stream.micro_batches = 2 * requested
    keys = {"processing_class": tokenizer, "data_collator": base.data_collator}
    trainer = TokenBatchTrainer(model=base.model, args=base.args, train_dataset=stream, **keys)
    trainer.compiled_loss = lambda *args: None
    loader = trainer.get_train_dataloader()
    parts = 2 * requested // groups
    assert loader.collate_fn.shapes == [shape.split(parts).without_ones() for shape in stream.shapes]
    batches = list(islice(stream, 20))
    assert batches
    assert all(len(rows) <= loader.collate_fn.shapes[index].rows for index, rows in batches)


@pytest.mark.parametrize("average_by", ["last", "best"])
def test_saves_last_weights_if_early_stopping_precedes_checkpoints(make_trainer, tmp_path, average_by):
    trainer = make_trainer(average_checkpoints=2, average_by=average_by, save_strategy="steps", save_steps=100)
    trainer.save_final()
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=0, atol=0)


def test_signal_does_not_fail_if_stderr_is_closed(monkeypatch):
    """In a pipe, Ctrl-C also ends the program that reads stderr."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stop = StopOnSignal()
    with os.fdopen(write_end, "w") as output:
        monkeypatch.setattr("sys.stderr", output)
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        stop._request_stop(signal.SIGINT)
        logger.removeHandler(handler)
        print("the output of this line is discarded", file=output, flush=True)
    assert stop.signal_number == signal.SIGINT
