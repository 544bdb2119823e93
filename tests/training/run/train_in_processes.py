"""Train a tiny model in two processes, with compiled and with eager steps, and save the weights of each process.

    python tests/training/run/train_in_processes.py DIR

The processes are forks of a process that has imported everything. The "compiled" loss is traced as one graph, but no
code is generated, to save time.
"""

import os
import socket
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch._dynamo.utils import counters
from transformers import PreTrainedTokenizerFast

from training.data.collators import PaddingCollator
from training.recipe.arguments import TrainingArguments
from training.run import compilation
from training.run.trainer import TokenBatchTrainer
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


def train(folder: Path, mode: str) -> None:
    """Train six updates of two micro-batches per process."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 40)}
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)), **special)
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0}
    config = VanillaTransformerConfig(vocab_size=40, d_model=16, encoder_attention_heads=2, **sizes)
    rows = [torch.randint(3, 40, (2 + i % 7,)).tolist() for i in range(64)]
    arguments = TrainingArguments(
        output_dir=str(folder), tokens_per_update=96, gradient_accumulation_steps=2, max_steps=6, learning_rate=0.01,
        adam_epsilon=1e-4,
        step_mode="compiled", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = TokenBatchTrainer(
        model=VanillaTransformerForConditionalGeneration(config), args=arguments, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows[::-1]}), data_collator=PaddingCollator(0),
    )  # fmt: skip
    if mode == "eager":
        trainer.compiled_loss.find_error = lambda *args: "not tried" if arguments.process_index == 1 else None
    trainer.train()
    assert (trainer.compiled_loss is None) == (mode == "eager")
    assert counters["stats"]["unique_graphs"] == 1  # of the compiled steps, which are the first
    torch.save(
        [parameter.detach() for parameter in trainer.model.parameters()], folder / f"{mode}_{os.environ['RANK']}.pt"
    )


def main() -> None:
    folder = Path(sys.argv[1])
    compilation.BACKEND = "eager"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        if child := os.fork():
            children.append(child)
            continue
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank))
        os.environ["LOCAL_RANK"] = str(rank)
        for mode in ("compiled", "eager"):
            train(folder, mode)
        os._exit(0)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()
