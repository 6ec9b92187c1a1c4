"""Small graphs and models on the emulated device: results, and the launches that gave them; with fusions and without.

In: nodes made on `Build`'s leaves, or a model file. Out: arrays, names of kernels.
"""
from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import ggraph
from ggraph.backends.cuda import Cuda, lower
from ggraph.backends.cuda.emulator import Emulator
from ggraph.backends.cuda.plan import Compiled
from ggraph.backends.ref.arrays import Operand
from ggraph.tensor import Tensor
from tests import spec
from tests.backends.opcase import LARGEST, Build, nodes_of

Array = Any
Make = Callable[[Build], Sequence[Tensor]]


@contextmanager
def unfused() -> Iterator[None]:
    with patch.dict(lower.FUSIONS, clear=True):
        yield


def launches(plan: Compiled) -> list[str]:
    """Kernels that run at the present sizes, without their types."""
    return [launch.kernel.name for launch, _, _ in plan.active]


def run(make: Make, present: Mapping[str, int] = LARGEST, keep: Collection[int] = ()) -> tuple[list[Array], list[str]]:
    """What `make` returns as arrays, and the kernels that ran. Of all results (and of those kept, counted among the computed nodes)
    the bytes are read after the run."""
    cuda = Cuda(Emulator())
    g = Build(cuda, 3, present, {name: max(n, present[name]) for name, n in LARGEST.items()})
    results = make(g)
    nodes = list(dict.fromkeys(n for r in results for n in nodes_of(r)))
    for node in nodes:
        if node.view_src is None:
            node.buffer = cuda.alloc(int(node.nbytes))
    plan = cuda.compile(nodes, {r.root for r in results} | {nodes[i].root for i in keep})
    plan.resize(present)
    plan.run()
    found = [_read(cuda, plan, r, present) for r in (*results, *(nodes[i] for i in keep))]
    ran = launches(plan)
    cuda.close()
    return found, ran


def _read(cuda: Cuda, plan: Compiled, node: Tensor, present: Mapping[str, int]) -> Array:
    from ggraph.backend import HostBuffer
    from ggraph.size import Sizes
    from ggraph.tensor import leaf
    root = node.root
    numbers = Sizes((*root.ne, *root.nb)).set(present).tolist()
    host = leaf(root.type, root.ne, "")
    host.buffer = HostBuffer(np.array(cuda.download(root.buffer, root.offset, int(root.nbytes))))
    return Operand(host, numbers[:4], numbers[4:], 0, {}).read()


def both(make: Make, present: Mapping[str, int] = LARGEST) -> tuple[list[Array], list[Array], list[str], list[str]]:
    """(results fused, results unfused, kernels fused, kernels unfused)"""
    fused, few = run(make, present)
    with unfused():
        plain, many = run(make, present)
    return fused, plain, few, many


def model(name: str, folder: Path, qtype: str | None = "Q4_K",
          edit: Callable[[spec.Spec], None] | None = None) -> Path:
    """A golden model of type `qtype`, its feed-forward width a whole number of blocks."""
    made = json.loads(json.dumps(spec.specs()[name]).replace("384", "512"))
    if edit:
        edit(made)
    return spec.write(made, folder / f"{name}.gguf", qtype)


def deep(n_layer: int) -> Callable[[spec.Spec], None]:
    """Make a spec one of so many layers, all like its first."""
    def edit(made: spec.Spec) -> None:
        rows = [t for t in made["tensors"] if t[0].startswith("blk.0.")]
        made["tensors"] = [t for t in made["tensors"] if not t[0].startswith("blk.")]
        for i in range(n_layer):
            made["tensors"] += [[t[0].replace("blk.0.", f"blk.{i}."), *copy.copy(t[1:])] for t in rows]
        for row in made["kv"]:
            if row[0].endswith(".block_count"):
                row[2] = n_layer
    return edit


def decode(path: Path, batches: Sequence[int] = (12, 1, 1, 3), n_seqs: int = 1, **options: Any
           ) -> tuple[Array, list[int], list[str]]:
    """(logits of all tokens, launches of each batch, kernels of the last batch but one), on the emulator. Each batch has so many
    tokens of each sequence."""
    plans: list[Compiled] = []
    run_plan = Compiled.run

    def keeping(self: Compiled, *args: Any, **kwargs: Any) -> None:
        plans.append(self)
        run_plan(self, *args, **kwargs)

    rows, counts, names, pos = [], [], [], 0
    with (patch.object(Compiled, "run", keeping), ggraph.Model(path, n_gpu_layers="all") as opened,
          ggraph.Context(opened, n_ctx=256 * n_seqs, n_batch=64, n_threads=1, n_seq_max=n_seqs, **options) as ctx):
        device: Any = ctx.backends[0]
        for n in batches:
            batch = ggraph.Batch()
            for seq in range(n_seqs):
                for i in range(pos, pos + n):
                    batch.add((7 * i + 5 * seq + 1) % 90, i, seq, output=True)
            pos += n
            before = len(plans)
            ctx.process("decode", batch)
            rows.append(np.array(ctx.logits))
            counts.append(sum(len(p.active) for p in plans[before:]))
            names.append([name for p in plans[before:] for name in launches(p)])
        assert isinstance(device, Cuda)
    return np.concatenate(rows), counts, names[-2]
