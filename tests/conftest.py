"""Small models and batches that the tests share."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the Hub's client is imported: no test reaches for the network

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

torch.set_num_threads(2)

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SENTENCES = {
    "en": ["the dog runs", "a cat sleeps in the house", "two birds sing", "the old man reads a book"],
    "de": ["der Hund rennt", "eine Katze schläft im Haus", "zwei Vögel singen", "der alte Mann liest ein Buch"],
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def make_config():
    def make(**overrides) -> VanillaTransformerConfig:
        size = {
            "vocab_size": 60,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "dropout": 0.0,
            "max_position_embeddings": 64,
        }
        return VanillaTransformerConfig(**(size | overrides))

    return make


@pytest.fixture
def make_model(make_config):
    """Models in evaluation mode whose every weight is drawn anew, so that no norm or bias hides behind its start."""

    def make(seed: int = 0, **overrides) -> VanillaTransformerForConditionalGeneration:
        torch.manual_seed(seed)
        model = VanillaTransformerForConditionalGeneration(make_config(**overrides))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
        return model.eval()

    return make


@pytest.fixture
def batch():
    """Three sources of 7, 5 and 3 tokens, padded on the right, and targets of 6."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 60, (3, 7), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in enumerate((7, 5, 3)):
        input_ids[row, length:] = 0
        attention_mask[row, length:] = 0
    decoder_input_ids = torch.randint(3, 60, (3, 6), generator=generator)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}


@pytest.fixture(scope="session")
def train_bpe():
    def train(texts: list[str], size: int) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(SPECIAL_TOKENS.values()), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
        return tokenizer

    return train


@pytest.fixture(scope="session")
def sentences() -> dict[str, list[str]]:
    return SENTENCES


@pytest.fixture(scope="session")
def special_tokens() -> dict[str, str]:
    return SPECIAL_TOKENS


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[1]
