"""Two runs of a model side by side, node by node: what ggraph-diff measures.

In: two open contexts and tokens. Out: the error at every node that both have, streamed: one node at a time is held. The second
run goes on with its own values (`total`: how errors grow), or each of its nodes is given the first run's values again, so that
every error is that node's alone (`local`: who makes them).
"""
from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ggraph

Key = tuple[str, str, int]              # name, op, how many of that name and op came before
N_UBATCH = 32                           # tokens of a run: bounds what is held
FLOOR = 0.01                            # a channel or block counts as having at least this part of the mean energy


@dataclass
class Sums:
    """Of one node over all tokens: squares of the first, of the second, of the difference, products; and by channel (ne[0])."""
    aa: float = 0.0
    bb: float = 0.0
    dd: float = 0.0
    ab: float = 0.0
    max_abs: float = 0.0
    channel_aa: Any = 0.0
    channel_dd: Any = 0.0

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        a, b = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (a, b))
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            a, b = both_finite(a, b)
        d = b - a
        aa, dd = np.einsum("tc,tc->c", a, a), np.einsum("tc,tc->c", d, d)
        self.channel_aa, self.channel_dd = self.channel_aa + aa, self.channel_dd + dd
        self.aa, self.dd = self.aa + float(aa.sum()), self.dd + float(dd.sum())
        self.bb, self.ab = self.bb + float(np.vdot(b, b)), self.ab + float(np.vdot(a, b))
        self.max_abs = max(self.max_abs, float(np.abs(d).max(initial=0.0)))

    @property
    def nmse(self) -> float:
        """The difference's energy against the first one's."""
        return self.dd / self.aa if self.aa else (math.inf if self.dd else 0.0)

    @property
    def cosine(self) -> float:
        return self.ab / math.sqrt(self.aa * self.bb) if self.aa and self.bb else float(self.aa == self.bb)

    def worst(self) -> tuple[int, float]:
        """The channel with the largest error against its own energy, and that error."""
        return worst(np.atleast_1d(self.channel_aa), np.atleast_1d(self.channel_dd))


def both_finite(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Equal infinities count as equal; anything else that is not finite counts as an error as large as can be."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    odd = ~(np.isfinite(a) & np.isfinite(b))
    a, b = np.where(odd, 0.0, a), np.where(odd & same, 0.0, b)
    return a, np.where(odd & ~same, 1e150, b)


def worst(energy: np.ndarray, error: np.ndarray) -> tuple[int, float]:
    """Index and value of the largest error / energy; little energy counts as FLOOR of the mean."""
    floor = max(FLOOR * float(energy.mean()), 1e-300)
    ratio = error / np.maximum(energy, floor)
    i = int(ratio.argmax())
    return i, float(ratio[i])


@dataclass
class Tap:
    """A hook on the nodes of a Context that can be seen and that `match`; `see(key, array, node)` as a hook's fn."""
    see: Callable[[Key, np.ndarray, Any], Any]
    match: Callable[[Any], bool] = lambda node: True
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    last: str = ""

    def attach(self, ctx: ggraph.Context) -> None:
        ctx.hook = ggraph.Hook(self.match, self._called)
        ctx.on_step = self._reset

    def _reset(self, seen: object) -> None:
        self.counts.clear()

    def _called(self, name: str, array: np.ndarray, node: Any) -> Any:
        self.last = name or self.last
        name = name or f"{node.op} behind {self.last}"
        self.counts[name, node.op] += 1
        return self.see((name, node.op, self.counts[name, node.op] - 1), array, node)


@contextlib.contextmanager
def tapped(ctx: ggraph.Context, see: Callable[[Key, np.ndarray, Any], Any],
           match: Callable[[Any], bool] = lambda node: True) -> Iterator[None]:
    """Within it, `see` is called with every matching node; before and after, the memory is empty."""
    ctx.memory.clear()
    Tap(see, match).attach(ctx)
    try:
        yield
    finally:
        ctx.hook = ctx.on_step = None
        ctx.memory.clear()


def feed(ctx: ggraph.Context, tokens: Sequence[int]) -> Iterator[np.ndarray]:
    """Evaluate the tokens of sequence 0; logits [n, n_vocab] of each part, to be used at once."""
    for start in range(0, len(tokens), N_UBATCH):
        batch = ggraph.Batch()
        for token in tokens[start:start + N_UBATCH]:
            batch.add(token, None, 0, output=True)
        ctx.process("decode", batch)
        yield ctx.logits


class Feed:
    """The first run, in a thread of its own: its nodes one after the other, as many as `ahead` before they are wanted."""

    def __init__(self, ctx: ggraph.Context, tokens: Sequence[int], ahead: int = 4):
        self.ctx, self.tokens = ctx, tokens
        self._queue: queue.Queue[Any] = queue.Queue(ahead)
        self._early: dict[Key, list[np.ndarray]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            with tapped(self.ctx, lambda key, array, node: self._put((key, array.copy()))):
                for logits in feed(self.ctx, self.tokens):
                    self._put((("logits", "", 0), logits.copy()))
        except BaseException as e:
            with contextlib.suppress(ggraph.Aborted):       # nobody waits any more
                self._put((None, e))

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return
        raise ggraph.Aborted("the comparison was stopped")

    def take(self, key: Key) -> np.ndarray:
        """The next array of that name; what comes before it waits."""
        while not self._early.get(key):
            found, value = self._queue.get()
            if found is None:
                raise value
            self._early.setdefault(found, []).append(value)
        return self._early[key].pop(0)

    def drop(self, keys: set[Key]) -> None:
        """Forget what waits and is not of these keys."""
        for key in self._early.keys() - keys:
            del self._early[key]


def common(a: ggraph.Context, b: ggraph.Context) -> set[tuple[str, str]]:
    """(name, op) of nodes that both graphs have equally often, and that mean the same in both."""
    graphs = [ctx.graph() for ctx in (a, b)]
    counted = [Counter((n.name, n.op) for n in graph.nodes if n.name) for graph in graphs]
    turned = turned_values(graphs[0]) ^ turned_values(graphs[1])
    return {key for key, n in counted[0].items() if counted[1].get(key) == n and key not in turned}


def turned_values(graph: Any) -> set[tuple[str, str]]:
    """Results of attention that a Hadamard product has yet to turn back, as where V is quantized."""
    found = set()
    for source in (n.src[0] for n in graph.nodes if n.op == "hadamard"):
        while source.op in ("view", "reshape", "permute", "transpose"):
            source = source.src[0]
        if source.op == "flash_attn_ext" or (source.op == "mul_mat" and source.src[0].op != "none"):
            found.add((source.name, source.op))
    return found


@dataclass
class Compared:
    """`total` and `local` sums by node, in running order; `weights`: the tensors that a node reads; `shapes`: of its last part."""
    total: dict[Key, Sums] = field(default_factory=dict)
    local: dict[Key, Sums] = field(default_factory=dict)
    weights: dict[Key, list[str]] = field(default_factory=dict)
    shapes: dict[Key, list[int]] = field(default_factory=dict)


def compare(a: ggraph.Context, b: ggraph.Context, tokens: Sequence[int], rows: Callable[[np.ndarray, np.ndarray], None],
            keep: Callable[[Key, np.ndarray, Sequence[str]], None], progress: Callable[[], None] | None = None) -> Compared:
    """Both passes. `rows(logits_a, logits_b)` gets the free run's logits; `keep(key, array, weights)` the second run's local
    results. `progress` is called after each pass."""
    found, known = Compared(), common(a, b)
    leaves = set(b.model.weights.leaves)

    def total(key: Key, array: np.ndarray, node: Any) -> None:
        found.weights[key] = [s.root.name for s in node.src if s is not None and s.root.name in leaves]
        found.shapes[key] = list(array.shape[::-1])
        found.total.setdefault(key, Sums()).add(first.take(key), array)

    def local(key: Key, array: np.ndarray, node: Any) -> Any:
        wanted = first.take(key)
        found.local.setdefault(key, Sums()).add(wanted, array)
        keep(key, array, found.weights.get(key, ()))
        return wanted

    def only(see: Callable[[Key, np.ndarray, Any], Any]) -> Callable[[Key, np.ndarray, Any], Any]:
        def chosen(key: Key, array: np.ndarray, node: Any) -> Any:
            if key[:2] in known and array.dtype.kind == "f":
                return see(key, array, node)
            return first.take(key) if see is local and key[:2] in known else None
        return chosen

    for see in (total, local):
        with Feed(a, tokens) as first, tapped(b, only(see)):
            for logits in feed(b, tokens):
                reference = first.take(("logits", "", 0))
                first.drop(set())
                if see is total:
                    rows(reference, logits)
        if progress:
            progress()
    return found
