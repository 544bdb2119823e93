"""Speed beside stock `MarianMTModel` of equal size: one training step, and greedy decoding.

    python -m training.benchmark                       # the paper's base model, vocabulary 10,000, one thread
    python -m training.benchmark --size tiny --rounds 9

Models and attention implementations take turns in one run, and medians are compared, since machines are noisy. The
ratio is Marian's best time over ours: above 1, ours is the faster. Times are CPU seconds of this process.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import MarianConfig, MarianMTModel, PreTrainedModel

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

ATTENTIONS = ("eager", "sdpa")
LENGTH = 32  # tokens of a sentence, about Multi30k's longest
PADDED = 4  # tokens of padding on every second sentence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="base", help="base, big or tiny, as in VanillaTransformerConfig.from_size")
    parser.add_argument("--vocab_size", type=int, default=10_000, help="tokens in the shared vocabulary")
    parser.add_argument("--target_tokens", type=int, default=2048, help="target tokens a training batch")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that is not counted")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--only", choices=("fp32", "bf16", "greedy"), help="one of the three measurements alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    config = VanillaTransformerConfig.from_size(arguments.size, vocab_size=arguments.vocab_size)
    ours, marian = VanillaTransformerForConditionalGeneration(config), MarianMTModel(marian_config(config))
    models = {"ours": ours, "Marian": marian}
    sizes = {name: sum(p.numel() for p in model.parameters() if p.requires_grad) for name, model in models.items()}
    if len(set(sizes.values())) != 1:
        raise AssertionError(f"not the same work: trainable parameters {sizes}")
    print(f"{sizes['ours']:,} parameters, {arguments.target_tokens} target tokens a step, {arguments.threads} threads")

    batch = make_batch(arguments.target_tokens // LENGTH, arguments.vocab_size)
    for name in ("fp32", "bf16"):
        if arguments.only in (None, name):
            compare(f"training step, {name}", models, lambda m, n=name: training_step(m, batch, n), arguments.rounds)
    if arguments.only in (None, "greedy"):
        compare("greedy, 16 sentences x 30 tokens, fp32", models, lambda m: greedy(m, batch), arguments.rounds)


def marian_config(config: VanillaTransformerConfig) -> MarianConfig:
    """Marian's configuration of the same architecture."""
    names = ["vocab_size", "decoder_vocab_size", "d_model", "encoder_layers", "decoder_layers", "dropout"]
    names += ["encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"]
    names += ["activation_function", "scale_embedding", "attention_dropout", "activation_dropout"]
    names += ["pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "max_position_embeddings"]
    return MarianConfig(forced_eos_token_id=None, **{name: getattr(config, name) for name in names})


def make_batch(sentences: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Random tokens, LENGTH on either side, with padding at the end of every second sentence."""
    source, labels = torch.randint(3, vocab_size, (2, sentences, LENGTH))
    mask = torch.ones_like(source)
    mask[::2, -PADDED:] = 0
    labels[::2, -PADDED:] = -100
    return {"input_ids": source * mask, "attention_mask": mask, "labels": labels}


def training_step(model: PreTrainedModel, batch: dict[str, torch.Tensor], precision: str) -> None:
    model.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad()


def greedy(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    source = {name: batch[name][:16] for name in ("input_ids", "attention_mask")}
    model.eval().generate(**source, num_beams=1, min_new_tokens=30, max_new_tokens=30)


def compare(title: str, models: dict[str, PreTrainedModel], run: Callable, rounds: int) -> None:
    """Times `run(model)` for each model and attention implementation in turn, and prints medians and the ratio."""
    times: dict[tuple[str, str], list[float]] = {(name, a): [] for name in models for a in ATTENTIONS}
    for turn in range(rounds + 1):
        for attention in ATTENTIONS:
            for name, model in models.items():
                model.set_attn_implementation(attention)
                start = time.process_time()
                run(model)
                if turn:
                    times[name, attention].append(time.process_time() - start)
    print(f"\n{title}")
    medians = {key: statistics.median(values) for key, values in times.items()}
    for (name, attention), values in times.items():
        low, high = min(values), max(values)
        print(f"  {name:8}{attention:8}{medians[name, attention]:9.3f} s   ({low:.3f} to {high:.3f})")
    best = {name: min(medians[name, attention] for attention in ATTENTIONS) for name in models}
    print(f"  best against best: {best['Marian'] / best['ours']:.3f}", flush=True)


if __name__ == "__main__":
    main()
