"""Shared fixtures: small models, batches and tokenizers, and commands in separate processes."""

import importlib.util
import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

if "PYTEST_XDIST_WORKER" in os.environ:  # multiple threads per worker would compete for the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported; tests use no network

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # background jobs of a shell ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
disable_progress_bar()  # some tests compare stderr
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SENTENCES = {
    "en": ["the dog runs", "a cat sleeps in the house", "two birds sing", "the old man reads a book"],
    "de": ["der Hund rennt", "eine Katze schläft im Haus", "zwei Vögel singen", "der alte Mann liest ein Buch"],
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def read_messages(caplog):
    """Function that returns the messages of the logger `vanilla_transformer` since its last call."""
    caplog.set_level(logging.INFO, "vanilla_transformer")

    def read() -> str:
        text = "".join(f"{message}\n" for message in caplog.messages)
        caplog.clear()
        return text

    return read


@pytest.fixture
def make_config():
    def make(**overrides) -> VanillaTransformerConfig:
        size = {
            "vocab_size": 60,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "dropout": 0.0,
            "max_position_embeddings": 64,
        }
        return VanillaTransformerConfig(**(size | overrides))

    return make


@pytest.fixture
def make_model(make_config):
    """Factory of models in evaluation mode. All parameters are random, including those of norms and biases."""

    def make(seed: int = 0, **overrides) -> VanillaTransformerForConditionalGeneration:
        torch.manual_seed(seed)
        model = VanillaTransformerForConditionalGeneration(make_config(**overrides))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
        return model.eval()

    return make


@pytest.fixture
def batch():
    """Three sources of 7, 5 and 3 tokens, padded on the right, and targets of 6."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 60, (3, 7), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in enumerate((7, 5, 3)):
        input_ids[row, length:] = 0
        attention_mask[row, length:] = 0
    decoder_input_ids = torch.randint(3, 60, (3, 6), generator=generator)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}


@pytest.fixture(scope="session")
def train_bpe():
    def train(texts: list[str], size: int) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(SPECIAL_TOKENS.values()), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
        return tokenizer

    return train


@pytest.fixture(scope="session")
def sentences() -> dict[str, list[str]]:
    return SENTENCES


@pytest.fixture(scope="session")
def special_tokens() -> dict[str, str]:
    return SPECIAL_TOKENS


@pytest.fixture(scope="session")
def sentencepiece_models(sentences) -> dict[str, bytes]:
    """One unigram SentencePiece model per language, as in OPUS-MT models."""
    sentencepiece = pytest.importorskip("sentencepiece")
    models = {}
    for side, lines in sentences.items():
        content = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines * 20), model_writer=content, vocab_size=90, hard_vocab_limit=False,
            bos_id=-1, pad_id=-1, eos_id=0, unk_id=1, minloglevel=2,
        )  # fmt: skip
        models[side] = content.getvalue()
    return models


@pytest.fixture(scope="session")
def marian_files(sentencepiece_models, tmp_path_factory) -> Path:
    """Directory of a `MarianTokenizer` with two vocabularies: 37 tokens of the source (German), 29 of the target."""
    from sentencepiece import SentencePieceProcessor

    folder = tmp_path_factory.mktemp("marian")
    names = ("source.spm", "vocab"), ("target.spm", "target_vocab")
    for (pieces_name, name), content in zip(names, reversed(sentencepiece_models.values()), strict=True):
        (folder / pieces_name).write_bytes(content)
        pieces = SentencePieceProcessor(model_proto=content)
        tokens = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())]
        ordered = [*tokens[:2], "<pad>", *reversed(tokens[2:])]
        (folder / f"{name}.json").write_text(json.dumps({token: i for i, token in enumerate(ordered)}))
    settings = {"source_lang": "de", "target_lang": "en", "separate_vocabs": True}
    settings |= {"tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def make_tokenizer(train_bpe, sentences, special_tokens):
    """Factory: (whether the vocabulary is shared) -> a tokenizer and the matching fields of the configuration."""

    def make(shared: bool):
        first, second = train_bpe(sentences["en"] + sentences["de"], 60), train_bpe(sentences["de"], 50)
        if shared:
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=first, **special_tokens)
            return tokenizer, {"vocab_size": first.get_vocab_size()}
        tokenizer = VanillaTransformerTokenizer(
            source_tokenizer_object=first, target_tokenizer_object=second, **special_tokens
        )
        sizes = {"vocab_size": first.get_vocab_size(), "decoder_vocab_size": second.get_vocab_size()}
        return tokenizer, sizes | {"share_encoder_decoder_embeddings": False}

    return make


@pytest.fixture
def any_peft_version(monkeypatch):
    """Adapters work with PEFT 0.21, but transformers 5.24 requires 0.22, which is not on PyPI yet."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.21")


@pytest.fixture
def full_disk():
    """Context manager that limits files to 10,000 bytes: larger ones raise a disk error."""

    @contextmanager
    def full():
        resource = pytest.importorskip("resource", reason="Windows has no limits of the file size")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return full


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[1]


# --- Commands in separate processes ---

RECIPE = """
tokenizer_vocab_size: 300
d_model: 32
encoder_layers: 1
decoder_layers: 1
encoder_attention_heads: 2
decoder_attention_heads: 2
encoder_ffn_dim: 64
decoder_ffn_dim: 64
tokens_per_update: 256
max_steps: 6
learning_rate: 1.0e-3
warmup_steps: 2
logging_steps: 2
eval_strategy: steps
eval_steps: 3
save_steps: 3
precision: fp32
attn_implementation: sdpa
use_cpu: true
num_beams: 2
max_new_tokens: 12
test_file: test
disable_tqdm: true
"""


@pytest.fixture(scope="session")
def make_recipe():
    """Factory: write 120 training pairs, 10 validation and 10 test pairs, and a recipe that trains for a second."""
    from training.demo.corpus import generate

    def make(folder: Path) -> Path:
        data = folder / "data"
        data.mkdir()
        for split, pairs in generate(train=120, validation=10, test=10).items():
            for side, language in enumerate(("en", "de")):
                path = data / f"{'val' if split == 'validation' else split}.{language}"
                path.write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
        path = folder / "small.yaml"
        path.write_text(f"data_dir: {data}\noutput_dir: {folder / 'out'}\n{RECIPE}")
        return path

    return make


@pytest.fixture
def recipe(tmp_path, make_recipe) -> Path:
    return make_recipe(tmp_path)


@pytest.fixture(scope="session")
def small_corpus() -> str:
    """Setup code of a command: the built-in corpus has 4,000 training pairs and 50 validation and test pairs."""
    return "from training.demo.corpus import generate; generate.__defaults__ = 4000, 50, 50, 0"


@pytest.fixture(scope="session")
def save_tutorial():
    """Function that saves the `.pt` file of a tutorial, with 4 heads."""
    path = Path(__file__).parent / "hub" / "importing" / "references.py"
    specification = importlib.util.spec_from_file_location("references", path)
    references = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(references)

    def save(path: Path) -> None:
        class_name, arguments, _, _ = references.CASES["notebook"]
        torch.save(getattr(references, class_name)(d=16, **arguments).state_dict(), path)

    return save


WORK = {  # command -> module with its work, which the command imports after it has parsed its arguments
    "hub.export": "hub.exporting.exporter",
    "hub.import_checkpoint": "hub.importing.importer",
    "hub.push": "hub.publishing.upload",
    "hub.space.__main__": "hub.space.publishing",
}
KILLS = int(os.environ.get("VT_KILLS", "4"))  # per command

SERVER = """
import importlib, json, os, sys, traceback
for name in sys.argv[1:]:
    importlib.import_module(name)

def child(request):
    os.setpgid(0, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)
    sys.stdin = open(0)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)
    sys.argv = [request["program"], *request["arguments"]]
    exec(request["setup_code"])
    status = 0
    try:
        importlib.import_module(request["program"]).main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)

print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
    elif (pid := os.fork()) == 0:
        child(request)
    else:
        os.setpgid(pid, pid)  # also in the parent: a signal may follow immediately
        print(pid, flush=True)
"""


@dataclass
class Program:
    """A running command. `status` blocks until it exits."""

    server: "Server"
    pid: int
    files: dict[str, Path]

    def kill(self, number: int | None = None) -> None:
        os.killpg(self.pid, signal.SIGKILL if number is None else number)

    @property
    def status(self) -> int:
        if not hasattr(self, "_status"):
            self._status = int(self.server.request({"wait": self.pid}))
        return self._status

    @property
    def has_ended(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    @property
    def stdout(self) -> str:
        return self.files["stdout"].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.files["stderr"].read_text(errors="replace")

    def wait_for(self, condition, seconds: float = 500) -> None:
        """Block until `condition()` is true. Fails if the command exits before, or after a timeout."""
        end = time.monotonic() + seconds
        while True:
            has_ended = self.has_ended
            if condition():  # checked after `has_ended`: both may change in between
                return
            assert not has_ended, self.stdout[-2000:] + self.stderr[-3000:]
            assert time.monotonic() < end, f"still waiting after {seconds} s"
            time.sleep(0.01)


class Server:
    """Process that has imported all modules, and forks to start commands quickly."""

    def __init__(self, folder: Path, modules: tuple[str, ...], environment: dict[str, str]):
        self.folder, self.count = folder, 0
        repository = Path(__file__).parents[1]
        defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
        defaults |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(repository)}
        work = [WORK[each] for each in modules if each in WORK]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *modules, *work], env=os.environ | defaults | environment, cwd=repository,
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while (line := self.process.stdout.readline()) != "ready\n":
            assert line, "the server process did not start"

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error) -> None:
        self.process.stdin.close()
        self.process.wait()

    def request(self, request: dict) -> str:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def start(self, program: str, *arguments: str | Path, stdin: str = os.devnull, setup_code: str = "") -> Program:
        """Start `python -m <program> <arguments>`. Its process first executes the Python code `setup_code`."""
        self.count += 1
        files = {name: self.folder / f"{self.count}.{name}" for name in ("stdout", "stderr")}
        for path in files.values():
            path.touch()
        request = {"program": program, "arguments": list(map(str, arguments))}
        request |= {"setup_code": setup_code, "stdin": str(stdin)}
        pid = self.request(request | {name: str(path) for name, path in files.items()})
        return Program(self, int(pid), files)

    def run(self, program: str, *arguments: str | Path, status: int = 0, **options: str) -> Program:
        """Run a command until it exits, and check its exit status."""
        process = self.start(program, *arguments, **options)
        assert process.status == status, process.stdout[-2000:] + process.stderr[-4000:]
        return process


@pytest.fixture(scope="session")
def start_programs(tmp_path_factory):
    """Factory: (modules with a main(), environment variables) -> a `Server`, for use in a with statement."""

    def start(*modules: str, **environment: str) -> Server:
        return Server(tmp_path_factory.mktemp("programs"), modules, environment)

    return start


@pytest.fixture(scope="session")
def kill_at_random_moments():
    """Function (start, check): kill `VT_KILLS` commands, half of them near their end, and call `check()` after each."""

    def kill_at_random_moments(start: Callable[[], Program], check: Callable[[], None]) -> None:
        begin = time.monotonic()
        process = start()  # measures the run time, which is updated after each run
        assert process.status == 0, process.stderr[-4000:]
        check()
        seconds, killed, rng = time.monotonic() - begin, 0, random.Random(0)
        for i in range(10 * KILLS):
            delay = seconds * (rng.random() if i % 2 else 0.8 + 0.3 * rng.random())
            begin = time.monotonic()
            process = start()
            while not (process.has_ended or time.monotonic() > begin + delay):
                time.sleep(0.001)
            process.kill()
            was_killed = process.status == -signal.SIGKILL
            assert was_killed or process.status == 0, process.stderr[-4000:]
            elapsed = time.monotonic() - begin
            seconds = max(seconds, elapsed) if was_killed else elapsed
            check()
            killed += was_killed
            if killed == KILLS:
                return
        raise AssertionError(f"only {killed} of {10 * KILLS} commands could be killed before they exited")

    return kill_at_random_moments
