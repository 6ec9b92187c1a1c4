"""ggraph-perplexity: how well a model predicts a text, how far its predictions are from another's, and multiple choice.

In: a command line, or `perplexity` and `divergence` from Python. Out: `Perplexity`, `Divergence`, `Choices`, as text or JSON. The
methods, the numbers and the file of a base model's predictions are llama.cpp's; a second method is Hugging Face's.
"""
from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

import ggraph
from ggraph import env, hub

from . import _choices, _windows
from ._console import Bars
from ._estimate import Divergence, Estimate, Perplexity, Values, divergence_of, mean, perplexity_of
from ._input import read_text
from ._logits import LogitsFile, LogitsWriter, Row, distance, distance_from_saved, nll
from ._options import CONTEXT, MODEL, ROPE, Command, IntRange, Params, context_arguments, group, options

MAX_SEQS = 64
TEXT = Path(__file__).parent / "data" / "persuasion.txt"
Report = Callable[[int, int, str], None]        # (windows done, of, the estimate so far)
Measure = Callable[[int, int, tuple[Row, ...], int], tuple[float, ...]]     # of one row: window, its number there, logits, token


def perplexity(model: ggraph.Model, tokens: Sequence[int], *, method: str = "llama.cpp", n_ctx: int = 512, stride: int = 0,
               n_chunks: int = -1, n_batch: int = 2048, save: str | Path | None = None, progress: Report | None = None,
               **context: Any) -> Perplexity:
    """How well a model predicts a text, which `model.vocab.encode` has made into `tokens` (with BOS, where the model has one).

    `method` "llama.cpp": pieces of `n_ctx`, the second half of each predicted; with a `stride`, overlapping windows. "hf": Hugging
    Face's sliding windows, every token predicted once; `stride` is n_ctx / 2 if not given. `n_chunks`: so many windows at most.
    `save`: write llama.cpp's file of all predictions. `context`: more options of `ggraph.Context`. `Error` for a text that is too
    short.
    """
    if save and (method != "llama.cpp" or stride):
        raise ggraph.Error("predictions can be saved by llama.cpp's method without a stride alone")
    name, windows = _plan(model, tokens, method, n_ctx, stride, n_chunks)
    with contextlib.ExitStack() as stack:
        ctx = stack.enter_context(_context(model, windows, n_batch, context))
        writer = None
        if save:
            pieces = [tokens[i * n_ctx:(i + 1) * n_ctx] for i in range(len(windows))]
            writer = stack.enter_context(LogitsWriter(save, pieces, model.n_vocab))

        def measure(window: int, number: int, rows: tuple[Row, ...], token: int) -> tuple[float, ...]:
            if writer:
                writer.write(window, number, rows[0])
            return (nll(rows[0], token),)
        running: list[Estimate] = []

        def report(done: int, total: int, so_far: Values) -> None:
            running.append(perplexity_of(so_far[0]))
            if progress:
                progress(done, total, f"{running[-1].value:.4f}")
        table = _table([ctx], windows, measure, 1, report)
    values, errors = zip(*running)
    return Perplexity(name, perplexity_of(table[0]), table.shape[1], n_ctx, len(windows), values, errors)


def divergence(model: ggraph.Model, base: ggraph.Model | LogitsFile, tokens: Sequence[int] | None = None, *, n_ctx: int = 512,
               n_chunks: int = -1, n_batch: int = 2048, progress: Report | None = None, **context: Any) -> Divergence:
    """How far the predictions of `model` are from those of `base`, by llama.cpp's method.

    A `base` model is run side by side, and compared exactly; a `LogitsFile` brings its own tokens and windows, with what is rarer
    than e^-16 of its probabilities cut off. `Error` where the vocabularies differ in size.
    """
    if isinstance(base, LogitsFile):
        n_ctx = base.n_ctx
        tokens = base.tokens.ravel().tolist()
        windows = _windows.chunks([*tokens, *tokens], n_ctx, _bos(model), base.n_chunks if n_chunks < 1
                                  else min(n_chunks, base.n_chunks))
    elif tokens is None:
        raise ggraph.Error("a base model needs tokens to be compared on")
    else:
        windows = _plan(model, tokens, "llama.cpp", n_ctx, 0, n_chunks)[1]
    if base.n_vocab != model.n_vocab:
        raise ggraph.Error(f"the base has a vocabulary of {base.n_vocab}, the model one of {model.n_vocab}; "
                           "both must come from the same model")

    def measure(window: int, number: int, rows: tuple[Row, ...], token: int) -> tuple[float, ...]:
        if isinstance(base, LogitsFile):
            return distance_from_saved(rows[0], base.row(window, number), token)
        return distance(rows[0], rows[1], token)

    def report(done: int, total: int, so_far: Values) -> None:
        if progress:
            progress(done, total, f"KLD {mean(so_far[2]).value:.6f}, PPL {perplexity_of(so_far[0]).value:.4f}")
    models = [model] if isinstance(base, LogitsFile) else [model, base]
    with contextlib.ExitStack() as stack:
        contexts = [stack.enter_context(_context(m, windows, n_batch, context)) for m in models]
        table = _table(contexts, windows, measure, 4, report)
    return divergence_of(table[0], table[1], table[2], table[3] > 0, n_ctx=n_ctx, n_chunks=len(windows), base=base.path.name)


def _plan(model: ggraph.Model, tokens: Sequence[int], method: str, n_ctx: int, stride: int,
          n_chunks: int) -> tuple[str, list[_windows.Window]]:
    """The method's name, and its windows."""
    if not (model.hparams.causal and model.hparams.head):
        raise ggraph.Error(f"{model.path.name} does not predict a next token; perplexity is of models that write text")
    if method == "hf":
        stride = stride or max(1, n_ctx // 2)
        return f"Hugging Face, stride {stride}", _windows.sliding(tokens, n_ctx, stride, n_chunks)
    if method != "llama.cpp":
        raise ggraph.Error(f"the method is {method!r}; it must be 'llama.cpp' or 'hf'")
    if stride:
        return f"llama.cpp, stride {stride}", _windows.strided(tokens, n_ctx, stride, n_chunks)
    return "llama.cpp", _windows.chunks(tokens, n_ctx, _bos(model), n_chunks)


def _bos(model: ggraph.Model) -> int | None:
    return model.vocab.bos if model.vocab.add_bos else None


def _context(model: ggraph.Model, windows: Sequence[_windows.Window], n_batch: int, options: Params) -> ggraph.Context:
    """For as many windows side by side as llama.cpp takes."""
    size = _windows.longest(windows) + 1
    if size > model.hparams.n_ctx_train:
        env.log(f"windows of {size} tokens are longer than the {model.hparams.n_ctx_train} that the model was trained with")
    n_seqs = max(1, min(n_batch // size, len(windows), MAX_SEQS))
    return ggraph.Context(model, **{**options, "n_ctx": size * n_seqs, "n_batch": n_batch, "n_seq_max": n_seqs})


def _table(contexts: Sequence[ggraph.Context], windows: Sequence[_windows.Window], measure: Measure, n_columns: int,
           report: Callable[[int, int, Values], None]) -> Values:
    """float64 [n_columns, n_tokens]: what `measure` says of each predicted token; `report` sees the columns up to the last window
    that is done."""
    begin = np.cumsum([0, *(len(w.targets) for w in windows)])
    table = np.zeros((n_columns, int(begin[-1])))
    for rows in _windows.evaluate(contexts, windows):
        for i, token in enumerate(rows.targets.tolist()):
            number = rows.first + i
            table[:, begin[rows.window] + number] = measure(rows.window, number, tuple(x[i] for x in rows.logits), token)
        if rows.first + len(rows.targets) == len(windows[rows.window].targets):
            report(rows.window + 1, len(windows), table[:, :begin[rows.window + 1]])
    return table


# --- the command

_text, _what, _base, _output = group("Text"), group("Method"), group("Against a base model"), group("Output")
_tasks = group("Multiple choice (-f: tasks as JSON, or in llama.cpp's forms)")
_file = click.Path(exists=True, dir_okay=False, allow_dash=True)

TEXTS = (
    _text("-f", "--file", type=_file, help="The text, or the tasks; - is standard input.  [default: five chapters of Jane Austen]"),
    _text("-bf", "--binary-file", type=_file, help="The same as -f, as llama.cpp calls it for multiple choice."),
    _text("-p", "--prompt", metavar="TEXT", help="The text itself."),
)
METHOD = (
    _what("--method", type=click.Choice(["llama.cpp", "hf", "both"]), default="llama.cpp", show_default=True,
          help="llama.cpp's: pieces, the second half predicted. Hugging Face's: sliding windows, every token predicted."),
    _what("n_ctx", "-c", "--ctx-size", type=IntRange(min=4), default=512, show_default=True, metavar="N",
          help="Tokens of a window."),
    _what("--chunks", type=IntRange(min=-1), default=-1, metavar="N", help="So many windows at most.  [default: the whole text]"),
    _what("--ppl-stride", type=IntRange(min=0), default=0, metavar="N",
          help="From window to window; 0: llama.cpp's do not overlap, Hugging Face's by half."),
    _what("--ppl-output-type", type=IntRange(0, 1), default=0, show_default=True, metavar="0|1",
          help="1: also a line for each window: its place, the estimate so far, its logarithm, the error of that."),
)
BASE = (
    _base("--base", metavar="MODEL", help="Run this model side by side and compare the predictions (KL divergence)."),
    _base("--kl-divergence", is_flag=True, help="Compare with the predictions in the file of --kl-divergence-base."),
    _base("logits", "--kl-divergence-base", "--save-all-logits", type=click.Path(dir_okay=False), metavar="FILE",
          help="The file of predictions (llama.cpp's form): read with --kl-divergence, else written."),
)
TASKS = (
    _tasks("--hellaswag", is_flag=True, help="Which of four endings is the right one."),
    _tasks("--hellaswag-tasks", type=IntRange(min=0), default=400, show_default=True, metavar="N", help="So many, drawn; 0: all."),
    _tasks("--winogrande", is_flag=True, help="Which of two words fits into the sentence."),
    _tasks("--winogrande-tasks", type=IntRange(min=0), default=0, metavar="N", help="So many, drawn.  [default: all]"),
    _tasks("--multiple-choice", is_flag=True, help="Which answer belongs to the question."),
    _tasks("--multiple-choice-tasks", type=IntRange(min=0), default=0, metavar="N", help="So many, drawn.  [default: all]"),
)
OUTPUT = (
    _output("--json", is_flag=True, help="The result as one line of JSON."),
    _output("-q", "--quiet", is_flag=True, help="No progress on standard error."),
)


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@options(TEXTS, MODEL, METHOD, BASE, TASKS, CONTEXT[1:], ROPE, OUTPUT)
@click.version_option(ggraph.__version__)
def main(**p: Any) -> None:
    """Measure a model on a text: perplexity, KL divergence from a base model, multiple choice.

    The text's tokens are predicted in windows; each estimate is printed with its standard error and the number of tokens.
    """
    env.set_quiet(p["quiet"])
    kind = _check(p)
    with Bars(p["quiet"]) as bars, _opened(p, p["model"], bars) as model:
        arguments = {**context_arguments(p), "progress": bars}
        if kind in ("hellaswag", "winogrande", "multiple-choice"):
            results: list[Any] = [_choose(p, kind, model, arguments, bars)]
        elif kind == "divergence":
            results = [_compare(p, model, arguments, bars)]
        else:
            results = [_measure(p, method, model, arguments, bars) for method in _methods(p)]
    for result in results:
        if p["ppl_output_type"] and isinstance(result, Perplexity) and not p["json"]:
            click.echo("\n".join(_lines(result)))
        click.echo(json.dumps(result.json()) if p["json"] else _SHOW[type(result)](result))


def _check(p: Params) -> str:
    """What is asked for; UsageError for options that exclude one another."""
    kinds = [k for k in ("hellaswag", "winogrande", "multiple-choice") if p[k.replace("-", "_")]]
    kinds += ["divergence"] if p["kl_divergence"] or p["base"] else []
    if len(kinds) > 1:
        raise click.UsageError(f"give only one of {', '.join(kinds)}")
    if sum(p[name] is not None for name in ("file", "binary_file", "prompt")) > 1:
        raise click.UsageError("give only one of -f, -bf and -p")
    p["file"] = p["file"] or p["binary_file"]
    if kinds and kinds[0] != "divergence" and not p["file"]:
        raise click.UsageError("give a file of tasks with -f")
    if p["kl_divergence"] and (p["base"] or not p["logits"]):
        raise click.UsageError("--kl-divergence needs --kl-divergence-base FILE, and no --base")
    if p["base"] and p["logits"]:
        raise click.UsageError("--base runs the model; a file of its predictions is not needed")
    if kinds == ["divergence"] and (p["method"] != "llama.cpp" or p["ppl_stride"]):
        raise click.UsageError("models are compared by llama.cpp's method, without a stride")
    return kinds[0] if kinds else "perplexity"


def _methods(p: Params) -> list[str]:
    return ["llama.cpp", "hf"] if p["method"] == "both" else [p["method"]]


@contextlib.contextmanager
def _opened(p: Params, name: str, bars: Bars) -> Iterator[ggraph.Model]:
    path = hub.resolve(name, lambda done, total: bars("fetch", done, total))
    with ggraph.Model(path, kv_overrides=p["kv_overrides"], repack=p["repack"]) as model:
        yield model


def _tokens(p: Params, model: ggraph.Model) -> list[int]:
    return model.vocab.encode(p["prompt"] if p["prompt"] is not None else read_text(p["file"] or TEXT), parse_special=False)


class _Running:
    """Progress: a bar with the estimate on a terminal, elsewhere the estimates in llama.cpp's form, [1]12.3,[2]11.9, ..."""

    def __init__(self, p: Params, bars: Bars):
        self.lines, self.bars = not (p["quiet"] or bars.terminal or p["ppl_output_type"]), bars

    def __call__(self, done: int, total: int, estimate: str) -> None:
        self.bars("windows", done, total, estimate)
        if self.lines:
            click.echo(f"[{done}]{estimate}" + ("," if done < total else "\n"), nl=False, err=True)


def _sizes(p: Params) -> Params:
    return {"n_ctx": p["n_ctx"], "n_chunks": p["chunks"]}


def _measure(p: Params, method: str, model: ggraph.Model, arguments: Params, bars: Bars) -> Perplexity:
    save = p["logits"] if method == "llama.cpp" else None
    return perplexity(model, _tokens(p, model), method=method, stride=p["ppl_stride"], save=save,
                      **{**arguments, **_sizes(p), "progress": _Running(p, bars)})


def _compare(p: Params, model: ggraph.Model, arguments: Params, bars: Bars) -> Divergence:
    with contextlib.ExitStack() as stack:
        arguments = {**arguments, **_sizes(p), "progress": _Running(p, bars)}
        if p["base"]:
            return divergence(model, stack.enter_context(_opened(p, p["base"], bars)), _tokens(p, model), **arguments)
        return divergence(model, stack.enter_context(LogitsFile(p["logits"])), **arguments)


def _choose(p: Params, kind: str, model: ggraph.Model, arguments: Params, bars: Bars) -> _choices.Choices:
    tasks = _choices.load(kind, p["file"], p[kind.replace("-", "_") + "_tasks"])
    running = _Running(p, bars)
    return _choices.choices(model, kind, tasks, **{
        **arguments, "n_ctx": p["n_ctx"], "progress": lambda done, total, share: running(done, total, f"{100 * share:.2f}%")})


# --- as text


def _show_perplexity(r: Perplexity) -> str:
    return (f"Final estimate: PPL = {r.ppl.value:.4f} +/- {r.ppl.error:.5f} "
            f"({r.method}; {r.n_chunks} windows of {r.n_ctx} tokens, {r.n_tokens} tokens predicted)")


def _lines(r: Perplexity) -> Iterator[str]:
    """As llama-perplexity prints them: where the window begins, the estimate so far, the mean of -log p and its error."""
    step = int(r.method.rpartition(" ")[2]) if "stride" in r.method else r.n_ctx
    for i, (value, error) in enumerate(zip(r.running, r.running_error)):
        yield f"{i * step:8d}  {value:.4f}  {math.log(value):4f}  {error / value:4f}"


def _show_divergence(r: Divergence) -> str:
    """In llama.cpp's form."""
    def percent(e: Estimate) -> str:
        return f"{100 * e.value:6.3f} ± {100 * e.error:5.3f} %"

    def named(at: str) -> str:
        return {"100": "Maximum", "50": "Median ", "0": "Minimum"}.get(at, f"{float(at):4.1f}%  ")
    rows = [("Mean PPL(Q)", r.ppl), ("Mean PPL(base)", r.ppl_base), ("Mean ln(PPL(Q)/PPL(base))", r.log_ratio),
            ("Mean PPL(Q)/PPL(base)", r.ratio), ("Mean PPL(Q)-PPL(base)", r.difference)]
    lines = [f"{r.n_tokens} tokens predicted, {r.n_chunks} windows of {r.n_ctx} tokens, base {r.base}", "",
             "====== Perplexity statistics ======", *(f"{name:<30}: {e}" for name, e in rows),
             f"{'Cor(ln(PPL(Q)), ln(PPL(base)))':<30}: {100 * r.correlation:6.2f}%", "",
             "====== KL divergence statistics ======", f"Mean    KLD: {r.kld}",
             *(f"{named(at)} KLD: {value:10.6f}" for at, value in r.kld_at.items()), "",
             "====== Token probability statistics ======", f"Mean    Δp: {percent(r.delta_p)}",
             *(f"{named(at)} Δp: {100 * value:6.3f}%" for at, value in r.delta_p_at.items()),
             f"RMS Δp    : {percent(r.delta_p_rms)}", f"Same top p: {percent(r.same_top)}"]
    return "\n".join(lines)


def _show_choices(r: _choices.Choices) -> str:
    return (f"{r.kind}: {100 * r.accuracy.value:.4f} +/- {100 * r.accuracy.error:.4f} % of {r.n_tasks} tasks "
            f"(95 %: {100 * r.interval[0]:.2f} to {100 * r.interval[1]:.2f} %; by chance {100 * r.chance:.2f} %)")


_SHOW: dict[type, Callable[[Any], str]] = {
    Perplexity: _show_perplexity, Divergence: _show_divergence, _choices.Choices: _show_choices}

if __name__ == "__main__":
    sys.exit(main())
