"""Tokens drawn on the emulated device: what the host would draw, one step ahead of it, with one upload and one download a step."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph import ops
from ggraph.backends.cuda import Cuda
from ggraph.backends.cuda.emulator import Emulator
from ggraph.dtypes import F32, I32
from tests import tiny
from tests.backends.opcase import Build, nodes_of

PROMPT = "the rain in an"
CHAINS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "default": {"seed": 1}, "hot": {"seed": 2, "temperature": 2.0, "top_k": 0, "top_p": 0.9},
    "by number": {"seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.001}, "all": {"seed": 4, "top_k": 0, "top_p": 1.0, "min_p": 0.0}}
pytestmark = pytest.mark.usefixtures("emulated")


@pytest.fixture
def llm(models: dict[str, Path]) -> Iterator[ggraph.LLM]:
    with ggraph.Model(models["dense"]) as model, ggraph.LLM(model, n_ctx=256, n_batch=64, n_ubatch=16) as llm:
        yield llm


def emulator(llm: ggraph.LLM) -> Emulator:
    backend = llm.ctx.backends[0]
    assert isinstance(backend, Cuda) and isinstance(backend.device, Emulator)
    return backend.device


def on_host(llm: ggraph.LLM, **options: Any) -> ggraph.Generation:
    """The same generation with a chain that the device does not know: a bias of nothing."""
    return llm.generate(PROMPT, **options, logit_bias={5: 0.0})


@pytest.mark.parametrize("name", CHAINS)
def test_the_same_tokens_as_on_the_host(llm: ggraph.LLM, name: str) -> None:
    device, host = llm.generate(PROMPT, max_tokens=10, **CHAINS[name]), on_host(llm, max_tokens=10, **CHAINS[name])
    assert device._drawn is not None and host._drawn is None
    assert device.read() == host.read() and device.tokens == host.tokens
    assert vars(device.timings).keys() == vars(host.timings).keys()
    assert (device.timings.prompt_n, device.timings.eval_n, device.timings.sample_n) == (11, 9, 10)


def test_a_recurrent_model_waits_for_each_token(models: dict[str, Path]) -> None:
    with ggraph.Model(models["hybrid"]) as model, ggraph.LLM(model, n_ctx=256, n_batch=64, n_ubatch=16) as llm:
        device = llm.generate(PROMPT, max_tokens=8, seed=1)
        pieces = [piece for piece in device if device._drawn is not None and not device._drawn.ahead]
        assert "".join(pieces) == device.text
        host = on_host(llm, max_tokens=8, seed=1)
        host.read()
        assert device.tokens == host.tokens


def test_two_copies_a_step_and_the_host_one_step_behind(llm: ggraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.generate(PROMPT, max_tokens=4, seed=1).read()
    device, events, steps = emulator(llm), list[str](), list[Counter[str]]()
    fetch = device._fetch

    def watched(address: int, nbytes: int) -> Callable[[], np.ndarray]:
        wait, number = fetch(address, nbytes), sum(e.startswith("begin") for e in events)
        assert nbytes == 4
        events.append(f"begin {number}")

        def read() -> np.ndarray:
            events.append(f"read {number}")
            return wait()
        return read
    monkeypatch.setattr(device, "_fetch", watched)
    g = llm.generate(PROMPT, max_tokens=8, seed=1)
    g._read_prompt()
    while len(g.tokens) < 8:
        device.counts.clear()
        g.output.tokens.append(g._sample())
        steps.append(Counter(device.counts))
    for step in steps[:-1]:
        assert step["uploads"] == step["downloads"] == 1
    assert steps[-2]["replays"] == 1 and not steps[-2]["launches"] and not steps[-1]["uploads"]
    assert events == ["begin 0", *(e for i in range(7) for e in (f"begin {i + 1}", f"read {i}")), "read 7"]


@pytest.mark.parametrize("options", [{"max_tokens": 9}, {"max_tokens": 30, "stop": ["e"]}, {"max_tokens": 1}, {"max_tokens": 0}])
def test_memory_is_left_as_plain_decoding_leaves_it(llm: ggraph.LLM, options: dict[str, Any]) -> None:
    device = llm.generate(PROMPT, seed=7, **options)
    text, left = device.read(), list(llm._history.tokens)
    assert llm.ctx.memory.seq_pos_max(0) == len(left) - 1
    host = on_host(llm, seed=7, **options)
    assert (host.read(), host.stop_type, host.tokens) == (text, device.stop_type, device.tokens)
    assert llm._history.tokens == left


def test_the_samplers_random_numbers_go_on(llm: ggraph.LLM) -> None:
    """A sampler used for two texts in a row draws the second as on the host, though a number was taken ahead."""
    found = []
    for bias in (None, {5: 0.0}):
        sampler = llm.sampler(seed=5, logit_bias=bias)
        found.append([llm.generate(PROMPT, max_tokens=n, stop=["e"], sampler=sampler).read() for n in (6, 5, 6)])
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_end_of_the_context(models: dict[str, Path]) -> None:
    with ggraph.Model(models["dense"]) as model, ggraph.LLM(model, n_ctx=256, n_ubatch=64) as llm:
        prompt = [tiny.BOS, *[270 + i % 20 for i in range(240)]]
        full = llm.generate(prompt, seed=1, ignore_eos=False)
        full.read()
        assert full.finish_reason == "length" or full.stop_type == "eos"
        host = llm.generate(prompt, seed=1, logit_bias={5: 0.0})
        host.read()
        assert (full.tokens, full.stop_type) == (host.tokens, host.stop_type)
        shifted, plain = (llm.generate(prompt, max_tokens=30, context_shift=True, temperature=0.0, logit_bias=bias)
                          for bias in (None, {5: 0.0}))
        assert shifted.read() == plain.read() and shifted.shifted == plain.shifted


@pytest.mark.parametrize("options", [{"repeat_penalty": 1.2}, {"logprobs": 2}, {"draft": "ngram"}, {"mirostat": 2}])
def test_what_the_device_does_not_know_is_done_on_the_host(llm: ggraph.LLM, options: dict[str, Any]) -> None:
    g = llm.generate(PROMPT, max_tokens=4, **options)
    assert g._drawn is None and len(g.read()) >= 0 and len(g.tokens) <= 4


def test_half_of_the_layers_draw_on_the_host(models: dict[str, Path]) -> None:
    with ggraph.Model(models["dense"], n_gpu_layers=2) as model, ggraph.LLM(model, n_ctx=256, n_ubatch=16) as llm:
        assert llm.ctx.drawing() is None and llm.generate(PROMPT, max_tokens=2)._drawn is None


def test_logits_that_cannot_be_drawn_from(llm: ggraph.LLM) -> None:
    drawing = llm.ctx.drawing()
    assert drawing is not None
    g = llm.generate(PROMPT, max_tokens=4)
    g._read_prompt()
    drawing.pending = lambda: lambda: np.array([-1], np.int32)  # type: ignore[method-assign]
    with pytest.raises(ggraph.SamplerError, match="highest logit is not finite"):
        g._sample()


def test_the_distribution_is_the_chains() -> None:
    """Chi-square over 3,000 draws from one row, temperature 0.8 after top_k 6: with 5 degrees of freedom, 20.5 is exceeded once
    in 1,000."""
    n, cuda = 3000, Cuda(Emulator())
    g = Build(cuda)
    logits = np.array([0.5, -1, 2, 1.2, 0.1, 0.9, 1.5, -3, 0.7, -0.2], np.float32)
    steps = np.zeros((n, 4, 2), np.float32)
    steps[:, :3] = [(ops.SAMPLE["top_k"], 6), (ops.SAMPLE["temp"], 0.8), (ops.SAMPLE["dist"], 0)]
    uniform = np.random.default_rng(3).integers(-2**31, 2**31, (n, 2)).astype(np.int32)
    node = ops.sample(g.leaf(F32, (10, n), np.tile(logits, (n, 1))), g.leaf(F32, (2, 4, n), steps), g.leaf(I32, (2, n), uniform))
    node.buffer = cuda.alloc(int(node.nbytes))
    cuda.compile(nodes_of(node), {node}).run()
    tokens = np.array(cuda.download(node.buffer, 0, 4 * n).view(np.int32))
    kept = np.argsort(-logits)[:6]
    p = np.exp(logits[kept] / 0.8)
    expected = n * p / p.sum()
    seen = np.array([(tokens == t).sum() for t in kept])
    assert seen.sum() == n and ((seen - expected) ** 2 / expected).sum() < 20.5
    cuda.close()
