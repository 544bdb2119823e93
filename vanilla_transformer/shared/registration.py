"""Registration of the model with the Auto classes of transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..generation_vanilla_transformer import beam_search
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from ..pipeline_vanilla_transformer import TranslationPipeline
from ..tokenization_vanilla_transformer import VanillaTransformerTokenizer

__all__ = ["TranslationPipeline", "beam_search"]  # the other names are used below

AutoConfig.register("vanilla_transformer", VanillaTransformerConfig, exist_ok=True)
AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, exist_ok=True)
AutoTokenizer.register(VanillaTransformerConfig, tokenizer_class=VanillaTransformerTokenizer, exist_ok=True)

# A saved checkpoint carries the code of these classes
VanillaTransformerConfig.register_for_auto_class()
VanillaTransformerModel.register_for_auto_class("AutoModel")
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
VanillaTransformerTokenizer.register_for_auto_class("AutoTokenizer")
