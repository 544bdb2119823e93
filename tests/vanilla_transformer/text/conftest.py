"""A translator whose translations are known: it turns the order of words around, and knows which is which."""

import pytest

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.alignment_vanilla_transformer import word_spans


class Reversing(TranslationPipeline):
    """The words of a sentence in upper case, from the last to the first, with single spaces between them."""

    def _translate(self, sentences, *_, return_alignments=False, **__):
        self.seen = []
        for sentence in sentences:
            self.seen.append(sentence)
            result, spans = {"translation_text": ""}, word_spans(sentence)
            links = []
            for start, end in reversed(spans):
                text = result["translation_text"] + " " * bool(result["translation_text"])
                result["translation_text"] = text + sentence[start:end].upper()
                links.append(((start, end), (len(text), len(result["translation_text"]))))
            yield result | ({"alignments": links} if return_alignments else {})


@pytest.fixture
def random_translator(make_model, make_tokenizer):
    """A model with random weights, whose translations have two tokens."""
    tokenizer, sizes = make_tokenizer(True)
    return TranslationPipeline(model=make_model(**sizes), tokenizer=tokenizer, max_new_tokens=2)


@pytest.fixture
def reversing(random_translator):
    return Reversing(model=random_translator.model, tokenizer=random_translator.tokenizer)
