"""Gradio page that shows translations as they are generated, and attention.

In a clone: `python -m hub.space CHECKPOINT`. On a Space: `python app.py`, with a README.md in the same directory whose
front matter contains the checkpoint under `models`. Requires gradio, torch and transformers, and sentencepiece for
tokenizers of OPUS-MT models. The model's code is loaded from the checkpoint.
"""

import html
import inspect
import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import torch
from huggingface_hub import RepoCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.modeling_outputs import Seq2SeqLMOutput

MAX_SOURCE_TOKENS = 200
MODEL_TYPE = "vanilla_transformer"
EXTRA_TOKENS = 50  # section 6.1 of the paper: "the maximum output length during inference [is] input length + 50"
ATTENTIONS = {
    "cross": "from translation to source",
    "encoder": "within the source (encoder)",
    "decoder": "within the translation (decoder)",
}
MEAN = "mean of all"
CSS = """
.heat-scroll { overflow-x: auto; padding-bottom: 8px; }
.heat { border-collapse: collapse; font-size: 14px; }
.heat th { font-weight: normal; padding: 2px 6px; white-space: nowrap; border: 1px solid var(--border-color-primary); }
.heat thead th { writing-mode: vertical-rl; transform: rotate(180deg); padding: 6px 2px; text-align: left; }
.heat tbody th { text-align: right; position: sticky; left: 0; background: var(--body-background-fill); }
.heat td { min-width: 26px; height: 26px; padding: 0; border: 1px solid var(--border-color-primary); }
.heat caption { caption-side: bottom; text-align: left; padding-top: 8px; }
.heat-key { display: inline-block; width: 120px; height: 10px; vertical-align: middle; margin: 0 6px; }
"""
UNKNOWN_TEXT = "\ue000 \ue000. \ue000, \ue000! \ue000?"  # an unknown character, and marks of all languages
HUE = "31, 119, 180"


class Translator:
    """Model and tokenizer of a checkpoint. The weights are the moving average, if the directory contains one (`ema/`).

    Args:
        checkpoint: Directory, or repository on the Hub. It must be trusted: its code is run (`trust_remote_code`).
    """

    def __init__(self, checkpoint: str):
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
        average = Path(checkpoint, "ema")
        weights = average if (average / "config.json").exists() else checkpoint
        model = AutoModelForSeq2SeqLM.from_pretrained(weights, trust_remote_code=True, attn_implementation="eager")
        self.model, config = model.eval(), model.config  # only eager attention returns the weights
        if config.model_type != MODEL_TYPE:
            command = f"vanilla-transformer import {checkpoint} OUTPUT"
            raise ValueError(f"it is a {type(model).__name__}. Convert it with: {command}")
        if hasattr(Seq2SeqLMOutput, "cache") and "past_key_values" in inspect.signature(model.forward).parameters:
            raise ValueError("its code is for transformers before 5.24. Load the model with the package, and save it.")
        self.positions = config.max_position_embeddings if config.position_embedding_type == "learned" else sys.maxsize
        table, unknown = self.model.get_input_embeddings().weight, self.tokenizer.unk_token_id
        self.unknown_ids = set() if unknown is None else {*(table == table[unknown]).all(-1).nonzero()[:, 0].tolist()}
        self.target = self.tokenizer.stock("target") if hasattr(self.tokenizer, "stock") else self.tokenizer

    def encode(self, text: str) -> dict[str, torch.Tensor]:
        """Tokenize a text. Raise ValueError with a message for the page if it cannot be translated."""
        if not text.strip():
            raise ValueError("Type a sentence first.")
        batch = self.tokenizer(text.strip(), return_tensors="pt")
        limit = min(MAX_SOURCE_TOKENS, self.positions)
        if (length := batch["input_ids"].shape[1]) > limit:
            raise ValueError(f"The text has {length} tokens, the maximum is {limit}. Split it into sentences.")
        ids, others = ({*self.tokenizer(each, add_special_tokens=False)["input_ids"]} for each in (text, UNKNOWN_TEXT))
        if not ids.isdisjoint(self.unknown_ids) and ids <= self.unknown_ids | others:
            message = "The vocabulary does not contain any of these words. Is this the source language of the model?"
            raise ValueError(message)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def unknown_words(self, text: str) -> list[str]:
        """Return the words with an unknown token. Some imports give several tokens the embedding of it."""
        return [word for word in text.split() if not self.unknown_ids.isdisjoint(self.tokenizer(word)["input_ids"])]

    def decode(self, ids: torch.Tensor) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def stream(self, batch: dict[str, torch.Tensor]) -> Iterator[str]:
        """Yield the greedy translation after each token."""
        tokens: queue.Queue[torch.Tensor | None] = queue.Queue()
        ids = torch.empty(0, dtype=torch.long)
        options = {"num_beams": 1, "num_return_sequences": 1, "do_sample": False, "tokenizer": self.target}
        options["max_new_tokens"] = self.max_new_tokens(batch)

        def generate() -> None:
            streamer = SimpleNamespace(put=tokens.put, end=lambda: None)
            try:
                self.model.generate(**batch, **options, streamer=streamer)
            finally:
                tokens.put(None)

        with ThreadPoolExecutor(1) as executor:
            future = executor.submit(generate)
            for new in iter(tokens.get, None):
                ids = torch.cat([ids, new.flatten()])
                yield self.decode(ids)
            future.result()  # raises the exception of the thread

    @torch.no_grad()
    def candidates(self, batch: dict[str, torch.Tensor], beams: int) -> list[tuple[torch.Tensor, float]]:
        """Return the best translations: ids (T), and the score of beam search.

        The score of one beam is the mean log-probability of its tokens. Several beams have the processed scores,
        with the length penalty of the generation config.
        """
        outputs = self.model.generate(
            **batch, num_beams=beams, num_return_sequences=beams, do_sample=False, tokenizer=self.target,
            max_new_tokens=self.max_new_tokens(batch), output_scores=True, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        if beams > 1:
            return list(zip(outputs.sequences, outputs.sequences_scores.tolist(), strict=True))
        logits = torch.stack(outputs.logits, dim=1).log_softmax(-1)  # (1, T, V)
        return [(outputs.sequences[0], logits.gather(-1, outputs.sequences[:, 1:, None]).mean().item())]

    @torch.no_grad()
    def attention(self, batch: dict[str, torch.Tensor], ids: torch.Tensor) -> dict[str, Any]:
        """Return (weights (layers, heads, T, S), row tokens, column tokens) of a translation for each `ATTENTIONS`."""
        eos = self.model.generation_config.eos_token_id
        eos_ids = eos if isinstance(eos, list) else [eos]
        eos_positions = [i for i, token in enumerate(ids.tolist()) if i and token in eos_ids]
        ids = ids[: eos_positions[0] + 1] if eos_positions else ids
        outputs = self.model(**batch, decoder_input_ids=ids[None, :-1], output_attentions=True, use_cache=False)
        names = {i: token for token, i in self.tokenizer.get_vocab().items()}  # of the source vocabulary
        source = [names.get(i, f"<{i}>") for i in batch["input_ids"][0].tolist()]
        target = [self.target.convert_ids_to_tokens(i) or f"<{i}>" for i in ids.tolist()]  # a row may lack a token
        weights = {"cross": outputs.cross_attentions, "encoder": outputs.encoder_attentions}
        weights["decoder"] = outputs.decoder_attentions
        axes = {"cross": (target[1:], source), "encoder": (source, source), "decoder": (target[1:], target[:-1])}
        return {kind: (torch.cat(list(weights[kind])).float().numpy(), *axes[kind]) for kind in ATTENTIONS}

    def max_new_tokens(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the maximum number of new tokens, from the generation config or else from section 6.1."""
        config = self.model.generation_config
        limit = config.max_new_tokens or (config.max_length and config.max_length - 1)
        return min(limit or batch["input_ids"].shape[1] + EXTRA_TOKENS, self.positions - 1)


def heat_map(attention: dict[str, Any] | None, kind: str, layer: str, head: str) -> str:
    """Return the selected weights as an HTML table with one row per query token and one column per key token."""
    if not attention:
        return "<p>Translate a sentence to see its attention.</p>"
    weights, rows, columns = attention[kind]
    weights = weights[min(int(layer), len(weights)) - 1]  # the selected stack may have fewer layers or heads
    weights = weights.mean(0) if head == MEAN else weights[min(int(head), len(weights)) - 1]
    head_row = "".join(f'<th scope="col">{html.escape(token)}</th>' for token in columns)
    body = ""
    for token, row in zip(rows, weights, strict=True):
        cells = "".join(
            f'<td style="background: rgba({HUE}, {weight:.3f})" '
            f'title="{html.escape(token)} to {html.escape(column)}: {weight:.2f}"></td>'
            for column, weight in zip(columns, row, strict=True)
        )
        body += f'<tr><th scope="row">{html.escape(token)}</th>{cells}</tr>'
    key = f'<span class="heat-key" style="background: linear-gradient(to right, transparent, rgb({HUE}))"></span>'
    return (
        f'<div class="heat-scroll" tabindex="0" role="region" aria-label="attention"><table class="heat">'
        f"<caption>weight 0{key}1; the weights of a row sum to 1</caption>"
        f"<thead><tr><td></td>{head_row}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def nbest_list(candidates: list[tuple[str, float]]) -> str:
    """Return the translations of beam search with their scores as an HTML list."""
    items = "".join(f"<li>{html.escape(text)} <small>{score:.3f}</small></li>" for text, score in candidates)
    return f"<p>Best translations of beam search with their scores</p><ol>{items}</ol>"


def status_line(text: str) -> str:
    """Return a line that screen readers announce when it changes."""
    return f'<p role="status" aria-live="polite">{html.escape(text)}</p>'


class PageEvents:
    """Functions that the page calls on events. The checkpoint is loaded when the page is first opened."""

    def __init__(self, checkpoint: str):
        self.checkpoint = checkpoint
        self.loading = threading.Lock()
        self.loaded: Translator | None = None

    def translator(self) -> Translator:
        with self.loading:
            self.loaded = self.loaded or Translator(self.checkpoint)
        return self.loaded

    def load(self) -> Iterator[tuple]:
        """Load the checkpoint. Yield the status, the button and the choices of layers and heads."""
        yield status_line(f"Loading {self.checkpoint} ..."), gr.skip(), gr.skip(), gr.skip()
        try:
            model = self.translator().model
        except Exception as error:  # safetensors, torch and transformers raise different types
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            yield status_line(f"{self.checkpoint} cannot be loaded: {reason}"), gr.skip(), gr.skip(), gr.skip()
            return
        config, size = model.config, model.num_parameters() / 1e6
        layers = max(config.encoder_layers, config.decoder_layers)
        heads = max(config.encoder_attention_heads, config.decoder_attention_heads)
        yield (
            status_line(f"Ready: {config.encoder_layers} + {config.decoder_layers} layers, {size:.1f}M parameters."),
            gr.Button(interactive=True),
            gr.Dropdown([str(i + 1) for i in range(layers)], value=str(config.decoder_layers)),
            gr.Dropdown([MEAN, *(str(i + 1) for i in range(heads))], value=MEAN),
        )

    def translate(self, text: str, beams: int, kind: str, layer: str, head: str) -> Iterator[tuple]:
        """Translate a sentence. Yield the status, the translation, the n-best list, the attention and its heat map."""
        try:
            yield from self._translate(text, beams, kind, layer, head)
        except ValueError as error:  # of `encode` or transformers
            yield status_line(str(error)), "", "", None, heat_map(None, kind, layer, head)

    def _translate(self, text: str, beams: int, kind: str, layer: str, head: str) -> Iterator[tuple]:
        start = time.perf_counter()
        model = self.translator()
        batch, first = model.encode(text), None
        for greedy in model.stream(batch):
            if greedy and first is None:
                first = time.perf_counter() - start
            yield status_line("Translating ..."), greedy, gr.skip(), gr.skip(), gr.skip()
        candidates = model.candidates(batch, int(beams))
        attention = model.attention(batch, candidates[0][0])
        status = f"Done in {time.perf_counter() - start:.2f} s"
        status += f", first token after {first:.2f} s" if first else ""
        if unknown := model.unknown_words(text):
            status += f". Unknown words: {', '.join(unknown)}"
        texts = [(model.decode(ids), score) for ids, score in candidates]
        table = heat_map(attention, kind, layer, head)
        yield status_line(f"{status}."), texts[0][0], nbest_list(texts), attention, table


def make_page(checkpoint: str) -> gr.Blocks:
    events = PageEvents(checkpoint)
    with gr.Blocks(title=f"{checkpoint}: translate and inspect attention") as page:
        gr.Markdown(f"# Translate and inspect attention\n`{html.escape(checkpoint)}`, an encoder-decoder Transformer")
        status = gr.HTML(status_line("Starting ..."))
        text = gr.Textbox(label="Sentence", placeholder="Type a sentence and press Enter", lines=1, autofocus=True)
        with gr.Row():
            beams = gr.Slider(1, 10, value=5, step=1, label="Beams", info="hypotheses in beam search")
            button = gr.Button("Translate", variant="primary", interactive=False)
        translation = gr.Textbox(label="Translation", lines=2, interactive=False, elem_id="translation")
        candidates = gr.HTML()
        gr.Markdown("## Attention")
        kind = gr.Radio([(label, kind) for kind, label in ATTENTIONS.items()], value="cross", label="Attention")
        with gr.Row():
            layer = gr.Dropdown(["1"], value="1", label="Layer")
            head = gr.Dropdown([MEAN], value=MEAN, label="Head")
        heat = gr.HTML(heat_map(None, "cross", "1", MEAN))
        attention = gr.State(None)

        page.load(events.load, outputs=[status, button, layer, head])
        outputs = [status, translation, candidates, attention, heat]
        gr.on([button.click, text.submit], events.translate, [text, beams, kind, layer, head], outputs)
        # `input` instead of `change`: an update by `load` could overwrite the heat map of the first translation
        gr.on([kind.input, layer.input, head.input], heat_map, [attention, kind, layer, head], heat)
    return page


def show(checkpoint: str, port: int | None = None) -> None:
    """Serve the page until it is stopped. The default port is the first free one from 7860."""
    make_page(checkpoint).queue().launch(server_port=port, css=CSS)


if __name__ == "__main__":
    show(RepoCard.load(Path(__file__).with_name("README.md")).data.models[0])
