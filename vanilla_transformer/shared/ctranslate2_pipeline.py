"""Translation with CTranslate2 on a CPU, for many sentences.

pipeline = CTranslate2Pipeline(model=model, tokenizer=tokenizer, quantization="int8")
pipeline(sentences, num_beams=5, early_stopping=True)
"""

import copy
import tempfile
from collections.abc import Sized
from itertools import islice
from typing import Any

import torch
from torch import nn

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.generation_vanilla_transformer import iter_modifications, resolve_generation_config
from vanilla_transformer.pipeline_vanilla_transformer import EXTRA_TOKENS
from vanilla_transformer.shared.generation_settings import NEUTRAL_VALUES, SUPPORTED_OPTIONS, unsupported_fields

MAX_TOKENS = 4096  # rows of the table of sinusoidal positions; longer sentences are decoded with PyTorch
# fields of the generation config that the conversion stores in the CTranslate2 model
CONVERTED_FIELDS = ("eos_token_id", "decoder_start_token_id", "bad_words_ids", "suppress_tokens")
MIN_SCORE = -1e6  # below that of any translation without masked tokens
NO_EARLY_EXIT = 1e-9  # replaces a length penalty of 0, with which CTranslate2 ends when the best hypothesis is finished


class CTranslate2Pipeline(TranslationPipeline):
    """`TranslationPipeline` that decodes with CTranslate2, in as many threads as torch uses.

    The translations equal those of `TranslationPipeline`, except that rounding decides between hypotheses of equal
    scores. The constructor converts the model, which takes seconds. Constructor and calls raise ValueError for models
    and options that CTranslate2 does not support. `quantization` is the type of the weight matrices, such as int8. It
    defaults to float32, and other types change translations.
    """

    def __init__(self, quantization: str | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        import ctranslate2  # optional dependency

        from vanilla_transformer.shared.ctranslate2_conversion import to_spec

        config = self.model.config
        # no name is that of EOS, because CTranslate2 does not translate a source that consists only of EOS
        self.source_names = [f"source {i}" for i in range(config.vocab_size)]
        names = self.source_names, [str(i) for i in range(config.decoder_vocab_size)]
        spec = to_spec(self.model, *names, self.source_names[0], None, quantization, MAX_TOKENS)
        self.converted = copy.deepcopy(converted_fields(self.model))
        self.start_id = int(spec.config.decoder_start_token)
        with tempfile.TemporaryDirectory() as folder:
            spec.save(folder)
            self.engine = ctranslate2.Translator(folder, inter_threads=torch.get_num_threads(), intra_threads=1)

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Translate strings, as `TranslationPipeline` does."""
        validate_ctranslate2_options(self, kwargs)
        for name, value in converted_fields(self.model).items():
            if value != self.converted[name]:
                raise ValueError(f"{name} has changed after the conversion to CTranslate2. Create another pipeline.")
        return super().__call__(inputs, **kwargs)

    def _supports_extra_tokens(self, *args: Any) -> bool:
        return False  # a batch has one limit

    def forward(self, model_inputs: dict[str, torch.Tensor], **options: Any) -> dict[str, Any]:
        """Start to decode a padded batch, and return the results of its sentences as futures."""
        config = resolve_generation_config(self.model, options)
        ids, mask = model_inputs["input_ids"], model_inputs["attention_mask"].bool()
        length = ids.shape[1]
        limit = config.max_new_tokens or (config.max_length or length + EXTRA_TOKENS + 1) - 1
        limit = min(limit, (self._max_sequence_length() or limit + 1) - 1)
        if max(length, limit) > MAX_TOKENS:
            return super().forward(model_inputs, **options)
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        futures = self.engine.translate_batch(
            [[self.source_names[i] for i in row[is_token].tolist()] for row, is_token in zip(ids, mask, strict=True)],
            beam_size=config.num_beams or 1,
            num_hypotheses=config.num_return_sequences or 1,
            length_penalty=penalty or (NO_EARLY_EXIT if config.early_stopping is True else 0.0),
            max_input_length=0,
            min_decoding_length=0,
            max_decoding_length=limit,
            return_end_token=True,
            return_scores=options.get("return_scores", False) or (config.num_return_sequences or 1) > 1,
            asynchronous=True,
        )
        return {"futures": futures, "return_scores": options.get("return_scores", False)}

    def postprocess(self, model_outputs: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Wait for the results of a batch, and return at most n dictionaries per sentence."""
        if "futures" in model_outputs:
            results = [future.result() for future in model_outputs["futures"]]
            sequences = [[[self.start_id, *map(int, each)] for each in result.hypotheses] for result in results]
            scores = {"scores": torch.tensor([result.scores for result in results])}
            model_outputs = {"sequences": sequences} | (scores if model_outputs["return_scores"] else {})
            model_outputs["is_found"] = [[each > MIN_SCORE for each in result.scores] for result in results]
        return super().postprocess(model_outputs)


def converted_fields(model: Any) -> dict[str, Any]:
    """Return the fields of the generation config that the conversion reads."""
    return {name: getattr(model.generation_config, name) for name in CONVERTED_FIELDS}


def is_set(name: str, value: Any) -> bool:
    """Return whether an option of a call may have an effect, such as `alpha=0`."""
    if torch.is_tensor(value):
        return True
    is_empty = isinstance(value, Sized) and not len(value)
    return value is not None and value is not False and not is_empty and value != NEUTRAL_VALUES.get(name)


def validate_ctranslate2_options(translator: TranslationPipeline, options: dict[str, Any]) -> None:
    """Raise ValueError if CTranslate2 does not decode as the pipeline does with the options of a call."""
    model, options = translator.model, translator._forward_params | translator._postprocess_params | options
    config, parameters = resolve_generation_config(model, options), model.parameters()
    modifications = iter_modifications(model, with_encoder=True) if model.device.type == "cpu" else ()
    has_beams = (config.num_beams or 1) > 1
    finds_best_only = config.length_penalty == 0 and (config.num_return_sequences or 1) == 1
    reasons = {
        **{key: is_set(key, each) for key, each in options.items() if key not in SUPPORTED_OPTIONS},
        **{key: getattr(config, key) != value for key, value in converted_fields(model).items()},
        **dict.fromkeys(unsupported_fields(config), True),
        f"the model type {model.config.model_type}": model.config.model_type != "vanilla_transformer",
        f"the device {model.device} here": model.device.type != "cpu",
        **dict.fromkeys(islice(modifications, 1), True),
        "weights that are not float32": any(
            type(p) is not nn.Parameter or p.dtype != torch.float32 for p in parameters
        ),
        "bad_words_ids and suppress_tokens with beam search": has_beams
        and bool(config.bad_words_ids or config.suppress_tokens),
        f"early_stopping={config.early_stopping} with beam search. Set it to true in generation_config.json": has_beams
        and not (config.early_stopping is True or finds_best_only),
    }
    if problems := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(f"CTranslate2 does not support {', '.join(problems)}.")
