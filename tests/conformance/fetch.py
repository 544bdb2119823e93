"""Lays Hugging Face's own model tests out as the package `tests`, from the source distribution of transformers.

    python tests/conformance/fetch.py FOLDER

The sources come from PyPI, at the version that is installed here; nothing of them is kept in this repository. They
import a few siblings that the distribution leaves out (exporters, generation, distributed): those become empty mixins.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

LEFT_OUT = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}


def main() -> None:
    folder = Path(sys.argv[1]) / f"transformers-{transformers.__version__}"
    if (folder / "tests" / "test_modeling_common.py").exists():
        return
    with tempfile.TemporaryDirectory() as downloads:
        requirement = f"transformers=={transformers.__version__}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--no-build-isolation", "--dest", downloads, requirement], check=True)
        (archive,) = Path(downloads).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tests = [m for m in tar.getmembers() if m.name.count("/") == 2 and m.name.split("/")[1] == "tests"]
            tar.extractall(sys.argv[1], members=tests, filter="data")
    for name, text in LEFT_OUT.items():
        path = folder / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
