"""Check that code, tests and docs use standard terms: `python tests/check_language.py [PATH ...]`.

Each rule is a regular expression with the term to use instead. It is applied to every line of text, in which
underscores are read as spaces, so that identifiers are checked too. Rules under `PROSE` apply to comments, docstrings
and Markdown only. An exception needs a reason.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

EVERYWHERE = {
    r"wholly|wholes?": "complete, full, valid; of a write: atomic",
    r"(go|goes|going|went|gone) on": "resume, continue",
    r"anew": "again, from scratch",
    r"where (there|nobody|somebody|nothing|none|it|they|that|this|one|no|not|all|its|their)": "if, when",
    r"alone": "only",
    r"behind": "after, following",
    r"in front": "before, prepended to",
    r"besides?": "compared with, next to, in addition to",
    r"(sides|direction) exchanged|exchanged sides": "source and target swapped",
    r"tells?|told|telling": "report, log, state, specify",
    r"says?|said|saying": "specify, state, define",
    r"(nats|bits|bytes|tokens|sentences|words|characters|lines|pairs|batches|updates|steps|seconds|milliseconds|"
    r"launches|kernels|gradients|graphs|tensors|rows|shapes|once|twice|times|minutes|hours|one|two) an? "
    r"(second|token|sentence|batch|line|step|update|process|rank|epoch|word|pair|row|layer|head|beam|shape|week|day|core)":
        "per",
    r"refus(e|es|ed|ing|al|als)": "reject, not supported",
    r"(?<!there )(?<!there's )(is|are|was|were) no (?!longer|more|less|greater|better|op\b)": "is not a",
    r"cures?|cured": "fix, suggested action",
    r"mend(s|ed|ing)?": "fix, correct",
    r"pass(ed|es|ing)? over": "skip, ignore",
    r"cut off": "truncated, cutoff",
    r"(left|leave|leaves|leaving) out": "drop, exclude, omit, skip",
    r"not there|(is|are) there(?=[.,;:)]|$)": "missing, exists",
    r"stands?|stood|standing": "is, is stored, is located",
    r"stand ins?": "stub",
    r"lies|lie|lying": "is stored, is located",
    r"(?<!in )(?<!decimal )places?": "position, path, location",
    r"room": "capacity, remaining length, free space",
    r"drawn|draws?|drew": "sampled; plotted",
    r"pictures?": "plot, figure, image",
    r"look(s|ed|ing)? (at|like)": "attend to, read, inspect",
    r"read off": "inferred from",
    r"asks?|asked|asking": "request",
    r"waited for": "synchronized with",
    r"hand(s|ed|ing)? (on|out|over|back)": "pass, forward, return",
    r"put(s|ting)? together": "merge, assemble",
    r"shar(e|es|ed) out|deal(s|t)? out": "distribute, split",
    r"predict together": "are ensembled",
    r"ours|theirs": "this package's; the source checkpoint's",
    r"stock": "native Transformers class",
    r"nobody|somebody|anybody|someone|everybody": "no one; the user; a third party",
    r"strangers?": "external user",
    r"slips?": "typo",
    r"in (plain |two )?words": "as a readable message",
    r"in silence": "silently",
    r"of (its|their|our|his|the user's|one's) own": "separate, dedicated",
    r"but for|but that": "except for",
    r"such (are|have|is|has)|such as (are|have|is|has)": "those that are",
    r"so many": "this many",
    r"(this|the) very": "exactly this",
    r"likewise": "also",
    r"(is|are) (another|others)": "differs",
    r"(made|makes|make|making) up": "synthetic, generated",
    r"made": "created, generated, built, written",
    r"by heart": "memorized",
    r"embedded corpus": "built-in corpus",
    r"settings of generation|ways? of decoding|parameters? of decoding": "generation config, decoding settings",
    r"linear maps?|input map": "linear layer, projection",
    r"projection before the softmax": "LM head",
    r"(last|final|closing) norm|norm (on|of) (the |its )?embeddings?": "final LayerNorm; embedding LayerNorm",
    r"(begin|end) tokens?": "BOS token, EOS token",
    r"padding's id|id of (the )?padding": "pad token id",
    r"fill(s|ed|ing)?( \w+)? up": "pad",
    r"given beginning|to begin with": "prompt, prefix, starts with",
    r"criteria to stop|reasons to stop": "stopping criteria",
    r"processors of logits": "logits processors",
    r"piece by piece|in pieces": "in chunks",
    r"recorded|recordings?": "captured; saved",
    r"tak(e|es|ing|en) turns|in turns?": "alternate, interleaved",
    r"plain (step|steps|loss|decoding|twin|twins|training|update)": "eager, unsmoothed, reference implementation",
    r"course of the learning rate": "learning-rate schedule",
    r"translations by people": "reference translations",
    r"other direction": "reverse direction",
    r"signs? of life": "progress message",
    r"first process": "main process (rank 0)",
    r"several processes": "multiple processes",
    r"verbs?": "command",
    r"at home": "not uploaded",
    r"(go|goes|going|went|gone) (up|along|into|without)": "is uploaded, is included",
    r"opens a door": "is a credential",
    r"(path|paths) of this machine": "local path",
    r"by (its|the) owner's word": "according to the owner",
    r"not(e|es|ed) down": "record, log",
    r"break(s|ing)? off|broke off|broken off": "fails, is interrupted",
    r"if need be": "if necessary",
    r"endless(ly)?": "unbounded",
    r"remarks?": "warning",
    r"counted from (0|1|one|zero)": "0-based, 1-based",
    r"(?<!on )bad lines?": "invalid pairs",
    r"names (why|what|both)": "the message contains",
    r"witness(es)?": "regression fixture",
    r"within it": "context manager that",
    r"some (minutes|seconds|hours|ten|twenty|thirty|thousand|hundred|[0-9]+)": "a few, about",
    r"alike": "the same way",
    r"hence|thus|thereby|whence|hitherto|therein|thereof|wherein": "so, therefore",
    r"lest|albeit|amid|amidst|ere|nigh|aught|naught": "plain words",
    r"\w*(normalis|regularis|recognis|initialis|optimis|tokenis|serialis|organis|minimis|maximis|summaris|visualis)\w*":
        "American spelling",
    r"licences?|behaviours?|colours?|favours?|centres?|artefacts?|catalogues?|labelled|modelled": "American spelling",
}  # fmt: skip
PROSE = {
    r"folders?": "directory",
    r"widths?": "hidden size, inner dimension, head dimension; number of candidates",
}
DOCSTRING_START = re.compile(r"(What|Of|By|As|Whatever|Such|Those|Within|Where)\b")

# (path prefix, expression that matches the allowed text, reason)
EXCEPTIONS: list[tuple[str, str, str]] = [
    ("tests/check_language.py", r".*", "the list of the terms"),
    ("tests/witness/", r".*", "checkpoints of an earlier version, kept byte for byte"),
    ("CHANGELOG.md", r"`[^`]*`", "names of earlier versions"),
    ("", r"\bfinal_norm\b", "the name of a config field"),
    ("", r"\bdef stock\(|\.stock\(|['\"`]stock['\"`(]", "a method of the tokenizer that saved checkpoints also have"),
    ("", r"tests/witness|/ \"witness\" /|if \"witness\" in", "name of the directory"),
    ("tests/vanilla_transformer/", r"\bdata\.draw\(", "a method of hypothesis"),
    ("training/demo/", r"(?i)verbs?|places?", "grammatical terms"),
    ("tests/training/demo/", r"(?i)verbs?|places?|look for her", "grammatical terms, and a sentence of the corpus"),
    ("training/distillation/pair_table.py", r'"left_out"', "key of files on disk"),
    ("", r"\bwidth(_ratios)?=[\"(\d]", "an HTML attribute, and arguments of plots"),
    ("docs/annotated.ipynb", r"\bverb\b", "a part of speech"),
    ("training/recipe/arguments.py", r"^RENAMED_VALUES = .*", "values of earlier versions"),
    ("tests/training/recipe/test_reading.py", r'"(recorded|refuse|bad_lines)"', "keys and values of earlier versions"),
    ("hub/import", r'"left_out"', "a key of import_report.json"),
    ("tests/hub/", r'"left_out"', "a key of import_report.json"),
    ("hub/importing/toolkits/fairseq.py", r"no_decoder_final_norm", "a setting of fairseq"),
    ("vanilla_transformer/shared/command_line.py", r'^    "bad_lines": ', "old name of a renamed option"),
    ("tests/training/distillation/test_pair_table.py", r'"left_out"', "key of files on disk"),
    ("vanilla_transformer/shared/ctranslate2_conversion.py", r"no_final_norm=", "an argument of CTranslate2"),
    ("vanilla_transformer/shared/ctranslate2_pipeline.py", r"return_end_token=", "an argument of CTranslate2"),
    ("hub/space/static/index.html", r"width=device-width", "HTML"),
]


def prose_of(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each line of comments, docstrings and Markdown."""
    if path.suffix == ".py":
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                start = node.body[0]
                lines = text.split("\n")[start.lineno - 1 : start.end_lineno]
                yield from enumerate(lines, start.lineno)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    elif path.suffix in (".yaml", ".yml", ".toml"):
        yield from ((i, line.partition("#")[2]) for i, line in enumerate(text.split("\n"), 1))
    else:
        yield from enumerate(text.split("\n"), 1)


def docstring_starts(path: Path, text: str) -> Iterator[tuple[int, str]]:
    is_code = path.suffix == ".py" and "witness" not in path.parts
    for node in ast.walk(ast.parse(text)) if is_code else ():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            doc = ast.get_docstring(node)
            if doc and DOCSTRING_START.match(doc):
                yield node.body[0].lineno, doc.split("\n")[0]


def findings(path: Path, name: str, text: str) -> Iterator[str]:
    """Yield one message for each term that a rule forbids and no exception allows."""
    allowed = [re.compile(each) for prefix, each, _ in EXCEPTIONS if name.startswith(prefix)]
    for rules, lines in ((EVERYWHERE, enumerate(text.split("\n"), 1)), (PROSE, prose_of(path, text))):
        numbered = list(lines)
        joined = "\n".join(line for _, line in numbered).replace("_", " ")
        terms = {
            re.compile(rf"(?<![\w-])(?:{each})(?![\w-])", re.IGNORECASE | re.MULTILINE): rules[each] for each in rules
        }
        terms = {
            term: instead for term, instead in terms.items() if term.search(joined)
        }  # rare: saves most of the time
        for number, line in numbered:
            spans = [match.span() for each in allowed for match in each.finditer(line)] if terms else []
            for term, instead in terms.items():
                for match in term.finditer(line.replace("_", " ")):
                    if not any(start <= match.start() and match.end() <= end for start, end in spans):
                        yield f"{name}:{number}: {match[0]!r}: use {instead}"
    for number, start in docstring_starts(path, text):
        yield f"{name}:{number}: docstring starts with {start.split()[0]!r}: use an imperative or a noun phrase"


def read(path: Path) -> str:
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def main() -> None:
    """Print the findings in the tracked files below the given paths, and exit with status 1 if there are any."""
    root = Path(__file__).parents[1]
    listed = subprocess.run(["git", "ls-files", "-z", *sys.argv[1:]], cwd=root, capture_output=True, check=True).stdout
    suffixes = (".py", ".md", ".yaml", ".yml", ".toml", ".ipynb", ".html", ".js", ".cff")
    names = [name for name in listed.decode().split("\0") if name.endswith(suffixes) or name == "Makefile"]
    found = [line for name in names for line in findings(root / name, name, read(root / name))]
    print(*found, f"{len(found)} terms to replace in {len(names)} files", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
