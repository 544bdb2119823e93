"""Hashes of sentence pairs."""

from itertools import product

from training.data.parallel_text import ParallelText


def test_hash_is_compatible_with_earlier_versions():
    """From commit 5b43b0a: an interrupted run stores it in its `recipe.yaml` and must resume."""
    text = ParallelText(["the dog runs", "a \\ b", ""], ["der Hund rennt", "größer", "x"])
    assert text.sha256() == "4b164584e78e04b1a6b5615cab3172274ed2e73328f4f93f2e94a0a2a983316c"


def test_hashes_are_unique_with_tabs_and_newlines():
    words = ["".join(letters) for length in range(3) for letters in product("a\t\n", repeat=length)]
    pairs = list(product(words, words))
    texts = [(pair,) for pair in pairs] + list(product(pairs[::3], pairs))
    hashes = {ParallelText([pair[0] for pair in text], [pair[1] for pair in text]).sha256() for text in texts}
    assert len(hashes) == len(texts)
