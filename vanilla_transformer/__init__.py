"""The encoder-decoder of "Attention Is All You Need" as a model of Hugging Face transformers.

Importing this package makes `AutoConfig`, `AutoModel`, `AutoModelForSeq2SeqLM` and `AutoTokenizer` know it.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel

__version__ = "0.1.0"

AutoConfig.register("vanilla_transformer", VanillaTransformerConfig, exist_ok=True)
AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(
    VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, exist_ok=True
)

# A checkpoint carries the code of these classes
VanillaTransformerConfig.register_for_auto_class()
VanillaTransformerModel.register_for_auto_class("AutoModel")
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
