"""Settings of a generation config that CTranslate2 supports."""

from transformers import GenerationConfig

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
    """Return the fields of a generation config that have an effect, but not in CTranslate2."""
    fields = {name for name, value in config.to_diff_dict().items() if value != NEUTRAL_VALUES.get(name)}
    return sorted(fields - SUPPORTED_OPTIONS - NEUTRAL_FIELDS)
