"""Speed beside stock models of equal size and weights, as a table, `benchmark.json` and `benchmark.png`.

    python -m training.benchmark                                                # three sizes, one thread, random text
    python -m training.benchmark --lines step --precision bf16 --sizes base     # one measurement
    python -m training.benchmark --lines greedy beam --model CHECKPOINT --source test.en --reference test.de \\
        --also exported_marian exported_ctranslate2                             # a trained model on real text
    python -m training.benchmark --lines recipe --recipe RECIPE.yaml --data_dir FOLDER

All that is compared takes turns in one run, since machines are noisy: each line tells the median of tokens a second,
its ratio to the best of Marian, and the range. Before a comparison it is checked that the work is the same:
weights, loss, translations. The floor is the time that the matrix products of the work would take alone at the speed
that this machine has for a large one; "of limit" is its share of the time that was measured. In decoding it is that of
float32, which bfloat16 and int8 weights may pass.

On a CPU with one thread times are those of the processor, else of the wall.
"""

import argparse
import copy
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sacrebleu
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, set_seed

from training import benchmark_recipe
from training.hardware import describe, keep_memory
from training.peers import TorchPeer, TutorialPeer, bart
from training.pictures import plot_benchmark
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.generation_vanilla_transformer import beam_search
from vanilla_transformer.to_marian import to_marian

REAL: dict[str, Any] = {"initialization": "normal"}  # logits as small as a trained model's: huge ones cost exp() time
SIZES = {
    "t128": VanillaTransformerConfig.from_size("tiny", **REAL),
    "d256": VanillaTransformerConfig.from_size(
        "tiny", d_model=256, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=512, decoder_ffn_dim=512, **REAL
    ),
    "base": VanillaTransformerConfig.from_size("base", vocab_size=10_000, **REAL),
    "big": VanillaTransformerConfig.from_size("big", vocab_size=37_000, **REAL),
}
LINES = ("step", "greedy", "beam", "sample", "memory", "load", "recipe")
LENGTH = 16  # tokens of a sentence of random text, about Multi30k's mean
PADDED = 2  # tokens of padding on every second sentence
NEW = 30  # tokens of each translation of random text
BEAMS = 5
SAME = 0.995  # share of translations that have to be equal; the others are ties
Rates = dict[str, list[float]]


def main() -> None:
    arguments = parse()
    if not arguments.default_malloc:
        keep_memory()
    torch.set_num_threads(arguments.threads)
    if arguments.measure_memory:
        print(peak_memory(arguments))
        return
    set_seed(0)
    benchmark = Benchmark(arguments)
    for line in arguments.lines:
        benchmark.measure(line)
    benchmark.save(arguments.output_dir)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("--lines", nargs="+", choices=LINES, default=LINES[:-1], help="what is measured")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["t128", "d256", "base"], help="of random models")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"], help="of a step")
    parser.add_argument("--target_tokens", nargs="+", type=int, default=[1536], help="target tokens in a step's batch")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each, after one that is not counted")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on a CPU")
    parser.add_argument("--default_malloc", action="store_true", help="leave the C library's allocator as it is")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--model", help="decode with this checkpoint, a folder or a name on the Hub")
    parser.add_argument("--source", type=Path, help="with --model: a text file to translate")
    parser.add_argument("--reference", type=Path, help="with --source: its translations, for BLEU")
    parser.add_argument("--sentences", type=int, default=128, help="so many are decoded, in batches")
    parser.add_argument("--batch_size", type=int, default=32, help="sentences in a batch of decoding")
    parser.add_argument("--also", nargs="+", type=Path, default=[], help="the same model exported by hub.export")
    parser.add_argument("--recipe", type=Path, help="for the line `recipe`: a recipe with text files")
    parser.add_argument("--data_dir", type=Path, help="with --recipe: folder of its files")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark"), help="for the table and the chart")
    parser.add_argument("--measure_memory", help=argparse.SUPPRESS)  # one model's, in a process of its own
    arguments = parser.parse_args()
    if arguments.source and not arguments.model:
        parser.error("--source needs --model, which translates it")
    if arguments.also and not arguments.model:
        parser.error("--also needs --model, the checkpoint that was exported")
    if arguments.reference and not arguments.source:
        parser.error("--reference needs --source, which it translates")
    for path in (arguments.source, arguments.reference, arguments.recipe, arguments.data_dir, *arguments.also):
        if path and not path.exists():
            parser.error(f"{path} does not exist")
    if arguments.reference:
        lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in (arguments.source, arguments.reference)]
        if lines[0] != lines[1]:
            parser.error(f"{arguments.source} has {lines[0]} lines, {arguments.reference} {lines[1]}: give a pair")
    if (arguments.output_dir / "benchmark.json").exists() and not arguments.measure_memory:
        parser.error(f"{arguments.output_dir} holds an earlier benchmark: remove it, or give another --output_dir")
    if "recipe" in arguments.lines and not (arguments.recipe and arguments.data_dir):
        parser.error("the line `recipe` needs --recipe and --data_dir")
    return arguments


class Benchmark:
    """Measures line by line, prints each as soon as it is there, and keeps everything for the files."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.rows: list[dict[str, Any]] = []
        self.speeds = {name: matrix_speed(self.device, kind, self.clock) for name, kind in KINDS.items()}
        self.machine = describe(self.device) | {"threads": arguments.threads, "torch": torch.__version__}
        self.machine["GFLOP/s"] = {name: round(speed / 1e9) for name, speed in self.speeds.items()}
        self.machine["malloc"] = "default" if arguments.default_malloc else "keeps its memory"
        print(json.dumps(self.machine), flush=True)

    def measure(self, line: str) -> None:
        arguments = self.arguments
        if line == "recipe":
            rates = benchmark_recipe.compare(arguments.recipe, arguments.data_dir)
            self.add("", "whole recipe beside the stock Trainer", rates, "Seq2SeqTrainer", "target tokens/s")
        elif line == "step":
            for size in arguments.sizes:
                for tokens in arguments.target_tokens:
                    self.step(size, tokens)
        elif line == "memory":
            self.memory()
        elif line == "load":
            for size in arguments.sizes:
                self.load(size)
        else:
            for size in [arguments.model] if arguments.model else arguments.sizes:
                self.decode(size, line)

    # --- Training ---

    def step(self, size: str, tokens: int) -> None:
        """Forward and backward pass, the plain cross-entropy."""
        models = step_models(SIZES[size], self.device)
        batch = make_batch(tokens // LENGTH, SIZES[size].vocab_size, self.device)
        check_same_loss(models, batch)
        count = int((batch["labels"] != -100).sum())
        for precision in self.arguments.precision:
            turns = {name: partial(step, name, model, batch, precision) for name, model in models.items()}
            with FlopCounterMode(display=False) as counter:
                turns["ours eager"]()
            rates, _ = self.take_turns(turns, lambda _: count)
            floor = counter.get_total_flops() / self.speeds[precision]
            title = f"training step of {tokens} tokens, {precision}"
            self.add(size, title, rates, "Marian", "target tokens/s", limit=count / floor)

    def memory(self) -> None:
        """Peak of a step at a vocabulary of 37,000 and 8,192 target tokens, each model in a process of its own."""
        peaks = {}
        for name in ("ours", "Marian"):
            command = [sys.executable, "-m", "training.benchmark", "--measure_memory", name]
            command += ["--device", str(self.device), "--threads", str(self.arguments.threads)]
            command += ["--default_malloc"] if self.arguments.default_malloc else []
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            peaks[name] = [float(output.split()[-1])]
        self.add("base", "peak memory of a step, 8,192 tokens, vocabulary 37,000", peaks, "Marian", "MiB")

    # --- Loading and decoding ---

    def load(self, size: str) -> None:
        model = VanillaTransformerForConditionalGeneration(SIZES[size])
        with tempfile.TemporaryDirectory() as folder:
            paths = {"ours": Path(folder, "ours"), "Marian": Path(folder, "marian")}
            model.save_pretrained(paths["ours"])
            to_marian(model).save_pretrained(paths["Marian"])
            turns = {name: partial(AutoModelForSeq2SeqLM.from_pretrained, path) for name, path in paths.items()}
            rates, _ = self.take_turns(turns, lambda _: 1)
        self.add(size, "from_pretrained", rates, "Marian", "loads/s")

    def decode(self, size: str, line: str) -> None:
        """Greedy decoding, beam search or sampling: translations of ours and of the others are compared."""
        task = Task(self.arguments, size, self.device)
        options: dict[str, Any] = {"num_beams": BEAMS if line == "beam" else 1, "do_sample": line == "sample"}
        decoders = task.decoders(options)
        rates, first = self.take_turns(decoders, lambda translations: sum(map(len, translations)))
        reference = first["Marian sdpa"]
        same = {name: sum(map(list.__eq__, ids, reference)) / len(ids) for name, ids in first.items()}
        wrong = [
            name for name, share in same.items() if share < SAME and name.endswith(("eager", "sdpa", "beam_search"))
        ]
        if wrong and line != "sample":
            raise AssertionError(f"not the same translations as Marian's, of the share of {SAME}: {same}")
        with FlopCounterMode(display=False) as counter:
            decoders["ours beam_search" if line != "sample" else "ours sdpa"]()
        told = {name: f"{100 * share:.1f} % the same" for name, share in same.items()}
        if self.arguments.reference:
            told = {name: f"{text}, BLEU {task.bleu(first[name]):.1f}" for name, text in told.items()}
        title = {"greedy": "greedy", "beam": f"{BEAMS} beams", "sample": "sampling"}[line]
        limit = sum(map(len, reference)) * self.speeds["fp32"] / counter.get_total_flops()
        self.add(size, f"{title}, {len(reference)} sentences", rates, "Marian", "tokens/s", limit, told)

    # --- Taking turns, and telling ---

    def take_turns(
        self, turns: Mapping[str, Callable[[], Any]], count: Callable[[Any], int]
    ) -> tuple[Rates, dict[str, Any]]:
        """How much each does a second, `count` of what it returns; and what it returned in a turn that is not timed."""
        rates: Rates = {name: [] for name in turns}
        first = {name: run() for name, run in turns.items()}
        for _ in tqdm(range(self.arguments.rounds), leave=False, desc="turns"):
            for name, run in turns.items():
                start = self.clock()
                found = run()
                seconds = self.clock() - start
                rates[name].append(count(found) / seconds)
        return rates, first

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        one = self.device.type == "cpu" and self.arguments.threads == 1
        return time.process_time() if one else time.perf_counter()

    def add(
        self, size: str, title: str, rates: Rates, rival: str, unit: str, limit: float | None = None, told: Any = None
    ) -> None:
        """Keeps and prints one comparison. `limit`: what the matrix products alone would allow, in `unit`."""
        medians = {name: statistics.median(values) for name, values in rates.items()}
        best = max(value for name, value in medians.items() if name.startswith(rival))
        row: dict[str, Any] = {"size": size, "line": title, "unit": unit, "limit": limit, "rates": {}}
        print(f"\n{size}  {title}  ({unit})")
        for name, value in medians.items():
            low, high = min(rates[name]), max(rates[name])
            row["rates"][name] = {"median": value, "low": low, "high": high, "ratio": value / best}
            text = f"  {name:26}{value:11,.1f}   {value / best:5.2f}   ({low:,.1f} to {high:,.1f})"
            text += f"   {100 * value / limit:5.1f} % of limit" if limit else ""
            if told:
                row["rates"][name]["note"] = told[name]
                text += f"   {told[name]}"
            print(text, flush=True)
        self.rows.append(row)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": self.machine, "rows": self.rows}, indent=2)
        (folder / "benchmark.json").write_text(text, encoding="utf-8")
        plot_benchmark(self.rows, folder / "benchmark.png")
        print(f"\n{folder}/benchmark.json and benchmark.png hold all of this")


# --- The training step -----------------------------------------------------------------------------------------------


KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def matrix_speed(device: torch.device, kind: torch.dtype, clock: Callable[[], float]) -> float:
    """Floating-point operations a second of a large matrix product: the best of many."""
    size = 1024 if device.type == "cpu" else 8192
    left, right = (torch.randn(size, size, dtype=kind, device=device) for _ in range(2))
    seconds = []
    for _ in range(30):
        start = clock()
        left @ right
        seconds.append(clock() - start)
    return 2 * size**3 / min(seconds)


def step_models(config: VanillaTransformerConfig, device: torch.device) -> dict[str, Any]:
    """What takes a batch and gives a loss, by name; on a GPU compiled, too."""
    models: dict[str, Any] = {}
    ours = VanillaTransformerForConditionalGeneration(copy.deepcopy(config))
    for name, model in (("ours", ours), ("Marian", to_marian(ours)), ("Bart", bart(config))):
        for attention in ("eager", "sdpa"):
            own = copy.deepcopy(model).to(device).train()
            own.set_attn_implementation(attention)
            models[f"{name} {attention}"] = own
    models |= {"torch.nn.Transformer": TorchPeer(ours), "tutorial": TutorialPeer(ours)}
    if device.type == "cuda":
        models |= {
            f"{name} compiled": torch.compile(copy.deepcopy(models[name])) for name in ("ours sdpa", "Marian sdpa")
        }
    return {name: model.to(device).train() for name, model in models.items()}


def loss_of(name: str, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The plain cross-entropy; ours without logits."""
    return model(**batch, **({"smoothing": 0.0} if name.startswith("ours") else {}))["loss"]


def step(name: str, model: Any, batch: dict[str, torch.Tensor], precision: str) -> None:
    with torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = loss_of(name, model, batch)
    loss.backward()
    model.zero_grad()


def make_batch(sentences: int, vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens, LENGTH on either side, with padding at the end of every second sentence."""
    source, labels = torch.randint(4, vocab_size, (2, sentences, LENGTH), device=device)
    mask = torch.ones_like(source)
    mask[::2, -PADDED:] = 0
    labels[::2, -PADDED:] = -100
    return {"input_ids": source * mask, "attention_mask": mask, "labels": labels}


@torch.no_grad()
def check_same_loss(models: dict[str, Any], batch: dict[str, torch.Tensor]) -> None:
    """Raises AssertionError unless all have as many weights, and but for Bart the same loss."""
    losses, sizes = {}, {}
    for name, model in models.items():
        sizes[name] = sum(
            p.numel() for n, p in model.named_parameters() if "position" not in n and "embedding" not in n
        )
        if not name.startswith("Bart"):
            losses[name] = float(loss_of(name, model.eval(), batch))
            model.train()
    spread = max(losses.values()) - min(losses.values())
    if spread > 1e-4 * max(losses.values()):
        raise AssertionError(f"not the same work: losses {losses}")
    sizes = {name: size for name, size in sizes.items() if name.split()[0] in ("ours", "Marian", "Bart")}
    if max(sizes.values()) > 1.01 * min(sizes.values()):
        raise AssertionError(f"not the same work: weights {sizes}")


def peak_memory(arguments: argparse.Namespace) -> float:
    """MiB that a step needs beyond the model and what was there before."""
    device = torch.device(arguments.device)
    config = VanillaTransformerConfig.from_size("base", vocab_size=37_000)
    ours, name = VanillaTransformerForConditionalGeneration(config), arguments.measure_memory
    model = (ours if name == "ours" else to_marian(ours)).to(device).train()
    batch = make_batch(8192 // LENGTH, config.vocab_size, device)
    step(name, model, {key: each[:4] for key, each in batch.items()}, "bf16")  # what is needed once
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(name, model, batch, "bf16")
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(name, model, batch, "bf16")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


# --- Decoding --------------------------------------------------------------------------------------------------------


class Task:
    """Sources in batches of like length, and everything that translates them: functions without arguments that return
    the ids of every translation, without special tokens."""

    def __init__(self, arguments: argparse.Namespace, size: str, device: torch.device):
        self.device, self.also = device, arguments.also
        self.tokenizer: Any = None
        if arguments.model:
            self.ours = VanillaTransformerForConditionalGeneration.from_pretrained(arguments.model)
            self.tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        else:
            self.ours = VanillaTransformerForConditionalGeneration(copy.deepcopy(SIZES[size]))
        if arguments.source:
            lines = arguments.source.read_text(encoding="utf-8").splitlines()[: arguments.sentences]
            sources = self.tokenizer(lines)["input_ids"]
            self.limits = {"max_new_tokens": 80}
        else:
            sources = torch.randint(4, self.ours.config.vocab_size, (arguments.sentences, LENGTH)).tolist()
            self.ours.generation_config.eos_token_id = None  # else nobody knows when a random model ends
            self.limits = {"max_new_tokens": NEW}
        self.references = None
        if arguments.reference:
            self.references = arguments.reference.read_text(encoding="utf-8").splitlines()[: arguments.sentences]
        self.order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        pad = self.ours.config.pad_token_id
        self.batches = []
        for start in range(0, len(sources), arguments.batch_size):
            rows = [torch.tensor(sources[i]) for i in self.order[start : start + arguments.batch_size]]
            ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
            mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            self.batches.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
        self.special = {self.ours.config.eos_token_id, pad, self.ours.config.decoder_start_token_id}

    def decoders(self, options: dict[str, Any]) -> dict[str, Callable[[], list[list[int]]]]:
        models: dict[str, tuple[PreTrainedModel, dict[str, Any]]] = {}
        for name, model in (("ours", self.ours), ("Marian", to_marian(self.ours))):
            for attention in ("eager", "sdpa"):
                own = copy.deepcopy(model).to(self.device).eval()
                own.set_attn_implementation(attention)
                models[f"{name} {attention}"] = own, {}
        if not options["do_sample"]:
            own, search = models["ours sdpa"][0], {"custom_generate": beam_search}
            models["ours beam_search"] = own, search
            models["ours beam_search, bf16"] = copy.deepcopy(own).to(torch.bfloat16), search
            if self.device.type == "cpu":
                int8 = torch.ao.quantization.quantize_dynamic(copy.deepcopy(own), {nn.Linear}, torch.qint8)
                models["ours beam_search, int8"] = int8, search
        if self.device.type == "cuda":
            for name in ("ours sdpa", "Marian sdpa"):
                models[f"{name} static"] = models[name][0], {"cache_implementation": "static"}
        runs: dict[str, Callable] = {
            name: partial(self.generate, model, options | own) for name, (model, own) in models.items()
        }
        for folder in self.also:
            if (folder / "model.bin").exists():
                for kind in ("float32", "int8"):
                    runs[f"CTranslate2 {kind}"] = self.ctranslate2(folder, kind, options["num_beams"])
            else:
                exported = AutoModelForSeq2SeqLM.from_pretrained(folder).to(self.device).eval()
                runs[f"Marian from {folder.name}"] = partial(self.generate, exported, options)
        return runs

    @torch.no_grad()
    def generate(self, model: PreTrainedModel, options: dict[str, Any]) -> list[list[int]]:
        set_seed(0)
        rows = []
        for batch in self.batches:
            rows += model.generate(**batch, **self.limits, **options).tolist()
        return [self.plain(row) for row in rows]

    def ctranslate2(self, folder: Path, kind: str, beams: int) -> Callable:
        import ctranslate2  # an extra of hub

        threads = torch.get_num_threads()
        translator = ctranslate2.Translator(str(folder), compute_type=kind, intra_threads=threads, inter_threads=1)
        names = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        to_id = {name: i for i, name in enumerate(names)}
        batches = [
            [[names[i] for i in row[mask.bool()].tolist()] for row, mask in zip(*batch.values(), strict=True)]
            for batch in self.batches
        ]

        def run() -> list[list[int]]:
            rows = []
            for batch in batches:
                found = translator.translate_batch(
                    batch, beam_size=beams, max_decoding_length=self.limits["max_new_tokens"], length_penalty=1.0
                )
                rows += [[to_id[token] for token in each.hypotheses[0]] for each in found]
            return [self.plain(row) for row in rows]

        return run

    def plain(self, row: Sequence[int]) -> list[int]:
        """Without the start, and up to the end."""
        row = list(row[1:] if row[0] == self.ours.config.decoder_start_token_id else row)
        end = self.ours.generation_config.eos_token_id
        return row[: row.index(end)] if end in row else row

    def bleu(self, rows: list[list[int]]) -> float:
        texts = [""] * len(rows)
        for i, row in zip(self.order, rows, strict=True):
            texts[i] = self.tokenizer.decode(row, skip_special_tokens=True)
        return sacrebleu.corpus_bleu(texts, [self.references]).score


if __name__ == "__main__":
    main()
