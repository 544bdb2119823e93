import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MarianMTModel

from hub.export import main, to_marian


@pytest.fixture
def command(run_main):
    return partial(run_main, main)


@pytest.fixture
def save(tmp_path, make_model, make_tokenizer):
    def save(shared: bool = True, **overrides):
        """A checkpoint folder of a small random model with a tokenizer."""
        tokenizer, sizes = make_tokenizer(shared)
        model = make_model(**(sizes | overrides))
        model.generation_config.update(num_beams=5, max_new_tokens=12)
        model.save_pretrained(tmp_path / "ours")
        tokenizer.save_pretrained(tmp_path / "ours")
        return model, tokenizer, tmp_path / "ours"

    return save


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_marian_computes_the_same(save, shared, tied, bias):
    """Logits of right-padded batches within 1e-5, and the same translations by 5 beams."""
    model, _, _ = save(shared=shared, tie_word_embeddings=tied, lm_head_bias=bias)
    marian = to_marian(model)
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(3, model.config.vocab_size, (6, 9), generator=generator)
    target = torch.randint(3, model.config.decoder_vocab_size, (6, 7), generator=generator)
    mask = torch.ones_like(source)
    for row in range(6):
        mask[row, 9 - row :] = 0
    source *= mask
    batch = {"input_ids": source, "attention_mask": mask}
    with torch.no_grad():
        ours, theirs = (each(**batch, decoder_input_ids=target).logits for each in (model, marian))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    first, second = (each.generate(**batch, num_beams=5, max_new_tokens=10) for each in (model, marian))
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_strangers_load_the_export(save, command, tmp_path, shared, capsys):
    """In a process where our package cannot be imported, with stock classes and without trust."""
    model, tokenizer, folder = save(shared=shared)
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


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"norm_position": "pre"}, "it is pre-norm"),
        ({"final_norm": True}, "a final norm"),
        ({"position_embedding_type": "learned"}, "positions are learned"),
        ({"embedding_norm": True}, "a norm on its embeddings"),
        ({"key_head_dim": 5}, "a width of their own"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps is 1e-06"),
    ],
)
def test_what_marian_cannot_express_is_refused(save, command, tmp_path, capsys, overrides, reason):
    _, _, folder = save(**overrides)
    command(folder, tmp_path / "marian", "--to", "marian", status=2)
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "marian").exists()


def test_other_folders_are_refused(save, command, tmp_path, capsys):
    model, _, folder = save()
    command(tmp_path / "nothing", tmp_path / "out", "--to", "marian", status=2)
    command(folder, tmp_path, "--to", "marian", status=2)
    assert "exists already" in capsys.readouterr().err
    MarianMTModel(to_marian(model).config).save_pretrained(tmp_path / "stock")
    command(tmp_path / "stock", tmp_path / "out", "--to", "marian", status=2)
    assert "is a marian, not a model of ours" in capsys.readouterr().err
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "stock"), MarianMTModel)
