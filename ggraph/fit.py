"""What a Context is asked for, resolved against its model and the free memory.

In: a Model and a Context's arguments. Out: `CParams`, and bytes: what the memory of layers takes, where, and whether it fits.
"""
from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from . import dtypes, env
from .adapters import Mix
from .backend import Backend, open_backend
from .build import Builder, Dims
from .cparams import POOLING, CParams, resolve_rope
from .drawing import Drawing
from .errors import Error, PlacementError, at_least, expect, flags, integer
from .graph import Graph
from .hparams import HParams
from .memory.kv import N_PAD
from .memory.layers import LayerMemory
from .model import Model, sensible
from .placement import Placement
from .schedule.plan import arena_bytes, device_needs
from .schedule.split import mapped
from .shift import shift_graph
from .tensor import Tensor

MAX_THREADS = 255
MAX_SEQS = 4096             # each takes a row of the table of who owns which cell


def memory_needed(model: Model, *, n_ctx: int = 0, n_batch: int = 2048, n_ubatch: int = 512, n_seq_max: int = 1,
                  kv_unified: bool = True, type_k: str = "f16", type_v: str = "f16", flash_attn: str | bool = "auto",
                  swa_full: bool = False) -> dict[str, int]:
    """Bytes that a Context of these sizes takes, without opening one: weights (mapped), kv, state (of recurrent layers),
    compute (the arena). `n_ctx` 0: the model's own context, whatever is free. Repacked copies of weights come on top."""
    expect("model", model, Model, "a Model; open a file with Model(path)")
    model.check_open()
    hp = model.hparams
    cp = resolve(model, n_ctx=hp.n_ctx_train if n_ctx == 0 else n_ctx, n_batch=n_batch, n_ubatch=n_ubatch, n_seq_max=n_seq_max,
                 kv_unified=kv_unified, type_k=type_k, type_v=type_v, flash_attn=flash_attn, n_threads=None,
                 n_threads_batch=None, embeddings=False, pooling=None, rope=None, swa_full=swa_full, n_rollback=0, mtp=False)
    memory = LayerMemory(hp, cp)
    state = memory.rs.nbytes if memory.rs else 0
    return {"weights": sum(t.nbytes for t in model.weights.leaves.values()), "kv": memory.nbytes - state, "state": state,
            "compute": arena_bytes(_graph(model, _builder(model, hp, cp, memory, Mix())), open_backend("ref"))}


def _builder(model: Model, hp: HParams, cp: CParams, memory: LayerMemory, mix: Mix, drawing: Drawing | None = None) -> Builder:
    """Of graphs at the largest sizes."""
    return Builder(hp, model.weights, cp, memory, Dims.largest(cp, recurrent=memory.rs is not None), False, mix, drawing)


def _graph(model: Model, b: Builder) -> Graph:
    with sensible(model.path.name):
        getattr(model.arch, b.cp.graph)(b)
    return b.g


def resolve(model: Model, *, n_ctx: int, n_batch: int, n_ubatch: int, n_seq_max: int, kv_unified: bool, type_k: str, type_v: str,
            flash_attn: str | bool, n_threads: int | None, n_threads_batch: int | None, embeddings: bool, pooling: str | None,
            rope: Mapping[str, Any] | None, swa_full: bool, n_rollback: int, mtp: bool = False, encoder: bool = False) -> CParams:
    """Check the arguments of a Context and fill in what they leave open."""
    flags(encoder=encoder)
    hp = model.encoder() if encoder else model.hparams
    at_least(0, n_ctx=n_ctx, n_rollback=n_rollback)
    at_least(1, n_batch=n_batch, n_ubatch=n_ubatch, n_seq_max=n_seq_max)
    n_ctx, n_rollback, n_batch, n_ubatch, n_seq_max = map(int, (n_ctx, n_rollback, n_batch, n_ubatch, n_seq_max))    # of NumPy
    flags(kv_unified=kv_unified, embeddings=embeddings, swa_full=swa_full, mtp=mtp)
    if n_seq_max > MAX_SEQS:
        raise Error(f"n_seq_max is {n_seq_max}; it must be at most {MAX_SEQS}")
    try:
        k, v = dtypes.parse(type_k), dtypes.parse(type_v)
    except ValueError as e:
        raise Error(f"type_k, type_v: {e}") from None
    total = fit_context(model, k, v) if n_ctx == 0 else n_ctx
    share = total if kv_unified else -(-total // n_seq_max)
    n_ctx_seq = -(-share // N_PAD) * N_PAD
    if flash_attn not in ("auto", "on", "off", True, False):
        raise Error(f"flash_attn is {flash_attn!r}; it must be 'auto', 'on' or 'off'")
    threads = _threads("n_threads", n_threads, os.cpu_count() or 1)
    n_ctx = n_ctx_seq if kv_unified else n_ctx_seq * n_seq_max
    n_batch = min(n_batch, n_ctx) if hp.causal else n_batch
    n_ubatch = min(n_ubatch, n_batch) if hp.cache else n_batch             # without a cache, a batch runs whole
    embeddings = embeddings or not hp.head
    if pooling is None:
        pooling = POOLING[hp.pooling_type] if embeddings and 0 <= hp.pooling_type < len(POOLING) else "none"
    if pooling not in POOLING:
        raise Error(f"pooling is {pooling!r}; it must be one of {', '.join(POOLING)}")
    return CParams(n_ctx=n_ctx, n_ctx_seq=n_ctx_seq, n_batch=n_batch, n_ubatch=n_ubatch, n_seq_max=n_seq_max,
                   n_threads=threads, n_threads_batch=_threads("n_threads_batch", n_threads_batch, threads), kv_unified=kv_unified,
                   flash_attn=flash_attn not in ("off", False), causal=hp.causal, embeddings=embeddings, pooling=pooling,
                   type_k=k, type_v=v, swa_full=swa_full, n_rollback=n_rollback, mtp=mtp, encoder=encoder, hidden=False,
                   rope=resolve_rope(hp, rope))


def _threads(name: str, asked: int | None, default: int) -> int:
    """How many; None or 0: as many as `default`."""
    n = default if asked is None else integer(name, asked) or default
    if not 1 <= n <= MAX_THREADS:
        raise Error(f"{name} is {n}; it must be 1 to {MAX_THREADS}")
    return n


def cell_bytes(hp: HParams, type_k: dtypes.DType, type_v: dtypes.DType, layers: Iterable[int]) -> int:
    """Bytes of K and V of one cell in all of these layers."""
    kept = [il for il in layers if hp.has_kv(il)]
    indexed = sum(any(hp.indexer.layers[il:il + 1]) for il in kept) * type_k.row_bytes(hp.indexer.head) if hp.indexer else 0
    return indexed + sum(type_k.row_bytes(hp.n_embd_k_gqa(il)) + type_v.row_bytes(hp.n_embd_v_gqa(il)) for il in kept) or 1


def need(model: Model, hp: HParams, cp: CParams, mix: Mix, offload_kqv: bool, placement: Placement) -> int:
    """Bytes that a Context takes on the device of a placement beside the weights that have their home there: caches and states,
    the arena of its plans, what these share, adapters and other weights that they read, the token that is drawn."""
    device = placement.device
    assert device is not None
    memory, drawing = LayerMemory(hp, cp), Drawing(device) if offload_kqv and placement.whole(hp.layers) else None
    cache = memory.place(lambda il: placement.layer(il) if offload_kqv else placement.host, device)
    for t in (*memory.tensors(), *([drawing.token] if drawing else [])):
        t.buffer = object()                         # each of its own, as far as a layout looks at them

    def home(leaf: Tensor) -> Backend | None:
        return placement.homes.get(leaf) or memory.home(leaf) or (device if drawing and leaf is drawing.token else None)

    def builder(drawing: Drawing | None = None) -> Builder:
        return _builder(model, hp, cp, memory, mix, drawing)

    graphs = [_graph(model, builder()), *([_graph(model, builder(drawing))] if drawing else []),
              *(shift_graph(builder(), group) for group in (memory.kv if memory.can_shift else ()))]
    arenas, shared, reads = zip(*(device_needs(graph, placement.backends, home, device) for graph in graphs))
    leaves = {t for t in reads[0] if home(t) is None and mapped(t)} | {t for adapter in mix.adapters for t in adapter.leaves}
    total: int = cache + max(arenas) + max(shared) + device.weight_bytes(leaves) + (int(drawing.token.nbytes) if drawing else 0)
    return total


def check_context(hp: HParams, cp: CParams, on_host: Collection[int]) -> None:
    """PlacementError if the cache of all layers on the host without a window does not fit the free memory."""
    whole = [il for il in on_host if not hp.is_swa(il) or cp.swa_full]
    needed, free = cell_bytes(hp, cp.type_k, cp.type_v, whole) * cp.n_ctx, env.free_memory()
    if needed > free:
        raise PlacementError(f"n_ctx = {cp.n_ctx} needs {needed / 2**20:.0f} MiB of cache, {free / 2**20:.0f} MiB are free; "
                             "give a smaller n_ctx, or a smaller cache type")


def fit_context(model: Model, type_k: dtypes.DType, type_v: dtypes.DType) -> int:
    """The model's own context, or the largest whose cache takes at most half of the free memory; says so if it is less."""
    hp = model.hparams
    per_cell = cell_bytes(hp, type_k, type_v, range(hp.n_layer))
    fits = max(N_PAD, env.free_memory() // 2 // per_cell // N_PAD * N_PAD)
    if fits < hp.n_ctx_train:
        env.log(f"n_ctx = {fits}: the model's own context of {hp.n_ctx_train} would need "
                f"{per_cell * hp.n_ctx_train / 2**30:.1f} GiB of KV cache")
    return min(hp.n_ctx_train, fits)
