"""ggraph-perplexity: windows, perplexity by hand, divergence, llama.cpp's file, and the command line."""
from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import ggraph
from ggraph.tools import _windows
from ggraph.tools import perplexity as tool
from ggraph.tools._input import read_text
from ggraph.tools._logits import LogitsFile, LogitsWriter, decode, distance, encode, nll
from tests import spec, tiny

WORDS = "the rain in the inn and the heron on a thin line, the other then in the tent.\n"
OTHER = {"llama__rope__freq_base": 100.0}       # the same weights, other predictions


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("ppl") / "m.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[ggraph.Model]:
    with ggraph.Model(path) as model:
        yield model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ggraph.Model]:
    with ggraph.Model(tiny.write(tmp_path_factory.mktemp("ppl") / "base.gguf", **OTHER)) as model:
        yield model


@pytest.fixture(scope="module")
def tokens(model: ggraph.Model) -> list[int]:
    return model.vocab.encode(WORDS * 6)


def plain(model: ggraph.Model, tokens: list[int]) -> np.ndarray:
    """Log-probabilities float64 [n, n_vocab] of one text read at once."""
    with ggraph.Context(model, n_ctx=len(tokens), n_batch=len(tokens)) as ctx:
        batch = ggraph.Batch()
        for pos, token in enumerate(tokens):
            batch.add(token, pos, 0, output=True)
        ctx.process("decode", batch)
        logits: np.ndarray = ctx.logits.astype(np.float64)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


# --- windows


def test_llama_cpp_predicts_the_second_half_of_pieces_that_begin_with_bos() -> None:
    one, two = _windows.chunks(list(range(100, 117)), 8, bos=1)
    assert one == _windows.Window([1, *range(101, 107)], 4, [105, 106, 107])
    assert two == _windows.Window([1, *range(109, 115)], 4, [113, 114, 115])
    assert _windows.chunks(list(range(100, 117)), 8, bos=None, n_chunks=1)[0].tokens[0] == 100


def test_a_stride_moves_windows_and_predicts_their_end() -> None:
    windows = _windows.strided(list(range(600)), 200, 100)
    assert [(w.tokens[0], w.first, w.targets[0], w.targets[-1]) for w in windows] == [
        (0, 155, 156, 255), (100, 155, 256, 355), (200, 155, 356, 455), (300, 155, 456, 555)]


def test_hugging_face_predicts_every_token_once() -> None:
    tokens = list(range(23))
    windows = _windows.sliding(tokens, 8, 3)
    assert [t for w in windows for t in w.targets] == tokens[1:]
    for w in windows:
        assert len(w.tokens) == w.first + len(w.targets) <= 8
        assert [w.tokens[w.first + i] + 1 for i in range(len(w.targets))] == w.targets


@pytest.mark.parametrize(("call", "word"), [
    (lambda: _windows.chunks([1] * 15, 8, None), "16 at least"), (lambda: _windows.chunks([1] * 15, 3, None), "too short"),
    (lambda: _windows.sliding([1] * 15, 8, 8), "less than the window"), (lambda: _windows.sliding([1], 8, 4), "two tokens"),
    (lambda: _windows.strided([1] * 3000, 256, 1600), "stride")])
def test_texts_and_windows_that_do_not_fit_are_refused(call: object, word: str) -> None:
    with pytest.raises(ggraph.Error, match=word):
        call()  # type: ignore[operator]


# --- perplexity


def test_perplexity_is_that_of_the_log_probabilities(model: ggraph.Model, tokens: list[int]) -> None:
    n_ctx, log_p = 32, []
    for start in range(0, len(tokens) // n_ctx * n_ctx, n_ctx):
        piece = tokens[start:start + n_ctx]
        rows = plain(model, [tiny.BOS, *piece[1:]])
        log_p += [rows[i, piece[i + 1]] for i in range(n_ctx // 2, n_ctx - 1)]
    got = tool.perplexity(model, tokens, n_ctx=n_ctx)
    assert got.n_tokens == len(log_p) == got.n_chunks * 15 and got.method == "llama.cpp"
    assert got.ppl.value == pytest.approx(math.exp(-np.mean(log_p)), rel=1e-5)
    assert got.ppl.error == pytest.approx(got.ppl.value * np.std(log_p) / math.sqrt(len(log_p) - 1), rel=1e-4)
    assert got.running[-1] == got.ppl.value and len(got.running) == got.n_chunks


def test_how_many_windows_run_together_changes_nothing(model: ggraph.Model, tokens: list[int],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    want = tool.perplexity(model, tokens, n_ctx=32)
    assert tool.perplexity(model, tokens, n_ctx=32, n_batch=8, n_ubatch=4) == want
    assert tool.perplexity(model, tokens, n_ctx=32, kv_unified=False) == want
    monkeypatch.setattr(_windows, "LOGITS_BYTES", 3 * 4 * model.n_vocab)
    assert tool.perplexity(model, tokens, n_ctx=32) == want


def test_hugging_faces_method(model: ggraph.Model, tokens: list[int]) -> None:
    whole = plain(model, tokens)
    log_p = [whole[i, token] for i, token in enumerate(tokens[1:])]
    got = tool.perplexity(model, tokens, method="hf", n_ctx=len(tokens) + 1)
    assert (got.n_chunks, got.n_tokens) == (1, len(tokens) - 1) and got.method.startswith("Hugging Face")
    assert got.ppl.value == pytest.approx(math.exp(-np.mean(log_p)), rel=1e-5)
    slid = tool.perplexity(model, tokens, method="hf", n_ctx=32, stride=8)
    assert slid.n_tokens == got.n_tokens and slid.n_chunks > 10


def test_recurrent_models_are_measured_side_by_side(tmp_path: Path) -> None:
    name = next(n for n in spec.specs() if n.startswith("mamba"))
    with ggraph.Model(spec.write(spec.specs()[name], tmp_path / "m.gguf")) as model:
        tokens = np.random.RandomState(0).randint(3, model.n_vocab, 96).tolist()
        windows = _windows.chunks(tokens, 16, None)
        np.testing.assert_array_equal(nll_of(model, windows, 1), nll_of(model, windows, 4))


def nll_of(model: ggraph.Model, windows: list[_windows.Window], n_seqs: int) -> np.ndarray:
    out = np.zeros((len(windows), len(windows[0].targets)))
    with ggraph.Context(model, n_ctx=64, n_seq_max=n_seqs) as ctx:
        for rows in _windows.evaluate([ctx], windows):
            for i, token in enumerate(rows.targets):
                out[rows.window, rows.first + i] = nll(rows.logits[0][i], token)
    return out


# --- divergence


def test_a_model_does_not_differ_from_itself(model: ggraph.Model, tokens: list[int]) -> None:
    got = tool.divergence(model, model, tokens, n_ctx=32)
    assert got.kld.value == pytest.approx(0, abs=1e-6) and got.same_top.value == 1 and got.delta_p_rms.value == 0
    assert got.ratio.value == pytest.approx(1) and got.correlation == pytest.approx(1)
    assert got.ppl == got.ppl_base == tool.perplexity(model, tokens, n_ctx=32).ppl


def test_divergence_is_the_sum_over_the_vocabulary(model: ggraph.Model, base: ggraph.Model, tokens: list[int]) -> None:
    tokens = tokens[:64]
    want, delta, same = [], [], []
    for start in (0, 32):
        piece = tokens[start:start + 32]
        q, p = (plain(m, [tiny.BOS, *piece[1:]])[16:31] for m in (model, base))
        want += list((np.exp(p) * (p - q)).sum(axis=1))
        delta += [np.exp(q[i, t]) - np.exp(p[i, t]) for i, t in enumerate(piece[17:])]
        same += list(p.argmax(axis=1) == q.argmax(axis=1))
    got = tool.divergence(model, base, tokens, n_ctx=32)
    np.testing.assert_allclose(got.kld_values, want, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(got.delta_p_values, delta, atol=1e-6)
    assert got.kld.value == pytest.approx(np.mean(want), rel=1e-3) and got.kld.value > 1e-4
    assert got.same_top.value == pytest.approx(np.mean(same)) and got.n_tokens == 30
    assert got.kld_at["100"] == got.kld_values.max() and got.kld_at["50"] == pytest.approx(np.median(want), rel=1e-3)
    assert got.delta_p_rms.value == pytest.approx(math.sqrt(np.mean(np.square(delta))), rel=1e-3)


def test_the_file_of_a_base_gives_what_the_base_gives(model: ggraph.Model, base: ggraph.Model, tokens: list[int],
                                                      tmp_path: Path) -> None:
    saved = tmp_path / "base.kld"
    ppl = tool.perplexity(base, tokens, n_ctx=32, save=saved).ppl
    direct = tool.divergence(model, base, tokens, n_ctx=32)
    with LogitsFile(saved) as file:
        got = tool.divergence(model, file)
        assert tool.divergence(model, file, n_chunks=1).n_chunks == 1
    assert got.base == "base.kld" and (got.n_tokens, got.n_ctx, got.ppl) == (direct.n_tokens, 32, direct.ppl)
    assert got.ppl_base.value == pytest.approx(ppl.value, rel=1e-4)
    assert got.kld.value == pytest.approx(direct.kld.value, rel=1e-3)
    assert got.same_top.value == pytest.approx(direct.same_top.value, abs=0.02)
    assert [p.name for p in tmp_path.iterdir()] == ["base.kld"]


# --- llama.cpp's file


def test_codes_hold_sixteen_nats_in_65535_steps() -> None:
    row = np.array([3.0, 1.0, -40.0, 2.5, 0.0], np.float32)
    codes = encode(row)
    assert len(codes) == 4 + 6 and codes[4] == 65535 and codes[6] == 0
    log_p = row - np.log(np.exp(row.astype(np.float64)).sum())
    np.testing.assert_allclose(decode(codes, 5)[[0, 1, 3, 4]], log_p[[0, 1, 3, 4]], atol=16 / 65535)
    assert decode(codes, 5)[2] == pytest.approx(log_p[0] - 16, abs=1e-3)


def test_equal_logits_have_a_scale_of_nothing() -> None:
    np.testing.assert_allclose(decode(encode(np.full(8, 2.0, np.float32)), 8), math.log(1 / 8), rtol=1e-6)


def test_what_is_impossible_to_both_costs_nothing() -> None:
    row = np.array([1.0, 0.0, -np.inf], np.float32)
    assert distance(row, row, 0).kld == pytest.approx(0, abs=1e-6)
    assert distance(row, np.zeros(3, np.float32), 0).kld == np.inf


def test_the_file_has_the_form_of_llama_cpp(tmp_path: Path) -> None:
    path, tokens = tmp_path / "x", [[5, 6, 7, 8], [9, 10, 11, 12]]
    with LogitsWriter(path, tokens, 3) as writer:
        for chunk in range(2):
            writer.write(chunk, 0, np.array([0, chunk, -1], np.float32))
    raw = path.read_bytes()
    assert raw[:8] == b"_logits_" and np.frombuffer(raw, "<i4", 3, 8).tolist() == [4, 3, 2]
    assert np.frombuffer(raw, "<i4", 8, 20).tolist() == [5, 6, 7, 8, 9, 10, 11, 12] and len(raw) == 52 + 2 * 8 * 2
    with LogitsFile(path) as file:
        assert file.tokens.tolist() == tokens and file.row(1, 0).argmax() == 1


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), LogitsWriter(tmp_path / "x", [[1, 2, 3, 4]], 3):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("damage", "word"), [
    (lambda raw: b"GGUF" + raw[4:], "no file of log-prob"), (lambda raw: raw[:-1], "cut short"),
    (lambda raw: raw[:10], "no file of log-prob"), (lambda raw: raw[:8] + b"\0" * 12 + raw[20:], "damaged")])
def test_damaged_files_are_named(damage: object, word: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with LogitsWriter(path, [[1, 2, 3, 4]], 3) as writer:
        writer.write(0, 0, np.zeros(3, np.float32))
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ggraph.Error, match=word):
        LogitsFile(path)


# --- the command


def run(path: Path, *args: str) -> Result:
    return CliRunner().invoke(tool.main, ["-m", str(path), "-t", "1", "-c", "32", *args])


def test_the_command_prints_both_methods_by_name(path: Path) -> None:
    done = run(path, "-p", WORDS * 6, "--method", "both")
    assert done.exit_code == 0, done.output
    first, second = done.stdout.splitlines()
    assert first.startswith("Final estimate: PPL = ") and "llama.cpp" in first and "tokens predicted" in first
    assert "Hugging Face, stride 16" in second
    assert "[1]" in done.stderr and ",[2]" in done.stderr


def test_a_line_for_each_window(path: Path, model: ggraph.Model, tokens: list[int]) -> None:
    lines = run(path, "-p", WORDS * 6, "--chunks", "3", "--ppl-output-type", "1").stdout.splitlines()
    whole = tool.perplexity(model, model.vocab.encode(WORDS * 6, parse_special=False), n_ctx=32, n_chunks=3)
    assert lines[3].startswith("Final estimate") and whole.running_error[-1] == whole.ppl.error
    for i, line in enumerate(lines[:3]):
        begin, value, mean, error = map(float, line.split())
        assert begin == 32 * i and value == pytest.approx(whole.running[i], abs=1e-4)
        assert mean == pytest.approx(math.log(value), abs=1e-5) and error == pytest.approx(whole.running_error[i] / value, abs=1e-5)


def test_the_command_as_json(path: Path, tmp_path: Path, tokens: list[int], model: ggraph.Model) -> None:
    text = tmp_path / "t.txt"
    text.write_text(WORDS * 6 + "\n")
    done = run(path, "-f", str(text), "-q", "--json", "--save-all-logits", str(tmp_path / "b"))
    assert json.loads(done.stdout)["ppl"]["value"] == pytest.approx(tool.perplexity(model, tokens, n_ctx=32).ppl.value)
    assert not done.stderr
    other = tiny.write(tmp_path / "other.gguf", **OTHER)
    from_file = json.loads(run(other, "-q", "--json", "--kl-divergence", "--kl-divergence-base", str(tmp_path / "b")).stdout)
    beside = json.loads(run(other, "-q", "--json", "-f", str(text), "--base", str(path)).stdout)
    assert from_file["kld"]["value"] == pytest.approx(beside["kld"]["value"], rel=1e-2)
    assert "kld_values" not in beside and beside["base"] == "m.gguf"


def test_divergence_is_shown_in_llama_cpps_form(path: Path) -> None:
    text = run(path, "-q", "-p", WORDS * 6, "--base", str(path)).stdout
    for part in ("KL divergence statistics", "Mean    KLD:", "99.9%   KLD:", "Median  KLD:", "RMS Δp    :", "Same top p: 100.000"):
        assert part in text


@pytest.mark.parametrize(("args", "code", "word"), [
    (["-p", "the"], 1, "64 at least"), (["-f", "nowhere.txt"], 2, "nowhere.txt"), (["--hellaswag"], 2, "tasks with -f"),
    (["--kl-divergence"], 2, "--kl-divergence-base FILE"), (["--hellaswag", "--winogrande"], 2, "only one"),
    (["-p", "x", "-f", "-"], 2, "only one"), (["--base", "m", "--method", "hf"], 2, "without a stride"),
    (["--base", "m", "--save-all-logits", "x"], 2, "not needed")])
def test_errors_are_one_sentence(path: Path, args: list[str], code: int, word: str) -> None:
    done = run(path, *args)
    assert done.exit_code == code and word in done.output and "Traceback" not in done.output


# --- the real models


@pytest.mark.slow
@pytest.mark.parametrize(("name", "want"), [("smollm2", 40.7409), ("gemma3", 37.6687)])
def test_perplexity_is_llama_cpps(name: str, want: float, request: pytest.FixtureRequest) -> None:
    """`llama-perplexity -m MODEL -f tools/data/persuasion.txt --chunks 8`, llama-cpp-python 0.3.36."""
    with ggraph.Model(request.getfixturevalue(name)) as model:
        tokens = model.vocab.encode(read_text(tool.TEXT), parse_special=False)
        assert tool.perplexity(model, tokens, n_chunks=8).ppl.value == pytest.approx(want, rel=0.015)
