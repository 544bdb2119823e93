"""Options of `generate()`: `beam_search` gives the same result or rejects the option."""

import pytest
import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.generation_vanilla_transformer import beam_search

pytestmark = pytest.mark.usefixtures("search_mode")


def until_end(sequences: torch.Tensor, ends: list[int]) -> list[list[int]]:
    """Remove the padding after EOS, which may differ between `generate()` and `beam_search`."""
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


def test_several_eos_ids(assert_same):
    """`generate()` then considers more continuations of each hypothesis."""
    for ends in ([2, 3], [2, 3, 4, 5, 6, 7], list(range(2, 22))):
        assert_same(ends, eos_token_id=ends, max_new_tokens=12)


def test_standard_stopping_criteria(assert_same):
    assert_same(max_new_tokens=12, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(6)]))
    shorter = StoppingCriteriaList([MaxLengthCriteria(8)])  # "never" still uses the other limit
    rising = {(20,): 4.0, (21,): 3.2, (2,): 2.8}  # scores that grow with the length make the limit matter
    for penalty in (0.5, 1.0, 2.0):
        options = {"early_stopping": "never", "length_penalty": penalty, "sequence_bias": rising}
        assert_same(max_new_tokens=30, stopping_criteria=shorter, **options)
    ends = [5, 9, 11, 17]
    criterion = EosTokenCriteria(torch.tensor(ends))
    assert_same([2, *ends], max_new_tokens=12, stopping_criteria=StoppingCriteriaList([criterion]))


def test_ensemble_with_logits_processors(make_model, source):
    """An ensemble of equal models gives the result of a single model."""
    model = make_model(vocab_size=30)
    options = {"num_beams": 3, "max_new_tokens": 9, "no_repeat_ngram_size": 1, "bad_words_ids": [[7]]}
    expected = model.generate(**source, **options)
    found = model.generate(**source, **options, custom_generate=beam_search, ensemble=[model])
    assert until_end(found, [2]) == until_end(expected, [2])


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
    assert [each.tolist() for each in streams[0]] == [each.tolist() for each in streams[1]]
    assert streams[1].is_over


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_length_penalties(assert_same, length_penalty, early_stopping):
    assert_same(max_new_tokens=12, length_penalty=length_penalty, early_stopping=early_stopping)


def test_left_padded_prompt(assert_same):
    prompt = torch.tensor([[1, 7, 9, 4], [0, 1, 7, 9], [0, 0, 1, 7], [0, 0, 0, 1], [1, 5, 5, 5]])
    mask = (prompt != 0).long()
    for dtype in (torch.long, torch.float, torch.bool):
        assert_same(decoder_input_ids=prompt, decoder_attention_mask=mask.to(dtype), max_new_tokens=9)


def test_left_padding_does_not_change_the_result(make_model, source):
    """A padded decoder prompt is continued like the prompt without padding."""
    model = make_model(vocab_size=30)
    sentence = {name: tensor[2:3] for name, tensor in source.items()}
    for num_beams in (1, 3):
        options = {"num_beams": num_beams, "max_new_tokens": 7, "custom_generate": beam_search}
        expected = model.generate(**sentence, **options, decoder_input_ids=torch.tensor([[1, 7]]))
        padded = model.generate(
            **sentence,
            **options,
            decoder_input_ids=torch.tensor([[1, 0, 1, 7]]),
            decoder_attention_mask=torch.tensor([[0, 0, 1, 1]]),
        )
        assert torch.equal(padded[:, 2:], expected)


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
