import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from hub.importing.layouts import LAYOUTS
from hub.importing.unpickling import try_load


def load_module(path: str):
    """Import a module of this directory, which is not a package."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # required by dataclasses
    spec.loader.exec_module(module)
    return module


TUTORIALS = load_module("importing/references.py")


@pytest.fixture(autouse=True)
def trust_pickles(monkeypatch):
    """Load the tests' files in this process, because a new process per file takes seconds."""
    monkeypatch.setattr("hub.importing.checkpoint_file.try_load_in_process", lambda path, _: try_load(path))


@pytest.fixture(scope="session")
def references():
    """Module with the models of the tutorials."""
    return TUTORIALS


@pytest.fixture(scope="session")
def load_tests_module():
    """Function that imports a module by its path in this directory."""
    return load_module


@pytest.fixture(params=TUTORIALS.CASES)
def case(request) -> str:
    """Name of each tutorial model."""
    return request.param


@pytest.fixture
def make_reference():
    """Function: name of a case, hidden size -> (reference model, state, layout, metadata, number of heads)."""

    def make(name: str, d: int = 16, **more):
        class_name, arguments, layout, metadata = TUTORIALS.CASES[name]
        torch.manual_seed(0)
        model = TUTORIALS.randomize(getattr(TUTORIALS, class_name)(d=d, **(arguments | more)))
        state = {key: value.clone() for key, value in model.state_dict().items()}
        return model, state, LAYOUTS[layout], metadata, getattr(model, "heads", 4)

    return make


@pytest.fixture
def save_as():
    """Function that saves a state dict in the format of one kind of training code."""

    def save_as(wrapper: str, state, folder: Path) -> Path:
        path = folder / ("model.safetensors" if wrapper == "safetensors" else "model.pt")
        wrapped = {
            "bare": state,
            "hkproj": {"epoch": 3, "model_state_dict": state, "optimizer_state_dict": {"state": {}}, "global_step": 7},
            "state_dict": {"state_dict": state, "optimizer": {}},
            "lightning": {"state_dict": {f"model.{key}": value for key, value in state.items()}, "epoch": 1},
            "ddp": {f"module.{key}": value for key, value in state.items()},
            "compiled": {f"_orig_mod.{key}": value for key, value in state.items()},
            "jadore": {"epoch": 1, "settings": argparse.Namespace(n_head=4, src_pad_idx=1), "model": state},
        }
        if wrapper == "safetensors":
            save_file({key: value.contiguous() for key, value in state.items()}, path)
        else:
            torch.save(wrapped[wrapper], path)
        return path

    return save_as


@pytest.fixture
def save_reference(make_reference, save_as, tmp_path):
    """Function that saves the weights of a tutorial model and returns the path of the file."""
    return lambda name, wrapper="bare", **more: save_as(wrapper, make_reference(name, **more)[1], tmp_path)


@pytest.fixture
def save_checkpoint(tmp_path, make_model, make_tokenizer):
    def save(shared: bool = True, **overrides):
        """Save a small random model with a tokenizer, and return (model, tokenizer, directory)."""
        tokenizer, sizes = make_tokenizer(shared)
        model = make_model(**(sizes | overrides))
        model.generation_config.update(num_beams=5, max_new_tokens=12)
        model.save_pretrained(tmp_path / "checkpoint")
        tokenizer.save_pretrained(tmp_path / "checkpoint")
        return model, tokenizer, tmp_path / "checkpoint"

    return save


@pytest.fixture(scope="module")
def hub():
    """Local server that implements the protocol of the Hub."""
    server = load_module("hub_server.py").Hub()
    yield server
    server.shutdown()


@pytest.fixture
def run_main(monkeypatch, tmp_path):
    """Function that runs `main` of a command in `tmp_path` and checks its exit status."""

    def run(main, *arguments, status: int = 0) -> None:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        monkeypatch.chdir(tmp_path)
        if status:
            with pytest.raises(SystemExit) as exit_:
                main()
            assert exit_.value.code == status
        else:
            main()

    return run


@pytest.fixture
def assert_rejected(run_main, tmp_path, capsys):
    """Function that checks that a command fails with a message of one line, and does not write `out`."""

    def check(main, *arguments, message: str) -> None:
        run_main(main, *arguments, status=2)
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not (tmp_path / "out").exists()

    return check


DEMO = {"norm_position": "post", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128}
DEMO |= {"decoder_ffn_dim": 128, "num_processes": 1, "tokens_per_update": 1024, "max_steps": 600}
DEMO |= {"learning_rate": 0.004, "eval_strategy": "no", "precision": "fp32", "attn_implementation": "sdpa"}


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory, start_programs, repository, small_corpus) -> Path:
    """Checkpoint of a small model, trained for 600 updates on the built-in corpus, once for all test processes."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "demo"
    settings = [str(word) for key, value in DEMO.items() for word in (f"--{key}", value)]
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "all_results.json").exists():
            with start_programs("training.train") as programs:
                recipe = repository / "training" / "recipes" / "demo.yaml"
                arguments = ("--output-dir", folder, *settings)
                programs.run("training.train", recipe, *arguments, setup_code=small_corpus)
    return folder


@pytest.fixture(scope="session")
def demo_sentences() -> list[tuple[str, str]]:
    """250 held-out pairs of the built-in corpus: (English, German)."""
    from training.demo.corpus import generate

    return generate(train=0, validation=0, test=250)["test"]


@pytest.fixture
def opus_folder(tmp_path, sentencepiece_models):
    """Function that saves an OPUS-MT model: MarianMT with random weights, two SentencePiece models, one vocabulary.

    The pad token has the last id, is the decoder start token, and is banned during generation.
    """
    from sentencepiece import SentencePieceProcessor

    def make(name: str = "opus-mt-en-de", **size) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        tokens = dict.fromkeys(("</s>", "<unk>"))
        for side, content in zip(("source", "target"), sentencepiece_models.values(), strict=True):
            (folder / f"{side}.spm").write_bytes(content)
            pieces = SentencePieceProcessor(model_proto=content)
            tokens |= dict.fromkeys(pieces.id_to_piece(i) for i in range(pieces.get_piece_size()))
        pad = len(tokens)
        vocabulary = {token: i for i, token in enumerate([*tokens, "<pad>"])}
        (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
        (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
        ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "bos_token_id": 0}
        small = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
        small |= {f"{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
        config = MarianConfig(
            **({"vocab_size": pad + 1} | ids | small | size), activation_function="swish", scale_embedding=True,
            forced_eos_token_id=0,
        )  # fmt: skip
        model = MarianMTModel(config).eval()
        with torch.no_grad():
            for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if "embed_positions" not in key:
                    tensor.add_(0.2 * torch.randn(tensor.shape))
        model.generation_config = GenerationConfig(
            **ids, bad_words_ids=[[pad]], forced_eos_token_id=0, max_length=16, num_beams=6, renormalize_logits=True
        )
        model.save_pretrained(folder)
        return folder

    return make


CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, CHROMIUM)), None)
    assert executable, f"This test requires a browser. Install one of {', '.join(CHROMIUM)}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def transformers_js(tmp_path_factory, repository) -> Path:
    """Directory node_modules with the version of transformers.js that the static page loads."""
    page = (repository / "hub" / "space" / "static" / "page.js").read_text(encoding="utf-8")
    (package,) = re.findall(r"https://cdn.jsdelivr.net/npm/(@huggingface/transformers@[\d.]+)", page)
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text("{}")
    npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", package]  # scripts download GPU files
    if not shutil.which("npm") or subprocess.run(npm, cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip(f"{package} cannot be installed.")
    return folder / "node_modules"


@pytest.fixture
def open_page(browser, transformers_js):
    """Function that opens a page in a browser, with access to transformers.js as the only external resource."""

    def from_npm(route) -> None:
        address = route.request.url
        match = re.fullmatch(r"https://cdn.jsdelivr.net/npm/((?:@[^/]+/)?[^@/]+)@([^/]+)/?(.*)", address)
        if not match:
            outside.append(address)
            route.abort()
            return
        package = transformers_js / match[1]
        package_json = json.loads((package / "package.json").read_text())
        assert package_json["version"] == match[2], address
        path = package / (match[3] or package_json["jsdelivr"])
        kind = "application/wasm" if path.suffix == ".wasm" else "text/javascript"
        route.fulfill(path=path, content_type=kind, headers={"Access-Control-Allow-Origin": "*"})

    outside: list[str] = []
    with ExitStack() as stack:

        def open_page(folder: Path, width: int = 1280):
            server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SilentHandler, directory=folder))
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            context = browser.new_context(viewport={"width": width, "height": 900})
            stack.callback(context.close)
            address = f"http://127.0.0.1:{server.server_address[1]}/"
            context.route(lambda url: not url.startswith((address, "data:", "blob:")), from_npm)
            page = context.new_page()
            page.goto(address)
            return page

        yield open_page
    assert not outside, "The page requested external resources."


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def no_graphs(monkeypatch):
    """Write placeholder files instead of graphs, because tracing takes seconds."""
    from hub.space import static_page

    def convert(model, tokenizer, quantization):
        def write(folder):
            (folder / "onnx").mkdir()
            for name in (*static_page.GRAPHS, "decoder_model_quantized.onnx"):
                (folder / "onnx" / name).write_bytes(b"graph")
            (folder / "config.json").write_text(json.dumps({"quantization": quantization}))

        return write

    monkeypatch.setattr(static_page, "convert", convert)


@pytest.fixture(scope="session")
def onnx_translator(repository):
    """Class in docs/exporting.md."""
    page = (repository / "docs" / "exporting.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(import json.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict = {}
    exec(code, names)
    return names["Translator"]
