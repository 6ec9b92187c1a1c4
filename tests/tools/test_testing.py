"""The pytest plugin: fixtures, assertions that fail with figures, and that it costs nobody anything."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ggraph
from ggraph import env
from ggraph.tools import testing
from ggraph.tools.testing import assert_kld_below, assert_logits_close, assert_ppl_below, assert_same_tokens
from tests import tiny

pytest_plugins = ["pytester"]
CACHE = env.cache_dir()         # of compiled kernels; pytester gives processes a home of their own
TEXT = "the rain in the inn and the heron on a thin line.\n" * 8
SUITE = """
from ggraph.tools.testing import assert_kld_below, assert_ppl_below, assert_same_tokens

def test_model(gguf_model):
    assert_ppl_below(gguf_model, 1e9, n_ctx=32, n_chunks=2)

def test_context(gguf_context):
    assert gguf_context.n_ctx == 512
    assert_same_tokens(gguf_context, "the", [])

def test_too_strict(gguf_model):
    assert_ppl_below(gguf_model, 1.0, n_ctx=32, n_chunks=2)

def test_base(gguf_model, gguf_base):
    assert_kld_below(gguf_model, gguf_base, 0.01, n_ctx=32, n_chunks=1)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("testing") / "m.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[ggraph.Model]:
    with ggraph.Model(path) as model:
        yield model


@pytest.fixture
def ctx(model: ggraph.Model) -> Iterator[ggraph.Context]:
    with ggraph.Context(model, n_ctx=256, n_batch=16) as ctx:
        yield ctx


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(CACHE))


def run(pytester: pytest.Pytester, *args: str | Path) -> pytest.RunResult:
    """In a process of its own: within this one, pytester would take the loaded modules away."""
    pytester.makepyfile(SUITE)
    return pytester.runpytest_subprocess("-p", "no:ggraph", "-p", "ggraph.tools.testing", "-W", "error", *args)


def test_a_suite_runs_with_every_model(pytester: pytest.Pytester, path: Path) -> None:
    result = run(pytester, "--gguf", path, "--gguf", path, "--gguf-base", path)
    result.assert_outcomes(passed=6, failed=2)
    result.stdout.fnmatch_lines(["*AssertionError: the perplexity is * ± * (30 tokens), not below 1"])


def test_without_a_model_tests_are_skipped(pytester: pytest.Pytester) -> None:
    run(pytester).assert_outcomes(skipped=4)


def test_the_plugin_imports_next_to_nothing() -> None:
    code = ("import sys, pytest; before = set(sys.modules); import ggraph.tools.testing; "
            "print(sorted(n for n in set(sys.modules) - before if not n.startswith('ggraph')))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "numba", "click", "gguf"} & set(eval(done.stdout)), done.stdout
    assert len(eval(done.stdout)) < 10, done.stdout


def test_logits_are_compared_row_by_row() -> None:
    rows = np.random.RandomState(0).standard_normal((3, 50)).astype(np.float32)
    assert_logits_close(rows, rows + 1e-5)
    assert_logits_close(rows[0], rows[0])
    other = rows.copy()
    other[1, 7] += 3
    with pytest.raises(AssertionError, match=r"row 1 .* NMSE of 0\.\d+.* token 7 "):
        assert_logits_close(other, rows)
    other[2, 0] = np.nan
    with pytest.raises(AssertionError, match=r"row 2 .* NMSE of nan"):
        assert_logits_close(other, rows)
    with pytest.raises(AssertionError, match="shape"):
        assert_logits_close(rows, rows[:2])


def test_tokens_are_those_of_greedy_generation(ctx: ggraph.Context, model: ggraph.Model) -> None:
    with ggraph.LLM(model, n_ctx=256) as llm:
        answer = llm.generate("the rain", max_tokens=6, temperature=0.0, ignore_eos=True, repeat_penalty=1.0)
        answer.read()
    assert_same_tokens(ctx, "the rain", answer.tokens)
    assert_same_tokens(ctx, model.vocab.encode("the rain"), answer.tokens[:2])
    wrong = [*answer.tokens[:3], (answer.tokens[3] + 1) % model.n_vocab]
    with pytest.raises(AssertionError, match=rf"token 3 of the continuation is {answer.tokens[3]} "):
        assert_same_tokens(ctx, "the rain", wrong)
    with pytest.raises(AssertionError, match="the text goes on with"):
        assert_same_tokens(ctx, "the rain", "something that it does not say")


def test_the_text_of_a_continuation(ctx: ggraph.Context, model: ggraph.Model) -> None:
    best = int(testing.logits(ctx, "the rain").argmax())
    assert_same_tokens(ctx, "the rain", model.vocab.decode([best]))


def test_perplexity_and_divergence_have_limits(model: ggraph.Model, tmp_path: Path) -> None:
    ppl = assert_ppl_below(model, 1e6, TEXT, n_ctx=32).ppl.value
    with pytest.raises(AssertionError, match=r"the perplexity is .* ± .* tokens\), not below"):
        assert_ppl_below(model, ppl, TEXT, n_ctx=32)
    assert assert_kld_below(model, model, 1e-3, TEXT, n_ctx=32).same_top.value == 1
    with (ggraph.Model(tiny.write(tmp_path / "b.gguf", llama__rope__freq_base=10.0)) as base,
          pytest.raises(AssertionError, match="the mean KL divergence is")):
        assert_kld_below(model, base, 1e-9, TEXT, n_ctx=32)
