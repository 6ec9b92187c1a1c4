"""What opens also goes: maps, file handles, threads and objects; and what another thread or process may do with them."""
from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ggraph
from ggraph import LLM, Batch, Context, Model
from ggraph.backend import HostBuffer, OutOfMemory
from tests import tiny

LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "lifetime.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, n_ctx=256) as llm:
        yield llm


def text(llm: LLM) -> str:
    return llm.generate("the rain in", max_tokens=4, temperature=0.0).read()


def held() -> tuple[int, int, int]:
    """Maps of the file, its handles, threads of this process."""
    maps = sum("lifetime.gguf" in line for line in Path("/proc/self/maps").read_text().splitlines())
    handles = 0
    for fd in os.listdir("/proc/self/fd"):
        if os.path.islink(link := f"/proc/self/fd/{fd}"):
            handles += "lifetime.gguf" in os.readlink(link)
    return maps, handles, len(os.listdir("/proc/self/task"))


@LINUX
@pytest.mark.parametrize("close", [True, False], ids=["closed", "forgotten"])
def test_nothing_stays_of_what_was_opened(path: Path, close: bool) -> None:
    def use() -> list[weakref.ref[Any]]:
        llm = LLM(path, n_ctx=256)
        text(llm)
        llm.embed(["the"])
        refs: list[weakref.ref[Any]] = [weakref.ref(x) for x in (llm, llm.model, llm.ctx, llm.model.file)]
        if close:
            llm.close()
        return refs
    use()                           # the pool's threads stay, for whoever comes next
    gc.collect()
    before = held()
    for _ in range(3):
        refs = use()
        gc.collect()
        assert [ref() for ref in refs] == [None] * len(refs)
    assert held() == before


@LINUX
def test_engine_and_embedder_end_with_their_threads(llm: LLM) -> None:
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        with Context(llm.model, n_ctx=256) as ctx, Context(llm.model, n_ctx=256, embeddings=True, pooling="mean") as other:
            engine, embedder = ggraph.Engine(ctx, llm.vocab), ggraph.Embedder(other)
            assert embedder.submit([1, 20]).result().shape == (tiny.N_EMBD,)
            engine.close()
            embedder.close()
    for _ in range(200):            # a thread that was joined is on its way out
        if len(os.listdir("/proc/self/task")) == before:
            break
        time.sleep(0.02)
    assert len(os.listdir("/proc/self/task")) == before


def single(llm: LLM) -> dict[str, Any]:
    return {"LLM": llm, "Model": llm.model, "Context": llm.ctx, "File": llm.model.file, "Sampler": llm.sampler(),
            "Generation": llm.generate("the", max_tokens=1)}


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda f: str(f.__name__))
@pytest.mark.parametrize("name", ["LLM", "Model", "Context", "File", "Sampler", "Generation"])
def test_what_cannot_be_copied_says_so(name: str, how: Callable[[Any], object], llm: LLM) -> None:
    with pytest.raises(ggraph.Error, match=f"a {name} cannot be copied"):
        how(single(llm)[name])


def test_what_is_only_data_can_be_sent_to_another_process(llm: LLM) -> None:
    vocab, template = pickle.loads(pickle.dumps((llm.vocab, llm.chat_template)))
    assert vocab.encode("the rain") == llm.vocab.encode("the rain")
    messages = [{"role": "user", "content": "the"}]
    assert llm.chat_template and template.render(messages) == llm.chat_template.render(messages)
    batch = Batch()
    batch.add(5, 0, 0)
    assert pickle.loads(pickle.dumps(batch)).token.tolist() == [5]


def test_contexts_of_one_model_in_several_threads(llm: LLM) -> None:
    def texts(_: int) -> list[str]:
        with LLM(llm.model, n_ctx=256) as own:
            return [text(own) for _ in range(4)]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(texts, range(3))) == [[text(llm)] * 4] * 3


def child(work: Callable[[], object]) -> int:
    """The exit code of a forked process that does this; 7 for an exception."""
    pid = os.fork()
    if pid == 0:
        code = 7
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    for _ in range(600):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


@FORK
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")        # it has threads: that is the point
def test_a_forked_process_goes_on_with_its_copy(llm: LLM) -> None:
    want = text(llm)
    assert child(lambda: text(llm) == want) == 0
    assert text(llm) == want


@FORK
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_an_engine_does_not_come_along_and_says_so(llm: LLM) -> None:
    with Context(llm.model, n_ctx=256) as ctx:
        engine = ggraph.Engine(ctx, llm.vocab)

        def work() -> bool:
            with pytest.raises(ggraph.Error, match="it was forked"):
                engine.call(lambda: None)
            engine.close()
            return True
        assert child(work) == 0
        assert engine.call(lambda: 5).result() == 5
        engine.close()


def test_a_closed_model_says_so(path: Path) -> None:
    model = Model(path)
    model.close()
    for use in (lambda: Context(model), lambda: ggraph.memory_needed(model), lambda: LLM(model)):
        with pytest.raises(ggraph.Error, match="closed"):
            use()


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="MiB are free"):
        HostBuffer.zeros(1 << 50)
    with Model(tiny.write_hybrid(tmp_path / "hybrid.gguf")) as model, pytest.raises(ggraph.Error, match="MiB are free"):
        Context(model, n_ctx=256, n_rollback=10**9)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGTERM as Unix has it")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_program(path: Path, number: int) -> None:
    code = ("import signal, sys, ggraph\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"       # which is off in what a shell runs in the background
            "llm = ggraph.LLM(sys.argv[1], n_ctx=256)\nprint('ready', flush=True)\n"
            "while True:\n    llm.generate('the rain', max_tokens=100).read()\n")
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -number if number == signal.SIGTERM else "KeyboardInterrupt" in said
