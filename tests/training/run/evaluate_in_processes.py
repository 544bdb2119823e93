"""Evaluate validation sets of 1 to 40 sentences in 1, 2 and 3 processes and write all scores to a directory.

    python tests/training/run/evaluate_in_processes.py DIR

The processes are forks of a process that has imported everything. The scores in expected.json are computed without
batches and without `translate_and_score`.
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from training.data.parallel_text import ParallelText
from training.inference.metrics import SequenceMetric, TranslationMetric
from training.recipe.arguments import TrainingArguments
from training.run.trainer import TokenBatchTrainer
from vanilla_transformer import (
    TranslationPipeline,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)

SENTENCES, SPECIAL = 40, {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
DECODING = {"num_beams": 1, "max_new_tokens": 6}


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL.values(), *(f"w{i}" for i in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def make_model(vocabulary: int) -> VanillaTransformerForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = VanillaTransformerConfig(vocab_size=vocabulary, d_model=16, encoder_attention_heads=2, **sizes)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    model.generation_config.update(**DECODING)
    return model


def compute(predictions: list[str], references: list[list[str]]) -> dict:
    return {
        name: value
        for metric in (TranslationMetric("de"), SequenceMetric())
        for name, value in metric.compute(predictions=predictions, references=references).items()
    }


@torch.no_grad()
def nats(model, tokenizer, source: str, target: str) -> float:
    """Return the cross-entropy of one pair, in a separate batch."""
    batch = tokenizer([source], text_target=[target], return_tensors="pt")
    labels = batch["labels"]
    return float(model(input_ids=batch["input_ids"], labels=labels).loss) * labels.numel()


def expected_scores(model, tokenizer, text: ParallelText, translations: list[str]) -> dict[int, dict]:
    scores = {}
    for size in range(1, SENTENCES + 1):
        part = text.select(range(size))
        order = sorted(range(size), key=lambda i: -len(part.sources[i].split()))
        following = {i: order[(position + 1) % size] for position, i in enumerate(order)}
        tokens = sum(len(target.split()) + 1 for target in part.targets)
        matched = sum(nats(model, tokenizer, *pair) for pair in zip(part.sources, part.targets, strict=True))
        shuffled = sum(nats(model, tokenizer, part.sources[following[i]], part.targets[i]) for i in range(size))
        scores[size] = compute(translations[:size], part.references) | {"loss": matched / tokens}
        if size > 1:
            scores[size]["source_gain"] = (shuffled - matched) / tokens
    return scores


def evaluate(model, tokenizer, text: ParallelText, folder: Path, rank: int, processes: int) -> None:
    """Write the scores of all sizes in one of the processes."""
    if processes > 1:
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # not used: the processes connect through a file
        store = f"file://{folder}/store_{processes}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    trainer = TokenBatchTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "out"), per_device_eval_batch_size=3, use_cpu=True, report_to="none",
            disable_tqdm=True, learning_rate=0.01, max_steps=1,
        ),
        train_dataset=Dataset.from_dict({"input_ids": [[2]], "labels": [[2]]}),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute,
    )  # fmt: skip
    assert (trainer.args.process_index, trainer.args.world_size) == (rank, processes)
    scores = {size: trainer.evaluate(text.select(range(size))) for size in range(1, SENTENCES + 1)}
    (folder / f"{processes}_{rank}.json").write_text(json.dumps(scores), encoding="utf-8")


def main() -> None:
    folder, tokenizer = Path(sys.argv[1]), make_tokenizer()
    model = make_model(len(tokenizer))
    words = torch.randint(0, 60, (SENTENCES, 9)).tolist()
    sources = [" ".join(f"w{word}" for word in row[: 2 + i % 8]) for i, row in enumerate(words)]
    translations = [TranslationPipeline(model=model, tokenizer=tokenizer)(source)[0] for source in sources]
    translations = [each["translation_text"] for each in translations]
    references = []  # the first one is correct in a third of the lines, the second one in another third
    for i, translation in enumerate(translations):
        wrong = f"w{i} {translation} w{i}"
        references.append([[translation, wrong], [wrong, translation], [wrong]][i % 3])
    text = ParallelText(sources, [row[0] for row in references], references=references)
    scores = expected_scores(model, tokenizer, text, translations)
    (folder / "expected.json").write_text(json.dumps(scores), encoding="utf-8")
    children = []
    for processes in (1, 2, 3):
        for rank in range(processes):
            if (child := os.fork()) == 0:
                evaluate(model, tokenizer, text, folder, rank, processes)
                sys.stdout.flush()
                os._exit(0)  # the destructors of gloo may wait for a process that has ended
            children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
