"""The model of lm-evaluation-harness, where that is installed; and what ggraph-eval says where it is not."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ggraph
from ggraph.tools import eval as command
from tests import tiny


def test_without_lm_eval_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.__main__", raising=False)
    with pytest.raises(SystemExit, match=r"pip install 'ggraph-runtime\[eval\]'"):
        command.main()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("lm_eval") / "m.gguf")


@pytest.fixture
def lm(path: Path) -> Iterator[Any]:
    pytest.importorskip("lm_eval")
    from ggraph.tools.lm_eval import GgraphLM
    lm = GgraphLM(str(path), max_length=64, batch_size=1, device="cpu")
    yield lm
    lm.close()


def asked(*args: Any) -> list[Any]:
    return [SimpleNamespace(args=a) for a in args]


def plain(path: Path, tokens: list[int], first: int) -> float:
    with ggraph.LLM(ggraph.Model(path), n_ctx=256) as llm:
        return sum(s.logprob for s in llm.score(tokens)[first - 1:])


def test_log_probabilities_are_those_of_the_text(lm: Any, path: Path) -> None:
    pairs = [("the rain", " in the inn"), ("the rain", " on"), ("the rain", " in the"), ("", "the heron"), ("a tent", " a line")]
    got = lm.loglikelihood(asked(*pairs), disable_tqdm=True)
    for (context, continuation), (log_p, greedy) in zip(pairs, got):
        whole = lm.tok_encode(context + continuation)
        first = len(lm.tok_encode(context)) if context else 1
        assert log_p == pytest.approx(plain(path, whole, first), rel=1e-4) and not greedy


def test_a_greedy_continuation_is_told(lm: Any) -> None:
    ids = lm.tok_encode("the rain")
    best = lm.llm.generate(ids, max_tokens=1, sampler=ggraph.Sampler("greedy", n_vocab=lm.model.n_vocab))
    best.read()
    other = (best.tokens[0] + 1) % lm.model.n_vocab
    got = lm._loglikelihood_tokens([(("", ""), ids, [best.tokens[0]]), (("", ""), ids, [other])], disable_tqdm=True)
    assert [greedy for _, greedy in got] == [True, False] and got[0][0] > got[1][0]


def test_what_is_too_long_keeps_its_end(lm: Any, path: Path) -> None:
    ids = [1, *range(260, 284)] * 4
    ((log_p, _),) = lm._loglikelihood_tokens([(("", ""), ids, [270, 271])], disable_tqdm=True)
    assert log_p == pytest.approx(plain(path, [*ids, 270, 271][-65:], 63), rel=1e-4)


def test_whole_texts_are_read_in_windows(lm: Any, path: Path) -> None:
    text = "the rain in the inn and the heron on a thin line. " * 6
    tokens = [tiny.BOS, *lm.tok_encode(text, add_special_tokens=False)]
    assert len(tokens) > 2 * 64
    want = sum(plain(path, tokens[i:i + 65], 1) for i in range(0, len(tokens) // 64 * 64, 64))
    rest = len(tokens) - 1 - len(tokens) // 64 * 64
    want += plain(path, tokens[-65:], 65 - rest) if rest else 0
    assert lm.loglikelihood_rolling(asked((text,))) == [pytest.approx(want, rel=1e-4)]


def test_texts_end_at_their_stops(lm: Any) -> None:
    (text,) = lm.generate_until(asked(("the rain", {"until": [], "max_gen_toks": 8})), disable_tqdm=True)
    assert text
    stop = text[2]
    (cut,) = lm.generate_until(asked(("the rain", {"until": [stop], "max_gen_toks": 8, "do_sample": False})), disable_tqdm=True)
    assert cut == text[:text.index(stop)]


def test_a_chat_is_rendered_and_bos_not_doubled(lm: Any) -> None:
    text = lm.apply_chat_template([{"role": "user", "content": "the rain"}])
    assert text.startswith("<|im_start|>user") and lm.chat_template(True) == tiny.TEMPLATE
    assert lm.tok_encode(text)[:2] == [tiny.BOS, 3] and lm.tok_encode("<s>" + text)[:2] == [tiny.BOS, 3]
