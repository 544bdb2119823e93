import json
import subprocess
import sys
from functools import partial

import ctranslate2
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel

from hub.export import main
from vanilla_transformer.to_marian import to_marian


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


ARCHITECTURES = {
    "post-norm": {},
    "pre-norm": {"norm_position": "pre"},
    "pre-norm without a last norm": {"norm_position": "pre", "final_norm": False},
    "post-norm with a last norm": {"final_norm": True},
    "learned positions": {"position_embedding_type": "learned"},
    "a norm on the embeddings, no scale": {"embedding_norm": True, "scale_embedding": False},
    "heads by side": {"encoder_attention_heads": 2, "decoder_attention_heads": 8, "decoder_layers": 1},
    "bias, gelu, eps": {"lm_head_bias": True, "activation_function": "gelu", "layer_norm_eps": 1e-3},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("shared", [True, False], ids=["one vocabulary", "two"])
@pytest.mark.parametrize("overrides", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_ctranslate2_computes_the_same(save, command, tmp_path, sentences, shared, overrides):
    """Log-probabilities of given targets within 1e-4, and the same ids, greedy and by 5 beams."""
    model, tokenizer, folder = save(shared=shared, **overrides)
    command(folder, tmp_path / "ct2", "--to", "ctranslate2")
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), intra_threads=1)
    sides = [tmp_path / "ct2"] * 2 if shared else [tmp_path / "ct2" / f"{s}_tokenizer" for s in ("source", "target")]
    source, target = (AutoTokenizer.from_pretrained(side) for side in sides)
    tokens = [source.convert_ids_to_tokens(source(text).input_ids) for text in sentences["en"]]

    batch = tokenizer(sentences["en"], text_target=sentences["de"], return_tensors="pt", padding=True)
    labels = batch.pop("labels")
    labels[labels == tokenizer.pad_token_id] = -100
    with torch.no_grad():
        logits = model(**batch, labels=labels).logits.log_softmax(-1)
    ours = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    goal = [target.convert_ids_to_tokens([id_ for id_ in row.tolist() if id_ >= 0])[:-1] for row in labels]
    for row, scored in enumerate(translator.score_batch(tokens, goal)):
        expected = ours[row][labels[row] >= 0]
        torch.testing.assert_close(torch.tensor(scored.log_probs), expected, atol=1e-4, rtol=0)

    for beams in (1, 5):
        generated = model.generate(**batch, num_beams=beams, max_new_tokens=12, early_stopping=beams > 1)
        results = translator.translate_batch(tokens, beam_size=beams, max_decoding_length=12)
        for row, result in zip(generated.tolist(), results, strict=True):
            kept = [id_ for id_ in row[1:] if id_ not in (tokenizer.pad_token_id, tokenizer.eos_token_id)]
            assert target.convert_tokens_to_ids(result.hypotheses[0]) == kept


def test_ctranslate2_weights_are_quantized_where_asked(save, command, tmp_path):
    _, _, folder = save()
    command(folder, tmp_path / "float", "--to", "ctranslate2")
    command(folder, tmp_path / "int8", "--to", "ctranslate2", "--quantization", "int8")
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("int8", "float")]
    assert sizes[0] < 0.5 * sizes[1]
    assert ctranslate2.Translator(str(tmp_path / "int8"), compute_type="default").compute_type.startswith("int8")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"key_head_dim": 5}, "a width of their own"),
        ({"activation_function": "mish"}, "activation_function is mish"),
        ({"decoder_start_token_id": None}, "special ids are not all set"),
        ({"eos_token_id": [2, 5]}, "several eos_token_id"),
        ({"vocab_size": 20, "pad_token_id": 0}, "the model has 20 rows"),
    ],
)
def test_what_ctranslate2_cannot_express_is_refused(save, command, tmp_path, capsys, overrides, reason):
    _, _, folder = save(**overrides)
    command(folder, tmp_path / "out", "--to", "ctranslate2", status=2)
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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
    command(folder, tmp_path / "out", "--to", "marian", "--quantization", "int8", status=2)
    assert "--quantization is for --to ctranslate2" in capsys.readouterr().err
    MarianMTModel(to_marian(model).config).save_pretrained(tmp_path / "stock")
    command(tmp_path / "stock", tmp_path / "out", "--to", "marian", status=2)
    assert "is a marian, not a model of ours" in capsys.readouterr().err
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "stock"), MarianMTModel)
