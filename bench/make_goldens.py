#!/usr/bin/env python3
"""Let llama.cpp answer tiny random models, and keep what it says as goldens of the tests.

    python bench/make_goldens.py encoders|adapters|nextn|blocks|t5      writes tests/golden/models/{encoders,adapters,..}.npz

Needs llama-cpp-python, built from source for this machine (`pip install --no-binary :all: llama-cpp-python`). It runs on one
thread, with flash attention off but for blocks, and the files say which version answered.
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

from tests import adapters, blocks, encoders, nextn, spec, t5  # noqa: E402

POOLING = ("none", "mean", "cls", "last", "rank")
Rows = Sequence[tuple[int, int, int]]                   # token, position, sequence


class Peer:
    """One model in one llama.cpp context."""

    def __init__(self, path: Path, n_seq: int, n_ctx: int, pooling: str | None = None, mtp: bool = False, *, n_ubatch: int = 0,
                 unified: bool = True, watch: Any = None, flash: bool = False):
        """`watch`: a `ggml_backend_sched_eval_callback`; `flash`: flash attention, with caches of F32."""
        import llama_cpp
        self.lib: Any = llama_cpp
        lib = self.lib
        self._silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._silent, None)
        mp = lib.llama_model_default_params()
        mp.n_gpu_layers, mp.use_extra_bufts, mp.load_mtp = 0, False, mtp
        self.model = lib.llama_model_load_from_file(str(path).encode(), mp)
        assert self.model, f"llama.cpp cannot load {path}"
        cp = lib.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max = n_ctx, n_ctx, n_ubatch or n_ctx, n_seq
        cp.n_threads, cp.n_threads_batch = 1, 1
        cp.flash_attn_type, cp.kv_unified = int(flash), unified
        if flash:
            cp.type_k = cp.type_v = 0                                   # F32
        if watch is not None:
            cp.cb_eval = watch
        if pooling is not None:
            cp.embeddings, cp.pooling_type = True, POOLING.index(pooling)
        cp.ctx_type = int(mtp)
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

    def keep_hidden(self, all_rows: bool) -> None:
        """From the next batch on, `hidden` has a row of every token, or of those with output; not in llama.cpp's C interface."""
        set_nextn = self.lib.llama_cpp._lib["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
        set_nextn.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        set_nextn(self.ctx, True, not all_rows)

    def hidden(self, n: int) -> np.ndarray:
        get_nextn = self.lib.llama_cpp._lib["_Z26llama_get_embeddings_nextnP13llama_context"]
        get_nextn.argtypes, get_nextn.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
        return _copy(get_nextn(self.ctx), n, self.n_embd)

    def predict(self, rows: Rows, hidden: np.ndarray) -> None:
        """Run the block for next-token prediction over tokens with the hidden states float32 [n, n_embd] before them."""
        lib = self.lib.llama_cpp._lib
        for name in ("init", "add_token", "set_embd_token", "set_pos", "set_output_logits", "free"):
            getattr(lib, "llama_batch_ext_" + name).argtypes = None
        lib.llama_batch_ext_init.restype = ctypes.c_void_p
        batch = ctypes.c_void_p(lib.llama_batch_ext_init(ctypes.c_void_p(self.ctx)))
        for (token, pos, seq), h in zip(rows, np.ascontiguousarray(hidden, np.float32)):
            i = lib.llama_batch_ext_add_token(batch, seq, token)
            assert lib.llama_batch_ext_set_embd_token(batch, i, _Embd(h.ctypes.data, 1, self.n_embd))
            assert lib.llama_batch_ext_set_pos(batch, i, (ctypes.c_int32 * 4)(pos, pos, pos, 0))
            assert lib.llama_batch_ext_set_output_logits(batch, i, True)
        assert lib.llama_process(ctypes.c_void_p(self.ctx), 1, batch) == 0
        lib.llama_batch_ext_free(batch)

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


class _Embd(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("n_rows", ctypes.c_size_t), ("n_embd", ctypes.c_size_t)]


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


def make_nextn(folder: Path) -> dict[str, np.ndarray]:
    """Hidden states of the layers, logits of the block over the same text, then of the block that goes on by itself."""
    found = {}
    for name in nextn.NAMES:
        path = nextn.write(name, folder / f"{name}.gguf")
        text = [(t, i, 0) for i, t in enumerate(spec.tokens()[:nextn.N_PROMPT])]
        layers, block = Peer(path, 1, 256), Peer(path, 1, 256, mtp=True)
        layers.keep_hidden(all_rows=True)
        block.keep_hidden(all_rows=False)
        layers.run(text)
        hidden = layers.hidden(len(text))
        block.predict(text, np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]]))
        logits, state = [block.logits(len(text))], hidden[-1:]
        for i in range(nextn.N_DRAFT):
            block.predict([(spec.tokens()[nextn.N_PROMPT + i], nextn.N_PROMPT + i, 0)], state)
            logits.append(block.logits(1))
            state = block.hidden(1)
        found |= {f"{name}/hidden": hidden, f"{name}/logits": np.concatenate(logits)}
        layers.close()
        block.close()
    return found


def make_blocks(folder: Path) -> dict[str, np.ndarray]:
    """Logits where blocks are chosen to attend to, and of the prompts where all are seen."""
    found = {}
    for name, case in blocks.CASES.items():
        batches = blocks.batches(case)
        for what, flash in (("chosen", not case.means), ("all", False)):
            path = blocks.write(name, folder, everything=what == "all")
            peer = Peer(path, len(case.lengths), blocks.n_ctx(case), n_ubatch=case.n_ubatch, unified=len(case.lengths) == 1,
                        flash=flash)
            logits = []
            for rows in batches if what == "chosen" else batches[:1]:
                peer.run(rows)
                logits.append(peer.logits(len(rows)))
            found[f"{name}/{what}"] = np.concatenate(logits)[blocks.picked(case, what == "chosen")]
            peer.close()
    return found


def make_t5(folder: Path) -> dict[str, np.ndarray]:
    """Logits of the decoder's batches, after both texts were encoded together."""
    found = {}
    for name, what in t5.SPECS.items():
        peer = Peer(spec.write(what, folder / f"{name}.gguf"), len(t5.TEXTS), t5.N_CTX)
        peer.run(t5.text(), encode=True)
        logits = []
        for rows in t5.batches():
            peer.run(rows)
            logits.append(peer.logits(len(rows)))
        found[name] = np.concatenate(logits)
        peer.close()
    return found


def main() -> None:
    import llama_cpp
    what = sys.argv[1]
    make = {"encoders": make_encoders, "adapters": make_adapters, "nextn": make_nextn, "blocks": make_blocks,
            "t5": make_t5}[what]
    with tempfile.TemporaryDirectory() as folder:
        found = make(Path(folder))
    path = ROOT / f"tests/golden/models/{what}.npz"
    np.savez_compressed(path, llama_cpp_python=np.array(llama_cpp.__version__), **found)  # type: ignore[arg-type]
    print(f"{len(found)} cases, {path.stat().st_size / 1024:.0f} KiB in {path}")


if __name__ == "__main__":
    main()
