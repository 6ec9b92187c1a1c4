"""Graph inputs: leaf tensors that fill themselves from the host before each run.

In: the step at hand (ubatch, cells) and the memory's bookkeeping. Out: arrays for the input's tensors. Everything that
differs between two batches with one graph key passes through here; what a class bakes into the graph instead, it must
state in `key`, and the `Size` variables that its shapes use in `sizes`. It knows nothing of backends.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import numpy as np

from .adapters import Mix
from .drawing import MAX_STEPS, Drawing
from .hparams import HParams, Indexer, Ngrams
from .memory import Step
from .memory.kv import ordered
from .memory.layers import LayerMemory
from .memory.line import Line, Window
from .tensor import F32, I32, Tensor, leaf


class Input(ABC):
    """One or more leaf tensors with one source. Each subclass says in `key` what of a step it bakes into the graph: a static
    method, or None, if nothing is."""
    keys: ClassVar[list[Callable[[Step], Hashable]]] = []           # of all subclasses that bake something
    key: ClassVar[Any]
    tensors: tuple[Tensor, ...]

    def __init_subclass__(cls) -> None:
        if cls.key is not None:                                     # an AttributeError where nothing is said
            Input.keys.append(cls.key)

    @abstractmethod
    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        """One array per tensor, C order, in the tensor's type."""


def graph_key(step: Step) -> tuple[Hashable, ...]:
    """The part of the graph's key that depends on the step: what the input classes bake in."""
    return tuple([key(step) for key in Input.keys])


def sizes(step: Step, memory: LayerMemory) -> dict[str, int]:
    """The value of every size variable for this step."""
    u = step.ubatch
    return {"n_tokens": u.n_tokens, "n_seqs": u.n_seqs, "n_seq_tokens": u.n_seq_tokens, "n_outputs": u.n_outputs,
            "n_pooled": len(set(u.seq.tolist())), **memory.sizes(step)}


class Tokens(Input):
    """`inp_tokens` I32 [n_tokens], or `inp_embd` F32 [n_embd, n_tokens] where the batch holds embeddings."""

    def __init__(self, n_embd: int, n_tokens: int, embd: bool):
        self.tensors = (leaf(F32, (n_embd, n_tokens), "inp_embd") if embd else leaf(I32, (n_tokens,), "inp_tokens"),)

    @staticmethod
    def key(step: Step) -> Hashable:
        return "token" if step.ubatch.token is not None else "embd"

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        data = step.ubatch.token if step.ubatch.token is not None else step.ubatch.embd
        assert data is not None
        return (data,)


class Hidden(Input):
    """`inp_h` F32 [n_embd, n_tokens]: for next-token prediction, the hidden state of the token before each."""

    def __init__(self, n_embd: int, n_tokens: int):
        self.tensors = (leaf(F32, (n_embd, n_tokens), "inp_h"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        assert step.ubatch.embd is not None
        return (step.ubatch.embd,)


class Positions(Input):
    """`inp_pos` I32 [n_axes * n_tokens], axis after axis. Text in a multi-axis model repeats its position on three axes."""

    def __init__(self, n_tokens: int, n_axes: int):
        self.n_axes = n_axes
        self.tensors = (leaf(I32, (n_axes * n_tokens,), "inp_pos"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        pos = step.ubatch.pos
        if len(pos) < self.n_axes:
            pos = np.concatenate([np.repeat(pos[:1], self.n_axes - 1, 0), np.zeros_like(pos[:1])])
        return (np.ascontiguousarray(pos[:self.n_axes]),)


class OutputIds(Input):
    """`inp_out_ids` I32 [n_outputs]: the rows of the ubatch whose result is asked for."""

    def __init__(self, n_outputs: int):
        self.tensors = (leaf(I32, (n_outputs,), "inp_out_ids"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        return (step.ubatch.output.nonzero()[0].astype(np.int32),)


class Draw(Input):
    """`draw_steps` F32 [2, MAX_STEPS, n_outputs] and `draw_uniform` I32 [2, n_outputs]: of each row its chain of samplers, and a
    random number for it."""

    def __init__(self, drawing: Drawing, n_outputs: int):
        self.drawing = drawing
        self.tensors = leaf(F32, (2, MAX_STEPS, n_outputs), "draw_steps"), leaf(I32, (2, n_outputs), "draw_uniform")

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        return self.drawing.steps[self.drawing.rows], self.drawing.uniform[self.drawing.rows]


class CellIds(Input):
    """`kv_idxs_0` (of KV group 0) I32 [n_tokens]: the cache row (stream * size + cell) that each token's K and V are written to."""

    def __init__(self, memory: LayerMemory, group: int, n_tokens: int):
        self.group, self.size, self.one = group, memory.kv[group].store.size, memory.kv[group].store.n_stream == 1
        self.tensors = (leaf(I32, (n_tokens,), f"kv_idxs_{group}"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        slots = step.slots[self.group]
        if self.one:
            return (slots.cells,)
        return ((slots.streams[:, None] * self.size + slots.cells).reshape(-1).astype(np.int32),)


class KQMask(Input):
    """`kq_mask_0` F32 [n_kv, n_tokens/n_stream, 1, n_stream]: 0 where a token sees a cell, -inf where not.

    With ALiBi the zeros become minus the distance in positions.
    """

    def __init__(self, memory: LayerMemory, group: int, n_kv: int, n_tokens_stream: int, n_stream: int, causal: bool, alibi: bool):
        self.memory, self.group, self.causal, self.alibi = memory, group, causal, alibi
        self.tensors = (leaf(F32, (n_kv, n_tokens_stream, 1, n_stream), f"kq_mask_{group}"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        store, slots, u = self.memory.kv[self.group].store, step.slots[self.group], step.ubatch
        seen = store.mask(u, slots, self.causal)
        mask = np.full(seen.shape, -np.inf, np.float32)
        mask[seen] = 0
        if self.alibi:
            pos = u.pos[0].reshape(len(seen), -1)
            for i, stream in enumerate(slots.streams):
                mask[i] -= np.abs(store.cells[stream].pos[None, :seen.shape[2]] - pos[i][:, None])
        return (mask,)


class UbatchMask(Input):
    """`kq_mask`, with a window `kq_mask_swa`, F32 [n_tokens, n_tokens] of layers without a cache: who sees whom in the ubatch."""

    def __init__(self, n_tokens: int, window: Window, causal: bool, alibi: bool):
        self.window, self.causal, self.alibi = window, causal, alibi
        self.tensors = (leaf(F32, (n_tokens, n_tokens), "kq_mask" if window.kind == "none" else "kq_mask_swa"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        u = step.ubatch
        held, pos = u.pos[0][None, :], u.pos[0][:, None]
        seen = u.seq[None, :] == u.seq[:, None]
        seen &= (held >= self.window.first(pos)) & (held <= self.window.last(pos, self.causal))
        return (np.where(seen, -np.abs(held - pos) if self.alibi else 0, -np.inf).astype(np.float32),)


class Distances(Input):
    """`pos_bucket` I32 [n_tokens * n_tokens]: in which of T5's buckets the distance of two tokens is, of the one seen in turn.

    Half of the buckets are for tokens that follow. Of each half the first half is for one distance each; the others grow until 128.
    """

    def __init__(self, n_tokens: int, n_buckets: int):
        self.n_buckets = n_buckets
        self.tensors = (leaf(I32, (n_tokens * n_tokens,), "pos_bucket"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        pos, n = step.ubatch.pos[0], self.n_buckets // 2
        distance = pos[None, :] - pos[:, None]
        return (_bucket(np.abs(distance), n) + np.int32(n) * (distance > 0),)


def _bucket(distance: np.ndarray, n: int) -> np.ndarray:
    """T5's, int32, of n: one for each small distance, the others wider and wider, all from 128 on in the last."""
    exact = n // 2
    far = np.maximum(distance, 1).astype(np.float32)
    wide = exact + np.log(far / np.float32(exact)) * np.float32(n - exact) / np.float32(np.log(128 / exact))
    return np.where(distance < exact, distance, np.minimum(np.floor(wide), n - 1)).astype(np.int32)


class CellDistances(Input):
    """`pos_bucket` I32 [n_kv * n_tokens]: in which of T5's buckets the distance to each cell is that comes before a token."""

    def __init__(self, memory: LayerMemory, group: int, n_kv: int, n_tokens: int, n_buckets: int):
        self.memory, self.group, self.n_buckets = memory, group, n_buckets
        self.tensors = (leaf(I32, (n_kv * n_tokens,), "pos_bucket"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        store, slots = self.memory.kv[self.group].store, step.slots[self.group]
        n_kv, streams = store.n_kv(slots), slots.streams.tolist()
        held = np.stack([store.cells[s].pos[:n_kv] for s in streams])[:, None, :]
        pos = step.ubatch.pos[0].reshape(len(streams), -1)[:, :, None]
        return (_bucket(np.maximum(pos - held, 0), self.n_buckets),)


class CrossStates(Input):
    """`inp_cross_embd` F32 [n_embd, n_cross]: what an encoder made of the texts of the ubatch's sequences. `kq_mask_cross` F32
    [n_cross, n_tokens]: 0 for those of a token's own sequence, -inf for the others."""

    def __init__(self, memory: LayerMemory, n_embd: int, n_tokens: int):
        self.memory = memory
        n = memory.n_cross
        self.tensors = leaf(F32, (n_embd, n), "inp_cross_embd"), leaf(F32, (n, n_tokens), "kq_mask_cross")

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        assert self.memory.cross is not None
        return self.memory.cross.of(step.ubatch.seq)


class KVCells(Input):
    """`kv_cells_0` I32 [n_cells] and `kv_spans_0` I32 [n_tokens, 4]: the mask as lists of cells in position order."""

    def __init__(self, memory: LayerMemory, group: int, n_cells: int, n_tokens: int, causal: bool):
        self.memory, self.group, self.causal = memory, group, causal
        self.tensors = leaf(I32, (n_cells,), f"kv_cells_{group}"), leaf(I32, (n_tokens, 4), f"kv_spans_{group}")

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        cells, spans = ordered(self.memory.kv[self.group].store, step.ubatch, step.slots[self.group], self.causal)
        return cells, spans


class BlockCells(Input):
    """What a layer needs that chooses blocks of positions to attend to.

    `blk_cells` I32 [block * n_blocks, n_tokens/n_stream, n_stream]: for each token the cells of its sequence by position; where a
    position has none, another one of its block. `blk_bias` F32 [n_blocks, 1, n_tokens/n_stream, n_stream]: huge for the last blocks
    before a token, which are always chosen, -inf for empty ones. `cell_blk` I32 [n_kv, n_stream]: the block of each cell.
    """

    def __init__(self, memory: LayerMemory, group: int, indexer: Indexer, n_blocks: int, n_kv: int, n_tokens_stream: int,
                 n_stream: int):
        self.memory, self.group, self.indexer = memory, group, indexer
        self.tensors = (leaf(I32, (indexer.block * n_blocks, n_tokens_stream, n_stream), f"blk_cells_{group}"),
                        leaf(F32, (n_blocks, 1, n_tokens_stream, n_stream), f"blk_bias_{group}"),
                        leaf(I32, (n_kv, n_stream), f"cell_blk_{group}"))

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        kv, u, slots, x = self.memory.kv[self.group], step.ubatch, step.slots[self.group], self.indexer
        n = kv.count_blocks(u)
        cells = np.empty((u.n_tokens, n, x.block), np.int32)
        bias = np.zeros((u.n_tokens, n), np.float32)
        for seqs, rows in u.sets():
            cells[rows], bias[rows] = self._by_block(kv.store.line(seqs[0]), n)
        last = u.pos[0][:, None] // x.block - np.arange(x.n_local)
        row, local = np.nonzero(last >= 0)
        bias[row, last[row, local]] += np.float32(1e30)
        return cells, bias, kv.block_of_cells(slots, n)

    def _by_block(self, line: Line, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Of one sequence: cells int32 [n, block], and 0 or -inf for each block."""
        cells = np.full((n, self.indexer.block), -1, np.int32)
        cells.reshape(-1)[line.pos] = line.cells
        some = cells.max(1, keepdims=True)
        return np.maximum(np.where(cells < 0, some, cells), 0), np.where(some[:, 0] < 0, -np.inf, 0).astype(np.float32)


class BlockMeans(Input):
    """What a layer needs that chooses blocks of positions by the means of their keys, in ubatches of sequences in step.

    `blk_rows` I32 [block * n_blocks * n_seqs]: for each sequence the cache rows of its cells by position; `blk_pos` I32
    [4 * n_blocks * n_seqs]: where each block begins, axis after axis. F32 [n_blocks, n_seq_tokens, n_seqs]: `blk_bias` is 0 where
    a token may choose a block, which is complete and before its own, and -inf elsewhere; `blk_seen` is 0 where it sees a block
    anyway. `cell_blk` I32 [n_kv, n_stream]: the block of each cell.
    """

    def __init__(self, memory: LayerMemory, group: int, block: int, n_blocks: int, n_kv: int, n_seq_tokens: int, n_seqs: int,
                 n_stream: int):
        self.memory, self.group, self.block = memory, group, block
        shape = (n_blocks, n_seq_tokens, n_seqs)
        self.tensors = (leaf(I32, (block * n_blocks * n_seqs,), f"blk_rows_{group}"),
                        leaf(I32, (4 * n_blocks * n_seqs,), f"blk_pos_{group}"), leaf(F32, shape, f"blk_bias_{group}"),
                        leaf(F32, shape, f"blk_seen_{group}"), leaf(I32, (n_kv, n_stream), f"cell_blk_{group}"))

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        kv, u, size = self.memory.kv[self.group], step.ubatch, self.block
        n, starts = kv.count_blocks(u), u.pos[0].reshape(u.n_seqs, -1)
        rows = np.zeros((u.n_seqs, n * size), np.int32)
        held = np.zeros((u.n_seqs, n * size), bool)
        for i, seqs in enumerate(u.seq_ids[::u.n_seq_tokens]):
            line = kv.store.line(seqs[0])
            rows[i, line.pos], held[i, line.pos] = line.cells + kv.store.stream(seqs[0]) * kv.store.size, True
        complete, some = (f(held.reshape(u.n_seqs, n, size), -1)[:, None] for f in (np.all, np.any))
        before = np.arange(n) < ((starts + 1) // size)[..., None]
        may = complete & before
        bias, seen = (np.where(x, 0, -np.inf).astype(np.float32) for x in (may, some & ~may))
        pos = np.broadcast_to(np.arange(n, dtype=np.int32) * size, (4, u.n_seqs, n))
        return rows, pos, bias, seen, kv.block_of_cells(step.slots[self.group], n)


class StateRows(Input):
    """`rs_src` I32 [n_seqs]: the state row that each sequence starts from; `rs_dst` I32 [n_seqs, n_snapshots]: the rows it leaves
    its last state in, the one before that, .."""

    def __init__(self, memory: LayerMemory, n_seqs: int):
        assert memory.rs is not None
        self.group = memory.rs.index
        self.tensors = leaf(I32, (n_seqs,), "rs_src"), leaf(I32, (n_seqs, memory.rs.store.n_snapshots), "rs_dst")

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        slots = step.slots[self.group]
        return slots.src, slots.dst


class NgramRows(Input):
    """`ple_rows` I32 [n_heads * n_tokens]: for each token the table rows that it and the tokens before it name."""

    def __init__(self, memory: LayerMemory, ngrams: Ngrams, n_tokens: int):
        assert memory.rs is not None
        self.group, self.ngrams, self.store = memory.rs.index, ngrams, memory.rs.store
        self.tensors = (leaf(I32, (len(ngrams.rows) * n_tokens,), "ple_rows"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        g, n = self.ngrams, len(self.ngrams.factors)
        texts = self.store.texts(step.ubatch, step.slots[self.group]).astype(np.int64)
        window = np.lib.stride_tricks.sliding_window_view(texts, n, axis=1)[..., ::-1].copy()       # the token itself first
        window[..., 0] = np.where(window[..., 0] < 0, g.embd, window[..., 0])
        before = window[..., 1:]
        before[np.logical_or.accumulate((before < 0) | (before == g.eos), axis=-1)] = g.eos
        mixed = np.bitwise_xor.accumulate(window.astype(np.uint64) * np.array(g.factors, np.uint64), axis=-1)[..., 1:]
        heads = np.repeat(mixed, len(g.rows) // (n - 1), axis=-1) % np.array(g.rows, np.uint64)
        return ((heads + np.array(g.offsets, np.uint64)).astype(np.int32).reshape(-1),)


class HeadSlopes(Input):
    """`slopes` F32 [1, n_head]: how fast the heads of linear attention forget: 2^(-8 h / n_head) for h = 1, 2, .., n_head."""

    def __init__(self, n_head: int):
        self.tensors = (leaf(F32, (1, n_head), "slopes"),)
        self.slopes = (2.0 ** (-8.0 / n_head * np.arange(1, n_head + 1))).astype(np.float32)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        return (self.slopes,)


class AttnScale(Input):
    """`attn_scale` F32 [1, 1, n_tokens]: Llama 4's temperature, log(floor((pos + offset) / floor) + 1) * scale + 1."""

    def __init__(self, hp: HParams, n_tokens: int):
        self.hp = hp
        self.tensors = (leaf(F32, (1, 1, n_tokens), "attn_scale"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        hp, pos = self.hp, step.ubatch.pos[0].astype(np.float32)
        steps = np.floor((pos + np.float32(hp.f_attn_temp_offset)) / np.float32(hp.n_attn_temp_floor_scale))
        return ((np.log(steps + 1) * np.float32(hp.f_attn_temp_scale) + 1).astype(np.float32),)


class PoolMean(Input):
    """`inp_mean` F32 [n_tokens, n_pooled]: row s averages the tokens of sequence s."""

    def __init__(self, n_tokens: int, n_pooled: int):
        self.tensors = (leaf(F32, (n_tokens, n_pooled), "inp_mean"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        seq = step.ubatch.seq
        member = (np.unique(seq)[:, None] == seq[None, :]).astype(np.float32)
        return (member / member.sum(1, keepdims=True, dtype=np.float32),)


class PoolRows(Input):
    """`inp_cls` I32 [n_pooled]: the row of each sequence's first (cls) or last token."""

    def __init__(self, n_pooled: int, last: bool):
        self.last = last
        self.tensors = (leaf(I32, (n_pooled,), "inp_cls"),)

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        u = step.ubatch
        order = np.argsort(u.pos[0], kind="stable")
        order = order[::-1] if self.last else order
        _, first = np.unique(u.seq[order], return_index=True)
        return (order[first].astype(np.int32),)


class AdapterScales(Input):
    """`adapter_scale_0` F32 [1], ..: how much of each adapter there is."""

    def __init__(self, mix: Mix):
        self.mix, self.adapters = mix, mix.adapters
        self.tensors = tuple(leaf(F32, (1,), f"adapter_scale_{i}") for i in range(len(self.adapters)))

    key = None

    def fill(self, step: Step) -> tuple[np.ndarray, ...]:
        return tuple(np.array([self.mix.scales[a]], np.float32) for a in self.adapters)


class Given(Input):
    """A tensor whose contents the caller has: `fill` takes them in place of a step."""

    def __init__(self, tensor: Tensor):
        self.tensors = (tensor,)

    key = None

    def fill(self, step: Any) -> tuple[np.ndarray, ...]:
        return (np.ascontiguousarray(step),)
