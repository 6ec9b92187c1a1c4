"""Standard error of the commands: progress bars, sizes, timings; and what Ctrl-C does while a text is written.

In: a Context, timings. Out: lines for people, none when quiet. Standard output belongs to the text alone.
"""
from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import ggraph
from ggraph import env

LABELS = {"weights": "loading weights", "kernels": "compiling kernels", "prompt": "reading the prompt", "fetch": "fetching",
          "bench": "measuring", "trace": "tracing", "compare": "comparing", "swap": "swapping tensors", "report": "reporting",
          "scales": "reading scales", "write": "writing", "quantize": "quantizing", "collect": "reading the text",
          "windows": "evaluating"}

MANY = 100_000      # things to count, as bytes and elements are: their share says more than their number


class Bars:
    """Progress: call it with (what, done, total). A bar on a terminal, elsewhere one line when something long begins.

    A `note` stands beside the bar.
    """

    def __init__(self, quiet: bool = False):
        self.quiet, self.terminal = quiet, sys.stderr.isatty()
        self.open: str | None = None
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        if self.quiet or total <= 1:
            return
        if self.open != what:
            self.close()
            if done >= total:       # over before it began
                return
            self._begin(what, total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=f"{LABELS[what]} {note}".rstrip())
        if done >= total:
            self.close()

    def _begin(self, what: str, total: int) -> None:
        self.open = what
        if not self.terminal:
            if what != "fetch":         # which says so itself
                env.log(f"{LABELS[what]} ...")
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        count = DownloadColumn() if what == "fetch" else MofNCompleteColumn() if total < MANY else TaskProgressColumn()
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn(),
                             console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(LABELS[what], total=total)
        self._bar.start()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self.open = self._bar = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Interrupt:
    """Within it, Ctrl-C calls `stop` and sets `pressed`; pressed again, it is an ordinary KeyboardInterrupt."""

    def __init__(self, stop: Callable[[], None]):
        self.stop, self.pressed = stop, False

    def __enter__(self) -> Interrupt:
        self._previous = signal.getsignal(signal.SIGINT)
        if self._previous != signal.SIG_IGN:        # of a job in the background it stays ignored
            signal.signal(signal.SIGINT, self._press)
        return self

    def _press(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)
        self.pressed = True
        self.stop()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)


def size(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes < 10 * 2**30 else f"{nbytes / 2**30:.2f} GiB"


def show_sizes(ctx: ggraph.Context) -> None:
    """What was loaded, and where memory goes."""
    model, cp, nbytes = ctx.model, ctx.cparams, ctx.bytes
    env.log(f"model {Path(model.path).name}: {model.hparams.arch}, {model.n_params / 1e6:.2f} M parameters")
    env.log(f"weights {size(nbytes['weights'])}")
    cells = " + ".join(f"{len(g.k)} layers x {g.store.size * g.store.n_stream} cells" for g in ctx.memory.kv)
    env.log(f"KV cache {size(nbytes['kv'])}: {cells or 'none'}, K {cp.type_k.name}, V {cp.type_v.name}")
    env.log(f"compute arena {size(nbytes['compute'])}: n_ctx {cp.n_ctx}, n_batch {cp.n_batch}, n_ubatch {cp.n_ubatch}")
    threads = f"{cp.n_threads}" if cp.n_threads == cp.n_threads_batch else f"{cp.n_threads} and {cp.n_threads_batch} (prompt)"
    env.log(f"backend {', '.join(b.name for b in ctx.backends)}: {threads} threads")


def show_timings(load_ms: float, t: Any) -> None:
    """In llama.cpp's form: load, prompt eval, eval; how many of the guesses were right, if there were some."""
    env.log(f"       load time = {load_ms:10.2f} ms")
    env.log(f"prompt eval time = {_rate(t.prompt_ms, t.prompt_n, 'tokens')}")
    env.log(f"       eval time = {_rate(t.eval_ms, t.eval_n, 'runs  ')}")
    env.log(f"   sampling time = {_rate(t.sample_ms, t.sample_n, 'runs  ')}")
    if t.draft_n:
        share = t.draft_n_accepted / t.draft_n
        env.log(f"draft acceptance = {share:10.5f} ({t.draft_n_accepted:5d} accepted / {t.draft_n:5d} drafted)")
    env.log(f"      total time = {load_ms + t.prompt_ms + t.eval_ms + t.sample_ms:10.2f} ms / {t.prompt_n + t.eval_n:5d} tokens")


def _rate(ms: float, n: int, unit: str) -> str:
    return (f"{ms:10.2f} ms / {n:5d} {unit} ({ms / max(n, 1):8.2f} ms per token, "
            f"{1e3 * n / ms if ms else 0:8.2f} tokens per second)")


def timings_json(load_ms: float, t: Any) -> dict[str, float]:
    """The same for programs; names are llama-server's."""
    def rates(name: str, n: int, ms: float) -> dict[str, float]:
        return {f"{name}_n": n, f"{name}_ms": round(ms, 3), f"{name}_per_token_ms": round(ms / max(n, 1), 3),
                f"{name}_per_second": round(1e3 * n / ms if ms else 0.0, 3)}
    return {"load_ms": round(load_ms, 3), "cache_n": t.cache_n, **rates("prompt", t.prompt_n, t.prompt_ms),
            **rates("predicted", t.eval_n, t.eval_ms), "sample_ms": round(t.sample_ms, 3),
            **({"draft_n": t.draft_n, "draft_n_accepted": t.draft_n_accepted} if t.draft_n else {})}
