import importlib.util
import sys
from pathlib import Path

import pytest


def load_beside(name: str):
    """A module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def references():
    """The module of the tutorials' models."""
    return load_beside("references")


@pytest.fixture(scope="module")
def hub():
    """The far side of the Hub's protocol, on loopback."""
    server = load_beside("hub_server").Hub()
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
    from training.demo_corpus import generate

    return generate()["test"]
