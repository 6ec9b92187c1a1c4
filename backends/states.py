"""State rows around a recurrence: which nodes read and write them, so that a kernel can read and write where they are kept.

In: nodes. Out: tensors of rows and of their numbers, or None where the nodes are anything else. It knows no kernels.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from ggraph.dtypes import F32, I32
from ggraph.size import terms_of
from ggraph.tensor import Tensor

from .lowering import packed


def same(a: int, b: int) -> bool:
    """Equal for every batch."""
    return terms_of(a) == terms_of(b)


def row_numbers(x: Tensor) -> bool:
    return x.type is I32 and x.nb[0] == I32.nbytes


def rows_of(sets: Sequence[Tensor]) -> Tensor | None:
    """The row numbers [n_seqs, n_snapshots] of nodes that write to one tensor."""
    first, rows = sets[0], [x.src[2] for x in sets]
    root = rows[0].root
    if not all(x.src[0].place() == first.src[0].place() and row_numbers(r) and r.root is root
               and same(r.view_offs, rows[0].view_offs + i * root.nb[1]) for i, (x, r) in enumerate(zip(sets, rows))):
        return None
    return Tensor("view", I32, (rows[0].ne[0], len(sets)), (root,), nb=root.nb[:2], view_src=root, view_offs=rows[0].view_offs)


def stored(readers: Sequence[Tensor] | None, node: Tensor, n_outputs: int, sets: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """The tensors of new states and of their rows, if `sets` keep all states that a recurrence leaves behind its outputs, and
    whatever else reads the node reads outputs."""
    n = node.params.get("n_snapshots", 1)
    if readers is None or n != len(sets) or (rows := rows_of(sets)) is None:
        return None
    to: Tensor = sets[0].src[0]
    start, size = node.view_offs + F32.nbytes * n_outputs, F32.nbytes * to.ne[0] * rows.ne[0]
    kept = [x.src[1] for x in sets]
    reads = [s for r in readers if r not in sets for s in r.src if s is not None and s.root is node.root]
    fits = (to.type is F32 and to.nb[0] == F32.nbytes
            and all(x.root is node.root and packed(x) and same(x.view_offs, start + i * size) for i, x in enumerate(kept))
            and all(same(s.view_offs, node.view_offs) and same(s.numel, n_outputs) for s in reads))
    return (to, rows) if fits else None


def goes_on(readers: Callable[[Tensor], list[Tensor] | None], concat: Tensor, before: Tensor, conv: Tensor,
            conts: Sequence[Tensor], sets: Sequence[Tensor]) -> bool:
    """Whether a convolution reads what came before, from a state row that `before` is, and then its inputs, and the last of these
    are kept, one window for each set: `get_rows [pad] concat (cont set_rows).. ssm_conv`."""
    padded, turned = concat.src
    n, x, d_conv = len(sets), turned.src[0], conv.src[1].ne[0]
    windows = [c.src[0] for c in conts]
    return (padded.root is before and turned.op == "transpose" and concat.params["axis"] == 0
            and same(padded.ne[0], d_conv - 1 + n - 1) and conv.src[0].root is concat
            and same(conv.src[0].view_offs, (n - 1) * F32.nbytes) and all(s.src[1].root is c for c, s in zip(conts, sets))
            and all(w.root is concat and w.nb[:3] == concat.nb[:3] and same(w.view_offs, (x.ne[1] + n - 1 - i) * F32.nbytes)
                    for i, w in enumerate(windows))
            and set(readers(concat) or ()) == {*conts, conv} and readers(before) == [concat]
            and all(readers(c) == [s] for c, s in zip(conts, sets)))
