"""What ggraph-trace keeps of a step: plain values, which a table, JSON, dot and a page are made of.

In: an `Observed` step of a Context. Out: dataclasses of numbers and strings. Shapes are in ggml's order, contiguous axis first.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ggraph

LAYER = re.compile(r"(?:-|_l)(\d+)( \(view\))?$")
WITHOUT_TEXT = ("none", "test")     # kinds of vocabulary that have ids alone
N_SHOWN = 8                         # values of an input that are kept
N_COLUMNS = 1024                    # of a mask


@dataclass(frozen=True)
class Variable:
    """A tensor that carries one of the five variables, or the same of several layers.

    `ne`, `nb`: its logical shape and byte strides at this step. `symbols`: the shape as it was built, in the sizes of a batch.
    `owner` has the bytes (`physical`: its shape as allocated), in `where`: file, cache or arena; they start at `offset`.
    """
    role: str
    name: str
    layers: list[int]
    op: str
    type: str
    ne: list[int]
    nb: list[int]
    symbols: list[str]
    owner: str
    physical: list[int]
    where: str
    offset: int
    note: str = ""


@dataclass(frozen=True)
class Stream:
    """Cells of one stream up to the highest in use: position (-1: free), the sequences that own each; those this step wrote."""
    stream: int
    pos: list[int]
    owners: list[list[int]]
    written: list[int]


@dataclass(frozen=True)
class Pool:
    """The KV cells of a group of layers. `n_kv`: cells that the graph read. Bytes are those of K and V in all its layers."""
    group: int
    layers: list[int]
    window: int
    size: int
    n_kv: int
    used: int
    bytes_used: int
    bytes: int
    streams: list[Stream]


@dataclass(frozen=True)
class States:
    """Rows of recurrent state: those each sequence set read (`src`) and wrote (`dst`, newest first); `marks`: for each sequence
    the positions whose state is kept, with the row. `bytes_used` counts one row for each sequence."""
    layers: list[int]
    n_rows: int
    src: list[int]
    dst: list[list[int]]
    marks: list[list[list[int]]]
    bytes_used: int
    bytes: int


@dataclass(frozen=True)
class Mask:
    """Who sees what: for each stream one string a token, "1" where it sees the cell of that number."""
    name: str
    rows: list[list[str]]


@dataclass(frozen=True)
class Node:
    """A step of the plan: nodes that ran as one, or "before x": what a product's activations are made ready for. `nbytes` is what
    it must at least read and write."""
    names: list[str]
    ops: list[str]
    type: str
    ne: list[int]
    layer: int | None
    split: int
    us: float
    nbytes: int

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.us / 1e3 if self.us else 0.0


@dataclass(frozen=True)
class Split:
    backend: str
    n_nodes: int
    copies: list[str]


@dataclass(frozen=True)
class Token:
    id: int
    text: str
    pos: list[int]
    seqs: list[int]
    output: bool


@dataclass(frozen=True)
class Row:
    """An output row: the likeliest tokens after this one, (id, text, probability); what became of it."""
    row: int
    seqs: list[int]
    pos: int
    top: list[tuple[int, str, float]]
    note: str = ""


@dataclass
class StepTrace:
    """One graph run. `batch` counts calls of `process`, `ubatch` and `n_ubatch` its runs in it. `after`: what was done next."""
    label: str
    kind: str
    batch: int
    ubatch: int
    n_ubatch: int
    tokens: list[Token]
    n_seqs: int
    sizes: dict[str, int]
    graph: int
    key: list[str]
    how: str
    splits: list[Split]
    variables: list[Variable]
    pools: list[Pool]
    states: States | None
    masks: list[Mask]
    nodes: list[Node]
    ms: float
    outputs: list[Row] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GraphNode:
    id: int
    name: str
    op: str
    type: str
    ne: list[str]
    layer: int | None
    view: bool
    src: list[int | str]            # a node's id, or the name of a leaf


@dataclass(frozen=True)
class GraphTrace:
    """A graph that steps shared: `nodes` in running order, shapes in the sizes of a batch."""
    key: list[str]
    nodes: list[GraphNode]


class Recorder:
    """Watches a Context. `process` runs a batch under a label; `steps` and `graphs` fill up. `n_top` tokens of each output row."""

    def __init__(self, ctx: ggraph.Context, n_top: int = 5):
        self.ctx, self.n_top = ctx, n_top
        self.steps: list[StepTrace] = []
        self.graphs: list[GraphTrace] = []
        self._keys: list[Any] = []
        self._rows: list[list[int]] = []            # of each step: its rows' numbers in the batch
        self._label, self._batch = "", 0
        ctx.on_step = self._see

    def process(self, label: str, batch: ggraph.Batch) -> list[StepTrace]:
        """Run it; the steps that it took, with their output rows."""
        first = len(self.steps)
        self._label = label
        self.ctx.process("decode", batch)
        taken = self.steps[first:]
        for i, step in enumerate(taken):
            step.ubatch, step.n_ubatch = i + 1, len(taken)
        self._batch += 1
        logits = dict(zip(np.flatnonzero(batch.output).tolist(), self.ctx.logits))
        for step, numbers in zip(taken, self._rows[first:]):
            step.outputs = [Row(row, t.seqs, t.pos[0], self._top(logits[row])) for row, t in zip(numbers, step.tokens) if t.output]
        return taken

    def _top(self, logits: np.ndarray) -> list[tuple[int, str, float]]:
        x = logits.astype(np.float64) - logits.max()
        p = np.exp(x) / np.exp(x).sum()
        best = np.argsort(-p, kind="stable")[:self.n_top].tolist()
        return [(t, self.text(t), float(p[t])) for t in best]

    def text(self, token: int) -> str:
        vocab = self.ctx.model.vocab
        return vocab.piece(token).decode("utf-8", "replace") if vocab.kind not in WITHOUT_TEXT else f"[{token}]"

    def _see(self, seen: ggraph.Observed) -> None:
        u = seen.step.ubatch
        ids = [-1] * u.n_tokens if u.token is None else u.token.tolist()
        tokens = [Token(t, self.text(t) if t >= 0 else "(embedding)", u.pos[:, i].tolist(), list(u.seq_ids[i]), bool(u.output[i]))
                  for i, t in enumerate(ids)]
        self._rows.append(u.rows.tolist())
        graph = self._graph(seen)
        self.steps.append(StepTrace(
            self._label, seen.kind, self._batch, 1, 1, tokens, u.n_seqs, dict(seen.values), graph, self.graphs[graph].key, seen.how,
            [Split(s.backend.name, len(s.nodes), [t.name for t, _ in s.copies]) for s in seen.plan.splits],
            variables(seen, self.ctx), list(pools(seen, self.ctx)), states(seen, self.ctx), masks(seen), nodes(seen),
            1e3 * seen.seconds))

    def _graph(self, seen: ggraph.Observed) -> int:
        if seen.key not in self._keys:
            self._keys.append(seen.key)
            self.graphs.append(GraphTrace(spell(seen.key, self.ctx), graph_nodes(seen)))
        return self._keys.index(seen.key)


def spell(key: Sequence[Any], ctx: ggraph.Context) -> list[str]:
    """A graph key in words: all that is baked into a graph."""
    cp, plain = ctx.cparams, [str(part) for part in key if isinstance(part, str)]
    words = [f"n_ctx {cp.n_ctx}", f"n_ubatch {cp.n_ubatch}", f"streams {cp.n_stream}",
             f"flash attention {'on' if cp.flash_attn else 'off'}", f"K {cp.type_k.name}", f"V {cp.type_v.name}"]
    words += [f"rollback {cp.n_rollback}"] if cp.n_rollback else []
    words += ["hook"] if ctx.hook else []
    return plain + words + [f"{len(ctx.adapters)} adapters"] * bool(ctx.adapters)


def layer_of(name: str) -> int | None:
    found = LAYER.search(name)
    return int(found[1]) if found else None


def layered(graph: Any) -> dict[Any, int | None]:
    """Node -> its layer. Nodes without a name belong with the one before them; input and output to none."""
    layers: dict[Any, int | None] = {}
    now: int | None = None
    for node in graph.nodes:
        if node.name:
            now = layer_of(node.name)
        layers[node] = now
    return layers


def symbol(n: Any) -> str:
    return str(getattr(n, "formula", int(n)))


def graph_nodes(seen: ggraph.Observed) -> list[GraphNode]:
    graph = seen.plan.graph
    ids = {n: i for i, n in enumerate(graph.nodes)}
    layers = layered(graph)
    return [GraphNode(i, n.name, n.op, n.type.name, trimmed([symbol(x) for x in n.ne], "1"), layers[n], is_view(n),
                      [ids.get(s, s.name) for s in n.src if s is not None]) for n, i in ids.items()]


def is_view(node: Any) -> bool:
    """It computes nothing: another shape of the same bytes."""
    return node.op in ("view", "reshape", "permute", "transpose")


def trimmed(ne: list[Any], one: Any = 1) -> list[Any]:
    """Without trailing axes of length 1."""
    while len(ne) > 1 and ne[-1] == one:
        ne = ne[:-1]
    return ne


# --- the five variables

def variables(seen: ggraph.Observed, ctx: ggraph.Context) -> list[Variable]:
    """Hidden states, positions and rotation, mask, memory, decode state: each tensor that carries one of them."""
    given, read = seen.inputs(), {t for i in seen.plan.inputs for t in i.tensors}
    found: list[Variable] = []
    for source in seen.plan.graph.inputs:
        for t in source.tensors:
            note = values(given[t.name]) + ("" if t in read else "; no kernel of this plan reads it")
            found.append(variable(seen, ctx, input_role(t.name), t, note))
    caches = {t for g in ctx.memory.groups for t in g.tensors()}
    found += [variable(seen, ctx, "memory", t, "") for t in seen.shapes if t in caches]
    found += [variable(seen, ctx, role, n, note) for n in seen.plan.graph.nodes for role, note in node_role(n, caches)]
    found += [variable(seen, ctx, "decode", t, name) for name, t in seen.plan.graph.outputs.items()]
    return collapsed(found)


INPUT_ROLES = {"inp_tokens": "hidden", "inp_embd": "hidden", "inp_pos": "positions", "kq_mask": "mask", "kv_cells": "mask",
               "kv_spans": "mask", "kv_idxs": "memory", "rs_": "memory", "inp_out_ids": "decode", "attn_scale": "positions"}


def input_role(name: str) -> str:
    return next((role for start, role in INPUT_ROLES.items() if name.startswith(start)), "hidden")


def node_role(node: Any, caches: set[Any]) -> Iterator[tuple[str, str]]:
    """What a node is of the five, if it is one of them."""
    stem = LAYER.sub("", node.name)
    if stem in ("inp_embd", "l_out", "result_norm") and not is_view(node):
        yield "hidden", {"inp_embd": "embeddings of the tokens", "l_out": "what a layer leaves", "result_norm": "normed"}[stem]
    elif node.op == "rope":
        p = node.params
        scaled = f", scale {p['freq_scale']:g}" if p["freq_scale"] != 1 else ""
        yield "positions", f"rotates {p['n_dims']} of {int(node.ne[0])}, base {p['freq_base']:g}{scaled}"
    elif node.root in caches and node.name.endswith("(view)"):
        yield "memory", "what attention reads"
    elif node.root in caches and node.op == "set_rows":
        yield "memory", f"written at {node.src[2].root.name}"
    elif node.op == "get_rows" and node.src[0].root in caches:
        yield "memory", f"the rows {node.src[1].root.name}"


def variable(seen: ggraph.Observed, ctx: ggraph.Context, role: str, t: Any, note: str) -> Variable:
    shape, root = seen.shapes[t], t.root
    name = t.name or (f"{t.op} of {root.name or t.src[0].name}")
    layer = layer_of(t.name or root.name or (t.src[0].name if t.src else ""))
    where = "file" if root.name in ctx.model.weights.leaves else "cache" if root.name.startswith("cache_") else "arena"
    return Variable(role, name, [] if layer is None else [layer], "" if t.op == "none" else t.op, t.type.name, list(shape.ne),
                    list(shape.nb), [symbol(n) for n in t.ne], "" if root is t else root.name or root.op,
                    [int(n) for n in root.ne], where, int(root.offset) + shape.offset, note)


def collapsed(found: Iterable[Variable]) -> list[Variable]:
    """The same tensor of several layers as one; offsets are those of the first."""
    groups: dict[Any, list[Variable]] = {}
    for v in found:
        stem = LAYER.sub(r"\2", v.name)
        groups.setdefault((v.role, stem, v.op, v.type, *v.ne, *v.nb, LAYER.sub("", v.owner), v.where, v.note), []).append(v)
    return [Variable(**{**vars(vs[0]), "name": key[1] if len(vs) > 1 else vs[0].name, "layers": [n for v in vs for n in v.layers],
                        "owner": LAYER.sub("", vs[0].owner) if len(vs) > 1 else vs[0].owner}) for key, vs in groups.items()]


def values(data: np.ndarray) -> str:
    """The first few, or for a mask how much of it is seen."""
    if data.dtype.kind == "f" and data.ndim == 4 and not np.isfinite(data).all():
        return f"{np.isfinite(data).sum()} of {data.size} visible"
    flat = data.reshape(-1)
    return " ".join(f"{x:g}" for x in flat[:N_SHOWN]) + (f" .. {flat[-1]:g}" if flat.size > N_SHOWN else "")


# --- memory

def pools(seen: ggraph.Observed, ctx: ggraph.Context) -> Iterator[Pool]:
    for g in ctx.memory.kv:
        slots, store = seen.step.slots[g.index], g.store
        written = dict(zip(slots.streams.tolist(), slots.cells.tolist()))
        streams = [stream(i, cells, written.get(i, [])) for i, cells in enumerate(store.cells)]
        used = sum(cells.n_used for cells in store.cells)
        per_cell = sum(t.type.row_bytes(int(t.ne[0])) for t in g.tensors())
        yield Pool(g.index, sorted(g.k), store.window, store.size, seen.values[f"n_kv{g.index}"], used, used * per_cell,
                   store.size * store.n_stream * per_cell, streams)


def stream(number: int, cells: Any, written: list[int]) -> Stream:
    n = cells.used_max
    owners = [[cells.seq0 + i for i in np.flatnonzero(column).tolist()] for column in cells.owner[:, :n].T]
    return Stream(number, cells.pos[:n].tolist(), owners, written)


def states(seen: ggraph.Observed, ctx: ggraph.Context) -> States | None:
    rs = ctx.memory.rs
    if rs is None:
        return None
    slots, marks = seen.step.slots[rs.index], [[[m.pos, m.row] for m in seq] for seq in rs.store.marks]
    per_row = sum(t.type.row_bytes(int(t.ne[0])) for t in rs.tensors())
    return States(sorted({*rs.r, *rs.s}), rs.store.n_rows, slots.src.tolist(), slots.dst.tolist(), marks,
                  sum(1 for seq in marks if seq) * per_row, rs.store.n_rows * per_row)


def masks(seen: ggraph.Observed) -> list[Mask]:
    """Masks as they were filled, up to the last cell that anyone sees."""
    found = []
    for name, data in seen.inputs().items():
        if name.startswith("kq_mask"):
            visible = np.isfinite(data)[:, 0]                       # [n_stream, tokens, cells]
            n = min(N_COLUMNS, int(np.flatnonzero(visible.any((0, 1)))[-1]) + 1 if visible.any() else 1)
            found.append(Mask(name, [["".join("1" if x else "0" for x in row[:n]) for row in one] for one in visible]))
    return found


# --- nodes

def nodes(seen: ggraph.Observed) -> list[Node]:
    """What the plan ran, in its order, with times and bytes."""
    layers, split = layered(seen.plan.graph), {n: i for i, s in enumerate(seen.plan.splits) for n in s.nodes}
    found = []
    for ended, ran, seconds in seen.steps():
        last = ran[-1]
        weights = dict.fromkeys(n.src[0].type.name for n in ended if n.op.startswith("mul_mat") and n.src[0].op == "none")
        names, ops = ([n.name for n in ended], [n.op for n in ended]) if ended else ([f"before {last.name}"], ["activations"])
        found.append(Node(names, ops, ",".join(weights), trimmed(list(seen.shapes[last].ne)), layers.get(last), split.get(last, 0),
                          1e6 * seconds, seen.traffic(ended)))
    return found
