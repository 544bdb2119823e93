"""Turns one of our checkpoints into a model that others run without our code.

    python -m hub.export runs/mine OUT --to marian      # transformers' MarianMTModel, where the architecture is its own

`MarianMTModel` is post-norm with sinusoidal positions, which stand in two halves there and alternate here: the residual
stream is permuted through every weight, and the logits are equal.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from hub.folders import write_whole
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

MARIAN_EPS = 1e-5  # fixed in its code
SAME_FIELDS = (
    *("vocab_size", "decoder_vocab_size", "d_model", "encoder_layers", "decoder_layers", "dropout"),
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("activation_function", "scale_embedding", "attention_dropout", "activation_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "max_position_embeddings"),
    *("share_encoder_decoder_embeddings", "tie_word_embeddings"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="hub.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="folder of a model of ours with its tokenizer, or a repository on the Hub")
    parser.add_argument("out", type=Path, help="folder to be made")
    parser.add_argument("--to", choices=("marian",), required=True, help="what to make")
    arguments = parser.parse_args()
    try:
        run(arguments.checkpoint, arguments.out)
    except (ValueError, OSError) as error:
        print(f"hub.export: {error}", file=sys.stderr)
        sys.exit(2)


def run(checkpoint: str, out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} exists already: give a folder that does not.")
    model = load(checkpoint)
    marian = to_marian(model)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def write(folder: Path) -> None:
        marian.save_pretrained(folder)
        if hasattr(tokenizer, "target_tokenizer"):
            special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
            for side in ("source", "target"):
                one = getattr(tokenizer, f"{side}_tokenizer")
                stock = PreTrainedTokenizerFast(tokenizer_object=one, **special)
                stock.save_pretrained(folder / f"{side}_tokenizer")
        else:
            tokenizer.save_pretrained(folder)

    write_whole(out, write)
    print(f"{out} is a MarianMTModel. To load it, with transformers alone:")
    print(f'    model = AutoModelForSeq2SeqLM.from_pretrained("{out}")')
    where = f"{out}/source_tokenizer" if hasattr(tokenizer, "target_tokenizer") else str(out)
    print(f'    tokenizer = AutoTokenizer.from_pretrained("{where}")')


def load(checkpoint: str) -> VanillaTransformerForConditionalGeneration:
    """A model of ours, in float32. Raises ValueError for any other."""
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{checkpoint} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    if model.config.model_type != VanillaTransformerConfig.model_type:
        raise ValueError(f"{checkpoint} is a {model.config.model_type}, not a model of ours.")
    return model.float().eval()


# --- MarianMT --------------------------------------------------------------------------------------------------------


def to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """A `MarianMTModel` with equal logits. Raises ValueError for an architecture that it cannot express."""
    config = model.config
    refuse_beyond_marian(config)
    order = torch.cat([torch.arange(0, config.d_model, 2), torch.arange(1, config.d_model, 2)])  # sines, cosines
    marian = MarianMTModel(
        MarianConfig(forced_eos_token_id=None, **{name: getattr(config, name) for name in SAME_FIELDS})
    )
    state = marian.state_dict()
    for name, tensor in model.state_dict().items():
        if name == "lm_head.bias":
            state["final_logits_bias"] = tensor[None]
            continue
        state[marian_name(name)] = permuted(name, tensor, order)
    if "model.shared.weight" in state:
        state["model.shared.weight"] = state["model.encoder.embed_tokens.weight"]
    marian.load_state_dict(state)
    marian.generation_config = GenerationConfig.from_dict(model.generation_config.to_dict())
    return marian.eval()


def marian_name(name: str) -> str:
    name = name.replace("feed_forward_layer_norm", "final_layer_norm").replace("feed_forward.", "")
    return name.replace("cross_attn", "encoder_attn")


def permuted(name: str, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows of what writes into the residual stream, columns of what reads from it."""
    if any(part in name for part in ("out_proj", "fc2", "layer_norm")):
        return tensor[order]
    return tensor[:, order] if tensor.ndim == 2 else tensor


def refuse_beyond_marian(config: VanillaTransformerConfig) -> None:
    reasons = {
        "it is pre-norm": config.norm_position == "pre",
        "it has a final norm": bool(config.final_norm),
        "its positions are learned": config.position_embedding_type == "learned",
        "it has a norm on its embeddings": config.embedding_norm,
        "its heads have a width of their own (key_head_dim, value_head_dim)": bool(
            config.key_head_dim or config.value_head_dim
        ),
        f"its layer_norm_eps is {config.layer_norm_eps}, and Marian's is fixed to {MARIAN_EPS}": (
            config.layer_norm_eps != MARIAN_EPS
        ),
        "its width is odd": config.d_model % 2 == 1,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"MarianMTModel cannot express this model: {'; '.join(found)}.")


if __name__ == "__main__":
    main()
