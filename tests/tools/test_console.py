"""Progress: a bar on a terminal, one line elsewhere, nothing when quiet; Ctrl-C twice."""
from __future__ import annotations

import io
import os
import signal
import sys

import pytest

from ggraph.tools._console import Bars, Interrupt, size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(bars: Bars) -> None:
    with bars:
        for done in range(0, 101, 10):
            bars("weights", done, 100)
        bars("kernels", 3, 3)           # over before it began
        bars("prompt", 0, 600)


def test_one_line_each_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    load(Bars())
    assert capsys.readouterr().err == "ggraph: loading weights ...\nggraph: reading the prompt ...\n"


def test_nothing_when_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    load(Bars(quiet=True))
    assert terminal.getvalue() == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    load(Bars())
    shown = terminal.getvalue()
    assert "loading weights" in shown and "100/100" in shown
    assert "\x1b[?25h" in shown         # the cursor is back


def test_bytes_and_elements_are_shown_as_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Bars() as bars:
        bars("weights", 0, 10**8)
        bars("weights", 42 * 10**6, 10**8)
    assert "42%" in terminal.getvalue() and "000" not in terminal.getvalue()


def test_ctrl_c_twice() -> None:
    stopped: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt(lambda: stopped.append(True)) as ctrl_c:
        os.kill(os.getpid(), signal.SIGINT)
        assert ctrl_c.pressed and stopped == [True]
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_size() -> None:
    assert (size(3 * 2**19), size(40 * 2**30)) == ("1.50 MiB", "40.00 GiB")
