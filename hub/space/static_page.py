"""The page that needs no server: a folder that any web server, or a static Space, hands out as it is.

The visitor's browser loads the model as ONNX graphs with 8-bit weights and runs them with transformers.js.
"""

import json
import shutil
from pathlib import Path

from huggingface_hub import RepoCard

from hub.atomic_dirs import validate_new_dir, write_dir_atomically
from hub.export import load
from hub.exporting.to_onnx import convert
from hub.exporting.tokenizer import save_tokenizer, tokenizer_folders
from vanilla_transformer.pipeline_vanilla_transformer import EXTRA_TOKENS

FILES = ("index.html", "page.css", "page.js")
NEEDED = ("encoder_model_quantized.onnx", "decoder_model_merged_quantized.onnx")  # the others are for other readers
MAX_SOURCE_TOKENS = 200  # source tokens that the page takes


def make(checkpoint: str, out: Path) -> None:
    """Writes the page of a checkpoint, a folder or a repository on the Hub, into the new folder `out`.

    Raises:
        ValueError: no checkpoint of ours; or `out` exists.
    """
    validate_new_dir(out)
    model, tokenizer = load(checkpoint, "onnx")
    config = model.config
    limit = config.max_position_embeddings if config.position_embedding_type == "learned" else None
    generation = model.generation_config
    own = generation.max_new_tokens or (generation.max_length and generation.max_length - 1)
    most = own or MAX_SOURCE_TOKENS + EXTRA_TOKENS
    name = Path(checkpoint).resolve().name if Path(checkpoint).exists() else checkpoint
    here = Path(__file__).parent / "static"

    def write(folder: Path) -> None:
        for file in FILES:
            shutil.copyfile(here / file, folder / file)
        place = folder / "model"
        place.mkdir()
        convert(model, tokenizer, "int8")(place)
        save_tokenizer(tokenizer, place)
        for path in (place / "onnx").iterdir():
            if path.name not in NEEDED:
                path.unlink()
        source, target = tokenizer_folders(tokenizer, Path("model"))
        table, unknown = model.get_input_embeddings().weight, tokenizer.unk_token_id
        page = {
            "name": name,
            "source": source.as_posix(),
            "target": target.as_posix(),
            "longest": min(MAX_SOURCE_TOKENS, limit or MAX_SOURCE_TOKENS),
            "extra": own or EXTRA_TOKENS,
            "most": min(most, limit - 1) if limit else most,
            "unknown": [] if unknown is None else (table == table[unknown]).all(-1).nonzero()[:, 0].tolist(),
            "bytes": {f"onnx/{file}": (place / "onnx" / file).stat().st_size for file in NEEDED},
        }
        (folder / "page.json").write_text(json.dumps(page, indent=1, ensure_ascii=False), encoding="utf-8")
        card = RepoCard.load(here / "README.md")
        card.data.title = name.rpartition("/")[2]
        if name == checkpoint and not Path(checkpoint).exists():
            card.data.models = [checkpoint]
        (folder / "README.md").write_text(str(card), encoding="utf-8")

    write_dir_atomically(out, write)
