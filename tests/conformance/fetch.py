"""Download the model tests of Transformers as the package `tests`.

    python tests/conformance/fetch.py DIRECTORY

The source distribution comes from PyPI, in the installed version of Transformers. Sibling modules that it lacks
(exporters, generation) are replaced by empty mixins.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

MISSING_MODULES = {
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
    for name, text in MISSING_MODULES.items():
        path = folder / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
