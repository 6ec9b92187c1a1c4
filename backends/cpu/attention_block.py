"""The parameter block that lowering and kernels of flash_attn_ext share, and the sizes that both count with.

Ten tensors of 9 words (zeros for what is absent), then single words. Plain Python: it must not load Numba.
"""
from __future__ import annotations

CHUNK = 128                     # positions that are summed on their own; part of what a result is, to the bit
ROWS = 48                       # rows (tokens x heads of a group) of a tile: keys and values are converted once for all
PANEL = 64                      # rows side by side
PIECE = 256                     # numbers of a row that a panel holds, in products of unpacked matrices

OUT, Q, K, V, K_ROOT, V_ROOT, CELLS, SPANS, MASK, SINKS, N_TENSORS = range(11)
# Threads that have work memory | its address | bytes of each | address of the states of chunks | how many have room |
# tokens of a tile | factor of the scores | cap, or 0 | where the result is wanted as activation tiles too, or 0 |
# whether the mask has slopes | the slope of each head
(THREADS, WORK, WORK_BYTES, PARTS, N_PARTS, TILE, SCALE, SOFTCAP, TILES, ALIBI, SLOPES
 ) = range(9 * N_TENSORS, 9 * N_TENSORS + 11)


def state_bytes(dv: int) -> int:
    """The sums of a row, its top and its sums of weights."""
    return 4 * padded(dv) + 128


def work_bytes(rows: int, dk: int, dv: int) -> int:
    """What one thread needs for a tile of so many rows: `attention_flash.areas`, then two sets of states."""
    dk = padded(dk)
    areas = 4 * rows * dk + 4 * CHUNK * (dk + padded(dv) + rows + 1) + 8 * CHUNK + 64 * dk
    return areas + 2 * rows * state_bytes(dv)


def padded(n: int) -> int:
    """Up to whole vectors."""
    return -(-n // 16) * 16
