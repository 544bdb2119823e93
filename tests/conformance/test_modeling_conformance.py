"""`ModelTesterMixin` of Transformers, applied to this model and, for comparison, to MarianMT.

`make conformance` adds the package `tests` of the Transformers source distribution to the path.
"""

import unittest

import torch
from tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor
from transformers import MarianConfig, MarianModel, MarianMTModel
from transformers.models.auto import modeling_auto

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)

# The tests find base models and models with labels in these mappings
modeling_auto.MODEL_MAPPING_NAMES["vanilla_transformer"] = "VanillaTransformerModel"
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["vanilla_transformer"] = (
    "VanillaTransformerForConditionalGeneration"
)


class Tester:
    """Model tester for `ModelTesterMixin`: a small configuration and a batch, with field names of both models."""

    batch_size = 13
    seq_length = encoder_seq_length = decoder_seq_length = 7
    hidden_size = 16
    num_hidden_layers = 2
    num_attention_heads = 4
    vocab_size = 99
    is_training = True

    def __init__(self, config_class):
        self.config_class = config_class

    def get_config(self):
        return self.config_class(
            vocab_size=self.vocab_size,
            d_model=self.hidden_size,
            encoder_layers=self.num_hidden_layers,
            decoder_layers=self.num_hidden_layers,
            encoder_attention_heads=self.num_attention_heads,
            decoder_attention_heads=self.num_attention_heads,
            encoder_ffn_dim=4,
            decoder_ffn_dim=4,
            dropout=0.1,
            attention_dropout=0.1,
            max_position_embeddings=50,
            eos_token_id=2,
            bos_token_id=0,
            pad_token_id=1,
            decoder_start_token_id=3,
        )

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size).clamp(3)
        ids[:, -1] = 2
        decoder_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size).clamp(3)
        return self.get_config(), {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "decoder_input_ids": decoder_ids,
            "decoder_attention_mask": torch.ones_like(decoder_ids),
        }

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


class Conformance(
    ModelTesterMixin, GenerationTesterMixin
):  # the second mixin is empty outside the Transformers repository
    is_encoder_decoder = True
    config_class: type

    def setUp(self):
        self.model_tester = Tester(self.config_class)


class VanillaTransformerConformanceTest(Conformance, unittest.TestCase):
    config_class = VanillaTransformerConfig
    all_model_classes = (VanillaTransformerModel, VanillaTransformerForConditionalGeneration)


class MarianConformanceTest(Conformance, unittest.TestCase):
    config_class = MarianConfig
    all_model_classes = (MarianModel, MarianMTModel)
