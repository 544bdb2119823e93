"""The tokenizers that go with an imported checkpoint: files of `tokenizers`, or lists of tokens."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hub.importing.conversion import ImportResult
from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer
from vanilla_transformer.shared.loading import rust_panics_as_errors

KNOWN = {  # how tutorials write their special tokens
    "pad_token": ("<pad>", "[PAD]", "<blank>", "<PAD>"),
    "bos_token": ("<s>", "[SOS]", "<sos>", "<bos>", "[BOS]", "<BOS>", "<START>"),
    "eos_token": ("</s>", "[EOS]", "<eos>", "<EOS>", "<END>"),
    "unk_token": ("<unk>", "[UNK]", "<UNK>"),
}
LARGEST_VOCABULARY = 10**7
UNLIKELY = 30.0  # nats: in float32 exp(-30) adds nothing to a sum that is 1; a finite loss remains for training


@dataclass
class SideTokenizer:
    """One language's tokenizer and, for each of its ids, the row of the file: `rows[id]`.

    Tokens that the file has no row for have that of the unknown token, which is then there several times.
    """

    tokenizer: Tokenizer
    special: dict[str, str]
    rows: list[int]

    def ids(self) -> dict[str, int]:
        vocabulary = self.tokenizer.get_vocab()
        return {name: vocabulary[token] for name, token in self.special.items()}


@dataclass
class TokenizerPair:
    """Both sides, ready to be used; `apply_to` makes a model agree with them."""

    tokenizer: PreTrainedTokenizerFast
    source: SideTokenizer
    target: SideTokenizer
    covers_all_rows: bool = False  # whether they have a token for each of the model's rows

    def apply_to(self, imported: ImportResult) -> dict[str, list[int]]:
        """Reorder the model's rows as in the tokenizers, add the missing ones, and set the special ids.

        Returns:
            For each side ("source", "target"), the row of the file for each row of the model.

        Raises:
            ValueError: a tokenizer has more tokens than the model has rows, or fewer although `covers_all_rows` is set;
                or both sides share one matrix but order it differently.
        """
        sizes = {"source": imported.model.config.vocab_size, "target": imported.model.lm_head.out_features}
        rows = {}
        for name, side in (("source", self.source), ("target", self.target)):
            number = max(side.rows) + 1
            if number > sizes[name] or (self.covers_all_rows and number != sizes[name]):
                raise ValueError(
                    f"the {name}'s tokenizer has {number} tokens, but the model has {sizes[name]} rows for "
                    f"them: it is not the one that the model was trained with."
                )
            rows[name] = [*side.rows, *range(number, sizes[name])]
            if surplus := len(side.rows) - number:
                imported.folds[f"rows of <unk> for {surplus} tokens outside of the {name}'s vocabulary"] = "exact"
        imported.model, rows = with_rows(imported.model, rows)
        model = imported.model
        imported.shapes = {name: getattr(model.config, name) for name in imported.shapes}
        if suppressed := model.generation_config.suppress_tokens:  # rows of the target, which have just moved
            model.generation_config.suppress_tokens = [rows["target"].index(old) for old in suppressed]
        begins_with_end = model.config.decoder_start_token_id == model.config.eos_token_id is not None
        ids = {f"{name}_id": value for name, value in self.target.ids().items() if name != "unk_token"}
        ids["decoder_start_token_id"] = ids["eos_token_id" if begins_with_end else "bos_token_id"]
        model.config.update(ids)
        model.generation_config.update(**ids)
        return rows


def repeats(rows: list[int]) -> list[bool]:
    """Return for each row whether an earlier one is the same."""
    first: dict[int, int] = {}
    return [first.setdefault(row, i) != i for i, row in enumerate(rows)]


def with_rows(
    model: VanillaTransformerForConditionalGeneration, rows: dict[str, list[int]], less: float = UNLIKELY
) -> tuple[VanillaTransformerForConditionalGeneration, dict[str, list[int]]]:
    """Return a model with the given rows of `model` for each side ("source", "target"), and these rows.

    A target row that repeats an earlier one is never generated: `less` is subtracted from its logit. If both sides
    share one matrix, both get the rows of the longer side.

    Raises:
        ValueError: both sides share one matrix, and differ in its order.
    """
    config, state = model.config, model.state_dict()
    if config.share_encoder_decoder_embeddings:
        shorter, longer = sorted(rows.values(), key=len)
        if longer[: len(shorter)] != shorter:
            raise ValueError(
                "the special tokens have different ids in the two tokenizers, but source and target share one matrix "
                "of embeddings: give the tokenizer that the model was trained with for both sides."
            )
        rows = dict.fromkeys(rows, longer)
    source, target = rows["source"], rows["target"]
    if source == list(range(config.vocab_size)) and target == list(range(model.lm_head.out_features)):
        return model, rows
    state["model.encoder.embed_tokens.weight"] = state["model.encoder.embed_tokens.weight"][source]
    for name in ("model.decoder.embed_tokens.weight", "lm_head.weight", "lm_head.bias"):
        if name in state:
            state[name] = state[name][target]
    fields = config.to_dict() | {"vocab_size": len(source), "decoder_vocab_size": len(target)}
    if any(again := repeats(target)):
        fields["lm_head_bias"] = True
        state["lm_head.bias"] = state.get("lm_head.bias", 0) - less * torch.tensor(again)
    made = type(model)(type(config).from_dict(fields))
    made.load_state_dict(state)
    made.generation_config = model.generation_config
    return made.eval(), rows


def read_tokenizers(source: Path | None, target: Path | None, source_begins: Any = None) -> TokenizerPair | None:
    """The tokenizers of both sides; one file serves for both. None where no file was given.

    Special tokens get the same ids in both vocabularies: where they have others, they are moved to the front.

    Args:
        source_begins: whether sources were trained with the begin token in front; it takes a tokenizer for each side.

    Raises:
        ValueError: a file that is no tokenizer, or has no padding, begin or end token.
    """
    if source_begins and (source is None or target is None):
        raise ValueError(
            "--set source_begins=true needs a tokenizer of its own for each side, since targets have no begin token in "
            "front: give --source_tokenizer and --target_tokenizer, which may be the same file."
        )
    if source is None and target is None:
        return None
    if source is None:
        raise ValueError("--target_tokenizer needs --source_tokenizer.")
    sides = [read_side(path) for path in ((source, target) if target else (source,))]
    return combine_tokenizers(sides, source_begins=bool(source_begins))


def combine_tokenizers(
    sides: list[SideTokenizer], source_begins: bool = False, source_ends: bool = True
) -> TokenizerPair:
    """One tokenizer of one side for both, or of two; targets end with the end token.

    Args:
        source_begins, source_ends: whether the begin token stands before sources, the end token behind them. Where not
            as before and behind targets, it takes two sides.
    """
    if len(sides) == 2 and sides[0].ids() != sides[1].ids():
        sides = [move_special_tokens_first(side) for side in sides]
    for i, side in enumerate(sides):
        begin = f"{side.special['bos_token']} " if source_begins and i == 0 and len(sides) == 2 else ""
        tokens = [(side.special[name], side.ids()[name]) for name in ("bos_token", "eos_token")]
        end = f" {side.special['eos_token']}" if source_ends or i == 1 else ""
        template = f"{begin}$A{end}"
        side.tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    if len(sides) == 1:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=sides[0].tokenizer, **sides[0].special)
        return TokenizerPair(tokenizer, sides[0], sides[0])
    both = VanillaTransformerTokenizer(
        source_tokenizer_object=sides[0].tokenizer,
        target_tokenizer_object=sides[1].tokenizer,
        **sides[0].special,
    )
    return TokenizerPair(both, sides[0], sides[1])


def read_side(path: Path) -> SideTokenizer:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as text ({error}).") from error
    if text.lstrip().startswith("{"):
        try:
            with rust_panics_as_errors():
                tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises no narrower type
            raise ValueError(f"{path} is no file of the library tokenizers: {error}") from error
    else:
        tokens = text.split("\n")
        tokens = tokens[:-1] if tokens[-1] == "" else tokens
        if len(set(tokens)) < len(tokens):
            twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
            raise ValueError(f"{path} has the token {twice!r} twice: give one token a line, in the order of the ids.")
        unk = next((token for name in ("unk_token", "pad_token") for token in KNOWN[name] if token in tokens), "<unk>")
        vocabulary = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = {
        name: next((token for token in names if tokenizer.token_to_id(token) is not None), None)
        for name, names in KNOWN.items()
    }
    if missing := [name for name, token in found.items() if token is None and name != "unk_token"]:
        names = ", ".join(KNOWN[missing[0]])
        raise ValueError(f"{path} has no {missing[0]}: none of {names} is in it.")
    special = {name: token for name, token in found.items() if token is not None}
    ids = list(tokenizer.get_vocab().values())
    if len(set(ids)) < len(ids):
        number = next(i for i, count in Counter(ids).items() if count > 1)
        raise ValueError(f"{path} gives the id {number} to several tokens: a model has one row for each.")
    largest = max(ids)
    if largest >= LARGEST_VOCABULARY:
        raise ValueError(f"{path} has a token with the id {largest}, more than any vocabulary has: it is broken.")
    return SideTokenizer(
        tokenizer, special, list(range(largest + 1))
    )  # of an id that no token has, the row stays as well


def move_special_tokens_first(side: SideTokenizer) -> SideTokenizer:
    """The same tokens with other ids: the special ones first, in the order padding, begin, end, unknown."""
    state = json.loads(side.tokenizer.to_str())
    vocabulary = state["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        raise ValueError(
            f"special tokens of a {state['model']['type']} tokenizer cannot be moved: give both the same ids."
        )
    first = [side.ids()[name] for name in KNOWN if name in side.special]
    order = first + [old for old in range(len(side.rows)) if old not in set(first)]
    new = {old: i for i, old in enumerate(order)}
    state["model"]["vocab"] = {token: new[old] for token, old in vocabulary.items()}
    for token in state["added_tokens"]:
        token["id"] = new[token["id"]]
    state["added_tokens"].sort(key=lambda token: token["id"])
    state["post_processor"] = None
    return SideTokenizer(Tokenizer.from_str(json.dumps(state)), side.special, [side.rows[old] for old in order])
