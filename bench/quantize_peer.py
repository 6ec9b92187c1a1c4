#!/usr/bin/env python3
"""Quantize the same numbers with ggraph and with llama.cpp: are the bytes the same, and whose weights are nearer?

    python bench/quantize_peer.py [--lib FOLDER] [--model smollm2] [--rows 64] [TYPE ...]
    python bench/quantize_peer.py --whole F16.gguf [MIX ...]   whole files: bytes, types, key/values, time
    python bench/quantize_peer.py --limits              write what tests/quants/test_quantize.py holds to
    python bench/quantize_peer.py --mixes               ask llama.cpp which type each tensor has in each mix, for the models
                                                        of tests/tools/mixes.py; writes tests/golden/mixes.json

Needs llama-cpp-python (or with --lib the folder with its shared libraries). Prints, for each type and kind of data: the share of
equal bytes, and the ratio of the root mean square errors (ours by theirs), plain and, with an importance matrix, weighted.
"""
from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ggraph import dtypes, gguf, hub, quants, writer  # noqa: E402

Floats = Any
NEEDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")        # llama.cpp makes these only with importance


def library(folder: str | None) -> Any:
    """ggml's base library, with the types of what is called."""
    if folder is None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise SystemExit("llama-cpp-python is not installed; install it, or give --lib")
        folder = str(Path(spec.origin).parent / "lib")
    lib = ctypes.CDLL(str(next(iter(sorted(Path(folder).glob("libggml-base.*"))))))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
                                        ctypes.c_int64, ctypes.c_void_p]
    return lib


def theirs(lib: Any, x: Floats, dtype: dtypes.DType, importance: Floats | None) -> Any:
    out = np.zeros((len(x), dtype.row_bytes(x.shape[1])), np.uint8)
    lib.ggml_quantize_chunk(dtype.id, x.ctypes.data, out.ctypes.data, 0, len(x), x.shape[1],
                            None if importance is None else importance.ctypes.data)
    return out


def samples(model: str, n_rows: int) -> Iterator[tuple[str, Floats]]:
    """Rows of a real model as F16 holds them, and of synthetic shapes."""
    rng = np.random.default_rng(1)
    n = 1536
    yield "normal", rng.standard_normal((n_rows, n)).astype(np.float32) * np.float32(0.02)
    yield "heavy tails", (rng.standard_t(3, (n_rows, n)) * 0.02).astype(np.float32)
    yield "uniform", rng.uniform(-0.05, 0.05, (n_rows, n)).astype(np.float32)
    yield "one-sided", np.abs(rng.standard_normal((n_rows, n)) * 0.02).astype(np.float32)
    with gguf.File(hub.resolve(model)) as file:
        names = ("blk.0.ffn_down.weight", "blk.7.ffn_down.weight", "blk.29.ffn_down.weight", "token_embd.weight")
        for info in (file.tensors[name] for name in names if name in file.tensors):
            rows = quants.unpack(info.data.reshape(info.ne[1], -1)[:4 * n_rows], info.type)
            rows = rows[:, :rows.shape[1] // 256 * 256].astype(np.float16).astype(np.float32)
            yield info.name, np.ascontiguousarray(rows[:n_rows])


def error(x: Floats, packed: Any, dtype: dtypes.DType, importance: Floats | None) -> float:
    miss = (x - quants.unpack(packed, dtype)).astype(np.float64)
    return float(np.sqrt(np.mean(miss * miss * (1 if importance is None else importance))))


def compare(lib: Any, dtype: dtypes.DType, name: str, x: Floats) -> None:
    rng = np.random.default_rng(2)
    wanted = rng.chisquare(2, x.shape[1]).astype(np.float32) + np.float32(0.01)
    parts = []
    for importance in (None, wanted):
        if importance is None and dtype.name in NEEDS:
            parts.append("needs importance".rjust(27))
            continue
        start = time.perf_counter()
        ours = quants.quantize(x, dtype, importance)
        middle = time.perf_counter()
        other = theirs(lib, x, dtype, importance)
        end = time.perf_counter()
        mine, peer = (error(x, packed, dtype, importance) for packed in (ours, other))
        same, ratio = 100 * np.mean(ours == other), mine / peer if peer else 1
        parts.append(f"{same:7.2f}% {ratio:8.4f} {(middle - start) / (end - middle):8.1f}x")
    print(f"{dtype.name:8} {name:22}", *parts, flush=True)


def limits(lib: Any, target: Path) -> None:
    """What tests/quants/test_quantize.py holds: digests of bytes, and errors."""
    from tests.quants import samples as small
    exact = {t.name: {name: hashlib.sha256(theirs(lib, x, t, None).tobytes()).hexdigest()[:16] for name, x in small.rows()}
             for t in small.EXACT}
    errors: dict[str, dict[str, float]] = {}
    for dtype in (t for t in quants.QUANTIZABLE if t.quantized and t not in small.EXACT):
        for name, x in small.rows():
            for w in (None, small.importance(x.shape[1])):
                if w is not None or dtype.name not in NEEDS:
                    found = small.error(x, theirs(lib, x, dtype, w), dtype, w)
                    errors.setdefault(dtype.name, {})[f"{name} {w is not None}"] = found
    head = {"command": "python bench/quantize_peer.py --limits", "llama_cpp": "0.3.36"}
    target.write_text(json.dumps({**head, "bytes": exact, "errors": errors}, indent=1) + "\n")


class Asked:
    """llama_model_quantize in a dry run, and what it logs: the type of every tensor."""
    LINE = re.compile(r"\]\s+(\S+)\s+- \[.*type =\s*(\w+), size = .*?(?:\((\w+)\))?$")

    def __init__(self) -> None:
        import llama_cpp
        self.lib: Any = llama_cpp
        self.lines: list[str] = []
        self._log = self.lib.llama_log_callback(lambda level, text, data: self.lines.append(text.decode(errors="replace")))
        self.lib.llama_log_set(self._log, None)

    def types(self, path: Path, mix: int, importance: bool) -> dict[str, str]:
        params = self.lib.llama_model_quantize_default_params()
        params.ftype, params.dry_run, params.nthread = mix, True, 1
        one = (ctypes.c_float * 1)(1.0)
        Data = self.lib.llama_model_imatrix_data
        data = (Data * 2)(Data(b"nothing", one, 1), Data(None, None, 0))
        if importance:
            params.imatrix = ctypes.cast(data, type(params.imatrix)) if not isinstance(params.imatrix, int | None) \
                else ctypes.cast(data, ctypes.c_void_p)
        self.lines.clear()
        if self.lib.llama_model_quantize(str(path).encode(), b"/dev/null", ctypes.byref(params)):
            raise SystemExit(f"{path}: " + "".join(self.lines[-5:]))
        found = {}
        for line in "".join(self.lines).splitlines():
            if m := self.LINE.search(line):
                found[m[1]] = (m[3] or m[2]).upper()
        return found


def whole(path: Path, names: list[str]) -> None:
    """Quantize a file of F16 or F32 with both: which tensors and key/values are the same, and how long it took."""
    from ggraph.tools import _mixes
    from ggraph.tools.quantize import quantize
    lib = Asked().lib
    with tempfile.TemporaryDirectory() as folder:
        mine, peer = (Path(folder) / name for name in ("mine.gguf", "peer.gguf"))
        for name in names:
            params = lib.llama_model_quantize_default_params()
            params.ftype, params.nthread = _mixes.mix(name).id, os.cpu_count()
            start = time.perf_counter()
            if lib.llama_model_quantize(str(path).encode(), str(peer).encode(), ctypes.byref(params)):
                raise SystemExit(f"llama.cpp cannot make {name} of {path}")
            middle = time.perf_counter()
            quantize(path, mine, name)
            end = time.perf_counter()
            with gguf.File(mine) as a, gguf.File(peer) as b:
                same = sum(np.array_equal(t.data, b.tensors[key].data) for key, t in a.tensors.items())
                types = all(t.type == b.tensors[key].type for key, t in a.tensors.items())
                keys = a.kv.keys() == b.kv.keys() and all(a.kv.raw(key) == b.kv.raw(key) for key in a.kv)
            print(f"{name}: {same} of {len(a.tensors)} tensors equal, types equal {types}, key/values equal {keys}, "
                  f"llama.cpp {middle - start:.1f} s, ggraph {end - middle:.1f} s", flush=True)


def hollow(outline: Any, path: Path) -> None:
    """A file with the header of a model, and a hole where its numbers would be."""
    kv = {key: writer.encode(kind, value) for key, kind, value in outline.kv}
    with path.open("wb") as out:
        specs = [writer.Spec(t.name, t.ne, t.type) for t in outline.tensors]
        writer.Writer(out, kv, specs)
        out.truncate(out.tell() + sum(-(-s.nbytes // 32) * 32 for s in specs))


def ask_mixes(target: Path) -> None:
    from ggraph.tools import _mixes
    from tests.tools import mixes
    peer, answers = Asked(), {}
    with tempfile.TemporaryDirectory() as folder:
        for outline in mixes.outlines():
            path = Path(folder) / "model.gguf"
            hollow(outline, path)
            types = {f"{mix.name} {importance}": peer.types(path, mix.id, importance) for mix in _mixes.MIXES.values()
                     for importance in (False, True)}
            ours = {f"{mix.name} {importance}": {name: kind.name for name, kind in _mixes.choose(
                mix, outline.tensors, _mixes.Sizes.read(outline.values), importance=importance).items()}
                for mix in _mixes.MIXES.values() for importance in (False, True)}
            wrong = [(mix, name, kind, ours[mix].get(name)) for mix in types for name, kind in types[mix].items()
                     if ours[mix].get(name) != kind]
            print(f"{outline.name}: {sum(map(len, types.values()))} answers, {len(wrong)} differ {wrong[:3]}", flush=True)
            answers[outline.name] = mixes.digest(types)
    head = {"command": "python bench/quantize_peer.py --mixes", "llama_cpp": peer.lib.__version__}
    target.write_text(json.dumps({**head, "digests": answers}, indent=0) + "\n")


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("types", nargs="*")
    args.add_argument("--lib")
    args.add_argument("--model", default="smollm2")
    args.add_argument("--rows", type=int, default=64)
    args.add_argument("--mixes", action="store_true")
    args.add_argument("--limits", action="store_true")
    args.add_argument("--whole", metavar="FILE")
    o = args.parse_args()
    if o.whole:
        whole(Path(o.whole), o.types or ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0", "BF16", "Q4_K_M"])
        return
    if o.mixes:
        ask_mixes(ROOT / "tests/golden/mixes.json")
        return
    lib = library(o.lib)
    if o.limits:
        limits(lib, ROOT / "tests/golden/quantize.json")
        return
    print("type     data                   equal bytes, error ratio, time ratio; then the same with an importance matrix")
    for dtype in [dtypes.parse(t) for t in o.types] or [t for t in quants.QUANTIZABLE if t.quantized]:
        for name, x in samples(o.model, o.rows):
            compare(lib, dtype, name, x)


if __name__ == "__main__":
    main()
