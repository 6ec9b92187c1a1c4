"""A plugin of pytest: `pytest --gguf FILE` gives tests a model and a context, and there are assertions about what models say.

In: GGUF files named on pytest's command line. Out: fixtures, and failures that say by how much. Every pytest in an environment with
ggraph loads this module, so it imports nothing else until a test asks for a model.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

import ggraph

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ._estimate import Divergence, Perplexity

N_CTX = 2048


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ggraph", "models (ggraph)")
    group.addoption("--gguf", action="append", default=[], metavar="FILE",
                    help="The model of `gguf_model` and `gguf_context`; repeated: their tests run with each.")
    group.addoption("--gguf-base", metavar="FILE", help="The model of `gguf_base`, as assert_kld_below compares with.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gguf_path" in metafunc.fixturenames:
        none = pytest.param(None, marks=pytest.mark.skip("needs a model: give --gguf FILE"))
        metafunc.parametrize("gguf_path", metafunc.config.getoption("--gguf") or [none], scope="session")


@pytest.fixture(scope="session")
def gguf_model(gguf_path: str) -> Iterator[ggraph.Model]:
    """The `ggraph.Model` of --gguf."""
    with ggraph.Model(gguf_path) as model:
        yield model


@pytest.fixture
def gguf_context(gguf_model: ggraph.Model) -> Iterator[ggraph.Context]:
    """An empty `ggraph.Context` of up to 2048 tokens over it."""
    with ggraph.Context(gguf_model, n_ctx=min(N_CTX, gguf_model.hparams.n_ctx_train)) as ctx:
        yield ctx


@pytest.fixture(scope="session")
def gguf_base(pytestconfig: pytest.Config) -> Iterator[ggraph.Model]:
    """The `ggraph.Model` of --gguf-base."""
    path = pytestconfig.getoption("--gguf-base")
    if not path:
        pytest.skip("needs a base model: give --gguf-base FILE")
    with ggraph.Model(path) as model:
        yield model


def logits(ctx: ggraph.Context, prompt: str | Sequence[int]) -> npt.NDArray[np.float32]:
    """float32 [n_vocab]: the prediction after a prompt. What the context held is gone."""
    ids = ctx.model.vocab.encode(prompt) if isinstance(prompt, str) else list(prompt)
    ctx.memory.clear()
    _read(ctx, ids)
    row: npt.NDArray[np.float32] = ctx.logits[-1].copy()
    return row


def _read(ctx: ggraph.Context, ids: Sequence[int]) -> None:
    for start in range(0, len(ids), ctx.cparams.n_batch):
        batch = ggraph.Batch()
        part = ids[start:start + ctx.cparams.n_batch]
        for i, token in enumerate(part):
            batch.add(token, None, 0, output=i == len(part) - 1)
        ctx.process("decode", batch)


def assert_logits_close(got: npt.ArrayLike, want: npt.ArrayLike, nmse: float = 1e-3) -> None:
    """Rows of logits [n, n_vocab] or [n_vocab]: each has a normalized mean square error of at most `nmse`."""
    __tracebackhide__ = True
    import numpy as np
    a, b = (np.atleast_2d(np.asarray(x, np.float64)) for x in (got, want))
    assert a.shape == b.shape, f"logits of shape {a.shape} cannot be compared with {b.shape}"
    error = ((a - b) ** 2).sum(axis=1) / np.maximum((b ** 2).sum(axis=1), np.finfo(float).tiny)
    worst = int(np.argmax(np.where(np.isnan(error), np.inf, error)))
    apart = int(np.abs(a[worst] - b[worst]).argmax())
    if not error[worst] <= nmse:
        raise AssertionError(f"row {worst} of the logits has an NMSE of {error[worst]:.3g}, at most {nmse:.3g} is allowed; "
                             f"token {apart} has {a[worst, apart]:.6g} in place of {b[worst, apart]:.6g}; the likeliest token "
                             f"is {a[worst].argmax()} (expected {b[worst].argmax()})")


def assert_same_tokens(ctx: ggraph.Context, prompt: str | Sequence[int], want: str | Sequence[int]) -> None:
    """Always taking the likeliest token, the model continues the prompt with `want`: a text, or token ids."""
    __tracebackhide__ = True
    vocab = ctx.model.vocab
    ids = vocab.encode(prompt) if isinstance(prompt, str) else list(prompt)
    got = _greedy(ctx, ids)
    if isinstance(want, str):
        found, expected = b"", want.encode()
        while len(found) < len(expected) and not vocab.is_eog(token := next(got)):
            found += vocab.decode_bytes([token])
        if not found.startswith(expected):
            raise AssertionError(f"the text goes on with {found.decode(errors='replace')!r}, expected {want!r}")
        return
    for i, (token, expect) in enumerate(zip(got, want)):
        if token != expect:
            raise AssertionError(f"token {i} of the continuation is {token} {vocab.piece(token)!r}, expected {expect} "
                                 f"{vocab.piece(expect)!r}")


def _greedy(ctx: ggraph.Context, ids: Sequence[int]) -> Iterator[int]:
    token = int(logits(ctx, ids).argmax())
    while True:
        yield token
        _read(ctx, [token])
        token = int(ctx.logits[-1].argmax())


def assert_ppl_below(model: ggraph.Model, limit: float, text: str | None = None, **options: Any) -> Perplexity:
    """The perplexity of a text (without one: five chapters of Jane Austen) is below `limit`; what was measured.

    `options` are those of `ggraph.tools.perplexity.perplexity`: n_ctx, n_chunks, method, ...
    """
    __tracebackhide__ = True
    from .perplexity import perplexity
    result = perplexity(model, _tokens(model, text), **options)
    if not result.ppl.value < limit:
        raise AssertionError(f"the perplexity is {result.ppl.value:.4f} ± {result.ppl.error:.4f} ({result.n_tokens} tokens), "
                             f"not below {limit:g}")
    return result


def assert_kld_below(model: ggraph.Model, base: ggraph.Model, limit: float, text: str | None = None, **options: Any) -> Divergence:
    """The mean KL divergence of a model's predictions from its base's is below `limit` nats; what was measured."""
    __tracebackhide__ = True
    from .perplexity import divergence
    result = divergence(model, base, _tokens(model, text), **options)
    if not result.kld.value < limit:
        raise AssertionError(f"the mean KL divergence is {result.kld.value:.6f} ± {result.kld.error:.6f} "
                             f"({result.n_tokens} tokens), not below {limit:g}; the same token is likeliest in "
                             f"{100 * result.same_top.value:.1f} %")
    return result


def _tokens(model: ggraph.Model, text: str | None) -> list[int]:
    from ._input import read_text
    from .perplexity import TEXT
    return model.vocab.encode(read_text(TEXT) if text is None else text, parse_special=False)
