"""Options of GenerationConfig: `beam_search` gives the result of `generate()` or rejects the option.

The result is the table in docs/decoding.md.
"""

import os

import pytest
import torch
import transformers
from transformers import GenerationConfig, TokenizersBackend, WatermarkingConfig

from vanilla_transformer.generation_vanilla_transformer import CACHE_NAME, beam_search

pytestmark = pytest.mark.usefixtures("search_mode")

MODELS = int(os.environ.get("VT_MODELS", "2"))  # number of random models in the slow test
BOTH, SAMPLING = ({"num_beams": 1}, {"num_beams": 3}), ({"do_sample": True}, {"do_sample": True, "num_beams": 3})
RETURNED = {"return_dict_in_generate": True}

# values of each option, decoded greedily and with beams, or (SAMPLING) with sampling and beam sampling
OPTIONS = {
    "max_length": [{"max_length": 7}],
    "max_new_tokens": [{"max_new_tokens": 6}],
    "min_length": [{"min_length": 6}],
    "min_new_tokens": [{"min_new_tokens": 5}],
    "early_stopping": [{"num_beams": 3, "early_stopping": each} for each in (True, False, "never")],
    "max_time": [{"max_time": 0.0}, {"max_time": 1000.0}],
    "stop_strings": [{"stop_strings": ["fc", "k"]}, {"stop_strings": ["k"], "eos_token_id": None}],
    "do_sample": [{**each} for each in SAMPLING],
    "num_beams": [{"num_beams": 2}, {"num_beams": 5}],
    "use_cache": [{"use_cache": False}],
    "cache_implementation": [{"cache_implementation": "static"}],
    "temperature": [{**each, "temperature": 0.6} for each in SAMPLING],
    "top_k": [{**each, "top_k": 9} for each in SAMPLING],
    "top_p": [{**each, "top_p": 0.7} for each in SAMPLING],
    "min_p": [{**each, "min_p": 0.05} for each in SAMPLING],
    "top_h": [{"do_sample": True, "top_h": 0.7}],
    "typical_p": [{**each, "typical_p": 0.7} for each in SAMPLING],
    "epsilon_cutoff": [{**each, "epsilon_cutoff": 0.02} for each in SAMPLING],
    "eta_cutoff": [{**each, "eta_cutoff": 0.02} for each in SAMPLING],
    "repetition_penalty": [{"repetition_penalty": 1.7}],
    "encoder_repetition_penalty": [{"encoder_repetition_penalty": 1.7}],
    "length_penalty": [{"num_beams": 3, "length_penalty": each} for each in (-1.0, 0.0, 2.0)],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 2}],
    "bad_words_ids": [{"bad_words_ids": [[5], [9], [7, 8], [11, 12, 13], [14, 14]]}],
    "renormalize_logits": [{"renormalize_logits": True, "bad_words_ids": [[5]]}],
    "forced_bos_token_id": [{"forced_bos_token_id": 8}],
    "forced_eos_token_id": [{"forced_eos_token_id": 2}, {"forced_eos_token_id": 9}],
    "remove_invalid_values": [{"remove_invalid_values": True}],
    "exponential_decay_length_penalty": [{"exponential_decay_length_penalty": (2, 1.5)}],
    "suppress_tokens": [{"suppress_tokens": list(range(4, 15))}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": list(range(4, 15))}],
    "sequence_bias": [{"sequence_bias": [[[5], 3.0], [[9, 9], 5.0], [[7], -4.0], [[11, 12], float("-inf")]]}],
    "token_healing": [{"token_healing": True}],
    "guidance_scale": [{"guidance_scale": 1.5}],
    "watermarking_config": [{"watermarking_config": WatermarkingConfig(bias=2.5)}],
    "num_return_sequences": [{"num_beams": 3, "num_return_sequences": 3}, {**SAMPLING[0], "num_return_sequences": 3}],
    "output_attentions": [{**RETURNED, "output_attentions": True}],
    "output_hidden_states": [{**RETURNED, "output_hidden_states": True}],
    "output_scores": [{**RETURNED, "output_scores": True}],
    "output_logits": [{**RETURNED, "output_logits": True}],
    "return_dict_in_generate": [RETURNED],
    "pad_token_id": [{"pad_token_id": 3}],
    "bos_token_id": [{"bos_token_id": 4}],
    "eos_token_id": [{"eos_token_id": [2, 5, 9]}, {"eos_token_id": None}],
    "encoder_no_repeat_ngram_size": [{"encoder_no_repeat_ngram_size": 2}, {"encoder_no_repeat_ngram_size": 1}],
    "decoder_start_token_id": [{"decoder_start_token_id": 6}],
    "prompt_lookup_num_tokens": [{"prompt_lookup_num_tokens": 3}],
    "low_memory": [{"num_beams": 3, "low_memory": True}],
    "penalty_alpha": [{"penalty_alpha": 0.6, "top_k": 4}],
    "dola_layers": [{"dola_layers": "low"}],
    "num_beam_groups": [{"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}],
    "constraints": [{"num_beams": 3, "constraints": [1]}],
    "force_words_ids": [{"num_beams": 3, "force_words_ids": [[5]]}],
}
OPTIONS |= {  # without effect if there is no assistant
    "cache_config": [{"cache_config": {}}],
    "max_cache_len": [{"cache_implementation": "static", "max_cache_len": 40}],
    "disable_compile": [{"disable_compile": True}],
    "is_assistant": [{"is_assistant": False}],
    "num_assistant_tokens": [{"num_assistant_tokens": 3}],
    "num_assistant_tokens_schedule": [{"num_assistant_tokens_schedule": "constant"}],
    "assistant_confidence_threshold": [{"assistant_confidence_threshold": 0.5}],
    "max_matching_ngram_size": [{"max_matching_ngram_size": 3}],
    "assistant_lookbehind": [{"assistant_lookbehind": 3}],
    "target_lookbehind": [{"target_lookbehind": 3}],
    "assistant_ensemble_weight": [{"assistant_ensemble_weight": 0.5}],
    "diversity_penalty": [{"diversity_penalty": 0.5}],
}
UNTESTED_OPTIONS = {  # set by transformers, or for other models and hardware
    *("transformers_version", "compile_config", "continuous_batching_config", "prefill_chunk_size", "use_mtp"),
    *("assistant_early_exit", "speculation_type"),
}
PAD = 3


def strip_padding(rows: torch.Tensor) -> list[list[int]]:
    """Remove the padding after EOS. `generate()` pads with -1 if nothing ends."""
    result = []
    for row in rows.tolist():
        while row and row[-1] in (PAD, -1):
            row.pop()
        result.append(row)
    return result


def is_equal(found, expected) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.shape == expected.shape and torch.allclose(found, expected, atol=2e-4, equal_nan=True)
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(is_equal, found, expected))
    return found == expected


class Comparison:
    """Comparison of both decoders for one model."""

    def __init__(self, make_model, make_tokenizer, seed: int):
        variant = {"norm_position": "pre"} if seed % 2 else {"lm_head_bias": True, "tie_word_embeddings": False}
        self.model = make_model(
            seed, vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=1 + seed % 3 % 2, **variant
        )
        self.model.set_attn_implementation("eager")  # required for attention weights
        self.model.generation_config.pad_token_id = PAD
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, 20, (3, 6), generator=generator)
        mask = torch.ones_like(ids)
        for row, length in enumerate(torch.randint(2, 7, (3,), generator=generator).tolist()):
            ids[row, length:] = mask[row, length:] = 0
        self.inputs = {"input_ids": ids, "attention_mask": mask}
        if seed % 4 == 3:  # left-padded decoder prompt
            prompt = torch.tensor([[1, 7, 9], [0, 1, 8], [0, 0, 1]])
            self.inputs |= {"decoder_input_ids": prompt, "decoder_attention_mask": (prompt != 0).long()}
        self.tokenizer, self.seed = make_tokenizer, seed

    def run(self, options: dict, **own):
        inputs = dict(self.inputs)
        if "decoder_start_token_id" in options:
            inputs = {name: value for name, value in inputs.items() if "decoder" not in name}
        if options.keys() & {"output_attentions", "output_hidden_states"} and "decoder_input_ids" in inputs:
            inputs["decoder_input_ids"] = torch.tensor(
                [[1, 7, 9], [1, 8, 5], [1, 4, 6]]
            )  # without padding, whose states are arbitrary
            del inputs["decoder_attention_mask"]
        if "stop_strings" in options:
            own["tokenizer"] = self.tokenizer
        limit = {} if "max_length" in options else {"max_new_tokens": 7}
        torch.manual_seed(self.seed)
        return self.model.generate(**inputs, **(limit | options), **own)

    def verdict(self, options: dict) -> str:
        """Return "equal", the reason of a rejection, or "DIFFERENT"."""
        has_output_options = bool(options.keys() & {"return_dict_in_generate", "do_sample"})
        scored = RETURNED if options.get("num_beams", 1) > 1 and not has_output_options else {}
        try:
            found = self.run(options | scored, custom_generate=beam_search)
        except ValueError as error:
            if "beam_search does not support" in str(error):
                return f"not supported: {str(error).split('. ')[0].removeprefix('beam_search does not support ')}"
            found = error
        try:
            expected = self.run(options | scored | ({"output_scores": True} if scored else {}))
        except Exception as error:
            return "generate() rejects it" if isinstance(found, Exception) else f"DIFFERENT, generate() has {error}"
        if isinstance(found, Exception):
            return f"DIFFERENT, beam_search has {found}"
        if isinstance(expected, torch.Tensor):
            return "equal" if strip_padding(found) == strip_padding(expected) else "DIFFERENT ids"
        names = (
            {"sequences_scores", "beam_indices"} & set(found) if scored else set(expected) - {CACHE_NAME, "sequences"}
        )
        wrong = [name for name in names if not is_equal(found[name], expected[name])]
        wrong += [] if strip_padding(found.sequences) == strip_padding(expected.sequences) else ["sequences"]
        return f"DIFFERENT {wrong}" if wrong else "equal"


@pytest.fixture
def letters(train_bpe, special_tokens):
    """Tokenizer with 20 tokens, each of which decodes to itself, as required by `stop_strings`."""
    from tokenizers import Tokenizer, decoders, models

    names = [*special_tokens.values(), *"abcdefghijklmnop"]
    words = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    words.decoder = decoders.Fuse()
    return TokenizersBackend(tokenizer_object=words, **special_tokens)


def measure(make_model, letters, models: int) -> dict[str, set[str]]:
    """Return the verdicts of each option, for all models and values."""
    known = vars(GenerationConfig()).keys()
    verdicts: dict[str, set[str]] = {}
    for seed in range(models):
        comparison = Comparison(make_model, letters, seed)
        for name, values in OPTIONS.items():
            for value in values if name in known else ():
                decoders = ({},) if value.keys() & {"num_beams", "do_sample"} else BOTH
                for each in decoders:
                    verdicts.setdefault(name, set()).add(comparison.verdict(each | value))
    return verdicts


def format_table(verdicts: dict[str, set[str]]) -> list[str]:
    return [f"| `{name}` | {'; '.join(sorted(found))} |" for name, found in sorted(verdicts.items())]


def is_pinned(repository) -> bool:
    """Return whether the docs were measured with the installed version of transformers."""
    return f"transformers=={transformers.__version__}" in (repository / "constraints.txt").read_text().split()


@pytest.mark.parametrize("models", [1, pytest.param(MODELS, marks=pytest.mark.slow)])
def test_options_match_the_table(make_model, letters, repository, models):
    verdicts = measure(make_model, letters, models)
    assert not {name: found for name, found in verdicts.items() if any("DIFFERENT" in each for each in found)}
    if is_pinned(repository):
        rows = (repository / "docs" / "decoding.md").read_text(encoding="utf-8").splitlines()
        measured = format_table(verdicts)
        start = rows.index(measured[0]) if measured[0] in rows else 0
        assert rows[start : start + len(measured)] == measured, "\n".join(measured)


def test_all_options_are_tested(repository):
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert not is_pinned(repository) or names <= OPTIONS.keys() | UNTESTED_OPTIONS
