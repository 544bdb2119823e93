"""Translation and scoring of sentence pairs: one function for validation during training and for the test after it."""

from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState

from training.data.pairs import ParallelText
from training.keys import TrainingArguments
from training.metrics import likelihood
from vanilla_transformer import TranslationPipeline

MIN_SOURCE_GAIN = 0.1  # nats per token


def translate_and_score(
    model: PreTrainedModel,
    tokenizer: Any,
    text: ParallelText,
    compute: Callable[..., dict[str, Any]] | None,
    args: TrainingArguments,
    **decoding: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Translate and score sentence pairs, distributed over all processes.

    The translations are made in the same batches for any number of processes.

    Args:
        model: Complete model, the same in each process.
        tokenizer: Tokenizer of the model.
        text: Sentence pairs. The metric uses all references, the losses use `text.targets`.
        compute: Method `compute` of a metric, or None to compute only the losses, without translating.
        args: Number and index of the processes, and sentences per batch.
        decoding: Arguments of `generate()`. Default to the generation config of the model.

    Returns:
        The scores, and the translations in the order of `text`. Both are the same in every process. In addition to the
        scores of the metric there are, in nats per target token, `loss` (cross-entropy) and `source_gain`: the increase
        of this loss if sentences of about equal length exchange their sources. It is near 0 for a model that ignores
        its source, and missing if there is only one source.
    """
    model.eval()
    size = args.per_device_eval_batch_size
    lengths = [len(ids) for ids in tokenizer(text.sources)["input_ids"]]
    order = sorted(range(len(text)), key=lengths.__getitem__, reverse=True)  # the order within the pipeline
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    indices = [i for batch in batches[args.process_index :: args.world_size] for i in batch]
    share = text.select(indices)
    translations = [""] * len(share)
    if compute is not None:
        translator = TranslationPipeline(model=model, tokenizer=tokenizer, batch_size=size, device=args.device)
        outputs = translator(share.sources, num_return_sequences=1, **decoding)
        translations = [output["translation_text"] for output in outputs]
    sources = list(dict.fromkeys(text.sources[i] for i in order))
    next_source = dict(zip(sources, sources[1:] + sources[:1], strict=True))
    exchanged = ParallelText([next_source[source] for source in share.sources], share.targets)
    losses = [likelihood(model, tokenizer, pairs, size, show=args.process_index == 0) for pairs in (share, exchanged)]
    rows = sorted(gather_object(list(zip(indices, translations, *losses, strict=True))))
    translations, scores = [row[1] for row in rows], dict[str, Any]()
    if args.process_index == 0:
        if compute is not None:
            scores |= compute(predictions=translations, references=text.references or text.targets)
        tokens = sum(row[2][1] for row in rows)
        loss, exchanged_loss = (sum(row[column][0] for row in rows) / tokens for column in (2, 3))
        scores["loss"] = loss
        if len(sources) > 1:
            scores["source_gain"] = exchanged_loss - loss
    return broadcast_object_list([scores])[0], translations


class SourceGainWarning(TrainerCallback):
    """Prints one warning if the model ignores its source after a third of the updates."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        late = [entry for entry in state.log_history if 0 < state.max_steps <= 3 * entry["step"]]
        found = [entry for entry in late if entry.get("eval_source_gain", MIN_SOURCE_GAIN) < MIN_SOURCE_GAIN]
        if len(found) == 1 and found[0] is late[-1]:
            print(
                f"warning: after {state.global_step} of {state.max_steps} updates the model ignores its source: "
                f"exchanging the sources of the validation data raises the loss by only "
                f"{found[0]['eval_source_gain']:.3f} nats per token. Set norm_position: pre, a lower learning_rate, "
                f"a longer warmup_steps, or a lower dropout."
            )
