"""GPU decoding, simulated on a CPU: replayed steps give the same result, with few synchronizations."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vanilla_transformer import decoder_vanilla_transformer, generation_vanilla_transformer
from vanilla_transformer.beam_search_vanilla_transformer import DONE_CHECK_INTERVAL
from vanilla_transformer.generation_vanilla_transformer import beam_search
from vanilla_transformer.glossary_vanilla_transformer import LexicalConstraints

SYNC_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique")  # lift_fresh: from Python


class SyncCounter(TorchDispatchMode):
    """Mode that counts operations that synchronize with a GPU or copy to it."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        has_boolean_index = "index" in name and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1:2])
        )
        if any(each in name for each in SYNC_OPERATIONS) or has_boolean_index:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class CapturedCalls(SyncCounter):
    """CUDA graph on a CPU: stores the operations with their tensors and repeats them in place.

    Unlike a GPU, the capture also executes the operations.
    """

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
    """Simulate CUDA graphs, and return the captured ones."""
    captured: list[CapturedCalls] = []

    def capture_cuda_graph(function: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
        graph = CapturedCalls()
        with graph:
            result = function()
        captured.append(graph)
        replays = iter([lambda: None])  # the capture counts as the first replay

        def replay() -> torch.Tensor:
            next(replays, graph.replay)()
            return result

        return replay

    monkeypatch.setattr(generation_vanilla_transformer, "is_async_device", lambda device: True)
    monkeypatch.setattr(decoder_vanilla_transformer, "supports_cuda_graphs", lambda model: True)
    monkeypatch.setattr(decoder_vanilla_transformer, "capture_cuda_graph", capture_cuda_graph)
    return captured


PROMPT = torch.tensor([[1, 7, 9, 4], [0, 1, 7, 9], [0, 0, 1, 7], [0, 0, 0, 1], [1, 5, 5, 5]])
LONG_PROMPT = torch.cat([PROMPT[:, :1].expand(-1, 36), PROMPT], 1)  # longer than the initial buffers
TERMS = [[], [[[7, 8]]], [[[9]], [[11]]], [], []]
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "return_dict_in_generate": True},
    "the paper's": {"num_beams": 3, "alpha": 0.6, "extra_tokens": 40},
    "processors": {"num_beams": 3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 8]], "min_length": 6},
    "a prompt": {"decoder_input_ids": PROMPT, "decoder_attention_mask": (PROMPT != 0).long()},
    "a prompt with beams": {"num_beams": 3, "decoder_input_ids": PROMPT},
    "a long prompt": {
        "num_beams": 2,
        "decoder_input_ids": LONG_PROMPT,
        "decoder_attention_mask": (LONG_PROMPT != 0).long(),
    },
    "a glossary": {"num_beams": 3, "glossary": lambda: LexicalConstraints(TERMS, *torch.zeros(4, 30).bool())},
}


def decode(model, source: dict, options: dict) -> tuple[torch.Tensor, ...]:
    """Return ids, and scores and beam indices if available."""
    options = {name: value() if callable(value) else value for name, value in options.items()}
    found = model.generate(**source, max_new_tokens=80, custom_generate=beam_search, **options)
    if isinstance(found, torch.Tensor):
        return (found,)
    return found.sequences, found.sequences_scores, found.beam_indices


@pytest.mark.parametrize("way", WAYS)
def test_replayed_steps_match_eager_steps(make_model, source, graphs, monkeypatch, way):
    """Also after the buffers have grown and the step is captured again."""
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
        for value, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(value, reference, atol=1e-4, rtol=0)
        assert not any(graph.counts for graph in graphs), [graph.counts for graph in graphs]
        graphs.clear()


def test_continues_without_capture(make_model, source, graphs, monkeypatch):
    model = make_model(vocab_size=30)
    expected = decode(model, source, {"num_beams": 3})

    def capture_cuda_graph(function, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decoder_vanilla_transformer, "capture_cuda_graph", capture_cuda_graph)
    warnings = []
    monkeypatch.setattr(decoder_vanilla_transformer.logger, "warning_once", warnings.append)
    (found,) = decode(model, source, {"num_beams": 3})
    assert torch.equal(found, expected[0])
    assert len(warnings) == 1
    assert "not permitted" in warnings[0]


def count_synchronizations(model, source: dict, options: dict, tokens: int) -> Counter[str]:
    with SyncCounter() as counter:
        options = {name: value() if callable(value) else value for name, value in options.items()}
        model.generate(**source, max_new_tokens=tokens, custom_generate=beam_search, **options)
    return counter.counts


@pytest.mark.parametrize("way", WAYS)
def test_few_synchronizations(make_model, source, monkeypatch, way):
    """Only the check for completion synchronizes, every few tokens. CPU decoding synchronizes at every token.

    The logits processors of transformers may synchronize at every token, too.
    """
    model = make_model(vocab_size=30)
    model.generation_config.eos_token_id = None
    options = {name: value for name, value in WAYS[way].items() if name not in ("extra_tokens", "min_length")}
    for static in (False, True):
        monkeypatch.setattr(generation_vanilla_transformer, "is_async_device", lambda device, value=static: value)
        more = count_synchronizations(model, source, options, 60) - count_synchronizations(model, source, options, 20)
        if static and way == "processors":
            assert more["_local_scalar_dense"] >= 40 // DONE_CHECK_INTERVAL
        elif static:
            assert more == {"_local_scalar_dense": 40 // DONE_CHECK_INTERVAL}
        else:
            assert more["_local_scalar_dense"] >= 40


@pytest.mark.parametrize("num_beams", [1, 3])
def test_stops_soon_after_last_sentence(make_model, source, graphs, monkeypatch, num_beams):
    model = make_model(2, vocab_size=30)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(30).index_fill_(0, torch.tensor([2]), 1.0))  # likely EOS
    steps = []
    step = decoder_vanilla_transformer.Ensemble.step
    monkeypatch.setattr(
        decoder_vanilla_transformer.Ensemble, "step", lambda self, ids: steps.append(1) or step(self, ids)
    )
    found = model.generate(**source, num_beams=num_beams, max_new_tokens=500, custom_generate=beam_search)
    assert found.shape[1] - 1 <= len(steps) <= found.shape[1] - 1 + DONE_CHECK_INTERVAL + 8 * (num_beams > 1)


def test_buffers_are_freed_after_the_call(make_model, source, graphs, monkeypatch):
    """They are freed without the garbage collector, which could run too late for the memory of a GPU."""
    decoders = []
    grow = decoder_vanilla_transformer.IncrementalDecoder.grow_buffers
    monkeypatch.setattr(
        decoder_vanilla_transformer.IncrementalDecoder,
        "grow_buffers",
        lambda self: decoders.append(weakref.ref(self)) or grow(self),
    )
    gc.disable()
    try:
        make_model(vocab_size=30).generate(**source, num_beams=2, max_new_tokens=9, custom_generate=beam_search)
        assert [decoder() for decoder in decoders] == [None]
    finally:
        gc.enable()


def test_threads_do_not_share_graph_memory(monkeypatch):
    """Otherwise a replay in one thread would overwrite the logits of a thread that decodes at the same time."""

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            self.memory = pool or object()

        def capture_end(self):
            pools.append(self.memory)

        def pool(self):
            return self.memory

    pools, current = [], Mock()
    simulated = {"CUDAGraph": Graph, "Stream": lambda: current, "current_stream": lambda: current}
    for name, value in (simulated | dict.fromkeys(("device", "stream"), nullcontext)).items():
        monkeypatch.setattr(torch.cuda, name, value)
    with ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as one:
        for executor in (one, other, one):
            executor.submit(decoder_vanilla_transformer.capture_cuda_graph, lambda: None, torch.device("cuda")).result()
    assert pools[0] is pools[2] is not pools[1]
