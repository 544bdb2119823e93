"""Settings of a generation config in exported models: which of them CTranslate2 and ONNX graphs support."""

from typing import Any

import torch
from transformers import GenerationConfig

from vanilla_transformer import VanillaTransformerForConditionalGeneration

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

SUPPORTED_OPTIONS = {  # options of a call, and fields of the generation config
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "max_new_tokens", "max_length"),
    *("batch_size", "progress", "return_scores"),
}
NEUTRAL_FIELDS = {  # fields of the generation config that do not affect the translations of the pipeline
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "bad_words_ids", "suppress_tokens"),
    *("alignment_heads", "use_cache", "transformers_version", "_from_model_config"),
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
}
NEUTRAL_VALUES = {"do_sample": False, "min_length": 0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
NEUTRAL_VALUES |= {"encoder_no_repeat_ngram_size": 0}


def unsupported_fields(config: GenerationConfig) -> list[str]:
    """Return the fields of a generation config that CTranslate2 would ignore."""
    fields = {name for name, value in config.to_diff_dict().items() if value != NEUTRAL_VALUES.get(name)}
    return sorted(fields - SUPPORTED_OPTIONS - NEUTRAL_FIELDS)


def unsupported_settings(config: GenerationConfig, **implied: Any) -> list[str]:
    """Return the settings of a generation config that an exported model cannot contain, except the `implied` values."""
    fields = [name for name in unsupported_fields(config) if getattr(config, name) != implied.get(name)]
    return fields + ["bad_words_ids of multiple tokens"] * any(len(word) > 1 for word in config.bad_words_ids or [])


def special_token_ids(model: VanillaTransformerForConditionalGeneration) -> dict[str, Any]:
    """Return the ids that `generate()` uses: those of the generation config, or of the model config if unset.

    BOS replaces a missing start token, and the first EOS token a missing pad token.
    """
    ids = {name: getattr(model.generation_config, name) for name in SPECIAL_IDS}
    ids = {name: getattr(model.config, name) if value is None else value for name, value in ids.items()}
    eos = ids["eos_token_id"]
    replacements = {"decoder_start_token_id": ids.pop("bos_token_id")}
    replacements["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
    ids = {name: replacements.get(name) if value is None else value for name, value in ids.items()}
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in ids.items()}


def masked_bias(model: VanillaTransformerForConditionalGeneration, score: float) -> torch.Tensor | None:
    """Return the bias of the LM head, or None. Tokens that the generation config suppresses have the value `score`.

    Like `generate()`, this ignores the EOS tokens in `bad_words_ids`.
    """
    head, config, eos = model.lm_head, model.generation_config, special_token_ids(model)["eos_token_id"]
    banned = {ids[0] for ids in config.bad_words_ids or [] if len(ids) == 1}
    banned.difference_update(eos if isinstance(eos, list) else [eos])
    banned.update(config.suppress_tokens or [])
    if not banned:
        return head.bias
    bias = torch.zeros(head.out_features) if head.bias is None else head.bias.detach()
    return bias.index_fill(0, torch.tensor(sorted(banned)), score)
