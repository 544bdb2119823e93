"""Turns a checkpoint of a "Transformer from scratch" tutorial into a folder that `AutoModelForSeq2SeqLM` loads.

    python -m hub.import_checkpoint model.pt OUT --num-heads 8
    python -m hub.import_checkpoint tmodel_10.pt OUT --num-heads 8 \\
        --source-tokenizer tokenizer_en.json --target-tokenizer tokenizer_it.json
    python -m hub.import_checkpoint model.pt OUT --num-heads 8 --pad-token-id 0 --compare-with my_code:build_model

The layout of the file is found by its keys. Every tensor is accounted for in `import_report.json`, and so is everything
that the file cannot tell. Nothing in the file is run: it is read with `weights_only=True`.
"""

import argparse
import importlib
import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import GenerationConfig

from hub.folders import write_whole
from hub.layouts import LAYOUTS
from hub.layouts.layout import Facts, Layout, State, Use, fill, pattern
from hub.tokenizer import Tokenizers, read_tokenizers
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

WRAPPERS = ("model_state_dict", "state_dict", "model_state", "model", "net", "weights")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.")  # DDP, torch.compile, Lightning, one's own
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
TOLERANCE = 1e-4  # of --compare-with, on logits


def main() -> None:
    parser = argparse.ArgumentParser(prog="hub.import_checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help=".pt, .pth, .tar, .chkpt or .safetensors")
    parser.add_argument("out", type=Path, help="folder to be made")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), help="instead of finding it")
    parser.add_argument("--num-heads", type=int, help="attention heads; a file does not tell")
    parser.add_argument("--source-tokenizer", type=Path, help="tokenizers' JSON, or a text file with a token a line")
    parser.add_argument("--target-tokenizer", type=Path, help="likewise; without: the source's for both")
    for name in SPECIAL:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="where layout and tokenizer do not tell")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="what a layout asks for by name")
    parser.add_argument("--compare-with", metavar="MODULE:CALLABLE", help="builds your own model: logits are compared")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"hub.import_checkpoint: {error}", file=sys.stderr)
        sys.exit(2)


def run(arguments: argparse.Namespace) -> None:
    if arguments.out.exists():
        raise ValueError(f"{arguments.out} exists already: give a folder that does not.")
    state, metadata = read(arguments.file)
    layout, evidence = find_layout(state, arguments.layout)
    print(f"looks like {layout.title}: {evidence}")
    metadata |= dict(key_value(text) for text in arguments.set)
    tokenizers = read_tokenizers(arguments.source_tokenizer, arguments.target_tokenizer, metadata.get("source_begins"))
    special_ids = {name: getattr(arguments, name) for name in SPECIAL if getattr(arguments, name) is not None}
    imported = convert(state, layout, metadata, arguments.num_heads, special_ids)
    if tokenizers:
        tokenizers.settle(imported.model)
    report = {"file": arguments.file.name, "layout": layout.name, "evidence": evidence, **imported.report()}
    if arguments.compare_with:
        report["parity"] = compare(arguments.compare_with, layout, state, imported.model)
    save(arguments.out, imported, tokenizers, report)
    tell(report, arguments.out, tokenizers)


# --- Reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[State, dict[str, Any]]:
    """The tensors of a file, freed of wrappers and prefixes, and its other entries.

    Raises:
        ValueError: no such file, not a checkpoint, or one that would run code when it is unpickled.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist.")
    if path.suffix == ".safetensors":
        try:
            return without_prefixes(load_file(path)), {}
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|global|class|function) `?([\w.]+)`?", str(error))
        what = f" ({found[1]})" if found else ""
        raise ValueError(
            f"{path} is refused: to read it, Python would have to run what it names{what}, which may be anything. If "
            f"it is yours, load it with your own code and save the tensors alone: torch.save(model.state_dict(), FILE)."
        ) from None
    except (RuntimeError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it is empty"
        raise ValueError(f"{path} is no checkpoint that torch can read: {reason}") from error
    metadata: dict[str, Any] = {}
    while isinstance(content, dict) and not is_state(content):
        inner = next((name for name in WRAPPERS if isinstance(content.get(name), dict)), None)
        if inner is None:
            keys = ", ".join(map(str, list(content)[:5]))
            raise ValueError(f"{path} holds no tensors under {', '.join(WRAPPERS)}: its entries are {keys}.")
        for name, value in content.items():
            if isinstance(value, argparse.Namespace):
                metadata |= vars(value)
            elif isinstance(value, str | int | float | bool):
                metadata[str(name)] = value
        content = content[inner]
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not the state of a model.")
    return without_prefixes(content), metadata


def is_state(content: dict) -> bool:
    return bool(content) and all(isinstance(value, torch.Tensor) for value in content.values())


def without_prefixes(state: State) -> State:
    changed = True
    while changed:
        changed = False
        for prefix in PREFIXES:
            if all(key.startswith(prefix) for key in state):
                state, changed = {key.removeprefix(prefix): value for key, value in state.items()}, True
    return state


def key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: give KEY=VALUE.")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


# --- Layout ----------------------------------------------------------------------------------------------------------


def find_layout(state: State, name: str | None = None) -> tuple[Layout, str]:
    """The layout whose keys are the file's, with the evidence in words.

    Raises:
        ValueError: none or several fit, or the named one does not; tells the closest and the first keys that differ.
    """
    differences = {layout.name: differing(layout, state) for layout in LAYOUTS.values()}
    fitting = [layout for layout in LAYOUTS.values() if not any(differences[layout.name])]
    if name is not None:
        if any(differences[name]):
            raise ValueError(f"the file is not of layout {name}: {in_words(differences[name])}")
        fitting = [LAYOUTS[name]]
    if len(fitting) == 1:
        keys = [key for key in fitting[0].keys if "{" not in key][:2]
        return fitting[0], f"all of its {len(state)} keys are that layout's, such as {' and '.join(keys)}"
    if fitting:
        choices = "; ".join(f"--layout {layout.name} ({layout.title})" for layout in fitting)
        raise ValueError(f"the keys are those of {len(fitting)} layouts, so say which it is: {choices}.")
    closest = sorted(differences, key=lambda each: sum(map(len, differences[each])))[:2]
    told = " ".join(f"Closest: {each}: {in_words(differences[each])}" for each in closest)
    raise ValueError(
        f"no known layout has these keys ({', '.join(list(state)[:3])}, ...). {told} A new layout is one file in "
        f"hub/layouts: see the README."
    )


def differing(layout: Layout, state: State) -> tuple[list[str], list[str]]:
    """The file's keys that the layout does not know, and the layout's that the file does not have."""
    patterns = {key: pattern(key) for key in layout.keys}
    matched, unknown = set(), []
    for name in state:
        found = [key for key, regex in patterns.items() if regex.fullmatch(name)]
        matched.update(found)
        if not found:
            unknown.append(name)
    return unknown, [key for key in layout.keys if key not in matched and key not in layout.optional]


def in_words(difference: tuple[list[str], list[str]]) -> str:
    unknown, missing = difference
    parts = []
    if unknown:
        parts.append(f"it does not know {', '.join(unknown[:3])}" + (", ..." if len(unknown) > 3 else ""))
    if missing:
        parts.append(f"the file lacks {', '.join(missing[:3])}" + (", ..." if len(missing) > 3 else ""))
    return " and ".join(parts) + "."


# --- Conversion ------------------------------------------------------------------------------------------------------


@dataclass
class Imported:
    model: VanillaTransformerForConditionalGeneration
    layout: Layout
    shapes: dict[str, Any]
    used: dict[str, list[str]] = field(default_factory=dict)  # their name -> ours
    folds: dict[str, str] = field(default_factory=dict)  # what was done -> exact, or up to what
    left_out: dict[str, str] = field(default_factory=dict)  # their name -> why
    check: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        fields = ("shapes", "folds", "left_out", "check", "used")
        return {name: getattr(self, name) for name in fields}


def convert(
    state: State, layout: Layout, metadata: dict[str, Any], num_heads: int | None, special_ids: dict[str, int]
) -> Imported:
    """Our model with the file's weights.

    Raises:
        ValueError: a tensor is missing, of a wrong shape, or contradicts another; names the file's key.
    """
    embedding = next(
        state[key] for key, use in layout.uses().items() if "model.encoder.embed_tokens.weight" in use.targets
    )
    facts = Facts(d_model=embedding.shape[-1], num_heads=num_heads, metadata=metadata)
    ours: State = {}
    origin: dict[str, str] = {}
    folds: dict[str, str] = {}
    left_out: dict[str, str] = {}
    used: dict[str, list[str]] = {}
    regexes = [(pattern(key), use) for key, use in layout.uses().items()]
    for name, tensor in state.items():
        match, use = next((m, use) for regex, use in regexes if (m := regex.fullmatch(name)))
        targets = [fill(target, match.groupdict().values()) for target in use.targets]
        if not tensor.is_floating_point():
            raise ValueError(f"{name} holds {tensor.dtype}, not floating-point numbers.")
        for target, value in zip(targets, folded(name, tensor, use, facts), strict=True):
            ours[target], origin[target] = value, name
        if use.told and targets:
            folds[use.told] = use.bound
        if targets:
            used[name] = targets
        else:
            left_out[name] = use.told
    layout_fields = layout.config | (layout.settle(facts, state) if layout.settle else {})
    heads = layout.num_heads(state) if layout.num_heads else num_heads
    if heads is None:
        raise ValueError("the number of attention heads cannot be read off a file: give it with --num-heads.")
    config = configuration(ours, origin, heads, layout_fields, layout, special_ids, facts.d_model)
    if layout.zero_biases:
        folds |= zero_biases(ours, config)
    model = build(config, ours, origin, layout)
    shapes = {name: getattr(config, name) for name in SHAPES}
    check = [*layout.check, *unset(config)]
    return Imported(model, layout, shapes, used, folds, left_out, check)


def folded(name: str, tensor: torch.Tensor, use: Use, facts: Facts) -> tuple[torch.Tensor, ...]:
    """The tensor as ours, computed in float64."""
    tensor = tensor.double()
    try:
        results = use.fold(tensor, facts) if use.fold else (tensor,) * len(use.targets)
    except (RuntimeError, ValueError, IndexError) as error:
        raise ValueError(f"{name}, of shape {tuple(tensor.shape)}: {error}") from error
    if len(results) != len(use.targets):
        raise ValueError(f"{name}, of shape {tuple(tensor.shape)}, does not come apart into {len(use.targets)} parts.")
    return tuple(result.float().contiguous() for result in results)


SHAPES = (
    *("vocab_size", "decoder_vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads"),
    *("decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "key_head_dim", "value_head_dim"),
    *("norm_position", "position_embedding_type", "layer_norm_eps"),
)


def configuration(
    ours: State, origin: dict[str, str], heads: int, fields: dict[str, Any], layout: Layout,
    special_ids: dict[str, int], d_model: int,
) -> VanillaTransformerConfig:  # fmt: skip
    """The architecture, read off the tensors."""

    def shape(name: str) -> torch.Size:
        if name not in ours:
            raise ValueError(missing(name, layout))
        return ours[name].shape

    layers = {
        side: 1 + max(int(name.split(".")[3]) for name in ours if name.startswith(f"model.{side}.layers."))
        for side in ("encoder", "decoder")
    }
    first = "model.encoder.layers.0.self_attn"
    widths = {}
    for kind, name in (("key_head_dim", f"{first}.q_proj.weight"), ("value_head_dim", f"{first}.v_proj.weight")):
        rows = shape(name)[0]
        if rows % heads:
            raise ValueError(f"{heads} heads do not divide the {rows} rows of {origin[name]}: is --num-heads right?")
        widths[kind] = None if rows == d_model else rows // heads
    if fields.get("position_embedding_type") == "learned":
        tables = {side: len(ours[f"model.{side}.embed_positions.weight"]) for side in layers}
        if len(set(tables.values())) != 1:
            raise ValueError(f"its tables of positions have {tables} rows: ours are of one length.")
        widths["max_position_embeddings"] = tables["encoder"]
    ids: dict[str, Any] = dict.fromkeys(SPECIAL) | layout.special_ids
    ids |= {name: fields[name] for name in SPECIAL if name in fields} | special_ids
    fields = {name: value for name, value in fields.items() if name not in SPECIAL}
    return VanillaTransformerConfig(
        vocab_size=shape("model.encoder.embed_tokens.weight")[0],
        decoder_vocab_size=shape("model.decoder.embed_tokens.weight")[0],
        d_model=d_model,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=shape("model.encoder.layers.0.feed_forward.fc1.weight")[0],
        decoder_ffn_dim=shape("model.decoder.layers.0.feed_forward.fc1.weight")[0],
        layer_norm_eps=layout.norm_eps(d_model),
        decoder_start_token_id=ids["bos_token_id"],
        **widths,
        **ids,
        **fields,
    )


def zero_biases(ours: State, config: VanillaTransformerConfig) -> dict[str, str]:
    """Fills in the biases of projections that the layout's linear maps do not have: of one kind all, or none."""
    told = {}
    for kind in ("q_proj", "k_proj", "v_proj", "out_proj"):
        weights = [name for name in ours if name.endswith(f".{kind}.weight")]
        biases = [name.removesuffix("weight") + "bias" for name in weights]
        if not any(name in ours for name in biases):
            told["attention without biases: zero ones"] = "exact"
            for weight, bias in zip(weights, biases, strict=True):
                ours[bias] = torch.zeros(len(ours[weight]))
    return told


def build(
    config: VanillaTransformerConfig, ours: State, origin: dict[str, str], layout: Layout
) -> VanillaTransformerForConditionalGeneration:
    """The model, every parameter of it from the file."""
    model = VanillaTransformerForConditionalGeneration(config)
    expected = model.state_dict()
    for name, tensor in expected.items():
        if name not in ours:
            raise ValueError(missing(name, layout))
        if ours[name].shape != tensor.shape:
            table = origin["model.decoder.embed_tokens.weight"]
            others = f"with {table}" if name.startswith("lm_head") else "with the file's other tensors"
            raise ValueError(
                f"{origin.get(name, name)} makes {name} of shape {tuple(ours[name].shape)}, but {others} it should be "
                f"{tuple(tensor.shape)}."
            )
    extra = [name for name in ours if name not in expected]
    if extra:
        raise ValueError(f"{origin[extra[0]]} has no place in a model of {config.encoder_layers} encoder layers.")
    model.load_state_dict(ours)
    special = {name: getattr(config, name) for name in (*SPECIAL, "decoder_start_token_id")}
    model.generation_config = GenerationConfig(**special, num_beams=1)
    return model.eval()


def missing(name: str, layout: Layout) -> str:
    """Which key of theirs would have filled ours."""
    for key, use in layout.uses().items():
        for target in use.targets:
            if match := pattern(target).fullmatch(name):
                return f"the file lacks {fill(key, match.groupdict().values())} (our {name})."
    return f"nothing in the file fills {name}."


def unset(config: VanillaTransformerConfig) -> list[str]:
    names = [name for name in SPECIAL if getattr(config, name) is None]
    if not names:
        return []
    options = " ".join(f"--{name.replace('_', '-')} N" for name in names)
    return [f"The file does not tell {', '.join(names)}: generating needs them. Import again with {options}."]


# --- Parity with the user's own code ---------------------------------------------------------------------------------


def compare(
    place: str, layout: Layout, state: State, model: VanillaTransformerForConditionalGeneration
) -> dict[str, Any]:
    """Largest difference of log-probabilities between the user's model and ours, on random batches with padding.

    Raises:
        ValueError: no such code, it does not take the state, or the difference is above 1e-4.
    """
    theirs = load_theirs(place)
    try:
        theirs.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{place} does not take the file's weights: {str(error).splitlines()[0]}") from error
    difference = parity(layout.run, theirs.eval(), model)
    if difference > TOLERANCE:
        raise ValueError(
            f"the log-probabilities of {place} and of the imported model differ by {difference:.2g}: the layout or "
            f"--num-heads is not right. Nothing was written."
        )
    return {"with": place, "largest_difference_of_log_probabilities": difference, "batches": 3}


def load_theirs(place: str) -> nn.Module:
    module_name, _, name = place.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        theirs = getattr(importlib.import_module(module_name), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--compare-with {place}: {error}. Give MODULE:CALLABLE, a function without arguments."
        ) from error
    if not isinstance(theirs, nn.Module):
        raise ValueError(f"--compare-with {place} gives a {type(theirs).__name__}, not a torch.nn.Module.")
    return theirs


@torch.no_grad()
def parity(
    run_theirs: Callable, theirs: nn.Module, model: VanillaTransformerForConditionalGeneration, batches: int = 3
) -> float:
    """Largest difference of log-probabilities at real target tokens, over random batches with padding behind.

    Under the right mask: a source's padding is hidden, a target token sees itself and what stands before it.
    """
    config, worst = model.config, 0.0
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(batches):
        ids = {}
        for side, size, length in (("source", config.vocab_size, 9), ("target", model.lm_head.out_features, 7)):
            tokens = torch.randint(0, size - 1, (4, length), generator=generator)
            tokens[tokens >= pad] += 1  # any but padding
            for row in range(4):
                tokens[row, length - row :] = pad
            ids[side] = tokens
        real = {side: tokens != pad for side, tokens in ids.items()}
        causal = torch.ones(7, 7, dtype=torch.bool).tril()
        source_mask, target_mask = real["source"][:, None, None], causal & real["target"][:, None, None]
        expected = run_theirs(theirs, ids["source"], source_mask, ids["target"], target_mask).log_softmax(-1)
        found = model(
            input_ids=ids["source"], attention_mask=real["source"].long(), decoder_input_ids=ids["target"]
        ).logits.log_softmax(-1)
        worst = max(worst, float((expected - found)[real["target"]].abs().max()))
    return worst


# --- The folder ------------------------------------------------------------------------------------------------------


def save(out: Path, imported: Imported, tokenizers: Tokenizers | None, report: dict[str, Any]) -> None:
    """The model, its tokenizer and the report."""

    def write(folder: Path) -> None:
        imported.model.save_pretrained(folder)
        if tokenizers:
            tokenizers.tokenizer.save_pretrained(folder)
        text = json.dumps(report, indent=2, ensure_ascii=False)
        (folder / "import_report.json").write_text(text + "\n", encoding="utf-8")

    write_whole(out, write)


def tell(report: dict[str, Any], out: Path, tokenizers: Tokenizers | None) -> None:
    print("read off the tensors: " + ", ".join(f"{name} {value}" for name, value in report["shapes"].items()))
    for fold, bound in report["folds"].items():
        print(f"  folded: {fold} [{bound}]")
    for name, reason in report["left_out"].items():
        print(f"  left out: {name}: {reason}")
    for line in report["check"]:
        print(f"  check: {line}")
    if "parity" in report:
        difference = report["parity"]["largest_difference_of_log_probabilities"]
        print(f"  your own model agrees: log-probabilities within {difference:.1g}")
    print(f"\n{len(report['used'])} tensors are in {out}, with import_report.json. To load it:")
    print("    import vanilla_transformer; from transformers import AutoModelForSeq2SeqLM")
    print(f'    model = AutoModelForSeq2SeqLM.from_pretrained("{out}")')
    if tokenizers:
        print(f"    python -m training.translate {out}")


if __name__ == "__main__":
    main()
