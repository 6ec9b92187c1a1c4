"""Models with many layers, made of the golden specs: their last layer again and again, or all of them in turn."""
from __future__ import annotations

from .spec import Spec


def tall(spec: Spec, n_layer: int, turns: bool = False) -> Spec:
    """The model of a spec with `n_layer` layers: its own, then the last one repeated; with `turns` all of them in turn."""
    n = next(value for key, _, value in spec["kv"] if key.endswith(".block_count"))
    like = [il if il < n else il % n if turns else n - 1 for il in range(n_layer)]
    layers = [[t for t in spec["tensors"] if t[0].startswith(f"blk.{il}.")] for il in range(n)]
    tensors = [t for t in spec["tensors"] if not t[0].startswith("blk.")]
    tensors += [[f"blk.{il}.{name.split('.', 2)[2]}", *rest] for il, old in enumerate(like) for name, *rest in layers[old]]
    return {**spec, "kv": [[key, kind, _value(key, value, n, like)] for key, kind, value in spec["kv"]], "tensors": tensors}


def _value(key: str, value: object, n: int, like: list[int]) -> object:
    if key.endswith(".block_count"):
        return len(like)
    if isinstance(value, list) and len(value) == n and not key.startswith("tokenizer") and not key.endswith("_sections"):
        return [value[il] for il in like]
    return value
