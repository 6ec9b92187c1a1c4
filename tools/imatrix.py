"""ggraph-imatrix: how much each column of each weight matrix matters, measured on a text; and files of it merged and shown.

In: a model and a text, or files made before. Out: for every matrix the sums of the squares of what it is multiplied with, in
llama.cpp's GGUF form, which `ggraph-quantize --imatrix` reads. `collect` is the same for programs. The text runs in chunks of the
context's size, each from an empty cache, as llama-imatrix does it.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

import ggraph
from ggraph import env, hub

from ._console import Bars
from ._imatrix import Entry, Matrix, merged, read, write
from ._input import read_text
from ._options import OFFLOAD, Command, IntRange, group, options
from ._output import check_target

CHUNK = 512
_what, _how, _out = group("What"), group("How"), group("Output")

WHAT = (
    _what("-m", "--model", metavar="MODEL", help="The model: a file or a known name; best in F16 or Q8_0."),
    _what("-f", "--file", type=click.Path(exists=True, dir_okay=False, allow_dash=True), metavar="FILE",
          help="The text, UTF-8; - is standard input."),
    _what("in_files", "--in-file", multiple=True, type=click.Path(exists=True, dir_okay=False), metavar="FILE",
          help="A file made before, to be summed up with the rest. May be repeated."),
    _what("--show-statistics", is_flag=True, help="Show what is in the files of --in-file."),
)
HOW = (
    _how("n_ctx", "-c", "--ctx-size", type=IntRange(min=8), default=CHUNK, show_default=True, metavar="N",
         help="Tokens of a chunk."),
    _how("n_chunks", "--chunks", type=IntRange(min=1), metavar="N", help="At most so many chunks.  [default: all]"),
    _how("skip", "--from-chunk", "--chunk", type=IntRange(min=0), default=0, metavar="N", help="Leave out the first N chunks."),
    _how("--parse-special", is_flag=True, help="Read special tokens in the text, such as <|im_end|>, as such and not as letters."),
    _how("--process-output", is_flag=True, help="Also for output.weight."),
    _how("n_threads", "-t", "--threads", type=IntRange(min=1), metavar="N", help="Threads.  [default: all cores]"),
)
OUTPUT = (
    _out("output", "-o", "--output", "--output-file", default="imatrix.gguf", show_default=True, metavar="FILE",
         help="Where it goes."),
    _out("--json", "as_json", is_flag=True, help="Statistics as JSON on standard output."),
    _out("-q", "--quiet", is_flag=True, help="No progress on standard error."),
)


@dataclass(frozen=True)
class Use:
    """One matrix and what it is multiplied with: `view` of node `source`; for experts, which of them each row goes to."""
    weight: Any
    view: Any
    ids: Any = None


@dataclass(frozen=True)
class Statistics:
    """Of one tensor: mean square of its inputs over all columns, the largest and smallest, how uneven they are (entropy of the
    columns' shares, 1 where all are the same), and how many rows of input there were (of experts: of the rarest one)."""
    name: str
    mean: float
    largest: float
    smallest: float
    evenness: float
    n_rows: int
    n_matrices: int


class Collector:
    """A hook's predicate and function: adds up squares as the nodes go by."""

    def __init__(self, graph: Any, process_output: bool):
        self.uses = list(_uses(graph, process_output))
        self.by_source: dict[str, list[Use]] = {}
        for use in self.uses:
            for tensor in (use.view, use.ids):
                if tensor is not None:
                    self.by_source.setdefault(tensor.root.name, []).append(use)
        self.matrix = Matrix()
        self.begin()

    def begin(self) -> None:
        """Before each chunk."""
        self.held: dict[str, np.ndarray] = {}       # of experts: values may come before it is known where they go, or after
        self.done: set[str] = set()

    def match(self, node: Any) -> bool:
        return node.name in self.by_source

    def see(self, name: str, array: np.ndarray, node: Any) -> None:
        for use in self.by_source[name]:
            if use.ids is None and _same(use.view, node):
                self._add(use, _look(array, use.view))
            elif use.ids is not None and (_same(use.view, node) or _same(use.ids, node)):
                if name not in self.held:
                    self.held[name] = array.copy()
                self._route(use)
        if all(use.weight.name in self.done for use in self.by_source[name]):
            self.held.pop(name, None)

    def _route(self, use: Use) -> None:
        x, ids = (self.held.get(tensor.root.name) for tensor in (use.view, use.ids))
        if x is not None and ids is not None and use.weight.name not in self.done:
            self._add_experts(use, _look(x, use.view)[0], _look(ids, use.ids)[0, 0])
            self.done.add(use.weight.name)

    def _add(self, use: Use, x: np.ndarray) -> None:
        """x: float32 in NumPy order, [batch, matrices, rows, columns]."""
        entry, n = self._entry(use, 1), use.weight.ne[2] * use.weight.ne[3]
        squares = np.einsum("bmrc,bmrc->bmc", x, x, dtype=np.float64).sum(axis=0)
        entry.sums += squares.reshape(-1, n * x.shape[-1]).sum(axis=0).astype(np.float32)
        entry.counts += np.float32(x[..., 0].size / n)

    def _add_experts(self, use: Use, x: np.ndarray, ids: np.ndarray) -> None:
        """x: float32 [tokens, used or 1, columns], ids [tokens, used]."""
        entry = self._entry(use, use.weight.ne[2])
        rows = np.broadcast_to(x, (*ids.shape, x.shape[-1]))
        for expert in np.unique(ids):
            chosen = rows[ids == expert]
            entry.sums[expert] += np.einsum("rc,rc->c", chosen, chosen, dtype=np.float64).astype(np.float32)
            entry.counts[expert] += len(chosen)

    def _entry(self, use: Use, n_counts: int) -> Entry:
        n = use.weight.ne[0] * use.weight.ne[2] * use.weight.ne[3]
        empty = Entry(np.zeros((n_counts, n // n_counts), np.float32), np.zeros(n_counts, np.float32))
        return self.matrix.entries.setdefault(use.weight.name, empty)


def _same(view: Any, node: Any) -> bool:
    """Is this the node that the view is of? Two nodes may have one name."""
    return bool((view.root.name, view.root.op, view.root.ne) == (node.name, node.op, node.ne))


def _uses(graph: Any, process_output: bool) -> Iterator[Use]:
    for node in graph.computed():
        if node.op not in ("mul_mat", "mul_mat_id"):
            continue
        weight = node.src[0]
        if weight.name.startswith("blk.") or (process_output and weight.name == "output.weight"):
            yield Use(weight, node.src[1], node.src[2] if node.op == "mul_mat_id" else None)


def _look(array: np.ndarray, view: Any) -> np.ndarray:
    """What a view of this node shows, four axes in NumPy order. The batch must have the graph's largest size."""
    flat = np.ascontiguousarray(array).reshape(-1)
    start = int(view.view_offs) // flat.itemsize
    shown: np.ndarray = np.lib.stride_tricks.as_strided(flat[start:], [int(n) for n in view.ne[::-1]],
                                                        [int(n) for n in view.nb[::-1]], writeable=False)
    return shown


def collect(model: ggraph.Model, tokens: Sequence[int], n_ctx: int = CHUNK, process_output: bool = False,
            n_threads: int | None = None, progress: Any = None) -> Matrix:
    """The importance matrix of a text's tokens, in whole chunks of `n_ctx`; what is left over at the end does not count.

    `ggraph.Error` if there is not one chunk. `progress`: called with (what, done, total).
    """
    n_chunks = len(tokens) // n_ctx
    if not n_chunks:
        raise ggraph.Error(f"the text has {len(tokens)} tokens, one chunk needs {n_ctx}: give a longer text, or a smaller -c")
    sizes = dict(n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=n_ctx, n_threads=n_threads)
    with ggraph.Context(model, **sizes) as ctx:  # type: ignore[arg-type]
        collector = Collector(ctx.graph(), process_output)
    hook = ggraph.Hook(collector.match, collector.see)
    bos = model.vocab.bos if model.vocab.add_bos else None
    with ggraph.Context(model, **sizes, on_node=hook, progress=progress) as ctx:  # type: ignore[arg-type]
        for chunk in range(n_chunks):
            ctx.memory.clear()
            collector.begin()
            batch = ggraph.Batch()
            for pos, token in enumerate(tokens[chunk * n_ctx:(chunk + 1) * n_ctx]):
                first = bos if pos == 0 else None
                batch.add(token if first is None else first, pos, 0, output=True)      # outputs: so that no layer leaves rows out
            ctx.process("decode", batch)
            if progress:
                progress("collect", chunk + 1, n_chunks)
    matrix = collector.matrix
    matrix.chunk_count, matrix.chunk_size = n_chunks, n_ctx
    missing = {use.weight.name for use in collector.uses} - matrix.entries.keys()
    if missing:
        raise ggraph.Error(f"what {min(missing)} is multiplied with was never seen ({len(missing)} matrices); please report it")
    return matrix


def statistics(matrix: Matrix) -> list[Statistics]:
    """Of each tensor, largest mean first."""
    found = []
    for name, entry in matrix.entries.items():
        mean = entry.mean
        share = mean / max(float(mean.sum()), 1e-30)
        entropy = float(-(share * np.log(np.maximum(share, 1e-30))).sum())
        found.append(Statistics(name, float(mean.mean()), float(mean.max()), float(mean.min()),
                                entropy / float(np.log(max(mean.size, 2))), int(entry.counts.min()), len(entry.sums)))
    return sorted(found, key=lambda s: -s.mean)


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@options(WHAT, HOW, OFFLOAD, OUTPUT)
@click.version_option(ggraph.__version__)
def main(**o: Any) -> None:
    """Measure an importance matrix on a text, or merge and show such files."""
    env.set_quiet(o["quiet"])
    if not o["in_files"] and not (o["model"] and o["file"]):
        raise click.UsageError("give a model and a text (-m, -f), or files made before (--in-file)")
    if bool(o["model"]) != bool(o["file"]):
        raise click.UsageError("-m and -f go together")
    matrix = merged(o["in_files"])
    if o["model"] or not o["show_statistics"]:
        check_target(o["output"])
    if o["model"]:
        with Bars(o["quiet"]) as bars:
            matrix.add(_measured(o, bars))
    if o["model"] or not o["show_statistics"]:
        write(matrix, o["output"])
        env.log(f"wrote {o['output']}: {len(matrix.entries)} tensors, {matrix.chunk_count} chunks of {matrix.chunk_size} tokens")
    rows = statistics(matrix)
    if o["as_json"]:
        head = {"datasets": matrix.datasets, "chunk_count": matrix.chunk_count, "chunk_size": matrix.chunk_size}
        click.echo(json.dumps({**head, "tensors": [asdict(row) for row in rows]}, indent=1))
    elif o["show_statistics"]:
        click.echo("\n".join(_text(rows)))


def _measured(o: dict[str, Any], bars: Bars) -> Matrix:
    path = hub.resolve(o["model"])
    text = read_text(o["file"])
    with ggraph.Model(path, **{name: o[name] for name in ("n_gpu_layers", "override_tensor", "device")}) as model:
        tokens = model.vocab.encode(text, parse_special=o["parse_special"])[o["skip"] * o["n_ctx"]:]
        if o["n_chunks"]:
            tokens = tokens[:o["n_chunks"] * o["n_ctx"]]
        matrix = collect(model, tokens, o["n_ctx"], o["process_output"], o["n_threads"], bars)
    matrix.datasets = [o["file"]]
    return matrix


def _text(rows: Sequence[Statistics]) -> Iterator[str]:
    wide = max((len(r.name) for r in rows), default=4)
    yield f"{'tensor':{wide}}  {'mean square':>12} {'largest':>12} {'smallest':>12} {'evenness':>9} {'rows':>8}"
    for r in rows:
        experts = f" of the rarest of {r.n_matrices} experts" if r.n_matrices > 1 else ""
        yield f"{r.name:{wide}}  {r.mean:12.5g} {r.largest:12.5g} {r.smallest:12.5g} {r.evenness:9.4f} {r.n_rows:8}{experts}"


__all__ = ["Collector", "Matrix", "Statistics", "collect", "main", "merged", "read", "statistics", "write"]

if __name__ == "__main__":
    main()
