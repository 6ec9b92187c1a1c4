"""Small vocabularies written as GGUF files, from the golden files or from scratch."""
from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import gguf

from ggraph.vocab import Vocab

GOLDEN = Path(__file__).parents[1] / "golden/vocab"
NAMES = [p.stem for p in sorted(GOLDEN.glob("*.json")) if p.stem != "pretok"]


def golden(name: str) -> dict[str, Any]:
    """The file, its `kv` completed from the one it is a variant of."""
    data: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    if "model" not in data["kv"]:
        data["kv"] = {**golden(name.partition("-")[0])["kv"], **data["kv"]}
    return data


def write(path: Path, model: Any = None, *, arch: str = "llama", name: str = "", **kv: Any) -> Path:
    """A file with these `tokenizer.ggml.*` keys and nothing else. Text in `precompiled_charsmap` is base64."""
    writer = gguf.GGUFWriter(path, arch)
    if name:
        writer.add_name(name)
    if model is not None:
        _add(writer, "tokenizer.ggml.model", model)
    for key, value in kv.items():
        if key == "precompiled_charsmap" and isinstance(value, str):
            value = base64.b64decode(value)
        _add(writer, f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def load(path: Path, **kv: Any) -> Vocab:
    return Vocab(write(path / "vocab.gguf", **kv))


def load_golden(path: Path, name: str, **changes: Any) -> Vocab:
    return load(path, **{**golden(name)["kv"], **changes})
