"""Fixtures for the tests of runs: trainers of a tiny model on a few pairs."""

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from training.data.collators import PaddingCollator
from training.data.parallel_text import ParallelText
from training.recipe.arguments import TrainingArguments
from training.run.trainer import TokenBatchTrainer


@pytest.fixture
def tokenizer(train_bpe, special_tokens, sentences):
    texts = sentences["en"] + sentences["de"]
    return PreTrainedTokenizerFast(tokenizer_object=train_bpe(texts, 60), **special_tokens)


@pytest.fixture
def make_trainer(make_model, tokenizer, sentences, tmp_path):
    def make(dropout: float = 0.0, layers: int = 2, model=None, started: float = 0.0, **keys):
        rows = tokenizer(sentences["en"], text_target=sentences["de"], return_attention_mask=False)
        data = Dataset.from_dict({"input_ids": rows["input_ids"], "labels": rows["labels"]})
        defaults = {
            "tokens_per_update": 64,
            "learning_rate": 0.01,
            "report_to": "none",
            "use_cpu": True,
            "max_steps": 3,
        }
        defaults |= {"save_strategy": "no", "disable_tqdm": True, "predict_with_generate": False}
        defaults |= {"output_dir": str(tmp_path / "out")}
        arguments = TrainingArguments(**(defaults | keys))
        sizes = {"vocab_size": len(tokenizer), "encoder_layers": layers, "decoder_layers": layers}
        model = model or make_model(dropout=dropout, **sizes)
        return TokenBatchTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=ParallelText(sentences["en"], sentences["de"]),
            processing_class=tokenizer,
            data_collator=PaddingCollator(tokenizer.pad_token_id),
            started=started,
        )

    return make


@pytest.fixture
def accelerate_environment():
    """Function (options): the environment variables that `accelerate launch` adds for one process."""

    def environment(*options: str) -> dict[str, str]:
        arguments = launch_command_parser().parse_args(["--num-processes", "1", "--cpu", *options, "program.py"])
        variables = prepare_simple_launcher_cmd_env(_validate_launch_command(arguments)[0])[1]
        return {name: value for name, value in variables.items() if name.startswith("ACCELERATE_")}

    return environment
