"""Mutated models, ours beside llama.cpp: every golden spec in other shapes, with other keys, with tensors present and absent.

    python bench/shapes.py [--only REGEX] [--mutation REGEX] [--out FILE.jsonl]

Needs llama-cpp-python. The tensors of a mutated spec are those that llama.cpp itself asks for, so no rule of ours makes them.
Tensors that it can do without are left out one after the other. A line per case that differs; all of them in FILE, one JSON object
each: NMSE of the logits, or what we refused. What llama.cpp refuses or does not survive says nothing about us. Where experts are
chosen, the first choice that differs is shown with the scores that decided it, and whether nothing but such close choices differs.
`REASONS` in mutations.py says where llama.cpp is not to be followed. Exit code 1 if anything differs for no known reason.
"""
from __future__ import annotations

import json
import lzma
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from mutations import BASE, COMPARED, FACTORS, LACKING, MUTATIONS, NEW, PROMPT, REASONS, SCENES, SHAPES, Scene  # noqa: E402
from sides import TOLERANCE, nmse, ours, table, theirs, why  # noqa: E402

from tests import spec  # noqa: E402
from tests.make_shapes import logits  # noqa: E402

IMPOSSIBLE = -1e38                                      # logits below are of tokens that are never meant
ROWS = {"chameleon": [30, 31]}                          # of goldens: those that stand alone in their batch


@click.command(help=__doc__)
@click.option("--only", default="", help="Specs whose name matches.")
@click.option("--mutation", default="", help="Mutations whose name matches.")
@click.option("--types", default="F32,Q8_0,Q4_0,NVFP4", show_default=True)
@click.option("--keep", is_flag=True, help="Compare nothing; add the models to tests/golden/models/shapes.json.xz.")
@click.option("--out", type=click.Path(path_type=Path), help="All results, a JSON object in a line for each.")
def main(only: str, mutation: str, types: str, keep: bool, out: Path | None) -> None:
    qtypes = [None if t == "F32" else t for t in types.split(",")]
    os.environ["GGML_NO_BACKTRACE"] = "1"
    names = [n for n in sorted([*spec.specs(), *NEW]) if re.search(only, n)]
    if keep:
        return keep_specs(names, mutation)
    counts: Counter[str] = Counter()
    with open(out or os.devnull, "w") as file:
        for name in names:
            for result in run_spec(name, mutation, qtypes):
                reason = "agree" if result["ok"] else "close choices of experts" if result.get("close") else reason_of(result)
                counts[reason] += 1
                result |= {} if result["ok"] else {"reason": reason}
                file.write(json.dumps(result) + "\n")
                file.flush()
                if not result["ok"]:
                    print(" ".join(f"{k}={v}" for k, v in result.items() if k != "ok"), flush=True)
    for reason, n in counts.most_common():
        print(f"{n:6d} {reason}")
    sys.exit(int("" in counts))


def reason_of(result: dict[str, Any]) -> str:
    """Why llama.cpp is not to be followed there; "" where that is not known."""
    names = result["spec"], result["mutation"]
    return next((reason for *patterns, reason in REASONS if all(re.fullmatch(p, n) for p, n in zip(patterns, names))), "")


def keep_specs(names: list[str], mutation: str) -> None:
    """`python -m tests.make_shapes` then makes their goldens."""
    kept = {c["name"]: c for c in spec.shapes()}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for case in cases(name, mutation, [None]):
                s, key = case.make(Path(folder)), f"{name}_{case.what}".removesuffix("_same")
                if s is None or case.what in SCENES:
                    continue
                if survives(spec.write(s, Path(folder) / "m.gguf"), s.get("encode", False)):
                    kept[key] = {"name": key, "spec": s, "rows": ROWS.get(name, [0, 7, 29, 31])}
                else:
                    print(f"llama.cpp has no answer for {key}")
    path = spec.FOLDER / "shapes.json.xz"
    path.write_bytes(lzma.compress(json.dumps(list(kept.values())).encode()))
    print(f"{len(kept)} models, {path.stat().st_size / 1024:.0f} KiB in {path}")


def survives(path: Path, encode: bool) -> bool:
    """llama.cpp runs this model; where it asserts or refuses, a process of its own ends."""
    process = get_context("fork").Process(target=logits, args=(path, encode))
    process.start()
    process.join()
    return process.exitcode == 0


def run_spec(name: str, mutation: str, qtypes: list[str | None]) -> Iterator[dict[str, Any]]:
    """All results of a spec, from a process of their own: llama.cpp ends it where it asserts. Then the next one goes on behind."""
    done, fork = 0, get_context("fork")
    while True:
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=work, args=(theirs, name, mutation, qtypes, done))
        process.start()
        theirs.close()
        try:
            while (result := ours.recv()) is not None:
                done += 1
                if result:
                    yield result
        except EOFError:                                # llama.cpp's assertion: nothing to compare
            done += 1
            continue
        finally:
            process.join()
        return


def work(pipe: Any, name: str, mutation: str, qtypes: list[str | None], skip: int) -> None:
    weights = spec.weights
    kept = lru_cache(300)(lambda name, shape: weights(name, list(shape)))
    spec.weights = lambda name, shape: kept(name, tuple(shape))                       # type: ignore[assignment]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)                                      # what it says then
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(cases(name, mutation, qtypes)):
            if i >= skip:
                pipe.send(compare(Path(folder), name, case) or {})
        pipe.send(None)


@dataclass(frozen=True)
class Case:
    """One model and what is run with it; `make` gives its spec, or None where llama.cpp refuses its key/values."""
    what: str
    qtype: str | None
    make: Callable[[Path], spec.Spec | None]
    scene: Scene = PROMPT


def cases(name: str, mutation: str, qtypes: list[str | None]) -> Iterator[Case]:
    def base(folder: Path) -> spec.Spec | None:
        return spec.specs().get(name) or mutated(folder, name, "same")
    with tempfile.TemporaryDirectory() as folder:
        tensors = (base(Path(folder)) or {"tensors": []})["tensors"]
    found = [Case(what, None, base, scene) for what, scene in SCENES.items()]
    found += [Case(what, qtype, partial(mutated, name=name, what=what)) for what in MUTATIONS
              for qtype in (qtypes if what in SHAPES else [None])]
    changes = {"no " + " ".join(parts): partial(drop, parts=parts) for parts in droppable(tensors)}
    changes |= {"fused": fused, "fused_three_biases": partial(fused, biases=False), "split": separate}
    found += [Case(what, None, partial(changed, base=base, change=change)) for what, change in changes.items()]
    found.append(Case("scales", "NVFP4", partial(changed, base=base, change=scaled)))
    return (c for c in found if c.qtype in qtypes and re.search(mutation, c.what))


def changed(folder: Path, base: Callable[[Path], spec.Spec | None], change: Callable[[spec.Spec], spec.Spec]) -> spec.Spec | None:
    s = base(folder)
    return s and change(s)


def first(name: str) -> spec.Spec:
    """A golden spec, or one of `NEW` without tensors."""
    if name in spec.specs():
        return spec.specs()[name]
    tokenizer = [e for e in spec.specs()["llama-dense"]["kv"] if e[0].startswith("tokenizer.")]
    keys = BASE | NEW[name]
    n = keys["vocab_size"]
    longer = {"tokenizer.ggml.tokens": [f"tok_{i}" for i in range(n)], "tokenizer.ggml.scores": [0.0] * n}
    tokenizer = [[k, t, longer.get(k, v)] for k, t, v in tokenizer]
    empty = {"arch": name, "kv": tokenizer, "tensors": [], **({"factors": FACTORS[name]} if name in FACTORS else {})}
    return {**empty, "kv": tokenizer + [[k[1:] if k[0] == "/" else f"{name}.{k}", kind(k, v, empty), v] for k, v in keys.items()]}


def mutated(folder: Path, name: str, what: str) -> spec.Spec | None:
    base = first(name)
    prefix = base["arch"] + "."
    keys = MUTATIONS[what]({k.removeprefix(prefix): v for k, _, v in base["kv"] if k.startswith(prefix)})
    if keys is None:
        return None
    other = [e for e in base["kv"] if not e[0].startswith(prefix)]
    kv = other + [[prefix + k, kind(k, v, base), v] for k, v in keys.items()]
    tensors = table(folder, {**base, "kv": kv, "tensors": []})
    return None if tensors is None else drop({**base, "kv": kv, "tensors": tensors}, LACKING.get(name, []))


def kind(key: str, value: Any, base: spec.Spec) -> str:
    """The GGUF type of a value: that of the spec, else by its Python type."""
    first = value[0] if isinstance(value, list) else value
    plain = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}[type(first)]
    known = next((k for name, k, _ in base["kv"] if name == f"{base['arch']}.{key}"), plain).removeprefix("ARRAY:")
    return f"ARRAY:{known}" if isinstance(value, list) else known


# --- tensors present and absent

def short(name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "", name)


def droppable(tensors: list[list[Any]]) -> list[list[str]]:
    """Names of tensors that files may lack: each of its own, biases of Q, K and V together, all biases, a whole shared expert."""
    names = list(dict.fromkeys(short(t[0]) for t in tensors))
    biases = [n for n in names if n.endswith(".bias")]
    qkv = [n for n in names if re.fullmatch(r"attn_[qkv]\.bias", n)]
    shared = [n for n in names if "_shexp" in n]
    return [[n] for n in names] + [g for g in (qkv, biases, shared) if len(g) > 1]


def drop(s: spec.Spec, parts: list[str]) -> spec.Spec:
    return {**s, "tensors": [t for t in s["tensors"] if short(t[0]) not in parts]}


def fused(s: spec.Spec, biases: bool = True) -> spec.Spec:
    """Q, K and V as one tensor, and their biases too."""
    return _joined(s, ("attn_q", "attn_k", "attn_v"), "attn_qkv", ("weight", "bias") if biases else ("weight",))


def scaled(s: spec.Spec) -> spec.Spec:
    """A scale for each matrix of a kind that llama.cpp knows scales of, and one for its inputs, which nobody reads. No biases: with
    those llama.cpp ends the process."""
    tensors = [t for t in s["tensors"] if not re.fullmatch(r"(attn|ffn)_\w+\.bias", short(t[0]))]
    kinds = r"(attn_(q|k|v|qkv|output|gate)|ffn_(gate|up|down)(_exps|_shexp)?|ssm_(in|out|alpha|beta))\.weight"
    found = [(name, shape) for name, shape, _ in tensors if name.startswith("blk.") and re.fullmatch(kinds, short(name))]
    more = [[name.replace("weight", what), shape[2:] or [1], "F32"] for name, shape in found for what in ("scale", "input_scale")
            if shape[0] % 64 == 0]
    return {**s, "tensors": tensors + more}


def separate(s: spec.Spec) -> spec.Spec:
    """Gate and up of the experts as two tensors where they are one, as one where they are two."""
    if any("gate_up_exps" in t[0] for t in s["tensors"]):
        def halves(name: str, shape: list[int], k: str) -> list[list[Any]]:
            if "gate_up_exps.weight" not in name:
                return [[name, shape, k]]
            return [[name.replace("gate_up", part), [shape[0], shape[1] // 2, *shape[2:]], k] for part in ("gate", "up")]
        return {**s, "tensors": [half for t in s["tensors"] for half in halves(*t)]}
    return _joined(s, ("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps")


def _joined(s: spec.Spec, parts: tuple[str, ...], name: str, suffixes: tuple[str, ...] = ("weight", "bias")) -> spec.Spec:
    out, sums = [], {}
    for t, shape, k in s["tensors"]:
        stem, suffix = short(t).rsplit(".", 1) if "." in short(t) else (short(t), "")
        if stem in parts and suffix in suffixes:
            whole, axis = t.replace(stem, name), 0 if suffix == "bias" else 1
            sums.setdefault(whole, [whole, [n if i != axis else 0 for i, n in enumerate(shape)], k])[1][axis] += shape[axis]
        else:
            out.append([t, shape, k])
    return {**s, "tensors": out + list(sums.values())}


# --- both sides

def compare(folder: Path, name: str, case: Case) -> dict[str, Any] | None:
    result: dict[str, Any] = {"spec": name, "mutation": case.what, "type": case.qtype or "F32"}
    s = case.make(folder)
    if s is None:
        return None
    path, encode, tolerance = spec.write(s, folder / "m.gguf", case.qtype), s.get("encode", False), TOLERANCE[case.qtype]
    want = theirs(path, case.scene, encode)
    if want is None or not np.isfinite(want).any():
        return None
    try:
        got = ours(path, case.scene)
    except Exception as e:
        return {**result, "ok": False, "refused": f"{type(e).__name__}: {e}"[:200].replace("\n", " ")}
    got, want = (rows[:, COMPARED.get(name, slice(None))] for rows in (got, want))
    possible = np.isfinite(want) & (want > IMPOSSIBLE)
    error = nmse(got[possible], want[possible]) if (np.isfinite(got) == possible).all() else float("inf")
    result |= {"ok": bool(error <= tolerance), "nmse": float(f"{error:.2e}")}
    return result if result["ok"] or encode else result | why(got, want, case.scene, path, tolerance)


if __name__ == "__main__":
    main()
