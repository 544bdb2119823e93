"""Compatibility with other tools: export, LoRA, quantization, FSDP and tensor parallelism."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.filterwarnings("ignore")


def test_torch_export(make_model, batch):
    """One exported program supports any batch size and lengths."""
    model = make_model()
    dims = {"batch": torch.export.Dim.AUTO, "source": torch.export.Dim.AUTO, "target": torch.export.Dim.AUTO}
    shapes = {
        "input_ids": {0: dims["batch"], 1: dims["source"]},
        "attention_mask": {0: dims["batch"], 1: dims["source"]},
        "decoder_input_ids": {0: dims["batch"], 1: dims["target"]},
    }
    with torch.no_grad():
        program = torch.export.export(
            model, (), batch | {"use_cache": False}, dynamic_shapes=shapes | {"use_cache": None}
        )
        other = {name: tensor[:2, :4] for name, tensor in batch.items()}
        actual = program.module()(**other, use_cache=False).logits
        torch.testing.assert_close(actual, model(**other).logits, atol=1e-5, rtol=0)


def test_fake_tensors(make_model, batch):
    """Fake tensors have shapes but no values, as in memory planners and exporters."""
    model = make_model()
    expected = model(**batch).logits.shape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
        assert model(**fake).logits.shape == expected


@pytest.mark.parametrize(("shared", "source"), [(True, "encoder"), (False, "decoder")])
def test_tied_weights_keys_of_lm_head(make_model, shared, source):
    """PEFT reads `_tied_weights_keys` to apply an adapter of one tied module to the other."""
    model = make_model(share_encoder_decoder_embeddings=shared)
    assert model._tied_weights_keys == {"lm_head.weight": f"model.{source}.embed_tokens.weight"}
    assert model.lm_head.weight is model.get_decoder().embed_tokens.weight


def test_peft_lora(make_model, batch, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q_proj", "v_proj"])
    base = make_model()
    before = base(**batch).logits.detach()
    model = peft.get_peft_model(base, config)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trainable) == 2 * 2 * (2 + 2 * 2)  # A and B, q and v; 2 encoder layers, 2 decoder layers with 2 each
    torch.testing.assert_close(model(**batch).logits, before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    labels = batch["decoder_input_ids"]
    losses = []
    for _ in range(5):
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    expected = model.eval()(**batch).logits.detach()
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make_model(), tmp_path).eval()
    torch.testing.assert_close(loaded(**batch).logits, expected)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, expected, atol=1e-5, rtol=0)
    assert merged.generate(batch["input_ids"], max_new_tokens=4).shape[0] == 3


def test_torchao_weight_only_quantization(make_model, batch, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import AutoModelForSeq2SeqLM, TorchAoConfig

    model = make_model()
    model.save_pretrained(tmp_path)
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    quantized = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    weight = quantized.model.encoder.layers[0].self_attn.q_proj.weight
    assert "Int8" in type(weight).__name__
    with torch.no_grad():
        expected, actual = model(**batch).logits, quantized(**batch).logits
    assert 0 < (actual - expected).abs().max() < 0.1 * expected.abs().max()
    assert quantized.generate(batch["input_ids"], max_new_tokens=4).shape[0] == 3


def test_output_attentions_and_hidden_states(make_model, batch):
    model = make_model(decoder_layers=3)
    model.set_attn_implementation("eager")
    outputs = model(**batch, output_attentions=True, output_hidden_states=True)
    assert [tuple(w.shape) for w in outputs.encoder_attentions] == [(3, 4, 7, 7)] * 2
    assert [tuple(w.shape) for w in outputs.decoder_attentions] == [(3, 4, 6, 6)] * 3
    assert [tuple(w.shape) for w in outputs.cross_attentions] == [(3, 4, 6, 7)] * 3
    assert (len(outputs.encoder_hidden_states), len(outputs.decoder_hidden_states)) == (3, 4)
    for weights in (*outputs.encoder_attentions, *outputs.decoder_attentions, *outputs.cross_attentions):
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert outputs.cross_attentions[0][2, :, :, 3:].abs().max() == 0  # no attention to padding
    assert outputs.decoder_attentions[0].triu(1).abs().max() == 0  # no attention to later positions


def test_inputs_embeds(make_model, batch):
    model = make_model()
    expected = model(**batch).logits
    embeddings = model.get_input_embeddings()
    actual = model(
        inputs_embeds=embeddings(batch["input_ids"]),
        attention_mask=batch["attention_mask"],
        decoder_inputs_embeds=embeddings(batch["decoder_input_ids"]),
    ).logits
    torch.testing.assert_close(actual, expected)


def test_tuple_outputs(make_model, batch):
    model = make_model()
    logits, *_ = model(**batch, return_dict=False)
    torch.testing.assert_close(logits, model(**batch).logits)
    states = model.get_encoder()(batch["input_ids"], attention_mask=batch["attention_mask"], return_dict=False)
    del batch["input_ids"]
    torch.testing.assert_close(model(**batch, encoder_outputs=states).logits, logits)


def test_tensor_parallel_plans_match_module_names(make_model):
    import re

    model = make_model()
    for part in (model.model.encoder, model.model.decoder, model):
        names = [name for name, _ in part.named_modules()]
        for pattern in type(part)._tp_plan:
            assert any(re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), name) for name in names), pattern


PROCESSES = """
import sys, torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSeq2SeqLM
from transformers.distributed.configuration_utils import DistributedConfig
import vanilla_transformer
folder, kind = sys.argv[1:]
dist.init_process_group("gloo")
batch = torch.load(folder + "/batch.pt")
reference = AutoModelForSeq2SeqLM.from_pretrained(folder)
config = DistributedConfig(tp_size=2) if kind == "tp" else DistributedConfig(fsdp_size=2)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, distributed_config=config)
name = "model.decoder.layers.1.cross_attn.q_proj.weight"
weight = model.get_parameter(name)
local = weight.to_local() if isinstance(weight, DTensor) else weight
assert local.shape[0] * 2 == reference.get_parameter(name).shape[0], "not split"
expected, actual = reference(**batch), model(**batch)
logits = actual.logits.full_tensor() if isinstance(actual.logits, DTensor) else actual.logits
torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=0)
expected.loss.backward()
actual.loss.backward()
for name in (name, "model.encoder.layers.0.feed_forward.fc1.weight", "model.encoder.embed_tokens.weight"):
    gradient = model.get_parameter(name).grad
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    expected_gradient = reference.get_parameter(name).grad
    if gradient.shape != expected_gradient.shape:                  # the rows of this process
        expected_gradient = expected_gradient.chunk(2)[dist.get_rank()]
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-4, msg=lambda text: name + text)
print("equal", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_two_processes(make_model, batch, tmp_path, kind, norm_position):
    """Logits and gradients of two processes (gloo) with FSDP2 or tensor parallelism equal those of one process."""
    make_model(norm_position=norm_position).save_pretrained(tmp_path)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"labels": batch["decoder_input_ids"]}
    torch.save(inputs, tmp_path / "batch.pt")
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [*command, str(script), str(tmp_path), kind], env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
    assert process.stdout.count("equal") == 2
