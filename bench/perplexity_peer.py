"""Perplexity and KL divergence of ggraph beside llama.cpp's, on the same files, text and windows.

    python bench/perplexity_peer.py MODEL.gguf ... [--kld] [--chunks 8] [-c 512]

Each model's perplexity is measured with both. With --kld, the first model is also written as F16, that as Q2_K and Q4_0 (by
llama.cpp), and the divergence of both from the F16 is measured. llama.cpp runs through llama-cpp-python's low-level calls, in a
process of its own, which gives the figures as JSON. It fails where they are further apart than they may be.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1]
PPL_LIMIT, F16_LIMIT, KLD_LIMIT = 0.015, 0.002, 0.03


# --- llama.cpp


class Peer:
    """A model in llama.cpp, for one window at a time."""

    def __init__(self, path: str, n_ctx: int):
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]
        self.lib: Any = llama_cpp
        self._log = self.lib.llama_log_callback(lambda level, text, data: None)
        self.lib.llama_log_set(self._log, None)
        self.model = self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params())
        params = self.lib.llama_context_default_params()
        params.n_ctx = params.n_batch = n_ctx
        self.ctx = self.lib.llama_init_from_model(self.model, params)
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.vocab)
        self.batch = self.lib.llama_batch_init(n_ctx, 0, 1)

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        ids = (self.lib.llama_token * (len(raw) + 8))()
        n = self.lib.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), True, False)
        return list(ids[:n])

    @property
    def bos(self) -> int | None:
        return self.lib.llama_vocab_bos(self.vocab) if self.lib.llama_vocab_get_add_bos(self.vocab) else None

    def second_half(self, tokens: list[int]) -> np.ndarray:
        """Log-probabilities float32 [n_ctx - 1 - n_ctx / 2, n_vocab] of one window."""
        b, first = self.batch, len(tokens) // 2
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.ctx), True)
        for i, token in enumerate(tokens):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, i, 1, i >= first
            b.seq_id[i][0] = 0
        b.n_tokens = len(tokens)
        if code := self.lib.llama_decode(self.ctx, b):
            raise RuntimeError(f"llama_decode returned {code}")
        logits = np.ctypeslib.as_array(self.lib.llama_get_logits(self.ctx), (len(tokens) - first, self.n_vocab))[:-1]
        logits = logits - logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
        return logits


def peer(models: list[str], text: str, n_ctx: int, chunks: int) -> dict[str, float]:
    """ "ppl" of one model; with a second one, also "kld" of the first from it."""
    peers = [Peer(m, n_ctx) for m in models]
    tokens = peers[0].tokenize(text)
    nll, kld = [], []
    for start in range(0, min(chunks, len(tokens) // n_ctx) * n_ctx, n_ctx):
        piece = tokens[start:start + n_ctx]
        read = piece if peers[0].bos is None else [peers[0].bos, *piece[1:]]
        rows = [p.second_half(read) for p in peers]
        nll += [-float(row[t]) for row, t in zip(rows[0], piece[n_ctx // 2 + 1:])]
        if len(rows) > 1:
            kld += [float((np.exp(b) * (b - a)).sum(dtype=np.float64)) for a, b in zip(*rows)]
    return {"ppl": float(np.exp(np.mean(nll))), **({"kld": float(np.mean(kld))} if kld else {})}


def quantize(source: str, target: str, ftype: str) -> None:
    import llama_cpp
    lib: Any = llama_cpp
    log = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(log, None)
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{ftype}")
    if lib.llama_model_quantize(source.encode(), target.encode(), params):
        raise RuntimeError(f"llama.cpp cannot quantize {source} to {ftype}")


# --- ggraph


def ours(models: list[str], text: str, n_ctx: int, chunks: int) -> dict[str, float]:
    import ggraph
    from ggraph.tools.perplexity import divergence, perplexity
    with ggraph.Model(models[0]) as model:
        tokens = model.vocab.encode(text, parse_special=False)
        if len(models) == 1:
            return {"ppl": perplexity(model, tokens, n_ctx=n_ctx, n_chunks=chunks).ppl.value}
        with ggraph.Model(models[1]) as base:
            result = divergence(model, base, tokens, n_ctx=n_ctx, n_chunks=chunks)
            return {"ppl": result.ppl.value, "kld": result.kld.value}


def as_f16(source: str, target: str) -> None:
    """The file dequantized: matrices F16, vectors F32."""
    import gguf
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind,
                                 sub_type=field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    writer.add_file_type(1)
    for t in reader.tensors:
        values = gguf.quants.dequantize(t.data, t.tensor_type).reshape([int(n) for n in t.shape[::-1]])
        writer.add_tensor(t.name, values.astype(np.float16 if values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- both


def apart(python: str, what: str, *args: Any) -> Any:
    """Call a function of this file in a process of its own, under another Python."""
    done = subprocess.run([python, __file__, "--call", json.dumps([what, *args])], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def compare(o: argparse.Namespace, folder: str) -> Iterator[tuple[str, str, float, float, float]]:
    """(file, what, llama.cpp's, ggraph's, the limit of the relative difference)"""
    text = o.text.read_text().removesuffix("\n")
    sizes = text, o.n_ctx, o.chunks
    for m in o.models:
        yield Path(m).name, "PPL", apart(o.peer, "peer", [m], *sizes)["ppl"], ours([m], *sizes)["ppl"], PPL_LIMIT
    if not o.kld:
        return
    f16 = f"{folder}/F16.gguf"
    as_f16(o.models[0], f16)
    yield "F16", "PPL", apart(o.peer, "peer", [f16], *sizes)["ppl"], ours([f16], *sizes)["ppl"], F16_LIMIT
    for name in ("Q2_K", "Q4_0"):
        path = f"{folder}/{name}.gguf"
        apart(o.peer, "quantize", f16, path, name)
        theirs, mine = apart(o.peer, "peer", [path, f16], *sizes), ours([path, f16], *sizes)
        yield name, "PPL", theirs["ppl"], mine["ppl"], PPL_LIMIT
        yield name, "KLD", theirs["kld"], mine["kld"], KLD_LIMIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--text", type=Path, default=FOLDER / "tools/data/persuasion.txt")
    parser.add_argument("-c", "--n-ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--kld", action="store_true", help="requantize the first model, and compare divergences as well")
    parser.add_argument("--peer", default=sys.executable, metavar="PYTHON", help="the Python that has llama-cpp-python")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.call:
        what, *args = json.loads(o.call)
        print(json.dumps({"peer": peer, "quantize": quantize}[what](*args)))
        return
    worst = 0.0
    print("| file | what | llama.cpp | ggraph | difference | limit |\n|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name, what, theirs, mine, limit in compare(o, folder):
            difference = abs(mine / theirs - 1)
            worst = max(worst, difference / limit)
            print(f"| {name} | {what} | {theirs:.6f} | {mine:.6f} | {100 * difference:.3f} % | {100 * limit:g} % |", flush=True)
    sys.exit(int(worst > 1))


if __name__ == "__main__":
    main()
