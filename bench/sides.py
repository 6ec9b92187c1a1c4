"""The same model on both sides, llama.cpp and ggraph: logits, the tensors that llama.cpp asks for, and why logits differ.

In: specs and scenes. Out: arrays of logits, or what explains that they differ. It knows no mutations.
"""
from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from make_goldens import Peer  # noqa: E402
from mutations import Scene  # noqa: E402

import ggraph  # noqa: E402
from ggraph.context import Hook  # noqa: E402
from tests import spec  # noqa: E402

TOLERANCE = {None: 1e-5, "Q8_0": 3e-3, "Q4_0": 8e-3, "NVFP4": 8e-3}
Steps = list[list[tuple[int, int, int]]]                # batches of (token, position, sequence)
Nodes = dict[str, list[np.ndarray]]                      # values by name, an array for each ubatch


# --- logits

def nmse(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(((got - want) ** 2).sum() / max((want ** 2).sum(), 1e-30))


def steps(scene: Scene) -> Iterator[list[tuple[int, int, int]]]:
    """Batches of (token, position, sequence)."""
    ids, n = iter(spec.tokens() * 8), [0] * len(scene.lengths)
    for lengths in [list(scene.lengths)] + [[1] * len(n)] * scene.n_decode:
        rows = []
        for s, length in enumerate(lengths):
            rows += [(next(ids), n[s] + i, s) for i in range(length)]
            n[s] += length
        yield rows


def theirs(path: Path, scene: Scene, encode: bool, watch: Any = None, what: Steps | None = None) -> np.ndarray | None:
    """Logits of all rows; None if llama.cpp refuses the model. `what` takes the place of the scene's own steps."""
    n_seq = len(scene.lengths)
    try:
        peer = Peer(path, n_seq, 256 * n_seq, n_ubatch=256 if encode else scene.n_ubatch, unified=scene.unified, watch=watch)
    except AssertionError:
        return None
    found = []
    for i, rows in enumerate(what or steps(scene)):
        if encode and i == 0:
            peer.run(rows, encode=True)
        peer.run(rows)
        found.append(peer.logits(len(rows)))
    peer.close()
    return np.concatenate(found)


def ours(path: Path, scene: Scene, hook: Hook | None = None, what: Steps | None = None) -> np.ndarray:
    n_seq, found = len(scene.lengths), []
    with ggraph.Model(path) as model, ggraph.Context(
            model, n_ctx=256 * n_seq, n_batch=256, n_ubatch=scene.n_ubatch, n_seq_max=n_seq, kv_unified=scene.unified,
            flash_attn="off", n_threads=1, on_node=hook) as ctx:
        for rows in what or steps(scene):
            batch = ggraph.Batch()
            for token, pos, seq in rows:
                batch.add(token, pos, seq, output=True)
            ctx.process("decode", batch)
            found.append(ctx.logits.copy())
    return np.concatenate(found)


# --- why they differ

def why(got: np.ndarray, want: np.ndarray, scene: Scene, path: Path, tolerance: float) -> dict[str, Any]:
    """The first row that differs; with experts, whether it is their choice alone.

    It is where llama.cpp's choice in the place of ours gives its logits (`forced`), our rule makes its choice of its scores
    (`rule`), and our scores are its scores (`scores`: their error in the layer where the first choice differs, up to that token).
    """
    errors = [nmse(g, w) for g, w in zip(got, want)]
    found: dict[str, Any] = {"row": next((i for i, e in enumerate(errors) if not e <= TOLERANCE[None]), -1)}
    peers, mine = Nodes(), Nodes()
    theirs(path, scene, False, watch(peers))
    ours(path, scene, Hook(wanted, lambda name, array, node: mine.setdefault(name, []).append(array[0, 0].copy())))
    queues = {name: list(arrays) for name, arrays in peers.items() if name.startswith("ffn_moe_topk")}
    if not queues:
        return found
    forced = ours(path, scene, Hook(lambda node: node.name in queues, lambda name, array, node: fit(queues[name].pop(0), array)))
    found |= {"forced": float(f"{nmse(forced, want):.2e}")} | closest(peers, mine, path)
    found["close"] = bool(found["forced"] <= tolerance and found.get("scores", 1.0) <= tolerance and found.get("rule", False))
    return found


def fit(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    assert theirs.shape == ours.shape[-2:], "the two sides cut the batch differently"
    return theirs.reshape(ours.shape).astype(ours.dtype)


def closest(peers: Nodes, mine: Nodes, path: Path) -> dict[str, Any]:
    """Where the first choice of experts differs: layer and token, how far the last of llama.cpp's choice and the first that we took
    in its place are apart in our scores (`gap`), by how much both sides' scores differ at most, and what `why` wants to know."""
    with ggraph.Model(path) as model:
        groups = model.hparams.n_expert_groups, model.hparams.n_group_used
    for name in sorted((n for n in mine if n.startswith("ffn_moe_topk")), key=lambda n: int(n.split("-")[1])):
        il = name.split("-")[1]
        node = next(k for k in (f"ffn_moe_{n}-{il}" for n in ("probs_biased", "probs", "logits")) if k in mine and k in peers)
        a, b, x, y = (np.concatenate(nodes) for nodes in (mine[name], peers[name], mine[node], peers[node]))
        for t in range(len(a)):
            if extra := set(a[t].tolist()) - set(b[t].tolist()):
                gap = min(x[t, list(extra)]) - max(x[t, list(set(b[t].tolist()) - set(a[t].tolist()))])
                rule = all(set(best(row, len(chosen), *groups)) == set(chosen.tolist()) for row, chosen in zip(y, b))
                return {"layer": int(il), "token": t, "gap": float(f"{gap:.2e}"), "rule": rule,
                        "scores_differ": float(f"{np.abs(x[t] - y[t]).max():.2e}"),
                            "scores": float(f"{nmse(x[:t + 1], y[:t + 1]):.2e}")}
    return {}


def best(scores: np.ndarray, n: int, n_groups: int, n_group_used: int) -> list[int]:
    """The n experts with the highest scores, of the groups whose two best experts have the highest sums."""
    if n_groups > 1:
        by_group = scores.reshape(n_groups, -1)
        kept = np.argsort(-np.sort(by_group)[:, -2:].sum(-1), kind="stable")[:n_group_used]
        scores = np.where(np.isin(np.arange(n_groups), kept)[:, None], by_group, -np.inf).reshape(-1)
    return [int(i) for i in np.argsort(-scores, kind="stable")[:n]]


def wanted(node: Any) -> bool:
    return bool(re.match(r"ffn_moe_(topk|probs|probs_biased|logits)-\d+$", node.name))


def watch(nodes: Nodes) -> Any:
    """llama.cpp's callback that keeps the routers' nodes."""
    import llama_cpp as lib
    base = ggml()

    def seen(tensor: int, ask: bool, _: Any) -> bool:
        name = base.ggml_get_name(tensor).decode()
        if not re.match(r"ffn_moe_(topk|probs|probs_biased|logits)-\d+$", name):
            return not ask
        if not ask:
            ne, nb = list((ctypes.c_int64 * 4).from_address(tensor + 16)), list((ctypes.c_size_t * 4).from_address(tensor + 48))
            raw = np.frombuffer((ctypes.c_char * nb[2]).from_address(base.ggml_get_data(tensor)),
                np.int32 if "topk" in name else np.float32)
            nodes.setdefault(name, []).append(np.lib.stride_tricks.as_strided(raw, ne[1::-1], nb[1::-1]).copy())
        return True
    return lib.llama_cpp.ggml_backend_sched_eval_callback(seen)


# --- the tensors that llama.cpp asks for

def table(folder: Path, s: spec.Spec) -> list[list[Any]] | None:
    """[name, shape, "F32"] of each, also of those that it can do without; None if it refuses the key/values."""
    import llama_cpp as lib
    base = ggml()
    path = spec.write(s, folder / "keys.gguf")
    found: list[list[Any]] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    def keep(tensor: int, _: Any) -> None:
        ne = list((ctypes.c_int64 * 4).from_address(tensor + 16))
        while len(ne) > 1 and ne[-1] == 1:
            ne.pop()
        found.append([base.ggml_get_name(tensor).decode(), ne, "F32"])
    gguf = base.gguf_init_from_file(str(path).encode(), _GGUFParams(True, None))
    init = lib.llama_cpp._lib.llama_model_init_from_user
    init.argtypes, init.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, lib.llama_model_params], ctypes.c_void_p
    silence(lib)
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = init(gguf, ctypes.cast(keep, ctypes.c_void_p), None, params)
    base.gguf_free(gguf)
    if not model:
        return None
    lib.llama_model_free(ctypes.c_void_p(model))
    return [t for t in {t[0]: t for t in found}.values() if not re.search(r"(?<!ffn_gate_inp)\.(input_)?scale$", t[0])]


@cache
def ggml() -> Any:
    """The functions of ggml that are asked here."""
    import llama_cpp
    base = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib/libggml-base.so"))
    for name, restype, *args in (("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p), ("ggml_get_data", ctypes.c_void_p,
        ctypes.c_void_p),
                                 ("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _GGUFParams), ("gguf_free", None,
                                     ctypes.c_void_p)):
        getattr(base, name).restype, getattr(base, name).argtypes = restype, args
    return base


class _GGUFParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


@cache
def _silent(lib: Any) -> Any:
    return lib.llama_log_callback(lambda level, text, data: None)


def silence(lib: Any) -> None:
    lib.llama_log_set(_silent(lib), None)
