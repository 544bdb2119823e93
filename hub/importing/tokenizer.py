"""Tokenizers of an imported checkpoint, from files of the library `tokenizers` or lists of tokens."""

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer
from vanilla_transformer.shared.loading import rust_panics_as_errors
from vanilla_transformer.shared.vocabularies import disable_bpe_dropout

from .conversion import ImportResult

SPECIAL_TOKENS = {  # spellings in the supported implementations
    "pad_token": ("<pad>", "[PAD]", "<blank>", "<PAD>"),
    "bos_token": ("<s>", "[SOS]", "<sos>", "<bos>", "[BOS]", "<BOS>", "<START>"),
    "eos_token": ("</s>", "[EOS]", "<eos>", "<EOS>", "<END>"),
    "unk_token": ("<unk>", "[UNK]", "<UNK>"),
}
MAX_VOCAB_SIZE = 10**7
REPEATED_ROW_PENALTY = 30.0  # nats; 1 + exp(-30) is 1 in float32, and training losses stay finite


@dataclass
class SideTokenizer:
    """Tokenizer of one language, and the row of the file for each id: `rows[id]`.

    Tokens without a row in the file have the row of the unknown token.
    """

    tokenizer: Tokenizer
    special: dict[str, str]
    rows: list[int]

    def special_ids(self) -> dict[str, int]:
        vocabulary = self.tokenizer.get_vocab()
        return {name: vocabulary[token] for name, token in self.special.items()}


@dataclass
class TokenizerPair:
    """Tokenizers of both sides; `apply_to` adapts a model to them."""

    tokenizer: PreTrainedTokenizerFast
    source: SideTokenizer
    target: SideTokenizer
    covers_all_rows: bool  # whether each row of the model has a token

    def apply_to(self, imported: ImportResult) -> dict[str, list[int]]:
        """Reorder the rows of the model as in the tokenizers, add missing rows, and set the special token ids.

        Returns the row of the file for each row of the model, for each side ("source", "target"). Raises ValueError if
        a tokenizer has more tokens than the model has rows, or fewer with `covers_all_rows`.
        """
        sizes = {"source": imported.model.config.vocab_size, "target": imported.model.lm_head.out_features}
        rows = {}
        for name, side in (("source", self.source), ("target", self.target)):
            number = max(side.rows) + 1
            if number > sizes[name] or (self.covers_all_rows and number != sizes[name]):
                mismatch = f"the {name} tokenizer has {number} tokens, but the model has {sizes[name]} rows"
                raise ValueError(f"{mismatch}. Use the tokenizer of the training.")
            rows[name] = [*side.rows, *range(number, sizes[name])]
            if surplus := len(side.rows) - number:
                imported.folds[f"rows of <unk> for {surplus} tokens outside the {name} vocabulary"] = "exact"
        imported.model, rows = select_rows(imported.model, rows)
        model = imported.model
        imported.shapes = {name: getattr(model.config, name) for name in imported.shapes}
        if suppressed := model.generation_config.suppress_tokens:  # target rows have moved
            model.generation_config.suppress_tokens = [rows["target"].index(old) for old in suppressed]
        starts_with_eos = model.config.decoder_start_token_id == model.config.eos_token_id is not None
        ids = {f"{name}_id": value for name, value in self.target.special_ids().items() if name != "unk_token"}
        ids["decoder_start_token_id"] = ids["eos_token_id" if starts_with_eos else "bos_token_id"]
        model.config.update(ids)
        model.generation_config.update(**ids)
        return rows


def find_repeats(rows: list[int]) -> list[bool]:
    """Return for each row whether it equals an earlier one."""
    first: dict[int, int] = {}
    return [first.setdefault(row, i) != i for i, row in enumerate(rows)]


def select_rows(
    model: VanillaTransformerForConditionalGeneration, rows: dict[str, list[int]], penalty: float = REPEATED_ROW_PENALTY
) -> tuple[VanillaTransformerForConditionalGeneration, dict[str, list[int]]]:
    """Return a model with the given rows of `model` for each side ("source", "target"), and these rows.

    A target row that repeats an earlier row is never generated: `penalty` is subtracted from its logit. If both sides
    share one matrix, both get the rows of the longer side. Raises ValueError if they order it differently.
    """
    config, state = model.config, model.state_dict()
    if config.share_encoder_decoder_embeddings:
        shorter, longer = sorted(rows.values(), key=len)
        if longer[: len(shorter)] != shorter:
            message = "source and target share one matrix, but the special tokens have different ids in the tokenizers"
            raise ValueError(f"{message}. Use the tokenizer of the training for both sides.")
        rows = dict.fromkeys(rows, longer)
    source, target = rows["source"], rows["target"]
    if source == list(range(config.vocab_size)) and target == list(range(model.lm_head.out_features)):
        return model, rows
    state["model.encoder.embed_tokens.weight"] = state["model.encoder.embed_tokens.weight"][source]
    for name in ("model.decoder.embed_tokens.weight", "lm_head.weight", "lm_head.bias"):
        if name in state:
            state[name] = state[name][target]
    fields = config.to_dict() | {"vocab_size": len(source), "decoder_vocab_size": len(target)}
    if any(is_repeat := find_repeats(target)):
        fields["lm_head_bias"] = True
        state["lm_head.bias"] = state.get("lm_head.bias", 0) - penalty * torch.tensor(is_repeat)
    result = type(model)(type(config).from_dict(fields)).to(model.dtype)
    result.load_state_dict(state)
    result.generation_config = model.generation_config
    return result.eval(), rows


def read_tokenizers(
    source: Path | None, target: Path | None, source_begins: bool = False, source_ends: bool = True
) -> TokenizerPair | None:
    """Read the tokenizers of both sides, or one tokenizer for both sides. Return None without files.

    If the special tokens have different ids on both sides, they get the first ids. Raises ValueError if a file is not a
    tokenizer or has no pad, BOS or EOS token, or if there is only one for the target.
    """
    if source is None and target is None:
        return None
    if source is None:
        raise ValueError("--target-tokenizer requires --source-tokenizer.")
    if source_begins or not source_ends:  # unlike targets
        target = target or source
    sides = [read_side_tokenizer(path) for path in ((source, target) if target else (source,))]
    return combine_tokenizers(sides, source_begins, source_ends)


def combine_tokenizers(
    sides: list[SideTokenizer], source_begins: bool = False, source_ends: bool = True, covers_all_rows: bool = False
) -> TokenizerPair:
    """Combine the tokenizers of source and target, or one tokenizer for both. Targets have an EOS and no BOS token.

    `source_begins` (sources start with the BOS token) and `source_ends=False` (no EOS token) require two sides.
    """
    if len(sides) == 2 and sides[0].special_ids() != sides[1].special_ids():
        sides = [move_special_tokens_first(side) for side in sides]
    for i, side in enumerate(sides):
        bos = f"{side.special['bos_token']} " if source_begins and i == 0 else ""
        tokens = [(side.special[name], side.special_ids()[name]) for name in ("bos_token", "eos_token")]
        eos = f" {side.special['eos_token']}" if source_ends or i == 1 else ""
        side.tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos}$A{eos}", special_tokens=tokens)
    if len(sides) == 1:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=sides[0].tokenizer, **sides[0].special)
    else:
        source, target = (side.tokenizer for side in sides)
        tokenizer = VanillaTransformerTokenizer(
            source_tokenizer_object=source, target_tokenizer_object=target, **sides[0].special
        )
    return TokenizerPair(tokenizer, sides[0], sides[-1], covers_all_rows)


def read_side_tokenizer(path: Path) -> SideTokenizer:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text ({error}).") from error
    if text.lstrip().startswith("{"):
        try:
            with rust_panics_as_errors():
                tokenizer = Tokenizer.from_str(text)
                disable_bpe_dropout([tokenizer])
        except Exception as error:  # tokenizers raises no narrower type
            raise ValueError(f"{path} is not a file of the library tokenizers: {error}") from error
    else:
        tokens = text.removesuffix("\n").split("\n")
        if len(set(tokens)) < len(tokens):
            repeated = next(token for i, token in enumerate(tokens) if token in tokens[:i])
            raise ValueError(f"{path} repeats the token {repeated!r}. Write one token per line, ordered by id.")
        unknown = (*SPECIAL_TOKENS["unk_token"], *SPECIAL_TOKENS["pad_token"])
        unk = next((token for token in unknown if token in tokens), "<unk>")
        tokenizer = build_word_tokenizer(tokens, unk)
    special = find_special_tokens(tokenizer.get_vocab(), str(path), optional="unk_token")
    ids = list(tokenizer.get_vocab().values())
    if len(set(ids)) < len(ids):
        number = next(i for i, count in Counter(ids).items() if count > 1)
        raise ValueError(f"{path} has several tokens with the id {number}. Each token must have its own id.")
    if (largest := max(ids)) >= MAX_VOCAB_SIZE:
        raise ValueError(f"{path} has a token with the id {largest}, which must be below {MAX_VOCAB_SIZE}.")
    return SideTokenizer(tokenizer, special, list(range(largest + 1)))  # keeps the rows of unused ids


def build_word_tokenizer(tokens: list[str], unk: str) -> Tokenizer:
    """Build a tokenizer that splits at white space. `tokens` are ordered by id."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def find_special_tokens(tokens: Collection[str], owner: str, optional: str = "") -> dict[str, str]:
    """Return the special tokens by name. Raise ValueError if one is missing, except `optional`."""
    found = {name: next((each for each in known if each in tokens), None) for name, known in SPECIAL_TOKENS.items()}
    if missing := [name for name, token in found.items() if token is None and name != optional]:
        raise ValueError(f"{owner} has no {missing[0]}. Expected one of {', '.join(SPECIAL_TOKENS[missing[0]])}.")
    return {name: token for name, token in found.items() if token is not None}


def move_special_tokens_first(side: SideTokenizer) -> SideTokenizer:
    """Return the same tokens with other ids: first pad, BOS, EOS and unknown token, then the others."""
    state = json.loads(side.tokenizer.to_str())
    vocabulary = state["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        kind = state["model"]["type"]
        raise ValueError(f"the special tokens of a {kind} tokenizer cannot be moved. Use equal ids on both sides.")
    first = [side.special_ids()[name] for name in SPECIAL_TOKENS if name in side.special]
    order = first + [old for old in range(len(side.rows)) if old not in set(first)]
    new = {old: i for i, old in enumerate(order)}
    state["model"]["vocab"] = {token: new[old] for token, old in vocabulary.items()}
    for token in state["added_tokens"]:
        token["id"] = new[token["id"]]
    state["added_tokens"].sort(key=lambda token: token["id"])
    state["post_processor"] = None
    return SideTokenizer(Tokenizer.from_str(json.dumps(state)), side.special, [side.rows[old] for old in order])
