"""The promises of a Context: a sequence's logits do not depend on company, ubatches, threads or layout, to the bit; what is
removed, saved, shifted or refused leaves the state that a recompute would give."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ggraph
from ggraph import env
from tests import spec
from tests.examples import examples

NAMES = ("llama-dense-b", "llama-moe-b", "gemma3-dense-b", "qwen35-dense-b")
RECURRENT = ("mamba-dense", "mamba2-dense", "jamba-dense", "falcon-h1-dense", "lfm2-dense", "kimi-linear-moe", "minimax-01-moe",
             "qwen4exp-moe")
EXACT = env.get("GGRAPH_BACKEND") != "ref"              # BLAS sums in an order that depends on the shape
Rows = dict[int, np.ndarray]                            # sequence -> logits [n, n_vocab]
QUICK = settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ggraph.Model]]:
    folder = tmp_path_factory.mktemp("models")
    opened = {n: ggraph.Model(spec.write(spec.specs()[n], folder / f"{n}.gguf")) for n in (*NAMES, *RECURRENT)}
    yield opened
    for model in opened.values():
        model.close()


def context(model: ggraph.Model, **options: Any) -> ggraph.Context:
    defaults: dict[str, Any] = {"n_ctx": 512, "n_batch": 256, "n_ubatch": 32, "n_threads": 2, "flash_attn": "on"}
    return ggraph.Context(model, **defaults | options)


def ids(seq: int, n: int) -> list[int]:
    """The text of a sequence: always the same for the same number."""
    return [int(t) for t in np.random.RandomState(seq).randint(0, 128, n)]


def feed(ctx: ggraph.Context, rows: Sequence[tuple[int, int]]) -> np.ndarray:
    """Decode (token, sequence) rows, each at the next position of its sequence; all logits."""
    batch = ggraph.Batch()
    for token, seq in rows:
        batch.add(token, None, seq, output=True)
    ctx.process("decode", batch)
    return np.array(ctx.logits)


def alone(model: ggraph.Model, seq: int, n: int, **options: Any) -> np.ndarray:
    with context(model, **options) as ctx:
        return feed(ctx, [(t, 0) for t in ids(seq, n)])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    if EXACT:
        return np.array_equal(a, b)
    return bool(np.abs(a - b).max() <= 1e-4 * np.abs(b).max())


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(data=st.data())
def test_a_sequence_alone_equals_the_same_beside_others(models: dict[str, ggraph.Model], name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4), "lengths")
    order = data.draw(st.permutations(range(len(lengths))), "order")
    options = {"n_seq_max": 4, "n_ubatch": data.draw(st.sampled_from([1, 7, 32, 64]), "n_ubatch"),
               "kv_unified": data.draw(st.booleans(), "unified"), "n_threads": data.draw(st.sampled_from([1, 2]), "threads")}
    cut = data.draw(st.integers(0, min(lengths) - 1), "cut")                  # the batch before: that much of each
    with context(models[name], **options) as ctx:
        got: Rows = {s: np.zeros((0, 128), np.float32) for s in order}
        for take in (slice(0, cut), slice(cut, None)):
            rows = [(t, s) for s in order for t in ids(s, lengths[s])[take]]
            if rows:
                out = feed(ctx, rows)
                for s in order:
                    got[s] = np.concatenate([got[s], out[[i for i, (_, r) in enumerate(rows) if r == s]]])
    for s in order:
        assert same(got[s], alone(models[name], s, lengths[s])), f"sequence {s}"


@pytest.mark.parametrize("n_ubatch,unified,cut", [(64, True, 9), (7, False, 20), (32, True, 1)])
@pytest.mark.parametrize("name", RECURRENT)
def test_every_kind_of_state_starts_anew_and_keeps_to_its_sequence(models: dict[str, ggraph.Model], name: str, n_ubatch: int,
                                                                   unified: bool, cut: int) -> None:
    lengths = (30, 23, 37)
    with context(models[name], n_seq_max=3, n_ubatch=n_ubatch, kv_unified=unified) as ctx:
        feed(ctx, [(t, s) for s in range(3) for t in ids(9 + s, 5)])             # leaves something in the rows
        assert all(ctx.memory.seq_rm(s) for s in range(3))
        parts = []
        for take in (slice(0, cut), slice(cut, None)):
            rows = [(t, s) for s, n in enumerate(lengths) for t in ids(s, n)[take]]
            out = feed(ctx, rows)
            parts.append([out[[i for i, (_, r) in enumerate(rows) if r == s]] for s in range(3)])
    for s, n in enumerate(lengths):
        assert same(np.concatenate([part[s] for part in parts]), alone(models[name], s, n, n_threads=1)), f"sequence {s}"


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 31, 32, 33])
def test_remove_then_decode_equals_a_recompute(models: dict[str, ggraph.Model], name: str, keep: int) -> None:
    with context(models[name]) as ctx:
        feed(ctx, [(t, 0) for t in ids(0, 36)])
        assert ctx.memory.seq_rm(0, keep, -1)
        assert ctx.memory.seq_pos_max(0) == keep - 1
        tail = feed(ctx, [(t, 0) for t in ids(0, 40)[keep:]])
    assert same(tail, alone(models[name], 0, 40)[keep:])


def test_a_refused_removal_changes_nothing(models: dict[str, ggraph.Model]) -> None:
    with context(models["qwen35-dense-b"]) as ctx:
        feed(ctx, [(t, 0) for t in ids(0, 20)])
        assert not ctx.memory.seq_rm(0, 10, -1)
        assert ctx.memory.seq_pos_max(0) == 19
        tail = feed(ctx, [(t, 0) for t in ids(0, 24)[20:]])
        assert same(tail, alone(models["qwen35-dense-b"], 0, 24)[20:])
        assert ctx.memory.seq_rm(0)
        assert same(feed(ctx, [(t, 0) for t in ids(1, 9)]), alone(models["qwen35-dense-b"], 1, 9))


@pytest.mark.parametrize("name,n,together", [("qwen35-dense-b", n, t) for n, t in ((1, True), (2, False), (20, True), (20, False),
                                                                                   (31, True), (32, False), (33, True))]
                         + [(name, n, n > 1) for n in (1, 32) for name in RECURRENT if name != "minimax-01-moe"])
def test_a_state_goes_back_as_far_as_it_was_asked_to(models: dict[str, ggraph.Model], name: str, n: int, together: bool) -> None:
    model = models[name]
    with context(model, n_rollback=3, n_seq_max=2) as ctx:
        feed(ctx, [(t, s) for s in (0, 1) for t in ids(s, n)])
        draft = [(t, 0) for t in ids(9, 3)]
        for rows in [draft] if together else [[row] for row in draft]:
            feed(ctx, rows)
        assert ctx.memory.seq_rm(0, n, -1)
        assert same(feed(ctx, [(t, 0) for t in ids(0, n + 5)[n:]]), alone(model, 0, n + 5)[n:])
        assert not ctx.memory.seq_rm(0, n, -1)
        assert same(feed(ctx, [(t, 1) for t in ids(1, n + 2)[n:]]), alone(model, 1, n + 2)[n:])


@pytest.mark.parametrize("name,n", [(name, n) for n in (1, 7, 8, 9, 40) for name in NAMES] + [(name, 9) for name in RECURRENT])
@pytest.mark.parametrize("one", [False, True])
def test_save_load_decode_equals_going_on(models: dict[str, ggraph.Model], tmp_path: Path, name: str, n: int, one: bool) -> None:
    file = tmp_path / "state"
    with context(models[name], n_seq_max=2) as ctx:
        feed(ctx, [(t, s) for s in (0, 1) for t in ids(s, n)])
        ctx.state_save(file, seq=0 if one else None)
        want = feed(ctx, [(t, 0) for t in ids(0, n + 4)[n:]])
    with context(models[name], n_seq_max=2, kv_unified=False) as ctx:
        feed(ctx, [(t, 1) for t in ids(5, 11)])
        ctx.state_load(file, seq=0 if one else None)
        assert same(feed(ctx, [(t, 0) for t in ids(0, n + 4)[n:]]), want)
        assert ctx.memory.seq_pos_max(1) == (10 if one else n - 1)


def test_a_damaged_or_foreign_state_is_refused(models: dict[str, ggraph.Model], tmp_path: Path) -> None:
    file = tmp_path / "state"
    with context(models["llama-dense-b"]) as ctx:
        feed(ctx, [(t, 0) for t in ids(0, 9)])
        ctx.state_save(file)
        whole = file.read_bytes()
        for bad in (b"", whole[:100], whole[:-200]):
            file.write_bytes(bad)
            with pytest.raises(ggraph.Error):
                ctx.state_load(file)
        file.write_bytes(whole)
        assert same(feed(ctx, [(t, 0) for t in ids(0, 12)[9:]]), alone(models["llama-dense-b"], 0, 12)[9:])
    for other in (context(models["gemma3-dense-b"]), context(models["llama-dense-b"], type_k="q8_0")):
        with other, pytest.raises(ggraph.Error, match="does not fit"):
            other.state_load(file)


@pytest.mark.parametrize("type_k", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("cut", [(0, 8), (1, 2), (4, 19)])
def test_shift_then_decode_follows_the_shortened_text(models: dict[str, ggraph.Model], type_k: str, cut: tuple[int, int]) -> None:
    """One layer sees only embeddings, so K and V of the rest do not depend on what was cut."""
    tiny = one_layer()
    options = {"type_k": type_k, "type_v": "f32" if type_k == "f32" else "f16"}
    text, (a, b) = ids(0, 30), cut
    with ggraph.Model(tiny) as model:
        with context(model, **options) as ctx:
            feed(ctx, [(t, 0) for t in text[:24]])
            assert ctx.memory.seq_rm(0, a, b) and ctx.memory.seq_add(0, b, -1, a - b)
            got = feed(ctx, [(t, 0) for t in text[24:]])
        with context(model, **options) as ctx:
            want = feed(ctx, [(t, 0) for t in text[:a] + text[b:]])[-6:]
    error = float(((got - want) ** 2).sum() / (want ** 2).sum())
    assert error < {"f32": 1e-9, "f16": 1e-5, "q8_0": 1e-2}[type_k]


_ONE_LAYER: list[Path] = []


def one_layer() -> Path:
    if not _ONE_LAYER:
        import tempfile
        s = dict(spec.specs()["llama-dense-b"])
        s["kv"] = [[k, t, 1 if k.endswith("block_count") else v] for k, t, v in s["kv"]]
        s["tensors"] = [t for t in s["tensors"] if not t[0].startswith("blk.") or t[0].startswith("blk.0.")]
        _ONE_LAYER.append(spec.write(s, Path(tempfile.mkdtemp()) / "one.gguf"))
    return _ONE_LAYER[0]


def test_a_branch_shares_the_past_and_goes_its_own_way(models: dict[str, ggraph.Model]) -> None:
    for name in NAMES:
        with context(models[name], n_seq_max=2) as ctx:
            feed(ctx, [(t, 0) for t in ids(0, 12)])
            assert ctx.memory.seq_cp(0, 1)
            out = feed(ctx, [(t, s) for i in range(4) for s, t in ((0, ids(0, 16)[12 + i]), (1, ids(7, 4)[i]))])
            assert same(out[::2], alone(models[name], 0, 16)[12:])
        with context(models[name]) as ctx:
            want = feed(ctx, [(t, 0) for t in ids(0, 12) + ids(7, 4)])[12:]
        assert same(out[1::2], want), name


@pytest.mark.parametrize("name", NAMES)
def test_no_graph_reuse_gives_identical_logits(models: dict[str, ggraph.Model], name: str) -> None:
    rows = []
    for reuse in (True, False):
        with context(models[name], graph_reuse=reuse) as ctx:
            feed(ctx, [(t, 0) for t in ids(0, 12)])
            rows.append(np.concatenate([feed(ctx, [(t, 0)]) for t in ids(0, 16)[12:]]))
            assert ctx.perf.plans["built"] == (0 if reuse else 5)
    assert np.array_equal(rows[0], rows[1])


def test_a_full_context_refuses_the_batch_and_stays(models: dict[str, ggraph.Model]) -> None:
    with context(models["llama-dense-b"], n_ctx=256) as ctx:
        for _ in range(2):
            feed(ctx, [(t, 0) for t in ids(0, 120)])
        with pytest.raises(ggraph.ContextFull, match="256"):
            feed(ctx, [(t, 0) for t in ids(0, 40)])
        assert ctx.memory.seq_pos_max(0) == 239
        feed(ctx, [(t, 0) for t in ids(0, 16)])


def test_bad_batches_name_what_is_wrong_and_change_nothing(models: dict[str, ggraph.Model]) -> None:
    with context(models["llama-dense-b"], n_seq_max=2) as ctx:
        feed(ctx, [(t, 0) for t in ids(0, 5)])
        for add, word in (((128, None, 0), "128"), ((-1, None, 0), "-1"), ((3, 9, 0), "position"), ((3, None, 2), "sequence 2")):
            batch = ggraph.Batch()
            batch.add(*add)
            with pytest.raises(ggraph.BatchError, match=word):
                ctx.process("decode", batch)
        with pytest.raises(ggraph.BatchError, match="n_batch"):
            feed(ctx, [(1, 1)] * 257)
        with pytest.raises(ggraph.BatchError):
            ctx.process("train", ggraph.Batch())
        assert ctx.memory.seq_pos_max(0) == 4 and ctx.memory.seq_pos_max(1) == -1


def test_hooks_see_replace_and_stop(models: dict[str, ggraph.Model]) -> None:
    seen: dict[str, tuple[int, ...]] = {}
    answers: dict[str, Any] = {}

    def look(name: str, array: np.ndarray, node: Any) -> Any:
        seen[name] = array.shape
        return answers.get(name)

    model = models["llama-dense-b"]
    with context(model, on_node=ggraph.Hook("l_out-*", look)) as ctx:
        plain = feed(ctx, [(t, 0) for t in ids(0, 6)])
        assert seen == {f"l_out-{il}": (1, 1, 6, model.hparams.n_embd) for il in range(model.hparams.n_layer)}
        assert np.allclose(plain, alone(model, 0, 6), rtol=1e-4, atol=1e-4)
        answers["l_out-1"] = np.zeros((1, 1, 1, model.hparams.n_embd), np.float32)
        assert not np.allclose(feed(ctx, [(5, 0)]), 0)
        answers["l_out-1"] = ggraph.STOP
        with pytest.raises(ggraph.Aborted, match="l_out-1"):
            feed(ctx, [(5, 0)])
        assert ctx.memory.seq_pos_max(0) == 6


def test_what_a_hook_makes_of_its_array_is_its_own(models: dict[str, ggraph.Model]) -> None:
    writeable = []

    def look(name: str, array: np.ndarray, node: Any) -> None:
        writeable.append(array.flags.writeable)
        array.flags.writeable = False

    with context(models["llama-dense-b"], on_node=ggraph.Hook("l_out-*", look)) as ctx:
        for t in ids(0, 3):
            feed(ctx, [(t, 0)])
    assert len(writeable) >= 6 and all(writeable)


def test_embeddings_input_equals_tokens(models: dict[str, ggraph.Model]) -> None:
    model = models["llama-dense-b"]
    table = spec.weights("token_embd.weight", [model.hparams.n_embd, 128])
    with context(model) as ctx:
        batch = ggraph.Batch()
        for t in ids(0, 9):
            batch.add_embd(table[t], None, 0, output=True)
        ctx.process("decode", batch)
        assert same(ctx.logits, alone(model, 0, 9))


def test_only_the_rows_asked_for_come_in_batch_order(models: dict[str, ggraph.Model]) -> None:
    model = models["gemma3-dense-b"]
    with context(model, n_seq_max=2, n_ubatch=4) as ctx:
        batch = ggraph.Batch()
        for i in range(10):
            for s in (1, 0):
                batch.add(ids(s, 10)[i], None, s, output=i in (3, 9))
        ctx.process("decode", batch)
        assert ctx.logits.shape == (4, 128) and not ctx.logits.flags.writeable
        want = {s: alone(model, s, 10) for s in (0, 1)}
        assert same(ctx.logits, np.stack([want[1][3], want[0][3], want[1][9], want[0][9]]))


def test_two_threads_at_once_raise_and_an_abort_leaves_a_usable_context(models: dict[str, ggraph.Model]) -> None:
    model = models["llama-dense-b"]
    started, go = threading.Event(), threading.Event()

    def wait(name: str, array: np.ndarray, node: Any) -> None:
        started.set()
        go.wait(10)

    with context(model, on_node=ggraph.Hook("l_out-0", wait)) as ctx:
        worker = threading.Thread(target=feed, args=(ctx, [(1, 0)]))
        worker.start()
        started.wait(10)
        with pytest.raises(ggraph.Error, match="another thread"):
            feed(ctx, [(1, 0)])
        go.set()
        worker.join()
        assert ctx.memory.seq_pos_max(0) == 0
        feed(ctx, [(2, 0)])


@pytest.mark.parametrize("what", ["context", "model", "process", "state"])
def test_a_hook_cannot_use_or_close_its_own_context(tmp_path: Path, what: str) -> None:
    """It is told so; what it does not catch ends the step, and Context and Model can be used and closed afterwards."""
    model = ggraph.Model(spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf"))
    todo = [what]

    def misuse(*seen: object) -> None:
        calls: dict[str, Callable[[], object]] = {
            "context": ctx.close, "model": model.close, "process": lambda: feed(ctx, [(2, 0)]),
            "state": lambda: ctx.state_save(tmp_path / "state")}
        if todo:
            calls[todo.pop()]()
    ctx: ggraph.Context = context(model, on_node=ggraph.Hook("l_out-0", misuse))
    with pytest.raises(ggraph.Error, match="a hook cannot (close|use) the Context that calls it"):
        feed(ctx, [(1, 0)])
    assert ctx.memory.seq_pos_max(0) == -1 and np.isfinite(feed(ctx, [(1, 0)])).all()
    with context(model) as second:
        feed(second, [(1, 0)])
    model.close()
    with pytest.raises(ggraph.Error, match="is closed"):
        feed(ctx, [(2, 0)])


@pytest.mark.parametrize("what", ["context", "model"])
def test_after_close_there_is_an_error(tmp_path: Path, what: str) -> None:
    model = ggraph.Model(spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf"))
    ctx = context(model)
    kept = feed(ctx, [(1, 0)])
    (ctx if what == "context" else model).close()
    with pytest.raises(ggraph.Error, match="this Context is closed, by itself or with its Model"):
        feed(ctx, [(2, 0)])
    with pytest.raises(ggraph.Error, match="is closed"):
        ctx.state_save(tmp_path / "state")
    assert np.isfinite(kept).all() and not (tmp_path / "state").exists()
    ctx.close()
    model.close()


def test_a_state_is_saved_where_a_folder_is_and_nothing_else_of_that_name(models: dict[str, ggraph.Model], tmp_path: Path) -> None:
    with context(models["llama-dense-b"]) as ctx:
        for path, said in (tmp_path / "no" / "state", "there is no folder"), (tmp_path, "is a folder, not a file"):
            with pytest.raises(ggraph.Error, match=said):
                ctx.state_save(path)


def test_a_model_that_closes_waits_for_what_runs(tmp_path: Path) -> None:
    model = ggraph.Model(spec.write(spec.specs()["llama-dense-b"], tmp_path / "m.gguf"))
    started, go, ended = threading.Event(), threading.Event(), []

    def wait(name: str, array: np.ndarray, node: Any) -> None:
        started.set()
        go.wait(10)

    ctx = context(model, on_node=ggraph.Hook("l_out-0", wait))
    worker = threading.Thread(target=lambda: ended.append(feed(ctx, [(1, 0)])))
    worker.start()
    started.wait(10)
    closer = threading.Thread(target=model.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    go.set()
    worker.join(10)
    closer.join(10)
    assert len(ended) == 1 and not closer.is_alive()


def test_ubatches_done_before_a_failure_stay(models: dict[str, ggraph.Model]) -> None:
    calls = []

    def stop_third(name: str, array: np.ndarray, node: Any) -> Any:
        calls.append(name)
        return ggraph.STOP if len(calls) == 3 else None

    model = models["qwen35-dense-b"]
    with context(model, n_ubatch=8, on_node=ggraph.Hook("l_out-0", stop_third)) as ctx:
        with pytest.raises(ggraph.Aborted) as failed:
            feed(ctx, [(t, 0) for t in ids(0, 30)])
        assert failed.value.n_done == 16 and ctx.memory.seq_pos_max(0) == 15
        tail = feed(ctx, [(t, 0) for t in ids(0, 30)[16:]])
        assert np.allclose(tail, alone(model, 0, 30)[16:], rtol=1e-3, atol=1e-4)
