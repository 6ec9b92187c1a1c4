"""Attention to chosen blocks: for each token the few blocks of positions whose best key (MSA) or mean of keys (QSA) matches best.

In: normed hidden states. Out: what each KV head sees (MSA), or all of them (QSA), in place of the mask. Keys and queries of the
choice are of their own, smaller than K and Q; the keys stay in a cache beside K.
"""
from __future__ import annotations

from .. import inputs, ops
from ..errors import ModelError
from ..hparams import Indexer
from ..memory.cache import KVCache
from ..tensor import F32, Tensor
from ..weights import Group
from .attention import Attention
from .core import as_f32


class ChosenBlocks(Attention):
    def choose_blocks(self, w: Group, x: Tensor, il: int) -> Tensor | None:
        """The mask F32 [n_kv, n_tokens_stream, n_head_kv or 1, n_stream] of layer `il` for normed x, with the weights of
        `Group.indexer`; None where all is seen."""
        indexer = self.hp.indexer
        if indexer is None or not self.cp.chooses_blocks(self.hp, il):
            return None
        kv = self._kv(il)
        k = ops.reshape(self.mm(w.indexer_k_proj, x), (indexer.head, 1, self.n_tokens))
        q = ops.reshape(self.mm(w.indexer_q_proj, x), (indexer.head, indexer.n_head, self.n_tokens))
        q = self.rope(self.norm(q, w.indexer_q_norm, "indexer_q", il), il)
        if not indexer.means:
            k = self.rope(self.norm(k, w.indexer_k_norm, "indexer_k", il), il)
        idx, = self.input(inputs.CellIds, self.memory, kv.index, self.n_tokens)
        self.g.expand(kv.cpy_i(self.cb(k, "indexer_k", il), idx, il))
        blocks, cell_block = (self._by_means if indexer.means else self._by_best)(w, q, indexer, kv, il)
        return self.cb(ops.add(self._of_cells(blocks, cell_block), self._mask(kv)), "msa_mask", il)

    # both: 0 for blocks that are seen, else -inf [n_blocks, n_head_kv or 1, n_tokens_stream, n_stream]; the block of each cell

    def _by_best(self, w: Group, q: Tensor, indexer: Indexer, kv: KVCache, il: int) -> tuple[Tensor, Tensor]:
        if indexer.n_head != self.hp.n_head_kv[il]:
            raise ModelError(f"{self.hp.arch}.attention.indexer.head_count is {indexer.n_head}; blocks are chosen for each of "
                             f"{self.hp.n_head_kv[il]} KV heads")
        by_cell, bias, cell_block = self.input(inputs.BlockCells, self.memory, kv.index, indexer, kv.n_blocks, kv.n_kv,
                                               self.n_tokens_stream, self.n_stream)
        scores = ops.add(self._scores(q, kv.get_i(il, self.n_stream)), ops.permute(self._mask(kv), (0, 2, 1, 3)))
        best = self.cb(self._best_of_blocks(scores, by_cell, indexer), "msa_bs", il)
        chosen = self.cb(ops.top_k(ops.add(best, bias), min(indexer.n_blocks, int(kv.n_blocks))), "msa_top_k", il)
        return self._seen(ops.fill(best, float("-inf")), chosen), cell_block

    def _by_means(self, w: Group, q: Tensor, indexer: Indexer, kv: KVCache, il: int) -> tuple[Tensor, Tensor]:
        n, n_seqs, n_blocks = self.dims.n_seq_tokens, self.dims.n_seqs, kv.n_blocks
        rows, pos, bias, seen, cell_block = self.input(inputs.BlockMeans, self.memory, kv.index, indexer.block, n_blocks,
                                                       kv.n_kv, n, n_seqs, self.n_stream)
        keys = ops.get_rows(kv.all_i(il), rows)
        keys = self.norm(self._means(keys, indexer.block), w.indexer_k_norm, "indexer_k_pooled", il)
        keys = self.rope(ops.reshape(keys, (indexer.head, 1, n_blocks * n_seqs)), il, pos=pos)
        scores = ops.relu(ops.mul_mat(ops.reshape(keys, (indexer.head, n_blocks, n_seqs)),
                                      ops.reshape(q, (indexer.head, indexer.n_head * n, n_seqs))))
        by_head = ops.cont(ops.permute(ops.reshape(scores, (n_blocks, indexer.n_head, n, n_seqs)), (1, 0, 2, 3)))
        score = self.cb(ops.reshape(ops.sum_rows(by_head), (n_blocks, n, n_seqs)), "indexer_score", il)
        chosen = self.cb(ops.top_k(ops.add(score, bias), min(indexer.n_blocks, int(n_blocks))), "indexer_top_k", il)
        shape = (1, self.n_tokens_stream, self.n_stream)
        return self._seen(ops.reshape(ops.cont(seen), (n_blocks, *shape)), ops.reshape(chosen, (chosen.ne[0], *shape))), cell_block

    @staticmethod
    def _means(keys: Tensor, size: int) -> Tensor:
        """[head, n] -> the means of each `size` neighbours [head, n / size]"""
        head, n = keys.ne[0], keys.ne[1] // size
        total = None
        for i in range(size):
            part = ops.view(keys, (head, n), (size * keys.nb[1],), i * keys.nb[1])
            total = ops.cont(part) if total is None else ops.add(total, part)
        assert total is not None
        return ops.scale(total, 1.0 / size)

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
    def _seen(blocks: Tensor, chosen: Tensor) -> Tensor:
        """`blocks`, 0 or -inf each, with 0 for the chosen ones too; it is written to."""
        n, n_head, n_tokens, n_stream = blocks.ne
        flat = n_tokens * n_stream
        zeros = ops.fill(ops.reshape(ops.cast(chosen, F32), (1, chosen.ne[0], n_head, flat)), 0.0)
        ids = ops.reshape(chosen, (chosen.ne[0], n_head, flat))
        return ops.reshape(ops.set_rows(ops.reshape(blocks, (1, n, n_head, flat)), zeros, ids), blocks.ne)

    @staticmethod
    def _of_cells(blocks: Tensor, cell_block: Tensor) -> Tensor:
        """[n_blocks, n_head, n_tokens_stream, n_stream] -> that of each cell's block [n_kv, n_tokens_stream, n_head, n_stream]"""
        n, n_head, n_tokens, n_stream = blocks.ne
        rows = ops.reshape(ops.cont(ops.permute(blocks, (2, 1, 0, 3))), (n_tokens * n_head, n, n_stream))
        cells = ops.cont(ops.transpose(ops.get_rows(rows, cell_block)))
        return ops.reshape(cells, (cell_block.ne[0], n_tokens, n_head, n_stream))
