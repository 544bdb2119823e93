"""Comparison of `beam_search` with `generate()`, with exhaustive search, and with the formula of the paper."""

import itertools

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.beam_search_vanilla_transformer import best_token, best_tokens
from vanilla_transformer.generation_vanilla_transformer import beam_search

pytestmark = pytest.mark.usefixtures("search_mode")


def until_end(sequences: torch.Tensor, ends=(2,)) -> list[list[int]]:
    """Remove the padding after EOS. `generate()` pads with EOS if the pad token id is 0."""
    rows = [row[1:] for row in sequences.tolist()]
    return [row[: next((i for i, token in enumerate(row) if token in ends), len(row)) + 1] for row in rows]


@pytest.fixture
def assert_same(make_model, source):
    """Return a function that compares ids, and scores with beams, for several models."""

    def compare(ends=(2,), **options) -> None:
        for seed in range(8):
            model = make_model(seed, vocab_size=30)
            for num_beams in (1, 3):
                options |= {"num_beams": num_beams, "return_dict_in_generate": True, "output_scores": num_beams > 1}
                expected = model.generate(**source, **options)
                found = model.generate(**source, **options, custom_generate=beam_search)
                assert until_end(found.sequences, ends) == until_end(expected.sequences, ends)
                if num_beams > 1:
                    scores = found.sequences_scores, expected.sequences_scores
                    torch.testing.assert_close(*scores, atol=1e-4, rtol=0)

    return compare


ARCHITECTURES = {
    "paper": {},
    "pre-norm, bias": {"norm_position": "pre", "lm_head_bias": True},
    "learned positions": {"position_embedding_type": "learned", "embedding_norm": True},
    "own head sizes": {"key_head_dim": 5, "value_head_dim": 11},
    "fewer layers": {"decoder_layers": 1, "decoder_attention_heads": 2},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_matches_generate(make_model, source, architecture, seed):
    model = make_model(seed, vocab_size=30, **ARCHITECTURES[architecture])
    expected = model.generate(**source, max_new_tokens=14)
    assert torch.equal(model.generate(**source, max_new_tokens=14, custom_generate=beam_search), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("beams", [2, 5])
@pytest.mark.parametrize(
    ("length_penalty", "early_stopping"),
    [
        (1.0, False),
        (1.0, True),
        (0.6, "never"),
        (0.0, False),
        (0.0, "never"),
        (-1.0, False),
        (-1.0, "never"),
        (2.0, True),
    ],
)
def test_beam_search_matches_generate(make_model, source, architecture, beams, length_penalty, early_stopping):
    """Compare all returned sequences and scores while finished sentences leave the batch."""
    options = {"num_beams": beams, "num_return_sequences": 2, "max_new_tokens": 14, "early_stopping": early_stopping}
    options |= {"length_penalty": length_penalty, "return_dict_in_generate": True, "output_scores": True}
    model = make_model(beams, vocab_size=30, **ARCHITECTURES[architecture])
    expected = model.generate(**source, **options)
    found = model.generate(**source, **options, custom_generate=beam_search)
    assert until_end(found.sequences) == until_end(expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=0)


def test_alpha_0_matches_generate_without_penalty(make_model, source):
    for seed in range(5):
        model = make_model(seed, vocab_size=30)
        expected = model.generate(**source, num_beams=4, max_new_tokens=14, length_penalty=0.0, early_stopping="never")
        found = model.generate(**source, num_beams=4, max_new_tokens=14, custom_generate=beam_search, alpha=0.0)
        assert until_end(found) == until_end(expected)


def log_probabilities(model, source: dict, row: int, hypotheses: list[tuple]) -> dict[tuple, float]:
    """Return the log-probability of each sequence of tokens, including EOS if present."""
    targets = torch.full((len(hypotheses), max(map(len, hypotheses)) + 1), -1)
    targets[:, 0] = model.config.decoder_start_token_id
    for i, tokens in enumerate(hypotheses):
        targets[i, 1 : len(tokens) + 1] = torch.tensor(tokens)
    sources = {name: tensor[row : row + 1].expand(len(hypotheses), -1) for name, tensor in source.items()}
    with torch.no_grad():
        log_p = model(**sources, decoder_input_ids=targets[:, :-1].clamp(min=0)).logits.log_softmax(-1)
    log_p = log_p.gather(-1, targets[:, 1:, None].clamp(min=0))[..., 0]
    return dict(zip(hypotheses, log_p.where(targets[:, 1:] >= 0, 0).sum(-1).tolist(), strict=True))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_many_beams_match_exhaustive_search(make_model, source, alpha):
    """Score every hypothesis of up to 3 tokens with a vocabulary of 5."""
    small = {"input_ids": source["input_ids"][:2] % 2 + 3, "attention_mask": source["attention_mask"][:2]}
    finished = [(*body, 2) for n in range(3) for body in itertools.product((0, 1, 3, 4), repeat=n)]
    truncated = list(itertools.product((0, 1, 3, 4), repeat=3))
    for seed in range(3):
        model = make_model(seed, vocab_size=5)
        found = model.generate(
            **small, num_beams=100, max_new_tokens=3, custom_generate=beam_search, alpha=alpha,
            return_dict_in_generate=True,
        )  # fmt: skip
        for row in range(2):
            every = log_probabilities(model, small, row, finished + truncated)
            scores = {tokens: value / ((5 + len(tokens)) / 6) ** alpha for tokens, value in every.items()}
            best = max(scores, key=lambda tokens: scores[tokens])
            assert tuple(until_end(found.sequences)[row][: len(best)]) == best
            assert float(found.sequences_scores[row]) == pytest.approx(scores[best], abs=1e-4)


def test_negative_penalty_does_not_stop_early(make_model):
    source = {"input_ids": torch.tensor([[3, 4, 2]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    sizes = {"vocab_size": 5, "d_model": 16, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    model = make_model(58, **sizes, tie_word_embeddings=False, lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
        model.lm_head.bias[2:4] = torch.tensor([3.0, 3.5])
    found = model.generate(
        **source, num_beams=125, max_new_tokens=4, custom_generate=beam_search, alpha=-2.0,
        return_dict_in_generate=True,
    )  # fmt: skip
    hypotheses = [
        tokens
        for length in range(1, 5)
        for tokens in itertools.product(range(5), repeat=length)
        if 2 not in tokens[:-1] and (tokens[-1] == 2 or length == 4)
    ]
    every = log_probabilities(model, source, 0, hypotheses)
    scores = [value / ((5 + len(tokens)) / 6) ** -2.0 for tokens, value in every.items()]
    assert float(found.sequences_scores[0]) == pytest.approx(max(scores), abs=1e-4)


def test_negative_limit_allows_one_token(make_model, source):
    for beams in (1, 3):
        model = make_model(vocab_size=30)
        assert model.generate(**source, num_beams=beams, custom_generate=beam_search, extra_tokens=-50).shape == (5, 2)


@pytest.mark.parametrize("size", [8, 9])
def test_rejects_prompt_without_free_positions(make_model, size):
    model = make_model(vocab_size=30, position_embedding_type="learned", max_position_embeddings=8)
    prompt = {"decoder_input_ids": torch.full((1, size), 1), "max_new_tokens": 2}
    for beams in (1, 3):
        with pytest.raises(ValueError, match=f"prompt of {size} tokens fills all 8 positions"):
            model.generate(
                torch.tensor([[3, 4]]), **prompt, num_beams=beams, custom_generate=beam_search, extra_tokens=5
            )


def test_extra_tokens_limits_each_sentence(make_model, source):
    """The limit depends on the length of each source, not on the longest one."""
    model = make_model(vocab_size=30)
    model.generation_config.eos_token_id = None  # every sequence reaches its limit
    for beams in (1, 3):
        found = model.generate(**source, num_beams=beams, custom_generate=beam_search, extra_tokens=4, alpha=0.6)
        tails = [row[1 + n + 4 :] for row, n in zip(found.tolist(), (9, 7, 5, 9, 3), strict=True)]
        assert found.shape[1] == 1 + 9 + 4
        assert not any(map(any, tails))


def test_ensemble_averages_probabilities(make_model, source):
    """Greedy decoding selects the largest mean probability. An ensemble of equal models changes nothing."""
    first, second = make_model(0, vocab_size=30), make_model(1, vocab_size=30)
    single = first.generate(**source, num_beams=3, max_new_tokens=9, custom_generate=beam_search)
    same = first.generate(**source, num_beams=3, max_new_tokens=9, custom_generate=beam_search, ensemble=[first])
    assert torch.equal(single, same)
    found = first.generate(**source, max_new_tokens=9, custom_generate=beam_search, ensemble=[second])
    for row, tokens in enumerate(until_end(found)):
        one = {name: tensor[row : row + 1] for name, tensor in source.items()}
        for n, token in enumerate(tokens):
            prefix = torch.tensor([[1, *tokens[:n]]])
            with torch.no_grad():
                both = [model(**one, decoder_input_ids=prefix).logits[0, -1].softmax(-1) for model in (first, second)]
            assert int((both[0] + both[1]).argmax()) == token


@pytest.mark.parametrize("forced", ["forced_bos_token_id", "forced_eos_token_id"])
@pytest.mark.parametrize(("beams", "rows"), [(2, 1), (2, 2), (4, 3), (3, 3)])
@pytest.mark.parametrize("penalty", [{"length_penalty": 0.0}, {"length_penalty": 1.0}, {"alpha": 0.6}])
def test_forced_token_is_in_every_row(make_model, source, forced, beams, rows, penalty):
    """Only one hypothesis is possible, and all rows contain it."""
    model = make_model(vocab_size=30)
    options = {"num_beams": beams, "num_return_sequences": rows, "max_new_tokens": 1, forced: 2}
    assert (
        model.generate(**source, **options, **penalty, custom_generate=beam_search)[:, 1:].tolist() == [[2]] * 5 * rows
    )


def test_bfloat16_runs(make_model, source):
    model = make_model(vocab_size=30).to(torch.bfloat16)
    found = model.generate(**source, num_beams=3, max_new_tokens=9, custom_generate=beam_search)
    assert found.shape[0] == 5


def test_rejects_ensemble_with_different_vocabularies(make_model, source):
    model, other = make_model(vocab_size=30), make_model(vocab_size=31)
    with pytest.raises(ValueError, match="same vocab_size and tokenizer, got 30 and 31"):
        model.generate(**source, max_new_tokens=5, custom_generate=beam_search, ensemble=[other])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_pad_token_may_be_eos(make_model, source, length_penalty):
    """EOS of the longest result is not removed as padding."""
    for seed in range(3):
        model = make_model(seed, vocab_size=30)
        model.generation_config.pad_token_id = model.generation_config.eos_token_id
        options = {"num_beams": 3, "max_new_tokens": 14, "length_penalty": length_penalty}
        expected = model.generate(**source, **options)
        found = model.generate(**source, **options, custom_generate=beam_search)
        length = expected.shape[1]
        assert torch.equal(found[:, :length], expected)
        assert bool((found[:, length:] == 2).all())


def test_rejects_other_model_types(source):
    config = MarianConfig(vocab_size=30, d_model=32, encoder_layers=1, decoder_layers=1, pad_token_id=0)
    with pytest.raises(ValueError, match="got marian"):
        MarianMTModel(config).generate(**source, max_new_tokens=5, custom_generate=beam_search)


def test_best_tokens_by_blocks():
    """The result equals that of `topk`, with and without blocks."""
    for size in (30, 8000, 8001):
        log_probs = torch.randn(7, size).log_softmax(-1)
        values, ids = best_tokens(log_probs, 10)
        assert torch.equal(values, log_probs.topk(10).values)
        assert torch.equal(ids, log_probs.topk(10).indices)
    crowded = torch.zeros(2, 8000)
    crowded[:, 4000:4010] = torch.arange(10).flip(0) + 1.0  # all in one block
    assert best_tokens(crowded, 10)[1].tolist() == [list(range(4000, 4010))] * 2


def test_best_token_by_blocks():
    """The result equals that of `argmax` (the first of equals), with and without blocks."""
    for size in (30, 8000, 8009):
        logits = torch.randn(7, size).bfloat16().float()  # with equals
        logits[3] = 1.0
        assert torch.equal(best_token(logits), logits.argmax(-1))


def test_several_eos_ids(assert_same):
    """`generate()` then considers more continuations of each hypothesis."""
    for ends in ([2, 3], [2, 3, 4, 5, 6, 7], list(range(2, 22))):
        assert_same(ends, eos_token_id=ends, max_new_tokens=12)


def test_ensemble_with_logits_processors(make_model, source):
    """An ensemble of equal models gives the result of a single model."""
    model = make_model(vocab_size=30)
    options = {"num_beams": 3, "max_new_tokens": 9, "no_repeat_ngram_size": 1, "bad_words_ids": [[7]]}
    expected = model.generate(**source, **options)
    found = model.generate(**source, **options, custom_generate=beam_search, ensemble=[model])
    assert until_end(found) == until_end(expected)


class TokenCollector(list):
    """Streamer that stores the tokens."""

    put = list.append
    is_over = False

    def end(self) -> None:
        self.is_over = True


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"no_repeat_ngram_size": 2}])
def test_streamer_gets_the_same_tokens(make_model, source, options):
    model = make_model(vocab_size=30)
    sentence = {name: tensor[:1] for name, tensor in source.items()}
    streams = TokenCollector(), TokenCollector()
    for streamer, search in zip(streams, ({}, {"custom_generate": beam_search}), strict=True):
        torch.manual_seed(0)
        model.generate(**sentence, max_new_tokens=9, streamer=streamer, **options, **search)
    torch.manual_seed(0)
    (expected,) = model.generate(**sentence, max_new_tokens=9, **options).tolist()
    assert torch.cat([each.flatten() for each in streams[0]]).tolist() == expected
    assert [each.tolist() for each in streams[0]] == [each.tolist() for each in streams[1]]
    assert streams[1].is_over


def test_decoder_prompts(assert_same):
    prompt = torch.tensor([[1, 7, 9, 4], [0, 1, 7, 9], [0, 0, 1, 7], [0, 0, 0, 1], [1, 5, 5, 5]])
    mask = (prompt != 0).long()
    for dtype in (torch.long, torch.float, torch.bool):
        assert_same(decoder_input_ids=prompt, decoder_attention_mask=mask.to(dtype), max_new_tokens=9)
    assert_same(decoder_input_ids=torch.tensor([[1, 7, 9]] * 5), max_new_tokens=9)


@pytest.mark.parametrize("options", [{"length_penalty": 1e9}, {"alpha": 1e23}])
def test_rejects_overflowing_penalty(make_model, source, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* overflows"):
        make_model(vocab_size=30).generate(
            **source, num_beams=2, max_new_tokens=5, custom_generate=beam_search, **options
        )


def test_rejects_streamer_with_beams(make_model, source):
    streamer = TokenCollector()
    options = {"streamer": streamer, "num_beams": 2, "max_new_tokens": 5, "custom_generate": beam_search}
    with pytest.raises(ValueError, match="streamer"):
        make_model(vocab_size=30).generate(**source, **options)
    assert not streamer


def test_ensemble_requires_input_ids(make_model, source):
    model, other = make_model(0, vocab_size=30), make_model(1, vocab_size=30)
    embeddings = model.get_input_embeddings()(source["input_ids"])
    states = model.get_encoder()(**source)
    options = {"max_new_tokens": 5, "custom_generate": beam_search, "ensemble": [other]}
    mask = source["attention_mask"]
    with pytest.raises(ValueError, match="An ensemble requires input_ids"):
        model.generate(inputs_embeds=embeddings, attention_mask=mask, **options)
    with pytest.raises(ValueError, match="An ensemble requires input_ids"):
        model.generate(encoder_outputs=states, attention_mask=mask, **options)
    single = options | {"ensemble": ()}
    expected = model.generate(**source, **single)
    assert torch.equal(model.generate(inputs_embeds=embeddings, attention_mask=mask, **single), expected)
    assert torch.equal(model.generate(encoder_outputs=states, attention_mask=mask, **single), expected)


def test_stop_strings_use_target_vocabulary(make_model, train_bpe, sentences, special_tokens):
    """Stop strings are searched in the generated text, not in the source vocabulary."""
    letters = ["abcdef"]  # transformers encodes them to compute the text of each token
    tokenizer = VanillaTransformerTokenizer(
        source_tokenizer_object=train_bpe(sentences["en"] + letters, 60),
        target_tokenizer_object=train_bpe(sentences["de"] + letters, 70),
        **special_tokens,
    )
    model = make_model(vocab_size=60, decoder_vocab_size=70, share_encoder_decoder_embeddings=False)
    model.generation_config.eos_token_id = None
    inputs = tokenizer("the dog runs", return_tensors="pt")
    first = int(model.generate(**inputs, max_new_tokens=1)[0, 1])
    text = tokenizer.decode(first)
    assert first > 3
    assert tokenizer.decode(first, use_source_tokenizer=True) != text
    stopped = model.generate(**inputs, max_new_tokens=12, stop_strings=[text], tokenizer=tokenizer)
    assert stopped.tolist() == [[1, first]]
