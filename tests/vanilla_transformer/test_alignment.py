"""Comparison of alignments and token scores with simple reference implementations."""

import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AttentionInterface, GenerationConfig, TokenizersBackend
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from vanilla_transformer import TranslationPipeline
from vanilla_transformer import alignment_vanilla_transformer as alignment
from vanilla_transformer.alignment_vanilla_transformer import align, choose_alignment_heads, word_spans
from vanilla_transformer.modeling_vanilla_transformer import scaled_dot_product_attention

SOURCES = ["the dog runs", "a cat sleeps in the house, today", "two", "the old man reads"]
TARGETS = ["der Hund rennt", "eine Katze schläft im Haus.", "zwei!", "der Mann"]


def words(text: str) -> list[str]:
    return [text[start:end] for start, end in word_spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The dog's 2 cats.", ["The", "dog", "'", "s", "2", "cats", "."]),
        (" \t\n", []),
        ("schläft(fest)", ["schläft", "(", "fest", ")"]),
        ("schla\u0308ft", ["schla\u0308ft"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("我爱你。", ["我", "爱", "你", "。"]),
        ("a👍🏽b", ["a", "👍", "🏽", "b"]),
        ("co\u00adop", ["co\u00adop"]),
    ],
)
def test_word_spans(text, expected):
    assert words(text) == expected


def reference_links(model, tokenizer, source: str, target: str, heads) -> list:
    """Return the links of one pair, computed token by token."""
    source_encoding = tokenizer(source, return_offsets_mapping=True)
    target_encoding = tokenizer(text_target=target, return_offsets_mapping=True)
    ids = [model.config.decoder_start_token_id, *target_encoding["input_ids"][:-1]]
    with torch.no_grad():
        attentions = model(
            input_ids=torch.tensor([source_encoding["input_ids"]]),
            decoder_input_ids=torch.tensor([ids]),
            output_attentions=True,
        ).cross_attentions
    if heads is None:
        heads = [(layer, head) for layer in range(len(attentions)) for head in range(attentions[0].shape[1])]
    links = []
    for start, end in word_spans(target):
        rows = [i for i, (a, b) in enumerate(target_encoding["offset_mapping"]) if a < end and start < b]
        totals = {}
        for a, b in word_spans(source):
            columns = [i for i, (c, d) in enumerate(source_encoding["offset_mapping"]) if c < b and a < d]
            totals[a, b] = sum(
                float(attentions[layer][0, head, i, j]) for layer, head in heads for i in rows for j in columns
            )
        links.append((max(totals, key=totals.get), (start, end)))
    return links


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("heads", [None, [[0, 3], [1, 1]]])
def test_align_matches_reference(make_model, make_tokenizer, shared, heads):
    tokenizer, sizes = make_tokenizer(shared)
    model = make_model(**sizes)
    model.set_attn_implementation("sdpa")
    actual = align(model, tokenizer, SOURCES, TARGETS, heads=heads, batch_size=3)
    if heads is not None:
        from_end = [[layer - 2 if layer == 1 else layer, head] for layer, head in heads]
        assert actual == align(model, tokenizer, SOURCES, TARGETS, heads=from_end[::-1])
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    assert actual == [reference_links(model, tokenizer, *pair, heads) for pair in zip(SOURCES, TARGETS, strict=True)]


def test_align_computes_only_the_weights_of_alignment_heads(make_model, make_tokenizer, monkeypatch):
    """All weights of a long sentence would need much memory."""
    tokenizer, sizes = make_tokenizer(True)
    model, modules = make_model(**sizes), []

    def record(module, *args, **kwargs):
        modules.append(module)
        return scaled_dot_product_attention(module, *args, **kwargs)

    monkeypatch.setattr("vanilla_transformer.modeling_vanilla_transformer.scaled_dot_product_attention", record)
    align(model, tokenizer, SOURCES, TARGETS, heads=[[1, 0], [1, 2]])
    assert [(each.layer_idx, each.is_causal) for each in modules] == [(1, False)]
    modules.clear()
    align(model, tokenizer, SOURCES, TARGETS)
    assert len(modules) == 6  # of all layers of the encoder and the decoder


def test_align_calls_attention_of_the_user(make_model, make_tokenizer):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    returns_weights = True

    def reversed_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        heads, weights = scaled_dot_product_attention(module, query, -key, value, attention_mask, scaling)
        return heads, weights if returns_weights else None

    AttentionInterface.register("reversed", reversed_attention)
    AttentionMaskInterface.register("reversed", eager_mask)
    expected = align(model, tokenizer, SOURCES, TARGETS)
    model.set_attn_implementation("reversed")
    actual = align(model, tokenizer, SOURCES, TARGETS)
    assert actual == [reference_links(model, tokenizer, *pair, None) for pair in zip(SOURCES, TARGETS, strict=True)]
    assert actual != expected
    returns_weights = False
    with pytest.raises(ValueError, match="The attention function 'reversed' returns no weights"):
        align(model, tokenizer, SOURCES, TARGETS)


def test_align_does_not_modify_model(make_model, make_tokenizer):
    """Other threads may use the model at the same time."""
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes).train()
    model.set_attn_implementation("sdpa")
    states = set()
    model.model.encoder.register_forward_hook(
        lambda *_: states.add((model.training, model.config._attn_implementation))
    )
    expected = align(model, tokenizer, SOURCES, TARGETS)
    choose_alignment_heads(model, tokenizer, SOURCES, TARGETS)
    assert states == {(True, "sdpa")}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            actual = list(pool.map(lambda _: align(model, tokenizer, SOURCES, TARGETS), range(12)))
    finally:
        sys.setswitchinterval(interval)
    assert actual == [expected] * 12
    assert states == {(True, "sdpa")}
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_texts_without_words_have_no_links(make_model, make_tokenizer):
    tokenizer, sizes = make_tokenizer(True)
    actual = align(make_model(**sizes), tokenizer, ["", "a dog", " "], ["der Hund", "", "x"])
    assert actual == [[], [], []]


def test_alignment_heads_of_checkpoint_are_default(make_model, make_tokenizer, tmp_path):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    model.generation_config = GenerationConfig(decoder_start_token_id=1, alignment_heads=[[1, 2]])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    actual = align(loaded, tokenizer, SOURCES, TARGETS)
    assert actual == align(model, tokenizer, SOURCES, TARGETS, heads=[[1, 2]])
    assert actual != align(model, tokenizer, SOURCES, TARGETS, heads=[[0, 0]])


def test_prediction_difference_matches_reference(make_model, make_tokenizer):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    source, target = SOURCES[1], TARGETS[1]
    source_encoding = tokenizer(source, return_offsets_mapping=True)
    target_encoding = tokenizer(text_target=target, return_offsets_mapping=True)
    labels = target_encoding["input_ids"]

    def scores(ids):
        decoder_ids = torch.tensor([[model.config.decoder_start_token_id, *labels[:-1]]])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), decoder_input_ids=decoder_ids,
                           attention_mask=torch.ones(1, len(ids))).logits[0]  # fmt: skip
        return logits.log_softmax(-1)[range(len(labels)), labels]

    expected = []
    for start, end in word_spans(target):
        rows = [i for i, (a, b) in enumerate(target_encoding["offset_mapping"]) if a < end and start < b]
        losses = []
        for a, b in word_spans(source):
            masked = [
                0 if c < b and a < d else id
                for id, (c, d) in zip(source_encoding["input_ids"], source_encoding["offset_mapping"], strict=True)
            ]
            losses.append(float((scores(source_encoding["input_ids"]) - scores(masked))[rows].sum()))
        expected.append(max(range(len(losses)), key=losses.__getitem__))
    assert alignment.prediction_difference_alignment(model, tokenizer, source, target).tolist() == expected


def test_chooses_heads_that_agree(make_model, make_tokenizer, monkeypatch):
    """If the gold alignment is that of head 2 of layer 1, only this head is chosen."""
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes).train()
    gold = {
        (SOURCES[i], TARGETS[i]): weights[1, 2].argmax(-1)
        for i, _, _, weights in alignment.iter_word_attention(model, tokenizer, SOURCES, TARGETS, 4)
    }
    monkeypatch.setattr(alignment, "prediction_difference_alignment", lambda model, tokenizer, *pair: gold[pair])
    assert choose_alignment_heads(model, tokenizer, SOURCES, TARGETS) == [[1, 2]]
    assert model.training
    assert choose_alignment_heads(model, tokenizer, ["two"], ["zwei"]) is None


def test_rejects_slow_tokenizer(make_model):
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow does not provide the character offsets"):
        align(make_model(), Slow(), ["a"], ["b"])


@pytest.fixture
def make_translator(make_model, make_tokenizer):
    def make(shared: bool = True, **variant) -> TranslationPipeline:
        tokenizer, sizes = make_tokenizer(shared)
        model = make_model(**sizes, **variant)
        model.generation_config.max_new_tokens = 7
        return TranslationPipeline(model=model, tokenizer=tokenizer)

    return make


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}])
def test_token_scores_match_model(make_translator, shared, options):
    """They are log-probabilities of one forward pass per sequence, and their mean is the score of the search."""
    translator = make_translator(shared)
    translator.model.generation_config.eos_token_id = [2, 9]  # only some translations end
    model, tokenizer = translator.model, translator.tokenizer
    actual = translator(SOURCES, return_scores=True, return_token_scores=True, **options)
    for source, candidates in zip(SOURCES, actual, strict=True):
        for each in candidates if options else [candidates]:
            target = tokenizer.stock("target") if not shared else tokenizer
            ids = target.convert_tokens_to_ids(each["tokens"])
            decoder_ids = torch.tensor([[model.config.decoder_start_token_id, *ids[:-1]]])
            with torch.no_grad():
                logits = model(**tokenizer(source, return_tensors="pt"), decoder_input_ids=decoder_ids).logits[0]
            expected = logits.log_softmax(-1)[range(len(ids)), ids]
            assert each["token_scores"] == pytest.approx(expected.tolist(), abs=1e-4)
            assert each["log_probability"] == pytest.approx(float(expected.sum()), abs=1e-3)
            assert each["score"] == pytest.approx(float(expected.mean()), abs=1e-4)
            assert target.decode(ids, skip_special_tokens=True) == each["translation_text"]


def test_token_scores_of_an_ensemble(make_translator, make_model):
    """They are those of the mean probability of all models, as the score is."""
    translator = make_translator(True)
    config = translator.model.config
    other = make_model(5, vocab_size=config.vocab_size, max_position_embeddings=config.max_position_embeddings)
    options = {"return_scores": True, "return_token_scores": True, "num_beams": 2}
    single = translator(SOURCES, **options)
    for each, first in zip(translator(SOURCES, ensemble=[other], **options), single, strict=True):
        assert each["score"] == pytest.approx(each["log_probability"] / len(each["tokens"]), abs=1e-4)
        assert each["score"] != pytest.approx(first["score"], abs=1e-2)


def test_token_scores_in_small_batches(make_translator, monkeypatch):
    translator = make_translator()
    expected = translator(SOURCES, return_token_scores=True)
    monkeypatch.setattr(alignment, "MAX_LOGITS_PER_BATCH", 1)
    for one, other in zip(translator(SOURCES, return_token_scores=True), expected, strict=True):
        assert one["token_scores"] == pytest.approx(other["token_scores"], abs=1e-4)


def test_token_scores_of_a_head_without_a_weight_matrix(make_translator):
    """Dynamic quantization of torch replaces `weight` by a method."""
    translator = make_translator()
    expected = translator(SOURCES, return_token_scores=True)
    head = translator.model.lm_head

    class QuantizedLinear(torch.nn.Module):
        out_features = head.out_features

        def weight(self):
            return head.weight

        def forward(self, hidden_states):
            return head(hidden_states)

    translator.model.lm_head = QuantizedLinear()
    assert translator(SOURCES, return_token_scores=True) == expected


def test_pipeline_returns_alignments(make_translator):
    translator = make_translator()
    options = {"num_beams": 3, "num_return_sequences": 2}
    unaligned = translator([*SOURCES, ""], **options)
    actual = translator([*SOURCES, ""], return_alignments=True, **options)
    for source, candidates, expected in zip([*SOURCES, ""], actual, unaligned, strict=True):
        texts = [each["translation_text"] for each in candidates]
        assert texts == [each["translation_text"] for each in expected]
        links = align(translator.model, translator.tokenizer, [source] * len(texts), texts)
        assert [each.get("alignments", []) for each in candidates] == links


def test_reports_lone_surrogates(make_translator):
    logging.getLogger("transformers").propagate = True
    outputs = make_translator()(["a \ud800 b", "the dog"])
    assert "character 3 of the sentence is half of a surrogate pair" in outputs[0]["error"]
    assert outputs[0]["translation_text"] == ""
    assert "error" not in outputs[1]


def test_reports_sentences_without_tokens(make_model, special_tokens, train_bpe):
    tokenizer = train_bpe(["a b"], 20)
    tokenizer.post_processor = None
    tokenizer.normalizer = normalizers.Replace("x", "")
    tokenizer.pre_tokenizer = None
    fast = TokenizersBackend(tokenizer_object=tokenizer, **special_tokens)
    translator = TranslationPipeline(model=make_model(vocab_size=len(fast)), tokenizer=fast)
    assert translator("xx")[0]["error"] == "the sentence has no tokens."


def test_strips_line_breaks(make_model, special_tokens):
    """The tokenizer has a token for line breaks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special_tokens.values(), *alphabet])}
    rust = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = TokenizersBackend(tokenizer_object=rust, **special_tokens)
    model = make_model(vocab_size=len(vocab), position_embedding_type="learned", max_position_embeddings=7)
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, max_new_tokens=3, return_alignments=True)
    assert translator(["the dog\n"]) == translator(["the dog"])


def test_start_token_is_that_of_generate(make_model, make_tokenizer):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)

    def first_ids():
        return set(
            alignment.Pairs(model, tokenizer, SOURCES, TARGETS).collate([0, 1])["decoder_input_ids"][:, 0].tolist()
        )

    model.generation_config.decoder_start_token_id = 7
    assert first_ids() == {7}
    model.generation_config.decoder_start_token_id = None
    model.config.decoder_start_token_id = 8
    assert first_ids() == {8}
    model.config.decoder_start_token_id = None
    model.generation_config.bos_token_id = 9
    assert first_ids() == {9}
    model.generation_config.bos_token_id = model.config.bos_token_id = None
    with pytest.raises(ValueError, match="need a start token"):
        first_ids()
