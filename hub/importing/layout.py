"""What a layout is: a table from somebody's parameter names to ours."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

State = dict[str, torch.Tensor]
Kind = (
    type[bool] | type[int] | type[float] | type[str] | tuple[str, ...]
)  # of a setting: a tuple has the words that it may be
Run = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TensorRule:
    """What becomes of one tensor of the file.

    Args:
        targets: our names, with the same `{...}` as the key that it stands for; none: the tensor is left out.
        fold: (tensor, facts) -> one tensor for each target; None: it is taken as it is.
        note: what the fold does, or why the tensor is left out, for the report.
        bound: "exact", or up to what.
        computed: our model computes it, so a file may lack it.
    """

    targets: tuple[str, ...]
    fold: Callable[[torch.Tensor, "CheckpointInfo"], tuple[torch.Tensor, ...]] | None = None
    note: str = ""
    bound: str = "exact"
    computed: bool = False


@dataclass
class CheckpointInfo:
    """What file and user say: dimensions, number of heads (None: nobody said), metadata; and the file's tensors."""

    d_model: int
    num_heads: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    state: State = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """A tutorial's checkpoint.

    Args:
        name: as `--layout` takes it.
        title: whose it is.
        keys: names in the file -> names of this model, or a `TensorRule`. `{i}` matches a number, `{p}` weight or bias,
            `{a|b}` one of these words; in the value they insert the matched text.
        config: fields of our configuration that the layout fixes.
        norm_eps: (d_model) -> `layer_norm_eps`.
        num_heads: (facts, state) -> how many heads there are, where the file tells; None: it must be asked for.
        zero_biases: our linear maps that may lack biases in a file; ours are then zero.
        special_ids: of the layout, where its code fixes them.
        check: what the user must look at, since the file cannot tell.
        variant_config: (facts, state) -> further configuration fields, for layouts with variants.
        run: how their model is called for logits or log-probabilities (B, T, V): (model, source (B, S), source mask
            (B, 1, 1, S), target (B, T), target mask (B, 1, T, T)); masks are True where a token may be seen.
        optional: keys that a file may lack.
        settings: what `--set` takes by name, and a training file's settings: bool, int, or the words to choose from.
        assumed: settings that are taken to be so where nobody tells.
        made: (facts, our tensors so far) -> what it is, for the report -> our tensors that no key of the file has.
        generation: how their own program decodes, as fields of `GenerationConfig`; without: greedily.
    """

    name: str
    title: str
    keys: dict[str, "str | TensorRule"]
    config: dict[str, Any]
    norm_eps: Callable[[int], float] = lambda d_model: 1e-5
    num_heads: Callable[[CheckpointInfo, State], int | None] | None = None
    zero_biases: tuple[str, ...] = ()
    special_ids: dict[str, int] = field(default_factory=dict)
    check: tuple[str, ...] = ()
    variant_config: Callable[[CheckpointInfo, State], dict[str, Any]] | None = None
    run: Run = lambda model, source, source_mask, target, target_mask: model(source, target)
    optional: tuple[str, ...] = ()
    settings: dict[str, Kind] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    made: Callable[[CheckpointInfo, State], dict[str, State]] | None = None
    generation: dict[str, Any] = field(default_factory=dict)

    def uses(self) -> dict[str, TensorRule]:
        return {key: use if isinstance(use, TensorRule) else TensorRule((use,)) for key, use in self.keys.items()}


ACTIVATIONS: tuple[str, ...] = ("relu", "gelu", "gelu_pytorch_tanh", "silu", "tanh")  # as transformers names them


def left_out(reason: str) -> TensorRule:
    return TensorRule((), note=reason)


def copied(*targets: str, note: str) -> TensorRule:
    """One tensor that their code uses in several places."""
    return TensorRule(targets, lambda tensor, facts: (tensor,) * len(targets), note)


ENCODER, DECODER = "model.encoder.layers.{i}", "model.decoder.layers.{i}"  # ours
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def attention(theirs: str, names: Iterable[str], *ours: str) -> dict[str, "str | TensorRule"]:
    """The four projections of one attention, theirs in the order q, k, v, output; `ours` where it is, or several."""
    table: dict[str, str | TensorRule] = {}
    for name, projection in zip(names, PROJECTIONS, strict=True):
        targets = [f"{place}.{projection}.{{p}}" for place in ours]
        several = copied(*targets, note="one attention that their decoder uses for itself and across")
        table[f"{theirs}.{name}.{{p}}"] = targets[0] if len(targets) == 1 else several
    return table


def feed_forward(theirs: str, names: Iterable[str], ours: str) -> dict[str, "str | TensorRule"]:
    """The two maps of a feed-forward network."""
    return {
        f"{theirs}{name}.{{p}}": f"{ours}.feed_forward.{fc}.{{p}}"
        for name, fc in zip(names, ("fc1", "fc2"), strict=True)
    }


def compile_pattern(key: str) -> re.Pattern:
    """`layers.{i}.fc.{p}` -> a regular expression with a group for each variable, numbered v0, v1, ..."""
    parts = re.split(r"(\{[^}]*\})", key)
    regex, count = "", 0
    for part in parts:
        if part.startswith("{"):
            body = {"{i}": "[0-9]+", "{p}": "weight|bias"}.get(part, part[1:-1])
            regex += f"(?P<v{count}>{body})"
            count += 1
        else:
            regex += re.escape(part)
    return re.compile(regex)


def expand_pattern(target: str, values: Iterable[str]) -> str:
    """Our name with the variables' values, in their order."""
    values = iter(values)
    return re.sub(r"\{[^}]*\}", lambda _: next(values), target)
