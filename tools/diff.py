"""ggraph-diff: where two files of one model differ, or one file on two backends or with two settings, and who makes the difference.

In: two sides and a prompt. Out: errors of weights and of every node, what each tensor does to the next token, and a verdict.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

import ggraph
from ggraph import env, hub

from ._compare import N_UBATCH, Compared, Key, Sums, compare, feed, tapped
from ._console import Bars
from ._input import read_text
from ._options import KV_TYPES, Command, IntRange, Params, group, options
from ._output import check_target, write_text
from ._record import WITHOUT_TEXT, layer_of
from ._tensors import TensorError, tensor_errors

PROMPT = ("In 1969 two people walked on the moon. They had left the Earth four days before, in a ship that was as tall as a church "
          "tower. def area(r): return 3.14159 * r ** 2  # The question is not whether we can, but when: \"Soon,\" she said.")
MARK = 0.01                     # total error from which a node counts as the first one that differs
KEPT = 1 << 30                  # bytes of results that are kept for swapping
N_TOP = 5
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Side:
    """A file (or known name) and how it is run."""
    path: str
    backend: str | None = None
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    n_threads: int | None = None


@dataclass(frozen=True)
class Limits:
    """What passes. `block`: error of the worst block of a tensor against its energy. `channel`: error that a node itself adds to
    its worst channel, where both sides have the same weights. `kld`: mean KL divergence of the next token, nats. `nmse`: total
    error of any node; None: not judged."""
    block: float = 4.0
    channel: float = 0.1
    kld: float = 0.1
    nmse: float | None = None


@dataclass(frozen=True)
class NodeError:
    """`nmse`, `cosine`, `max_abs`: of B's value against A's, each in its own run. `local_*`: of B's node given A's values;
    `channel` is the one (of ne[0]) where that is largest against its own energy. `weights`: the tensors that it reads; `same`:
    they are equal."""
    name: str
    op: str
    layer: int | None
    ne: list[int]
    weights: list[str]
    same: bool
    nmse: float
    cosine: float
    max_abs: float
    local_nmse: float
    local_cosine: float
    local_max_abs: float
    channel: int
    channel_nmse: float


@dataclass(frozen=True)
class Position:
    """The next token after `token`: KL divergence of B from A in nats; (id, text, p in A, p in B) of both sides' likeliest."""
    token: int
    text: str
    kld: float
    same_top: bool
    top: list[tuple[int, str, float, float]]


@dataclass(frozen=True)
class Swap:
    """A with one tensor of B at one node: how far the next tokens then are from A's."""
    tensor: str
    node: str
    layer: int | None
    type_a: str
    type_b: str
    kld: float
    top_changed: float


@dataclass(frozen=True)
class Failure:
    """What is beyond a limit: `what` (block, channel, kld, nmse), where, and the values."""
    what: str
    where: str
    value: float
    limit: float
    text: str


@dataclass
class Diff:
    """Everything. `first`: the first node with a total error beyond `mark`. Without failures it is a pass."""
    a: Side
    b: Side
    arch: str
    n_layer: int
    tokens: list[int]
    nodes: list[NodeError]
    tensors: list[TensorError]
    positions: list[Position]
    swaps: list[Swap]
    kld: float
    top_same: float
    first: str | None
    mark: float
    failures: list[Failure] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def diff(a: Side, b: Side, prompt: str | Sequence[int] | None = None, *, limits: Limits = Limits(), n_swap: int = 32,
         progress: Report | None = None) -> Diff:
    """Compare. `prompt`: text or token ids; None: a text of mixed kind. `n_swap`: for so many tensors with the largest local error
    the effect on the next token is measured; -1: all, 0: none. Errors: `Error` for files that are not of one model."""
    report = progress or (lambda what, done, total: None)
    with ExitStack() as stack:
        models = opened(stack, a, b)
        tokens = tokenized(models[0], prompt)
        ctx_a, ctx_b = (stack.enter_context(context(m, side, len(tokens), progress)) for m, side in zip(models, (a, b)))
        tensors = tensor_errors(ctx_a.model.file, ctx_b.model.file, lambda done, total: report("weights", done, total)) \
            if ctx_a.model is not ctx_b.model and ctx_a.model.path != ctx_b.model.path else []
        differing = {t.name: t for t in tensors if not t.same}
        rows, kept = Rows(ctx_a.model), Kept(differing if n_swap else {})
        report("compare", 0, 2)
        done = iter((1, 2))
        found = compare(ctx_a, ctx_b, tokens, rows.add, kept.add, lambda: report("compare", next(done), 2))
        nodes = node_errors(found, set(differing))
        swaps = swapped(ctx_a, tokens, chosen(found, kept, n_swap), kept, differing, report)
        hp, mark = ctx_a.model.hparams, MARK if limits.nmse is None else limits.nmse
        first = next((n.name for n in nodes if n.nmse > mark), None)
        result = Diff(a, b, hp.arch, hp.n_layer, tokens, nodes, tensors, rows.positions(tokens), swaps, rows.kld, rows.top_same,
                      first, mark)
        result.failures = list(failures(result, limits))
        return result


def opened(stack: ExitStack, a: Side, b: Side) -> tuple[ggraph.Model, ggraph.Model]:
    """A model for each side; the same one where both have the same file and backend."""
    first = stack.enter_context(ggraph.Model(a.path, backend=a.backend))
    one = (a.path, a.backend) == (b.path, b.backend)
    second = first if one else stack.enter_context(ggraph.Model(b.path, backend=b.backend))
    check(first, second)
    return first, second


def context(model: ggraph.Model, side: Side, n_tokens: int, progress: Report | None) -> ggraph.Context:
    return ggraph.Context(model, n_ctx=n_tokens, n_batch=N_UBATCH, n_ubatch=N_UBATCH, flash_attn=side.flash_attn,
                          type_k=side.type_k, type_v=side.type_v, n_threads=side.n_threads, progress=progress)


def check(a: ggraph.Model, b: ggraph.Model) -> None:
    x, y = a.hparams, b.hparams
    for what in ("arch", "n_layer", "n_embd", "n_vocab"):
        if getattr(x, what) != getattr(y, what):
            raise ggraph.Error(f"these are not two files of one model: {what} is {getattr(x, what)} in {a.path.name} and "
                               f"{getattr(y, what)} in {b.path.name}")
    if not x.head:
        raise ggraph.Error(f"{a.path.name} gives embeddings; ggraph-diff compares next tokens")


def tokenized(model: ggraph.Model, prompt: str | Sequence[int] | None) -> list[int]:
    if prompt is None and model.vocab.kind in WITHOUT_TEXT:
        prompt = [7919 * i % model.n_vocab for i in range(1, 49)]
    tokens = model.vocab.encode(PROMPT if prompt is None else prompt) if isinstance(prompt, str | None) else list(prompt)
    if not tokens:
        raise ggraph.Error("the prompt has no tokens; give a longer one")
    return tokens


# --- next tokens

class Rows:
    """Logits of both sides, row by row, made into what they say about the next token."""

    def __init__(self, model: ggraph.Model):
        self.model = model
        self._found: list[tuple[float, list[tuple[int, float, float]]]] = []

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        for x, y in zip(a, b):
            p, q = log_softmax(x), log_softmax(y)
            top = dict.fromkeys([*best(p, N_TOP), *best(q, N_TOP)])
            self._found.append((divergence(p, q), [(t, float(np.exp(p[t])), float(np.exp(q[t]))) for t in top]))

    @property
    def kld(self) -> float:
        return float(np.mean([kld for kld, _ in self._found]))

    @property
    def top_same(self) -> float:
        return float(np.mean([same_top(top) for _, top in self._found]))

    def positions(self, tokens: Sequence[int]) -> list[Position]:
        return [Position(token, self.text(token), kld, same_top(top), [(t, self.text(t), p, q) for t, p, q in top])
                for token, (kld, top) in zip(tokens, self._found)]

    def text(self, token: int) -> str:
        vocab = self.model.vocab
        return vocab.piece(token).decode("utf-8", "replace") if vocab.kind not in WITHOUT_TEXT else f"[{token}]"


def log_softmax(row: np.ndarray) -> np.ndarray:
    x = row.astype(np.float64) - row.max()
    return np.asarray(x - np.log(np.exp(x).sum()))


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """KL(P || Q) of log-probabilities, in nats."""
    known = np.isfinite(p)
    return float(max(0.0, np.sum(np.exp(p[known]) * (p[known] - q[known]))))


def best(row: np.ndarray, n: int) -> list[int]:
    n = min(n, len(row))
    top = np.argpartition(-row, n - 1)[:n]
    found: list[int] = top[np.argsort(-row[top], kind="stable")].tolist()
    return found


def same_top(top: Sequence[tuple[int, float, float]]) -> bool:
    return max(top, key=lambda t: t[1])[0] == max(top, key=lambda t: t[2])[0]


# --- nodes

def node_errors(found: Compared, differing: set[str]) -> list[NodeError]:
    out = []
    for key, total in found.total.items():
        local = found.local.get(key, Sums())
        channel, value = local.worst()
        weights = found.weights[key]
        out.append(NodeError(key[0], key[1], layer_of(key[0]), found.shapes[key], weights, not differing & set(weights), total.nmse,
                             total.cosine, total.max_abs, local.nmse, local.cosine, local.max_abs, channel, value))
    return out


# --- swapping: what B's tensor makes of A's values is put in the place of what A's makes

class Kept:
    """What nodes that read differing tensors made of A's values, up to KEPT bytes."""

    def __init__(self, differing: dict[str, TensorError]):
        self.differing, self.results = differing, dict[Key, list[np.ndarray]]()
        self.tensor: dict[Key, str] = {}
        self.nbytes, self.full = 0, False

    def add(self, key: Key, array: np.ndarray, weights: Sequence[str]) -> None:
        tensor = next((w for w in weights if w in self.differing), None)
        if tensor is None or (self.nbytes + array.nbytes > KEPT and key not in self.results):
            self.full |= tensor is not None
            return
        self.tensor[key] = tensor
        self.results.setdefault(key, []).append(array.copy())
        self.nbytes += array.nbytes


def chosen(found: Compared, kept: Kept, n: int) -> list[Key]:
    if kept.full:
        env.log(f"results take more than {KEPT / 2**30:.0f} GiB: not all tensors are swapped; a shorter prompt takes less")
    keys = sorted(kept.results, key=lambda key: -found.local[key].nmse)
    return keys if n < 0 else keys[:n]


def swapped(ctx: ggraph.Context, tokens: Sequence[int], keys: Sequence[Key], kept: Kept, differing: dict[str, TensorError],
            report: Report) -> list[Swap]:
    """Largest effect first."""
    if not keys:
        return []
    with tapped(ctx, lambda *seen: None, lambda node: False):
        plain = [np.stack([log_softmax(row) for row in rows]).astype(np.float32) for rows in feed(ctx, tokens)]
    out = []
    for i, key in enumerate(keys):
        report("swap", i, len(keys))
        kld, changed = effect(ctx, tokens, key, kept.results[key], plain)
        t = differing[kept.tensor[key]]
        out.append(Swap(t.name, key[0], layer_of(key[0]), t.type_a, t.type_b, kld, changed))
    report("swap", len(keys), len(keys))
    return sorted(out, key=lambda s: -s.kld)


def effect(ctx: ggraph.Context, tokens: Sequence[int], key: Key, results: Sequence[np.ndarray],
           plain: Sequence[np.ndarray]) -> tuple[float, float]:
    """Mean KL divergence, and the share of changed likeliest tokens, with one node's results replaced."""
    parts = iter(results)
    klds, changed = [], []
    with tapped(ctx, lambda seen, array, node: next(parts) if seen == key else None,
                lambda node: (node.name, node.op) == key[:2]):
        for before, rows in zip(plain, feed(ctx, tokens)):
            for p, row in zip(before, rows):
                q = log_softmax(row)
                klds.append(divergence(p.astype(np.float64), q))
                changed.append(int(p.argmax()) != int(q.argmax()))
    return float(np.mean(klds)), float(np.mean(changed))


# --- the gate

def failures(d: Diff, limits: Limits) -> Iterator[Failure]:
    for t in sorted(d.tensors, key=lambda t: -t.block_nmse):
        if not t.block_nmse <= limits.block:
            yield Failure("block", t.name, t.block_nmse, limits.block,
                          f"block {t.block} (row {t.row}) of tensor {t.name} is off by {t.block_nmse:.3g} times its energy")
    for n in sorted(d.nodes, key=lambda n: -n.channel_nmse):
        if n.same and not n.channel_nmse <= limits.channel:
            reads = f", which reads {', '.join(n.weights)}," if n.weights else ""
            yield Failure("channel", n.name, n.channel_nmse, limits.channel, f"node {n.name}{reads} adds an error of "
                          f"{n.channel_nmse:.3g} times the energy of channel {n.channel}")
    if not d.kld <= limits.kld:
        yield Failure("kld", "next token", d.kld, limits.kld,
                      f"the next token's distribution differs by {d.kld:.4g} nats on average")
    for n in d.nodes:
        if limits.nmse is not None and not n.nmse <= limits.nmse:
            yield Failure("nmse", n.name, n.nmse, limits.nmse,
                          f"node {n.name} is the first whose total error, {n.nmse:.3g}, is too large")
            return


# --- the command

_sides, _what = group("Sides (one value for both, or A's and B's joined by a comma)"), group("What to run")
_gate, _out = group("Limits"), group("Output")
SIDES = (
    _sides("--backend", metavar="NAME", help="ref, cpu, ..  [default: what GGRAPH_BACKEND says, or the best]"),
    _sides("-fa", "--flash-attn", default="auto", show_default=True, metavar="on|off|auto",
           help="Attention as one op, or as its parts."),
    _sides("type_k", "-ctk", "--cache-type-k", default="f16", show_default=True, metavar="TYPE", help="Type of K in the cache."),
    _sides("type_v", "-ctv", "--cache-type-v", default="f16", show_default=True, metavar="TYPE", help="Type of V in the cache."),
    _sides("n_threads", "-t", "--threads", default="", metavar="N", help="Threads.  [default: all cores]"),
)
WHAT = (
    _what("-p", "--prompt", metavar="TEXT", help="What both read.  [default: a short text of mixed kind]"),
    _what("-f", "--file", type=click.Path(exists=True, dir_okay=False, allow_dash=True),
          help="A file with the prompt; - is standard input."),
    _what("n_swap", "--swap", type=IntRange(min=-1), default=32, show_default=True, metavar="N",
          help="Measure what so many tensors of B do in A, those with the largest error; -1: all, 0: none."),
)
GATE = (
    _gate("--max-block", type=float, default=Limits.block, show_default=True, metavar="X",
          help="Error of a tensor's worst block, against the block's energy."),
    _gate("--max-channel", type=float, default=Limits.channel, show_default=True, metavar="X",
          help="Error that a node with equal weights adds to a channel, against the channel's energy."),
    _gate("--max-kld", type=float, default=Limits.kld, show_default=True, metavar="X",
          help="Mean KL divergence of the next token, nats."),
    _gate("--max-nmse", type=float, metavar="X", help=f"Total error of any node.  [default: not judged; {MARK} is marked]"),
)
OUTPUT = (
    _out("--html", type=click.Path(dir_okay=False), metavar="FILE",
         help="Write a report with plots (needs the extra `report`); - is standard output."),
    _out("as_json", "--json", is_flag=True, help="Everything as JSON on standard output, in place of the table."),
    _out("n_rows", "--rows", type=IntRange(min=0), default=12, show_default=True, metavar="N", help="Rows of each table."),
    _out("-q", "--quiet", is_flag=True, help="No progress on standard error."),
)


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("a", metavar="A")
@click.argument("b", required=False, metavar="[B]")
@options(SIDES, WHAT, GATE, OUTPUT)
@click.version_option(ggraph.__version__)
@click.pass_context
def main(ctx: click.Context, /, **p: Any) -> None:
    """Compare the model files A and B, or A with itself on two backends or with two settings.

    Exit code: 0 if all is within the limits, 1 if not (or something failed), 2 for a wrong command line, 130 after Ctrl-C.
    """
    env.set_quiet(p["quiet"])
    if p["prompt"] is not None and p["file"]:
        raise click.UsageError("give only one of --prompt and --file")
    prompt = read_text(p["file"]) if p["file"] else p["prompt"]
    check_target(p["html"])
    with Bars(p["quiet"]) as bars:
        a, b = sides(p, bars)
        limits = Limits(p["max_block"], p["max_channel"], p["max_kld"], p["max_nmse"])
        found = diff(a, b, prompt, limits=limits, n_swap=p["n_swap"], progress=bars)
    if p["html"]:
        from ._diff_page import page
        write_text(Path(p["html"]), page(found))
    if p["html"] == "-":
        pass                    # standard output has the page
    elif p["as_json"]:
        click.echo(json.dumps(found.json(), ensure_ascii=False))
    else:
        from ._diff_tables import show
        show(found, p["n_rows"])
    if not found.passed:
        ctx.exit(1)


CHOICES = {"flash_attn": ("on", "off", "auto"), "type_k": KV_TYPES, "type_v": KV_TYPES}


def sides(p: Params, bars: Bars) -> tuple[Side, Side]:
    """Both sides of a command line; UsageError where they are the same."""
    paths = [str(hub.resolve(name, lambda done, total: bars("fetch", done, total))) for name in (p["a"], p["b"] or p["a"])]
    settings = {name: pair(name, p[name] or "") for name in ("backend", "flash_attn", "type_k", "type_v", "n_threads")}
    made = [Side(paths[i], **{name: values[i] for name, values in settings.items()}) for i in (0, 1)]
    if made[0] == made[1]:
        raise click.UsageError("both sides are the same: give a second file, or two values as in --backend ref,cpu or -fa on,off")
    return made[0], made[1]


def pair(name: str, text: str) -> tuple[Any, Any]:
    words = text.split(",")
    flag = "--" + name.replace("type_", "cache-type-").replace("n_threads", "threads").replace("_", "-")
    if len(words) > 2 or any(w not in CHOICES.get(name, (w,)) for w in words):
        known = f" of {', '.join(CHOICES[name])}" if name in CHOICES else ""
        raise click.BadParameter(f"{text!r} is not one value or two{known}", param_hint=flag)
    if name == "n_threads" and not all(w.isdigit() or not w for w in words):
        raise click.BadParameter(f"{text!r} are not numbers", param_hint=flag)
    values = [(int(w) if name == "n_threads" else w) if w else None for w in words]
    return values[0], values[-1]


if __name__ == "__main__":
    sys.exit(main())
