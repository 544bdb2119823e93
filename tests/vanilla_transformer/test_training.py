"""Loss, gradients and training with the Trainer."""

import pytest
import torch
from torch.nn import functional
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TokenizersBackend

from vanilla_transformer.generation_vanilla_transformer import CACHE_NAME


@pytest.fixture
def labels():
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(3, 60, (3, 6), generator=generator)
    labels[1, 4:] = -100
    labels[2, 1:] = -100
    return labels


def test_loss_is_mean_over_labels(make_model, batch, labels):
    model = make_model()
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    outputs = model(**source, labels=labels)
    shifted = torch.cat([torch.ones(3, 1, dtype=torch.long), labels[:, :-1]], dim=1)
    logits = model(**source, decoder_input_ids=shifted.masked_fill(shifted == -100, 0)).logits
    torch.testing.assert_close(outputs.logits, logits)
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(outputs.loss, expected)
    assert outputs.get(CACHE_NAME) is None


def test_loss_is_divided_by_num_items_in_batch(make_model, batch, labels):
    model = make_model()
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    mean = model(**source, labels=labels).loss
    count = (labels != -100).sum()
    for items in (count * 4, int(count * 4)):
        torch.testing.assert_close(model(**source, labels=labels, num_items_in_batch=items).loss, mean / 4)


def test_labels_require_decoder_start_token_id(make_model, batch, labels):
    model = make_model(decoder_start_token_id=None)
    with pytest.raises(ValueError, match="decoder_start_token_id is None"):
        model(input_ids=batch["input_ids"], labels=labels)


def test_no_cache_in_training(make_model, batch):
    """A Trainer with label smoothing removes the labels. An unneeded cache is not created then."""
    model = make_model()
    assert CACHE_NAME not in model.train()(**batch)
    assert CACHE_NAME in model.eval()(**batch)
    assert CACHE_NAME in model.train()(**batch, use_cache=True)


def test_dropout_is_off_in_evaluation_and_on_in_training(make_model, batch):
    model = make_model(dropout=0.3, attention_dropout=0.1, activation_dropout=0.1)
    assert torch.equal(model(**batch).logits, model(**batch).logits)
    model.train()
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        assert not torch.equal(model(**batch).logits, model(**batch).logits)


def test_every_parameter_has_a_gradient(make_model, batch, labels):
    for variant in ({}, {"norm_position": "pre", "position_embedding_type": "learned", "embedding_norm": True}):
        model = make_model(**variant).train()
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0] == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(make_model, batch, labels, reentrant):
    model = make_model().train()
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model(**source, labels=labels).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    else:  # the name until transformers 5.20
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert model.model.encoder.layers[0].gradient_checkpointing
    model(**source, labels=labels).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.parametrize(("initialization", "bias"), [("xavier", 0.0), ("torch", None), ("normal", 0.0)])
def test_initialization_by_name(make_config, initialization, bias):
    from vanilla_transformer import VanillaTransformerForConditionalGeneration

    config = make_config(d_model=64, vocab_size=500, encoder_ffn_dim=256, initialization=initialization)
    model = VanillaTransformerForConditionalGeneration(config)
    layer = model.model.encoder.layers[0]
    fc1, embedding = layer.feed_forward.fc1, model.model.encoder.embed_tokens.weight
    expected_std = {"xavier": (2 / (64 + 256)) ** 0.5, "torch": 64**-0.5 / 3**0.5, "normal": 0.02}[initialization]
    expected_embedding = {"xavier": (2 / (500 + 64)) ** 0.5, "torch": 1.0, "normal": 0.02}[initialization]
    assert fc1.weight.std().item() == pytest.approx(expected_std, rel=0.05)
    assert embedding.std().item() == pytest.approx(expected_embedding, rel=0.05)
    if bias is not None:
        assert (fc1.bias == bias).all()
    else:
        assert fc1.bias.abs().max().item() == pytest.approx(64**-0.5, rel=0.05)
    assert (layer.self_attn_layer_norm.weight == 1).all()


def make_pairs(tokens=range(3, 60), count=64, length=6):
    """Return pairs of a synthetic task: the target is the reversed source."""
    generator = torch.Generator().manual_seed(3)
    sources = torch.randint(min(tokens), max(tokens) + 1, (count, length), generator=generator)
    return [{"input_ids": [*row, 2], "labels": [*reversed(row), 2]} for row in sources.tolist()]


@pytest.fixture
def make_trainer(train_bpe, sentences, special_tokens, tmp_path):
    tokenizer = TokenizersBackend(tokenizer_object=train_bpe(sentences["de"], 60), **special_tokens)

    def make(model, **settings):
        arguments = {"output_dir": tmp_path, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        arguments |= {"per_device_train_batch_size": 64, "lr_scheduler_type": "constant"} | settings
        return Seq2SeqTrainer(
            model=model,
            args=Seq2SeqTrainingArguments(**arguments),
            train_dataset=make_pairs(),
            eval_dataset=make_pairs(count=8),
            processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        )

    return make


def test_memorizes_training_data(make_config, make_trainer):
    from vanilla_transformer import VanillaTransformerForConditionalGeneration

    model = VanillaTransformerForConditionalGeneration(make_config(d_model=64, dropout=0.0, initialization="normal"))
    make_trainer(model, max_steps=250, learning_rate=3e-3, warmup_steps=20, adam_beta2=0.98).train()
    examples = make_pairs(count=16)
    ids = torch.tensor([example["input_ids"] for example in examples])
    outputs = model.generate(ids, max_new_tokens=8)
    correct = (outputs[:, 1:8] == torch.tensor([example["labels"] for example in examples])).all(-1)
    assert correct.float().mean() > 0.9


def test_gradient_does_not_depend_on_accumulation(make_model, make_trainer):
    """One batch of 64 equals 4 batches of 16 with unequal numbers of labels, within 1e-6 of the gradient norm."""
    gradients = []
    for steps in (1, 4):
        model = make_model()
        trainer = make_trainer(
            model,
            per_device_train_batch_size=64 // steps,
            gradient_accumulation_steps=steps,
            max_steps=1,
            learning_rate=1.0,
            optim="sgd",
            max_grad_norm=0.0,
        )
        trainer.train_dataset = [
            {"input_ids": p["input_ids"], "labels": p["labels"][: 1 + i % 7]} for i, p in enumerate(make_pairs())
        ]
        before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
        trainer.train()
        gradients.append(before - torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert gradients[0].norm() > 0.1
    assert (gradients[0] - gradients[1]).norm() <= 1e-6 * gradients[0].norm()


def test_parameters_after_20_updates_do_not_depend_on_accumulation(make_model, make_trainer):
    results = []
    for steps in (1, 4):
        model = make_model()
        settings = {"per_device_train_batch_size": 64 // steps, "gradient_accumulation_steps": steps}
        make_trainer(model, **settings, max_steps=20, learning_rate=0.05, optim="sgd", max_grad_norm=0.0).train()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert (results[0] - results[1]).abs().max() <= 1e-6
    assert (results[0] - torch.cat([p.detach().flatten() for p in make_model().parameters()])).abs().max() > 1e-3


def test_label_smoothing_through_the_trainer(make_model, make_trainer):
    model = make_model()
    trainer = make_trainer(model, label_smoothing_factor=0.1, max_steps=1)
    examples = trainer.data_collator(make_pairs(count=4))
    loss = trainer.compute_loss(model.train(), dict(examples), num_items_in_batch=torch.tensor(28))
    with torch.no_grad():
        log_probabilities = model(**examples).logits.log_softmax(-1)
    labels = examples["labels"].clamp(min=0)
    nll = -log_probabilities.gather(-1, labels[..., None]).squeeze(-1)
    expected = (0.9 * nll - 0.1 * log_probabilities.mean(-1))[examples["labels"] != -100].sum() / 28
    torch.testing.assert_close(loss, expected)
    trainer.train()


def test_evaluation_with_generation(make_model, make_trainer):
    trainer = make_trainer(make_model(), predict_with_generate=True, generation_max_length=9)
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(make_pairs(count=3)).predictions.shape[0] == 3
