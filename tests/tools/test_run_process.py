"""ggraph-run as a process: Ctrl-C, a reader that leaves, a chat on a terminal."""
from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import ggraph
from ggraph.tools._console import Interrupt
from tests import tiny

COMMAND = [sys.executable, "-W", "error", "-m", "ggraph.tools.run"]
ENDLESS = ("-c", "256", "--ignore-eos", "--context-shift", "-s", "1")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("run") / "tiny.gguf"))


def start(*args: str, **kw: Any) -> subprocess.Popen[bytes]:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*COMMAND, *args], **{**streams, **kw})


def test_ctrl_c_ends_a_completion_in_good_order(file: str) -> None:
    with start("-m", file, *ENDLESS, "the") as p:
        assert p.stdout is not None
        assert len(p.stdout.read(20)) == 20
        p.send_signal(signal.SIGINT)
        _, err = p.communicate(timeout=20)
    assert p.returncode == 130
    assert b"eval time" in err and b"Traceback" not in err


def test_ctrl_c_in_a_prompt_starts_no_further_ubatch(file: str) -> None:
    ubatches: list[int] = []

    def press(name: str, x: np.ndarray, node: object) -> None:
        ubatches.append(x.shape[-2])
        if len(ubatches) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    prompt = list(range(5, 205))
    sizes: dict[str, Any] = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 16}
    with ggraph.LLM(file, on_node=ggraph.Hook("l_out-0", press), **sizes) as llm, ggraph.LLM(file, **sizes) as fresh:
        g = llm.generate(prompt, max_tokens=5, temperature=0.0)
        with Interrupt(g.stop) as ctrl_c:
            assert g.read() == ""
        assert ctrl_c.pressed and g.finish_reason == "cancelled"
        assert ubatches == [16, 16, 16] and g.timings.prompt_n in (32, 48)
        again = llm.generate(prompt, max_tokens=5, temperature=0.0)
        assert again.read() == fresh.generate(prompt, max_tokens=5, temperature=0.0).read()
        assert again.timings.cache_n == g.timings.prompt_n


def test_the_end_of_a_command_searches_no_cycles() -> None:
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000)); import ggraph.tools.run"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"


def test_a_reader_that_leaves(file: str) -> None:
    with start("-m", file, *ENDLESS, "the") as p:
        assert p.stdout is not None and p.stderr is not None
        p.stdout.read(20)
        p.stdout.close()
        assert p.wait(20) == 1
        assert b"Traceback" not in p.stderr.read()


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *args: str):
        self.master, slave = pty.openpty()
        self.process = start(*args, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "dumb", "PYTHONUTF8": "1"})
        os.close(slave)
        self.seen = ""

    def expect(self, pattern: str, timeout: float = 30) -> str:
        """All output until the pattern, which is then taken."""
        end = time.monotonic() + timeout
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.master, 1 << 16).decode(errors="replace")
                except OSError:             # Linux: the other end is closed
                    raise AssertionError(f"ended before {pattern!r}: {self.seen!r}") from None
        before, self.seen = self.seen[:found.end()], self.seen[found.end():]
        return before

    def type(self, line: str) -> None:
        os.write(self.master, line.encode())

    def interrupt(self) -> None:
        time.sleep(0.2)         # a signal just before readline waits is noticed at the next key only
        self.process.send_signal(signal.SIGINT)

    def close(self) -> int:
        while self.process.poll() is None and select.select([self.master], [], [], 20)[0]:
            try:
                self.seen += os.read(self.master, 1 << 16).decode(errors="replace")
            except OSError:
                break
        os.close(self.master)
        return self.process.wait(20)


def test_a_chat_on_a_terminal(file: str) -> None:
    """Ctrl-C stops the answer, not the program; at the prompt it warns; the end of input leaves."""
    t = Terminal("-m", file, *ENDLESS)
    t.expect("> ")
    t.type("the rain\n")
    t.expect("the rain\r\n")
    t.expect(".{20}")
    t.interrupt()
    t.expect("> $")
    t.type("/load nowhere\n")
    t.expect("error: .*nowhere")
    t.expect("> $")
    t.interrupt()
    t.expect(r"\(Ctrl-C again or Ctrl-D leaves\)")
    t.expect("> $")
    t.type("/nonesuch\n")
    t.expect("there is no command /nonesuch")
    t.expect("> $")
    t.type("\x04")
    assert t.close() == 0
    assert "eval time" in t.seen and "Traceback" not in t.seen


def test_ctrl_c_twice_leaves_a_chat(file: str) -> None:
    t = Terminal("-m", file, *ENDLESS)
    t.expect("> ")
    t.interrupt()
    t.expect("again")
    t.expect("> $")
    t.interrupt()
    assert t.close() == 0
    assert "Traceback" not in t.seen
