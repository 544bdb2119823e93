import argparse
import importlib.util
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hub.importing.layouts import LAYOUTS


def load_module(path: str):
    """A module in or below this folder, which is no package."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


TUTORIALS = load_module("importing/references.py")


@pytest.fixture(scope="session")
def references():
    """The module of the tutorials' models."""
    return TUTORIALS


@pytest.fixture(scope="session")
def load_tests_module():
    """(path in this folder) -> the module."""
    return load_module


@pytest.fixture(params=TUTORIALS.CASES)
def case(request) -> str:
    """Each of the tutorials' models by name."""
    return request.param


@pytest.fixture
def make_reference():
    """(name of a case, width) -> reference model, its state, layout, metadata, heads."""

    def make(name: str, d: int = 16, **more):
        class_name, arguments, layout, metadata = TUTORIALS.CASES[name]
        torch.manual_seed(0)
        model = TUTORIALS.randomize(getattr(TUTORIALS, class_name)(d=d, **(arguments | more)))
        state = {key: value.clone() for key, value in model.state_dict().items()}
        return model, state, LAYOUTS[layout], metadata, getattr(model, "heads", 4)

    return make


@pytest.fixture
def save_as():
    """(how, state, folder) -> the file that one kind of training code makes of a model's state."""

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
def save_checkpoint(tmp_path, make_model, make_tokenizer):
    def save(shared: bool = True, **overrides):
        """A checkpoint folder of a small random model with a tokenizer: (model, tokenizer, folder)."""
        tokenizer, sizes = make_tokenizer(shared)
        model = make_model(**(sizes | overrides))
        model.generation_config.update(num_beams=5, max_new_tokens=12)
        model.save_pretrained(tmp_path / "ours")
        tokenizer.save_pretrained(tmp_path / "ours")
        return model, tokenizer, tmp_path / "ours"

    return save


@pytest.fixture
def full_disk():
    """Within `with full_disk():` no file may be larger than 10,000 bytes: the system answers with a disk's error."""

    @contextmanager
    def full():
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return full


@pytest.fixture(scope="module")
def hub():
    """The far side of the Hub's protocol, on loopback."""
    server = load_module("hub_server.py").Hub()
    yield server
    server.shutdown()


@pytest.fixture
def run_main(monkeypatch, tmp_path):
    """(a program's main, its arguments, status=...) runs it in `tmp_path`, to that exit status."""

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


SMALL = {
    "norm_position": "post",
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
SHORT = {
    "processes": 1,
    "max_tokens": 1024,
    "max_steps": 300,
    "learning_rate": 0.004,
    "eval_strategy": "no",
    "precision": "fp32",
}


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory, start_programs, repository) -> Path:
    """A small model after some hundred updates on the embedded corpus, by the training program."""
    folder = tmp_path_factory.mktemp("demo") / "model"
    settings = [str(word) for key, value in (SMALL | SHORT).items() for word in (f"--{key}", value)]
    with start_programs("training.train") as programs:
        recipe = repository / "training" / "recipes" / "demo.yaml"
        programs.run("training.train", recipe, "--output_dir", folder, *settings)
    return folder


@pytest.fixture(scope="session")
def demo_sentences() -> list[tuple[str, str]]:
    """The 1,000 held-out pairs of the embedded corpus: (English, German)."""
    from training.demo.corpus import generate

    return generate()["test"]
