"""Users change a model: by hooks, subclasses, or their own attention. Decoding then computes the changed model."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AttentionInterface, PreTrainedTokenizerFast
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from vanilla_transformer import TranslationPipeline, modeling_vanilla_transformer
from vanilla_transformer.generation_vanilla_transformer import beam_search
from vanilla_transformer.modeling_vanilla_transformer import DecoderLayer, MultiHeadAttention

OPTIONS = {"num_beams": 2, "max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}


def sharper_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    eager = modeling_vanilla_transformer.scaled_dot_product_attention
    return eager(module, query, key, value, attention_mask, 5 * scaling, dropout)


class HalvingLayer(DecoderLayer):
    def forward(self, *args, **kwargs):
        return 0.5 * super().forward(*args, **kwargs)


class OnesAttention(MultiHeadAttention):
    def forward(self, hidden_states, *args, **kwargs):
        return torch.ones_like(hidden_states), None


def change(model, kind: str) -> None:
    layer = model.get_decoder().layers[0]
    if kind == "hook":
        layer.cross_attn.register_forward_hook(lambda module, inputs, outputs: (torch.ones_like(outputs[0]), None))
    elif kind == "hook of the model":
        model.register_forward_hook(lambda module, inputs, outputs: outputs | {"logits": -outputs.logits})
    elif kind == "method":
        layer.forward = lambda hidden_states, *args, **kwargs: -hidden_states
    elif kind == "layer":
        layer.__class__ = HalvingLayer
    elif kind == "attention module":
        layer.self_attn.__class__ = OnesAttention
    else:
        AttentionInterface.register("sharper", sharper_attention)
        AttentionMaskInterface.register("sharper", eager_mask)
        model.set_attn_implementation("sharper")


@pytest.mark.parametrize("kind", ["hook", "hook of the model", "method", "layer", "attention module", "function"])
def test_changed_decoder(make_model, batch, kind):
    """`beam_search` and the pipeline decode with the loops of transformers. An ensemble reports the change."""
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(27))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    model = make_model(vocab_size=30)
    translator = TranslationPipeline(model=model, tokenizer=tokenizer)
    source = tokenizer("w3 w7 w9 w4", return_tensors="pt")
    before = model.generate(**source, **OPTIONS).logits[0]
    change(model, kind)
    expected = model.generate(**source, **OPTIONS)
    assert (expected.logits[0] - before).abs().max() > 0.1
    found = model.generate(**source, custom_generate=beam_search, **OPTIONS)
    assert all(map(torch.equal, found.logits, expected.logits))
    (translation,) = translator("w3 w7 w9 w4", num_beams=2, max_new_tokens=6)
    assert translation["translation_text"] == tokenizer.decode(expected.sequences[0], skip_special_tokens=True)
    with pytest.raises(ValueError, match="does not support an ensemble with (a modified|attn_implementation)"):
        make_model(1, vocab_size=30).generate(**source, custom_generate=beam_search, ensemble=[model])


def test_edited_attention(make_model, batch, monkeypatch):
    """With "eager", `beam_search` calls `scaled_dot_product_attention`, which users may edit."""
    model = make_model()
    model.set_attn_implementation("eager")
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    before = model.generate(**source, **OPTIONS).logits[0]
    eager = modeling_vanilla_transformer.scaled_dot_product_attention
    edited = lambda module, query, *args, **kwargs: eager(module, 5 * query, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(modeling_vanilla_transformer, "scaled_dot_product_attention", edited)
    expected = model.generate(**source, **OPTIONS)
    assert (expected.logits[0] - before).abs().max() > 0.1
    found = model.generate(**source, num_beams=2, max_new_tokens=6, custom_generate=beam_search)
    assert torch.equal(found, expected.sequences)


def test_hooks_of_transformers(make_model, batch):
    """Hooks that transformers installs to record hidden states do not prevent `beam_search`."""
    model = make_model()
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model(**batch, output_hidden_states=True, output_attentions=True)
    assert model.get_decoder().layers[0]._forward_hooks
    expected = model.generate(**source, num_beams=2, max_new_tokens=6)
    assert model.generate(**source, num_beams=2, max_new_tokens=6, custom_generate=beam_search).equal(expected)
