"""ggraph-trace: what it tells of each case is what the memory, the mask and the graph really were."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import ggraph
from ggraph.tools import tracing as command
from ggraph.tools._page import page
from ggraph.tools._record import StepTrace
from ggraph.tools.tracing import Trace, dot, trace
from tests import encoders, spec, tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("trace") / "m.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[ggraph.Model]:
    with ggraph.Model(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ggraph.Model]:
    """Layers with KV and layers with a state; no tokenizer."""
    with ggraph.Model(spec.write(spec.specs()["qwen35-dense"], tmp_path_factory.mktemp("trace") / "h.gguf")) as opened:
        yield opened


@pytest.fixture(scope="module")
def everything(model: ggraph.Model) -> Trace:
    return trace(model, ["the rain in the"], cases=("plain", "mixed", "verify"), kv_unified=(True, False), n_draft=3)


def steps(found: Trace, case: str, kv: str = "unified") -> list[StepTrace]:
    return next(r.steps for r in found.runs if (r.case, r.kv) == (case, kv))


def test_plain_the_five_variables(model: ggraph.Model, everything: Trace) -> None:
    prefill, first, second = steps(everything, "plain")
    n = len(prefill.tokens)
    assert n == len(model.vocab.encode("the rain in the")) and len(first.tokens) == len(second.tokens) == 1
    assert {v.role for v in first.variables} == {"hidden", "positions", "mask", "memory", "decode"}
    shapes = {v.name: v.ne for v in prefill.variables}
    assert shapes["inp_embd"] == [tiny.N_EMBD, n, 1, 1] and shapes["l_out-1"] == [tiny.N_EMBD, 1, 1, 1]
    assert shapes["Qcur"] == [tiny.HEAD, tiny.N_HEAD, n, 1] and shapes["kq_mask_0"][:2] == [256, n]
    assert shapes["cache_k (view)"] == [tiny.HEAD, tiny.N_HEAD_KV, 256, 1]
    view = next(v for v in prefill.variables if v.name == "cache_k (view)")
    assert (view.owner, view.where, view.layers) == ("cache_k", "cache", [0, 1]) and view.nb[:3] == [2, 64, 64]
    assert [s.pools[0].used for s in (prefill, first, second)] == [n, n + 1, n + 2]
    assert prefill.masks[0].rows[0] == ["1" * (i + 1) + "0" * (n - i - 1) for i in range(n)]
    assert first.tokens[0].id == prefill.outputs[0].top[0][0], "the next token is the likeliest"


def test_plain_nodes_have_times_and_bytes(everything: Trace) -> None:
    step = steps(everything, "plain")[-1]
    named = {n.names[-1]: n for n in step.nodes}
    assert sum(n.us for n in step.nodes) <= 1e3 * step.ms * 1.01
    assert named["result_output"].nbytes >= 4 * tiny.N_EMBD * tiny.N_VOCAB and named["result_output"].gb_s > 0
    assert sum(s.n_nodes for s in step.splits) >= len(step.nodes)


def test_mixed_in_one_pool_and_in_streams(everything: Trace) -> None:
    prefill, both, *last = steps(everything, "mixed")
    n0, n1 = len(prefill.tokens), len(both.tokens) - 1
    assert [t.seqs for t in both.tokens] == [[0], *[[1]] * n1] and [t.pos[0] for t in both.tokens] == [n0, *range(n1)]
    assert both.masks[0].rows[0][0] == "1" * (n0 + 1) + "0" * n1, "the text being written sees nothing of the other"
    assert both.masks[0].rows[0][1] == "0" * (n0 + 1) + "1" + "0" * (n1 - 1)
    assert both.after and last[0].pools[0].streams[0].owners[0] == [0, 2], "the branch shares its cells"
    apart = [s for s in steps(everything, "mixed", "per sequence") if s.label == both.label]
    assert [len(s.tokens) for s in apart] == [2, n1 - 1], "a run takes equally many tokens of each stream"
    assert len(apart[0].masks[0].rows) == 2 and apart[0].n_ubatch == 2
    copied = steps(everything, "mixed", "per sequence")[-1].pools[0].streams
    assert [s.pos[0] for s in copied] == [0, 0, 0] and copied[2].owners[0] == [2], "the branch has a copy"


def test_verify_takes_back_the_wrong_guess(everything: Trace) -> None:
    prefill, first, second = steps(everything, "verify")
    assert len(first.tokens) == 4 and len(first.outputs) == 4
    assert [bool(re.search("right", o.note)) for o in first.outputs] == [True, True, False, False]
    assert "wrong" in first.outputs[2].note and "refused" in first.outputs[3].note
    assert first.after == [f"memory.seq_rm(0, {len(prefill.tokens) + 3}, -1): 1 of 3 guesses taken back"]
    assert second.tokens[0].pos[0] == len(prefill.tokens) + 3 and second.tokens[0].id == first.outputs[2].top[0][0]


def test_states_do_not_grow_and_cells_do(hybrid: ggraph.Model) -> None:
    found = trace(hybrid, [[1, 2, 3, 4, 5, 6, 7, 8]], cases=("plain", "verify"))
    run = steps(found, "plain")
    hp = hybrid.hparams
    kv, recurrent = ([il for il in range(hp.n_layer) if f(il)] for f in (hp.has_kv, hp.is_recurrent))
    assert kv and recurrent and run[0].pools[0].layers == kv
    assert [s.pools[0].used for s in run] == [8, 9, 10]
    assert run[0].pools[0].bytes_used * 10 == run[2].pools[0].bytes_used * 8
    rows = [s.states for s in run]
    assert all(r and r.layers == recurrent and r.bytes_used == rows[0].bytes_used for r in rows if rows[0])
    assert rows[1] and rows[0] and rows[1].src == rows[0].dst[0], "a step starts from the row that the one before it wrote"
    names = {v.name for v in run[0].variables}
    assert {"cache_r", "cache_s", "rs_src", "rs_dst"} <= {re.sub(r"_l\d+$", "", n) for n in names}
    verified = steps(found, "verify")[1].states
    assert verified and len(verified.dst) == 5, "a state after each guess is kept"


def test_dot_names_every_end_of_an_edge(everything: Trace) -> None:
    text = dot(everything)
    known = set(re.findall(r"^    (\w+) \[label=", text, re.M))
    ends = {end for edge in re.findall(r"^    (\w+) -> (\w+);", text, re.M) for end in edge}
    assert ends and ends <= known and text.count("{") == text.count("}")


def test_the_page_stands_alone(everything: Trace) -> None:
    text = page(everything)
    assert not re.search(r"""(src|href)=["']?(http|//)|@import|url\(""", text)
    found: dict[str, Any] = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert [len(r["steps"]) for r in found["runs"]] == [len(r.steps) for r in everything.runs]
    assert text.count('<svg class="graph"') >= 3 and "Layer 0" in text
    assert "One pool of cells" in text


def invoke(*args: str) -> Result:
    return CliRunner().invoke(command.main, list(args))


def test_command(path: Path, tmp_path: Path) -> None:
    done = invoke("-m", str(path), "-p", "the rain", "-q", "--case", "mixed", "--compare-kv")
    assert done.exit_code == 0 and "kv_cells_0" in done.stdout and "per sequence" in done.stdout and not done.stderr
    told = json.loads(invoke("-m", str(path), "-p", "the rain", "-q", "-n", "1", "--json").stdout)
    assert [s["label"] for s in told["runs"][0]["steps"]] == ["prefill", "decode 1"]
    done = invoke("-m", str(path), "-q", "--html", str(tmp_path / "t.html"), "--dot", str(tmp_path / "t.dot"))
    assert done.exit_code == 0 and not done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"t.html", "t.dot"} and (tmp_path / "t.dot").read_text().startswith("digraph")


@pytest.mark.parametrize(("args", "told", "code"), [
    (("--token-ids", "1,x"), "not token ids", 2), (("--case", "none"), "not one of", 2),
    (("--html", "nowhere/x.html"), "nowhere", 1), (("--token-ids", "1,999999"), "the vocabulary has ids", 1)])
def test_what_is_wrong_is_told(path: Path, args: tuple[str, ...], told: str, code: int, tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("-m", str(path), "-q", *args)
    assert done.exit_code == code and told in done.stderr, done.stderr


def test_a_prompt_of_nothing(model: ggraph.Model) -> None:
    with pytest.raises(ggraph.Error, match="without tokens shows nothing"):
        trace(model, [[]])


def test_a_model_that_writes_no_text(tmp_path: Path) -> None:
    path = spec.write(encoders.SPECS["bert"], tmp_path / "b.gguf")
    with ggraph.Model(path) as model, pytest.raises(ggraph.Error, match="gives embeddings"):
        trace(model, [[1, 2, 3]])
