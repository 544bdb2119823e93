"""Page without a server: a directory of files that any web server or a static Space can serve.

The browser loads the model as ONNX graphs with 8-bit weights and runs them with transformers.js.
"""

import json
import shutil
import sys
from pathlib import Path

from huggingface_hub import RepoCard

from vanilla_transformer.pipeline_vanilla_transformer import EXTRA_TOKENS
from vanilla_transformer.shared.atomic_io import validate_new_dir, write_dir_atomically

from ..exporting.exporter import load
from ..exporting.to_onnx import convert
from ..exporting.tokenizer import save_tokenizer, tokenizer_dirs

FILES = ("index.html", "page.css", "page.js")
GRAPHS = ("encoder_model_quantized.onnx", "decoder_model_merged_quantized.onnx")  # graphs that transformers.js loads
MAX_SOURCE_TOKENS = 200


def create_page(checkpoint: str, out: Path) -> None:
    """Write the page of a checkpoint, a directory or a repository on the Hub, to the new directory `out`."""
    validate_new_dir(out)
    model, tokenizer = load(checkpoint, "onnx")
    config = model.config
    positions = config.max_position_embeddings if config.position_embedding_type == "learned" else sys.maxsize
    generation = model.generation_config
    max_new_tokens = generation.max_new_tokens or (generation.max_length and generation.max_length - 1)
    is_local = Path(checkpoint).exists()
    name = Path(checkpoint).resolve().name if is_local else checkpoint
    here = Path(__file__).parent / "static"

    def write(folder: Path) -> None:
        for file in FILES:
            shutil.copyfile(here / file, folder / file)
        model_dir = folder / "model"
        model_dir.mkdir()
        convert(model, tokenizer, "int8")(model_dir)
        save_tokenizer(tokenizer, model_dir)
        for path in (model_dir / "onnx").iterdir():
            if path.name not in GRAPHS:
                path.unlink()
        source, target = tokenizer_dirs(tokenizer, Path("model"))
        table, unknown = model.get_input_embeddings().weight, tokenizer.unk_token_id
        page = {
            "name": name,
            "source": source.as_posix(),
            "target": target.as_posix(),
            "max_source_tokens": min(MAX_SOURCE_TOKENS, positions),
            "extra_tokens": max_new_tokens or EXTRA_TOKENS,
            "max_new_tokens": min(max_new_tokens or MAX_SOURCE_TOKENS + EXTRA_TOKENS, positions - 1),
            "unknown_ids": [] if unknown is None else (table == table[unknown]).all(-1).nonzero()[:, 0].tolist(),
            "file_sizes": {f"onnx/{file}": (model_dir / "onnx" / file).stat().st_size for file in GRAPHS},
        }
        (folder / "page.json").write_text(json.dumps(page, indent=1, ensure_ascii=False), encoding="utf-8")
        card = RepoCard.load(here / "README.md")
        card.data.title = name.rpartition("/")[2]
        if not is_local:
            card.data.models = [checkpoint]
        (folder / "README.md").write_text(str(card), encoding="utf-8")

    write_dir_atomically(out, write)
