"""Type a sentence, watch its translation come, and look at where the model attends.

Of a clone: `python -m hub.space CHECKPOINT`. On a Space: `python app.py`, beside a README.md whose front matter names
the checkpoint under `models`. Needs gradio, torch, transformers and, for tokenizers of OPUS-MT models, sentencepiece.
The model's code comes with its checkpoint.
"""

import html
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from huggingface_hub import RepoCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

MAX_SOURCE_TOKENS = 200  # source tokens that the page takes
EXTRA_TOKENS = 50  # section 6.1 of the paper: "the maximum output length during inference [is] input length + 50"
ATTENTIONS = {
    "cross": "from translation to source",
    "encoder": "inside the source (encoder)",
    "decoder": "inside the translation (decoder)",
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
HUE = "31, 119, 180"


class Tokens(BaseStreamer):
    """Hands over each token while `generate()` runs in another thread."""

    def __init__(self) -> None:
        self.queue: queue.Queue[torch.Tensor | None] = queue.Queue()

    def put(self, value: torch.Tensor) -> None:
        self.queue.put(value)

    def end(self) -> None:
        self.queue.put(None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.queue.get, None)


class Translator:
    """A checkpoint and what the page asks of it.

    Args:
        checkpoint: folder, or repository on the Hub. Its code is run (`trust_remote_code`): name one that you trust.
    """

    def __init__(self, checkpoint: str):
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
        self.model = AutoModelForSeq2SeqLM.from_pretrained(
            checkpoint,
            trust_remote_code=True,
            attn_implementation="eager",  # the one that computes attention weights
        ).eval()
        table, unknown = self.model.get_input_embeddings().weight, self.tokenizer.unk_token_id
        self.unknown_ids = set() if unknown is None else {*(table == table[unknown]).all(-1).nonzero()[:, 0].tolist()}
        self.target = self.tokenizer.stock("target") if hasattr(self.tokenizer, "stock") else self.tokenizer

    def encode(self, text: str) -> dict[str, torch.Tensor]:
        """Raises ValueError, in words for the page, for a text that cannot be translated."""
        words = text.split()
        if not words:
            raise ValueError("Type a sentence first.")
        batch = self.tokenizer(text.strip(), return_tensors="pt")
        longest = MAX_SOURCE_TOKENS
        if self.model.config.position_embedding_type == "learned":
            longest = min(longest, self.model.config.max_position_embeddings)
        if (length := batch["input_ids"].shape[1]) > longest:
            raise ValueError(f"That is {length} tokens, and this page takes {longest}: split it into sentences.")
        if len(self.unknown(text)) == len(words):
            raise ValueError("The model has never seen any of these words or letters: is this its source language?")
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def unknown(self, text: str) -> list[str]:
        """The words of which something is unknown to the vocabulary, or has its embedding, as after an import."""
        return [word for word in text.split() if not self.unknown_ids.isdisjoint(self.tokenizer(word)["input_ids"])]

    def decode(self, ids: torch.Tensor) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def stream(self, batch: dict[str, torch.Tensor]) -> Iterator[str]:
        """The greedy translation, longer by a token each time."""
        tokens, ids = Tokens(), torch.empty(0, dtype=torch.long)
        options = {"num_beams": 1, "do_sample": False, "max_new_tokens": self.longest_output(batch)}

        def generate() -> None:
            try:
                self.model.generate(**batch, **options, streamer=tokens)
            finally:
                tokens.end()

        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(generate)
            for new in tokens:
                ids = torch.cat([ids, new.flatten()])
                yield self.decode(ids)
            running.result()  # raises what it raised

    @torch.no_grad()
    def candidates(self, batch: dict[str, torch.Tensor], beams: int) -> list[tuple[torch.Tensor, float]]:
        """The best translations by beam search: ids (T), and the mean log-probability of their tokens."""
        outputs = self.model.generate(
            **batch, num_beams=beams, num_return_sequences=beams, length_penalty=1.0, do_sample=False,
            max_new_tokens=self.longest_output(batch), output_scores=True, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        if beams > 1:
            return list(zip(outputs.sequences, outputs.sequences_scores.tolist(), strict=True))
        logits = torch.stack(outputs.logits, dim=1).log_softmax(-1)  # (1, T, V)
        return [(outputs.sequences[0], logits.gather(-1, outputs.sequences[:, 1:, None]).mean().item())]

    @torch.no_grad()
    def attention(self, batch: dict[str, torch.Tensor], ids: torch.Tensor) -> dict[str, Any]:
        """Of a finished translation: for each of `ATTENTIONS` weights (layers, heads, T, S), and the axes' tokens."""
        ends = self.model.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        end = [i for i, token in enumerate(ids.tolist()) if i and token in ends]
        ids = ids[: end[0] + 1] if end else ids
        outputs = self.model(**batch, decoder_input_ids=ids[None, :-1], output_attentions=True, use_cache=False)
        names = {i: token for token, i in self.tokenizer.get_vocab().items()}  # of sources, even if Marian has two
        found = batch["input_ids"][0].tolist()
        source = [
            names.get(i, name) for i, name in zip(found, self.tokenizer.convert_ids_to_tokens(found), strict=True)
        ]
        target = [self.target.convert_ids_to_tokens(i) or f"<{i}>" for i in ids.tolist()]  # a row may have no token
        weights = {"cross": outputs.cross_attentions, "encoder": outputs.encoder_attentions}
        weights["decoder"] = outputs.decoder_attentions
        axes = {"cross": (target[1:], source), "encoder": (source, source), "decoder": (target[1:], target[:-1])}
        return {kind: (torch.cat(list(weights[kind])).float().numpy(), *axes[kind]) for kind in ATTENTIONS}

    def longest_output(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the limit of new tokens: of the model's generation config, else that of section 6.1."""
        config = self.model.generation_config
        longest = config.max_new_tokens or (config.max_length and config.max_length - 1)
        longest = longest or batch["input_ids"].shape[1] + EXTRA_TOKENS
        if self.model.config.position_embedding_type == "learned":
            longest = min(longest, self.model.config.max_position_embeddings - 1)
        return longest


def heat_map(attention: dict[str, Any] | None, kind: str, layer: str, head: str) -> str:
    """The chosen weights as an HTML table: what attends down, what it attends to across."""
    if not attention:
        return "<p>Translate a sentence, and its attention is drawn here.</p>"
    weights, rows, columns = attention[kind]
    weights = weights[min(int(layer), len(weights)) - 1]  # the other stack may have fewer layers or heads
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
        f"<caption>weight 0{key}1; a row's weights add up to 1</caption>"
        f"<thead><tr><td></td>{head_row}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def best(found: list[tuple[str, float]]) -> str:
    """The n-best list, with scores."""
    items = "".join(f"<li>{html.escape(text)} <small>{score:.3f}</small></li>" for text, score in found)
    return f"<p>The best by beam search, with the mean log-probability of their tokens</p><ol>{items}</ol>"


def said(text: str) -> str:
    """A line that screen readers read aloud when it changes."""
    return f'<p role="status" aria-live="polite">{html.escape(text)}</p>'


def make_page(checkpoint: str) -> gr.Blocks:
    """The page. It comes at once; the checkpoint is loaded when it is first looked at."""
    loading = threading.Lock()
    loaded: list[Translator] = []

    def translator() -> Translator:
        with loading:
            if not loaded:
                loaded.append(Translator(checkpoint))
        return loaded[0]

    def load() -> Iterator[tuple]:
        yield said(f"Loading {checkpoint} ..."), gr.skip(), gr.skip(), gr.skip()
        try:
            model = translator().model
        except Exception as error:  # a broken checkpoint raises safetensors', torch's and transformers' own types
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            yield said(f"{checkpoint} cannot be loaded: {reason}"), gr.skip(), gr.skip(), gr.skip()
            return
        config, millions = model.config, model.num_parameters() / 1e6
        layers = max(config.encoder_layers, config.decoder_layers)
        heads = max(config.encoder_attention_heads, config.decoder_attention_heads)
        yield (
            said(
                f"Ready: {config.encoder_layers} + {config.decoder_layers} layers, {millions:.1f} million parameters."
            ),
            gr.Button(interactive=True),
            gr.Dropdown([str(i + 1) for i in range(layers)], value=str(config.decoder_layers)),
            gr.Dropdown([MEAN, *(str(i + 1) for i in range(heads))], value=MEAN),
        )

    def translate(text: str, beams: int, kind: str, layer: str, head: str) -> Iterator[tuple]:
        start = time.perf_counter()
        model = translator()
        try:
            batch = model.encode(text)
        except ValueError as error:
            yield said(str(error)), "", "", None, heat_map(None, kind, layer, head)
            return
        first = None
        for greedy in model.stream(batch):
            if greedy and first is None:
                first = time.perf_counter() - start
            yield said("Translating ..."), greedy, gr.skip(), gr.skip(), gr.skip()
        found = model.candidates(batch, int(beams))
        attention = model.attention(batch, found[0][0])
        done = f"Done in {time.perf_counter() - start:.2f} s" + (
            f", the first token after {first:.2f} s" if first else ""
        )
        if unknown := model.unknown(text):
            done += f". Never seen in training: {', '.join(unknown)}"
        texts = [(model.decode(ids), score) for ids, score in found]
        yield said(f"{done}."), texts[0][0], best(texts), attention, heat_map(attention, kind, layer, head)

    with gr.Blocks(title=f"{checkpoint}: translate and look inside") as page:
        gr.Markdown(f"# Translate, and look inside\n`{html.escape(checkpoint)}`, an encoder-decoder Transformer")
        status = gr.HTML(said("Starting ..."))
        text = gr.Textbox(label="Sentence", placeholder="Type a sentence and press Enter", lines=1, autofocus=True)
        with gr.Row():
            beams = gr.Slider(1, 10, value=5, step=1, label="Beams", info="translations kept while searching")
            button = gr.Button("Translate", variant="primary", interactive=False)
        translation = gr.Textbox(label="Translation", lines=2, interactive=False, elem_id="translation")
        candidates = gr.HTML()
        gr.Markdown("## Attention")
        kind = gr.Radio([(label, kind) for kind, label in ATTENTIONS.items()], value="cross", label="Which")
        with gr.Row():
            layer = gr.Dropdown(["1"], value="1", label="Layer")
            head = gr.Dropdown([MEAN], value=MEAN, label="Head")
        heat = gr.HTML(heat_map(None, "cross", "1", MEAN))
        attention = gr.State(None)

        page.load(load, outputs=[status, button, layer, head])
        outputs = [status, translation, candidates, attention, heat]
        gr.on([button.click, text.submit], translate, [text, beams, kind, layer, head], outputs)
        # By hand alone: what `load` puts there would be drawn, too, and might come behind a first translation
        gr.on([kind.input, layer.input, head.input], heat_map, [attention, kind, layer, head], heat)
    return page


def show(checkpoint: str, port: int | None = None) -> None:
    """Serves the page until it is stopped. `port`: None for the first free one from 7860."""
    make_page(checkpoint).queue().launch(server_port=port, css=CSS)


if __name__ == "__main__":
    show(RepoCard.load(Path(__file__).with_name("README.md")).data.models[0])
