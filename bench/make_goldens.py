#!/usr/bin/env python3
"""Let llama.cpp answer tiny random models, and keep what it says as goldens of the tests.

    python bench/make_goldens.py encoders|adapters      writes tests/golden/models/{encoders,adapters}.npz

Needs llama-cpp-python, built from source for this machine (`pip install --no-binary :all: llama-cpp-python`). It runs on one
thread with flash attention off, and the files say which version answered.
"""
from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import adapters, encoders, spec  # noqa: E402

POOLING = ("none", "mean", "cls", "last", "rank")
Rows = Sequence[tuple[int, int, int]]                   # token, position, sequence


class Peer:
    """One model in one llama.cpp context."""

    def __init__(self, path: Path, n_seq: int, n_ctx: int, pooling: str | None = None):
        import llama_cpp
        self.lib: Any = llama_cpp
        lib = self.lib
        self._silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._silent, None)
        mp = lib.llama_model_default_params()
        mp.n_gpu_layers, mp.use_extra_bufts = 0, False
        self.model = lib.llama_model_load_from_file(str(path).encode(), mp)
        assert self.model, f"llama.cpp cannot load {path}"
        cp = lib.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max, cp.n_threads, cp.n_threads_batch = n_ctx, n_ctx, n_ctx, n_seq, 1, 1
        cp.flash_attn_type, cp.kv_unified = 0, True
        if pooling is not None:
            cp.embeddings, cp.pooling_type = True, POOLING.index(pooling)
        self.ctx = lib.llama_init_from_model(self.model, cp)
        assert self.ctx, f"llama.cpp cannot open a context over {path}"
        self.n_embd = lib.llama_model_n_embd(self.model)
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def run(self, rows: Rows, encode: bool = False) -> None:
        """Process a batch all of whose rows are outputs."""
        batch = self.lib.llama_batch_init(len(rows), 0, 1)
        for i, (token, pos, seq) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos, 1, 1
            batch.seq_id[i][0] = seq
        batch.n_tokens = len(rows)
        code = (self.lib.llama_encode if encode else self.lib.llama_decode)(self.ctx, batch)
        assert code == 0, f"llama.cpp returned {code}"
        self.lib.llama_batch_free(batch)

    def logits(self, n: int) -> np.ndarray:
        return _copy(self.lib.llama_get_logits(self.ctx), n, self.n_vocab)

    def embeddings(self, pooling: str, n_rows: int, n_seq: int) -> np.ndarray:
        if pooling == "none":
            return np.concatenate([_copy(self.lib.llama_get_embeddings_ith(self.ctx, i), 1, self.n_embd) for i in range(n_rows)])
        width = self.lib.llama_model_n_cls_out(self.model) if pooling == "rank" else self.n_embd
        return np.concatenate([_copy(self.lib.llama_get_embeddings_seq(self.ctx, s), 1, width) for s in range(n_seq)])

    def set_adapters(self, loras: Sequence[tuple[Path, float]], vector: np.ndarray | None, layers: tuple[int, int]) -> None:
        """`vector` float32 [n_layer - 1, n_embd]: a control vector's directions of layers 1, 2, .."""
        lib = self.lib
        opened = [lib.llama_adapter_lora_init(self.model, str(path).encode()) for path, _ in loras]
        assert all(opened), "llama.cpp refuses an adapter"
        n = len(opened)
        code = lib.llama_set_adapters_lora(self.ctx, (lib.llama_adapter_lora_p_ctypes * n)(*opened), n,
                                           (ctypes.c_float * n)(*(s for _, s in loras)))
        assert code == 0
        if vector is not None:
            data = np.ascontiguousarray(vector, np.float32)
            pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            assert lib.llama_set_adapter_cvec(self.ctx, pointer, data.size, self.n_embd, *layers) == 0

    def close(self) -> None:
        self.lib.llama_free(self.ctx)
        self.lib.llama_model_free(self.model)


def _copy(pointer: Any, n: int, width: int) -> np.ndarray:
    return np.ctypeslib.as_array(pointer, (n, width)).copy()


def make_encoders(folder: Path) -> dict[str, np.ndarray]:
    """Embeddings of the batch `encoders.batch()` for every spec and pooling."""
    found = {}
    rows = encoders.batch()
    for name, pooling in encoders.cases():
        path = spec.write(encoders.SPECS[name], folder / f"{name}.gguf")
        peer = Peer(path, len(encoders.LENGTHS), 64, pooling)
        peer.run(rows, encode=True)
        found[f"{name}/{pooling}"] = peer.embeddings(pooling, len(rows), len(encoders.LENGTHS))
        peer.close()
    return found


def make_adapters(folder: Path) -> dict[str, np.ndarray]:
    """Logits of the batch `adapters.batch()` with no adapter, one, two, and a control vector."""
    found = {}
    for name in adapters.NAMES:
        files = adapters.write(folder, name)
        for case, (scales, vector) in adapters.CASES.items():
            peer = Peer(files.model, 1, 256)
            loras = [(path, scale) for path, scale in zip(files.loras, scales) if scale]
            peer.set_adapters(loras, adapters.directions(name) * vector if vector else None, adapters.LAYERS)
            peer.run(adapters.batch())
            found[f"{name}/{case}"] = peer.logits(len(adapters.batch()))
            peer.close()
    return found


def main() -> None:
    import llama_cpp
    what = sys.argv[1]
    make = {"encoders": make_encoders, "adapters": make_adapters}[what]
    with tempfile.TemporaryDirectory() as folder:
        found = make(Path(folder))
    path = ROOT / f"tests/golden/models/{what}.npz"
    np.savez_compressed(path, llama_cpp_python=np.array(llama_cpp.__version__), **found)  # type: ignore[arg-type]
    print(f"{len(found)} cases, {path.stat().st_size / 1024:.0f} KiB in {path}")


if __name__ == "__main__":
    main()
