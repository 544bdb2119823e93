"""Decoding as on a GPU, on a CPU: what is recorded and repeated gives the same, and little is asked from the device."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vanilla_transformer import generation_vanilla_transformer, incremental_decoding_vanilla_transformer
from vanilla_transformer.constraints_vanilla_transformer import LexicalConstraints
from vanilla_transformer.generation_vanilla_transformer import beam_search
from vanilla_transformer.search_vanilla_transformer import DONE_CHECK_INTERVAL

ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique")  # the last but one: from Python


class Asked(TorchDispatchMode):
    """Counts what a GPU would be waited for, and what would be copied to it."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_booleans = "index" in name and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1:2])
        )
        if any(each in name for each in ASKS) or by_booleans:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class Recording(Asked):
    """A CUDA graph on a CPU: keeps the kernels that are launched with the tensors that they read and write, and repeats
    them there. Other than a GPU, which only notes them down, it has already run them once."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def graphs(monkeypatch):
    """Decodes in place with steps that are recorded; the recordings."""
    found: list[Recording] = []

    def capture_cuda_graph(function: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
        graph = Recording()
        with graph:
            result = function()
        found.append(graph)
        turns = iter([lambda: None])

        def repeat() -> torch.Tensor:
            next(turns, graph.replay)()
            return result

        return repeat

    monkeypatch.setattr(generation_vanilla_transformer, "is_async_device", lambda device: True)
    monkeypatch.setattr(generation_vanilla_transformer, "supports_cuda_graphs", lambda model: True)
    monkeypatch.setattr(incremental_decoding_vanilla_transformer, "capture_cuda_graph", capture_cuda_graph)
    return found


BEGINNING = torch.tensor([[1, 7, 9, 4], [0, 1, 7, 9], [0, 0, 1, 7], [0, 0, 0, 1], [1, 5, 5, 5]])
LONG = torch.cat([BEGINNING[:, :1].expand(-1, 36), BEGINNING], 1)  # longer than the first room
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "return_dict_in_generate": True},
    "the paper's": {"num_beams": 3, "alpha": 0.6, "extra_tokens": 40},
    "processors": {"num_beams": 3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 8]], "min_length": 6},
    "a beginning": {"decoder_input_ids": BEGINNING, "decoder_attention_mask": (BEGINNING != 0).long()},
    "a beginning of beams": {"num_beams": 3, "decoder_input_ids": BEGINNING},
    "a long beginning": {"num_beams": 2, "decoder_input_ids": LONG, "decoder_attention_mask": (LONG != 0).long()},
    "a glossary": {"num_beams": 3, "glossary": lambda: LexicalConstraints([[], [[[7, 8]]], [[[9]], [[11]]], [], []])},
}


def decode(model, source: dict, options: dict) -> tuple[torch.Tensor, ...]:
    """Ids, and scores and parents where there are some."""
    options = {name: value() if callable(value) else value for name, value in options.items()}
    found = model.generate(**source, max_new_tokens=80, custom_generate=beam_search, **options)
    if isinstance(found, torch.Tensor):
        return (found,)
    return found.sequences, found.sequences_scores, found.beam_indices


@pytest.mark.parametrize("way", WAYS)
def test_what_is_recorded_gives_the_same(make_model, source, graphs, monkeypatch, way):
    """Also behind the first room of the buffers, where it is recorded anew."""
    for seed in range(3):
        model = make_model(seed, vocab_size=30, norm_position="pre" if seed else "post")
        model.generation_config.eos_token_id = 2 if seed else None
        with monkeypatch.context() as patch:
            patch.setattr(generation_vanilla_transformer, "is_async_device", lambda device: False)
            expected = decode(model, source, WAYS[way])
        assert not graphs
        found = decode(model, source, WAYS[way])
        assert not seed or len(graphs) > 0
        assert seed or len(graphs) > 1
        for mine, own in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, own, atol=1e-4, rtol=0)
        assert not any(graph.counts for graph in graphs), [graph.counts for graph in graphs]
        graphs.clear()


def test_it_goes_on_where_nothing_can_be_recorded(make_model, source, graphs, monkeypatch):
    model = make_model(vocab_size=30)
    expected = decode(model, source, {"num_beams": 3})

    def capture_cuda_graph(function, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(incremental_decoding_vanilla_transformer, "capture_cuda_graph", capture_cuda_graph)
    told = []
    monkeypatch.setattr(incremental_decoding_vanilla_transformer.logger, "warning_once", told.append)
    (found,) = decode(model, source, {"num_beams": 3})
    assert torch.equal(found, expected[0])
    assert len(told) == 1
    assert "not permitted" in told[0]


def asked(model, source: dict, options: dict, tokens: int) -> Counter[str]:
    with Asked() as counting:
        options = {name: value() if callable(value) else value for name, value in options.items()}
        model.generate(**source, max_new_tokens=tokens, custom_generate=beam_search, **options)
    return counting.counts


@pytest.mark.parametrize("way", WAYS)
def test_little_is_asked_from_a_gpu(make_model, source, monkeypatch, way):
    """A look every few tokens whether all is done, and nothing else; as on a CPU there would be more."""
    model = make_model(vocab_size=30)
    model.generation_config.eos_token_id = None
    options = {name: value for name, value in WAYS[way].items() if name not in ("extra_tokens", "min_length")}
    for in_place in (False, True):
        monkeypatch.setattr(generation_vanilla_transformer, "is_async_device", lambda device, own=in_place: own)
        more = asked(model, source, options, 60) - asked(model, source, options, 20)
        if in_place:
            assert more == {"_local_scalar_dense": 40 // DONE_CHECK_INTERVAL}
        else:
            assert more["_local_scalar_dense"] >= 40


@pytest.mark.parametrize("num_beams", [1, 3])
def test_it_ends_soon_after_the_last_sentence(make_model, source, graphs, monkeypatch, num_beams):
    model = make_model(2, vocab_size=30)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(30).index_fill_(0, torch.tensor([2]), 1.0))  # likely ends
    steps = []
    step = incremental_decoding_vanilla_transformer.Ensemble.step
    monkeypatch.setattr(
        incremental_decoding_vanilla_transformer.Ensemble, "step", lambda own, ids: steps.append(1) or step(own, ids)
    )
    found = model.generate(**source, num_beams=num_beams, max_new_tokens=500, custom_generate=beam_search)
    assert found.shape[1] - 1 <= len(steps) <= found.shape[1] - 1 + DONE_CHECK_INTERVAL + 8 * (num_beams > 1)


def test_buffers_go_with_the_call(make_model, source, graphs, monkeypatch):
    """Not when Python next looks for cycles: a GPU's memory would fill up before."""
    decoders = []
    grow = incremental_decoding_vanilla_transformer.StaticShapeDecoder.grow_buffers
    monkeypatch.setattr(
        incremental_decoding_vanilla_transformer.StaticShapeDecoder,
        "grow_buffers",
        lambda own: decoders.append(weakref.ref(own)) or grow(own),
    )
    gc.disable()
    try:
        make_model(vocab_size=30).generate(**source, num_beams=2, max_new_tokens=9, custom_generate=beam_search)
        assert [decoder() for decoder in decoders] == [None]
    finally:
        gc.enable()
