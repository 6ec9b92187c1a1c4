"""Attention to chosen blocks (MSA): for each token and KV head the few blocks of positions whose best key matches best.

In: normed hidden states. Out: what each KV head sees, in place of the mask that all share. Keys and queries of the choice are of
their own, smaller than K and Q; the keys stay in a cache beside K.
"""
from __future__ import annotations

from .. import inputs, ops
from ..errors import ModelError
from ..hparams import Indexer
from ..tensor import F32, Tensor
from ..weights import Group
from .attention import Attention
from .core import as_f32


class ChosenBlocks(Attention):
    def choose_blocks(self, w: Group, x: Tensor, il: int) -> Tensor | None:
        """The mask F32 [n_kv, n_tokens_stream, n_head_kv, n_stream] of layer `il` for normed x, or None where all is seen; with the
        weights `indexer.{q,k}_proj` and `indexer.{q,k}_norm`."""
        indexer = self.hp.indexer
        if indexer is None or not self.cp.chooses_blocks(self.hp, il):
            return None
        if indexer.n_head != self.hp.n_head_kv[il]:
            raise ModelError(f"{self.hp.arch}.attention.indexer.head_count is {indexer.n_head}; blocks are chosen for each of "
                             f"{self.hp.n_head_kv[il]} KV heads")
        q, k = (self._small_heads(w, x, name, n, indexer.head, il) for name, n in (("q", indexer.n_head), ("k", 1)))
        kv = self._kv(il)
        idx, = self.input(inputs.CellIds, self.memory, kv.index, self.n_tokens)
        self.g.expand(kv.cpy_i(k, idx, il))
        mask = self._mask(kv)
        by_cell, bias, cell_block = self.input(inputs.BlockCells, self.memory, kv.index, indexer, kv.n_blocks, kv.n_kv,
                                               self.n_tokens_stream, self.n_stream)
        scores = ops.add(self._scores(q, kv.get_i(il, self.n_stream)), ops.permute(mask, (0, 2, 1, 3)))
        best = self.cb(self._best_of_blocks(scores, by_cell, indexer), "msa_bs", il)
        chosen = self.cb(ops.top_k(ops.add(best, bias), min(indexer.n_blocks, int(kv.n_blocks))), "msa_top_k", il)
        return self.cb(ops.add(self._of_cells(self._only(best, chosen), cell_block), mask), "msa_mask", il)

    def _small_heads(self, w: Group, x: Tensor, name: str, n_head: int, head: int, il: int) -> Tensor:
        """[head, n_head, n_tokens], normed and rotated"""
        y = ops.reshape(self.mm(getattr(w, f"indexer_{name}_proj"), x), (head, n_head, self.n_tokens))
        return self.rope(self.norm(y, getattr(w, f"indexer_{name}_norm"), f"indexer_{name}", il), il)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q [head, n_head, n_tokens] times k [head, 1, n_kv, n_stream], in F32: [n_kv, n_head, n_tokens_stream, n_stream]"""
        n_head, n, n_stream = q.ne[1], self.n_tokens_stream, self.n_stream
        k = ops.view(k, (k.ne[0], k.ne[2], n_stream), k.nb[2:4])
        y = ops.mul_mat(as_f32(k), ops.reshape(q, (q.ne[0], n_head * n, n_stream)))
        return ops.reshape(y, (k.ne[1], n_head, n, n_stream))

    @staticmethod
    def _best_of_blocks(scores: Tensor, by_cell: Tensor, indexer: Indexer) -> Tensor:
        """The best score in each block of positions: [n_blocks, n_head, n_tokens_stream, n_stream]"""
        by_head = ops.cont(ops.permute(scores, (1, 0, 2, 3)))
        by_pos = ops.get_rows(by_head, by_cell)                               # [n_head, n_pos, n_tokens_stream, n_stream]
        return ops.pool_1d(ops.cont(ops.permute(by_pos, (1, 0, 2, 3))), indexer.block)

    @staticmethod
    def _only(best: Tensor, chosen: Tensor) -> Tensor:
        """0 for chosen blocks and -inf for others, in the shape of `best`."""
        n, n_head, n_tokens, n_stream = best.ne
        flat = n_tokens * n_stream
        nothing = ops.reshape(ops.fill(best, float("-inf")), (1, n, n_head, flat))
        zeros = ops.fill(ops.reshape(ops.cast(chosen, F32), (1, chosen.ne[0], n_head, flat)), 0.0)
        return ops.reshape(ops.set_rows(nothing, zeros, ops.reshape(chosen, (chosen.ne[0], n_head, flat))), best.ne)

    @staticmethod
    def _of_cells(blocks: Tensor, cell_block: Tensor) -> Tensor:
        """[n_blocks, n_head, n_tokens_stream, n_stream] -> that of each cell's block [n_kv, n_tokens_stream, n_head, n_stream]"""
        n, n_head, n_tokens, n_stream = blocks.ne
        rows = ops.reshape(ops.cont(ops.permute(blocks, (2, 1, 0, 3))), (n_tokens * n_head, n, n_stream))
        cells = ops.cont(ops.transpose(ops.get_rows(rows, cell_block)))
        return ops.reshape(cells, (cell_block.ne[0], n_tokens, n_head, n_stream))
