"""The `Seq2SeqTrainer` of transformers with batches by number of tokens, for which it has no hook."""

from copy import deepcopy
from typing import Any

from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer

from training.batching import TokenBatchSampler


class TokenBatchTrainer(Seq2SeqTrainer):
    """Trains on batches of at most `args.max_tokens` tokens a device.

    `train_dataset` has the columns `input_ids` and `labels` alone.
    """

    def get_train_dataloader(self) -> DataLoader:
        columns = (self.train_dataset["input_ids"], self.train_dataset["labels"])
        lengths = [(len(source), len(target)) for source, target in zip(*columns, strict=True)]
        sampler = TokenBatchSampler(lengths, self.args.max_tokens, self.args.data_seed or self.args.seed)
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple:
        """As in transformers, which leaves its defaults (`max_length=20`, ...) in the model's generation config."""
        generation_config = deepcopy(self.model.generation_config)
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self.model.generation_config = generation_config

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in transformers, less the samples a second, which would take a batch for one sentence."""
        logs.pop("train_samples_per_second", None)
        super().log(logs, *args, **kwargs)
