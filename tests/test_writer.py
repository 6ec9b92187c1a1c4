"""Writing GGUF files: what is written reads back, key/values keep their bytes, and nothing half-written takes a name."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggraph import dtypes, gguf, writer
from ggraph.errors import GGUFError
from tests import tiny

VALUES: list[tuple[str, Any]] = [
    ("UINT8", 255), ("INT8", -128), ("UINT16", 65535), ("INT16", -5), ("UINT32", 2**32 - 1), ("INT32", -1), ("FLOAT32", 0.5),
    ("BOOL", True), ("STRING", "häß\n"), ("UINT64", 2**64 - 1), ("INT64", -2**63), ("FLOAT64", 1e300), ("ARRAY:INT32", [1, -2]),
    ("ARRAY:STRING", ["a", "", "ü"]), ("ARRAY:BOOL", [True, False]), ("ARRAY:FLOAT32", [])]


def test_values_read_back(tmp_path: Path) -> None:
    kv = {f"k{i}": writer.encode(kind, value) for i, (kind, value) in enumerate(VALUES)}
    writer.copy([], kv, tmp_path / "a.gguf")
    with gguf.File(tmp_path / "a.gguf") as file:
        for i, (kind, value) in enumerate(VALUES):
            assert file.kv.kind(f"k{i}") == kind
            assert np.array_equal(file.kv[f"k{i}"], value) if isinstance(value, list) else file.kv[f"k{i}"] == value
        assert writer.raw_kv(file) == kv


@pytest.mark.parametrize("kind, value", [("UINT8", 256), ("UINT8", 1.5), ("INT32", "a"), ("BOOL", 2), ("STRING", 1),
                                         ("FLOAT32", "x"), ("ARRAY:INT32", 1), ("NOPE", 1), ("ARRAY:ARRAY:INT8", [[1]])])
def test_values_that_do_not_fit(kind: str, value: Any) -> None:
    with pytest.raises(GGUFError):
        writer.encode(kind, value)


def test_a_copy_is_the_same_file(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "a.gguf")
    with gguf.File(source) as file:
        writer.copy(file.tensors.values(), writer.raw_kv(file), tmp_path / "b.gguf")
    assert (tmp_path / "b.gguf").read_bytes() == source.read_bytes()


def test_alignment_is_kept(tmp_path: Path) -> None:
    kv = {"general.alignment": writer.encode("UINT32", 128)}
    specs = [writer.Spec("a", (3,), dtypes.F32), writer.Spec("b", (32, 2), dtypes.Q8_0)]
    with writer.replacing(tmp_path / "a.gguf") as out:
        made = writer.Writer(out, kv, specs)
        for s in specs:
            made.write(np.arange(s.nbytes, dtype=np.uint8))
        made.finish()
    with gguf.File(tmp_path / "a.gguf") as file:
        assert [t.offset % 128 for t in file.tensors.values()] == [0, 0]
        assert [t.data.tolist() for t in file.tensors.values()] == [list(range(s.nbytes)) for s in specs]


def test_nothing_half_written_takes_the_name(tmp_path: Path) -> None:
    target = tmp_path / "a.gguf"
    target.write_text("old")
    with pytest.raises(ValueError, match="never written"), writer.replacing(target) as out:
        writer.Writer(out, {}, [writer.Spec("a", (3,), dtypes.F32)]).finish()
    with pytest.raises(ValueError, match="12 bytes"), writer.replacing(target) as out:
        writer.Writer(out, {}, [writer.Spec("a", (3,), dtypes.F32)]).write(np.zeros(11, np.uint8))
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
    with pytest.raises(GGUFError, match="a name"):
        writer.copy([], {"": b""}, target)


def test_permissions_are_ordinary(tmp_path: Path) -> None:
    writer.copy([], {}, tmp_path / "a.gguf")
    (tmp_path / "b").touch()
    assert (tmp_path / "a.gguf").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_parts(tmp_path: Path) -> None:
    assert writer.part_path("x/m", 1, 12).name == "m-00002-of-00012.gguf"
    kv = {"a": writer.encode("UINT8", 1)}
    assert "a" in writer.part_kv(kv, 0, 2, 5) and "a" not in writer.part_kv(kv, 1, 2, 5)
