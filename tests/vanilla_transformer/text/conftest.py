"""Pipelines for the tests of documents and HTML."""

import random

import pytest

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.alignment_vanilla_transformer import word_spans


class ReversingPipeline(TranslationPipeline):
    """Pipeline that returns the words of a sentence in upper case and in reverse order, with alignments."""

    def _translate(self, sentences, *_, return_alignments=False, **__):
        self.sentences = []
        for sentence in sentences:
            self.sentences.append(sentence)
            result, spans = {"translation_text": ""}, word_spans(sentence)
            links = []
            for start, end in reversed(spans):
                text = result["translation_text"] + " " * bool(result["translation_text"])
                result["translation_text"] = text + sentence[start:end].upper()
                links.append(((start, end), (len(text), len(result["translation_text"]))))
            yield result | ({"alignments": links} if return_alignments else {})


@pytest.fixture
def random_translator(make_model, make_tokenizer):
    """Pipeline with random weights and translations of two tokens."""
    tokenizer, sizes = make_tokenizer(True)
    return TranslationPipeline(model=make_model(**sizes), tokenizer=tokenizer, max_new_tokens=2)


@pytest.fixture
def reversing(random_translator):
    return ReversingPipeline(model=random_translator.model, tokenizer=random_translator.tokenizer)


class CopyingPipeline(TranslationPipeline):
    """Pipeline that returns its sentences as translations, with alignments."""

    def _translate(self, sentences, *_, **__):
        for sentence in sentences:
            yield {"translation_text": sentence, "alignments": [(span, span) for span in word_spans(sentence)]}


@pytest.fixture
def copying(random_translator):
    return CopyingPipeline(model=random_translator.model, tokenizer=random_translator.tokenizer)


class ShufflingPipeline(TranslationPipeline):
    """Pipeline that returns the words in random order, without spaces before closing punctuation.

    Some words are missing, and some have no alignment.
    """

    rng = random.Random(29)

    def _translate(self, sentences, *_, **__):
        for sentence in sentences:
            spans = [span for span in word_spans(sentence) if self.rng.random() < 0.9] or word_spans(sentence)[:1]
            text, links = "", []
            for start, end in self.rng.sample(spans, len(spans)):
                word = sentence[start:end]
                text += " " * (bool(text) and word not in ".,)!" and text[-1] != "(")
                if self.rng.random() < 0.8:
                    links.append(((start, end), (len(text), len(text) + len(word))))
                text += word
            yield {"translation_text": text, "alignments": links}


@pytest.fixture
def shuffling(random_translator):
    return ShufflingPipeline(model=random_translator.model, tokenizer=random_translator.tokenizer)
