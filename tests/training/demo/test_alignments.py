"""Word alignments of the demo corpus, and alignments of a trained model."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.alignment_vanilla_transformer import align, choose_alignment_heads, word_spans

spec = importlib.util.spec_from_file_location("demo_alignments", Path(__file__).with_name("alignments.py"))
demo_alignments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo_alignments)
Aligned, aligned_sentences = demo_alignments.Aligned, demo_alignments.aligned_sentences
to_word_links, error_rate = demo_alignments.to_word_links, demo_alignments.error_rate


def link_words(sentence: Aligned, links: set[tuple[int, int]]) -> set[str]:
    source, target = ([text[a:b] for a, b in word_spans(text)] for text in (sentence.source, sentence.target))
    return {f"{source[i]}-{target[j]}" for i, j in links}


@pytest.fixture(scope="module")
def sentences():
    return {each.source: each for each in aligned_sentences(14)}


def test_links_of_negated_future(sentences):
    sentence = sentences["He will not look for her sweet strawberry patiently."]
    assert sentence.target == "Er wird ihre süße Erdbeere nicht geduldig suchen."
    sure = "He-Er not-nicht look-suchen for-suchen her-ihre sweet-süße strawberry-Erdbeere patiently-geduldig .-."
    assert link_words(sentence, sentence.sure) == set(sure.split())
    assert link_words(sentence, sentence.possible - sentence.sure) == {
        "will-wird",
        "will-suchen",
        "look-wird",
        "for-wird",
    }


def test_links_of_contraction_and_expression(sentences):
    sentence = next(each for each in sentences.values() if " im Sommer" in each.target)
    assert {"in-im", "summer-Sommer"} <= link_words(sentence, sentence.sure)
    sentence = sentences["Does the guest forget the pillow every morning?"]
    sure = "the-der guest-Gast forget-Vergisst the-das pillow-Kissen every-jeden morning-Morgen ?-?"
    assert link_words(sentence, sentence.sure) == set(sure.split())


def test_sentences_contain_no_numbers(sentences):
    for each in sentences.values():
        assert "⟦" not in each.source + each.target
        assert each.sure <= each.possible
        assert each.source[0].isupper()
        assert each.target[0].isupper()


def test_error_rate():
    gold = [Aligned("a b", "c d", {(0, 0)}, {(0, 0), (1, 1)}), Aligned("a", "b", {(0, 0)}, {(0, 0)})]
    assert error_rate([{(0, 0), (1, 1)}, {(0, 0)}], gold) == 0
    assert error_rate([{(1, 0)}, set()], gold) == 100
    assert error_rate([{(0, 0), (1, 0)}, set()], gold) == pytest.approx(50)  # 1 - (1 + 1) / (2 + 2)
    assert to_word_links([((2, 3), (0, 1))], gold[0]) == {(1, 0)}


@pytest.mark.slow
def test_trained_model_aligns_reversed_words(special_tokens):
    """From `a1 a2 a3` to `b3 b2 b1`: with the selected heads, the error rate is at most 25 %."""
    torch.manual_seed(0)
    rng = random.Random(0)
    vocabulary = [*special_tokens.values(), *(f"{side}{i}" for side in "ab" for i in range(20))]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **special_tokens)
    size = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    size |= {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "dropout": 0.0}
    config = VanillaTransformerConfig(vocab_size=len(vocabulary), norm_position="pre", initialization="normal", **size)
    model = VanillaTransformerForConditionalGeneration(config)

    def sample(n: int) -> list[list[int]]:
        return [[rng.randrange(20) for _ in range(rng.randint(3, 7))] for _ in range(n)]

    def texts(rows: list[list[int]]) -> tuple[list[str], list[str]]:
        return (
            [" ".join(f"a{i}" for i in row) for row in rows],
            [" ".join(f"b{i}" for i in reversed(row)) for row in rows],
        )

    steps = 300
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.98))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, step / 50) * (1 - step / steps)
        sources, targets = texts(sample(64))
        batch = tokenizer(sources, text_target=targets, padding=True, return_tensors="pt")
        loss = model(**batch | {"labels": batch["labels"].masked_fill(batch["labels"] == 0, -100)}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    rows = sample(70)
    sources, targets = texts(rows)
    heads = choose_alignment_heads(model, tokenizer, sources[:20], targets[:20])
    gold = []
    for source, target, row in zip(sources, targets, rows, strict=True):
        links = {(i, len(row) - 1 - i) for i in range(len(row))}
        gold.append(Aligned(source, target, links, links))
    alignments = align(model, tokenizer, sources, targets, heads=heads)
    assert error_rate([to_word_links(*pair) for pair in zip(alignments, gold, strict=True)], gold) <= 25
    untrained = VanillaTransformerForConditionalGeneration(config).eval()
    alignments = align(untrained, tokenizer, sources, targets, heads=heads)
    assert error_rate([to_word_links(*pair) for pair in zip(alignments, gold, strict=True)], gold) > 50
