"""GGUF files, right and wrong. The files are written byte by byte here, so that each can be wrong in one place."""
from __future__ import annotations

import re
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggraph import dtypes, gguf
from ggraph.errors import GGUFError

SCALARS = {"UINT8": (0, "B"), "INT8": (1, "b"), "UINT16": (2, "H"), "INT16": (3, "h"), "UINT32": (4, "I"),
           "INT32": (5, "i"), "FLOAT32": (6, "f"), "BOOL": (7, "B"), "UINT64": (10, "Q"), "INT64": (11, "q"),
           "FLOAT64": (12, "d")}


def string(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: str, value: float) -> bytes:
    type_id, code = SCALARS[kind]
    return struct.pack("<I" + code, type_id, value)


def text(s: str | bytes) -> bytes:
    return struct.pack("<I", 8) + string(s)


def numbers(kind: str, values: Iterable[float]) -> bytes:
    type_id, code = SCALARS[kind]
    values = list(values)
    return struct.pack(f"<IIQ{len(values)}{code}", 9, type_id, len(values), *values)


def strings(values: Iterable[str | bytes]) -> bytes:
    encoded = [string(s) for s in values]
    return struct.pack("<IIQ", 9, 8, len(encoded)) + b"".join(encoded)


def tensor(name: str | bytes, ne: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type_id, offset)


def build(kv: dict[str, bytes] | None = None, tensors: Iterable[bytes] = (), data: bytes = b"", *, alignment: int = 32,
          version: int = 3, n_kv: int | None = None, n_tensors: int | None = None) -> bytes:
    kv, tensors = kv or {}, list(tensors)
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors) if n_tensors is None else n_tensors,
                       len(kv) if n_kv is None else n_kv)
    head += b"".join(string(key) + value for key, value in kv.items()) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


KV = {
    "general.architecture": text("llama"),
    "tokenizer.ggml.tokens": strings(["<s>", "", "é", b"\xff\xfe", "x" * 300]),
    "tokenizer.ggml.scores": numbers("FLOAT32", [0.5, -1.5]),
    "llama.flags": numbers("BOOL", [1, 0, 7]),
    "general.alignment": scalar("UINT32", 32),
}
TENSORS = [tensor("a", (4, 2), 0, 0), tensor("b", (32,), 8, 32), tensor("c", (2, 1, 1, 3), 1, 96)]
A, C = np.arange(8, dtype=np.float32), np.arange(6, dtype=np.float16)
DATA = A.tobytes() + bytes(range(34)) + bytes(30) + C.tobytes()
GOOD = build(KV, TENSORS, DATA)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to(content: bytes, name: str = "model.gguf") -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name
    return to


def refused(path: Path, pattern: str) -> None:
    with pytest.raises(GGUFError, match=pattern) as caught:
        gguf.File(path).close()
    assert path.name in str(caught.value)
    assert not re.search("header is damaged$|or damaged$|cut short$", str(caught.value))      # what to do stands there, too


# Good files

@pytest.mark.parametrize("version", [2, 3])
def test_reads_everything(write: Write, version: int) -> None:
    with gguf.File(write(build(KV, TENSORS, DATA, version=version))) as f:
        assert (f.version, f.alignment, f.arch, f.size) == (version, 32, "llama", len(GOOD))
        assert list(f.kv) == list(KV) and len(f.kv) == len(KV) and "no.such" not in f.kv
        assert f.kv["tokenizer.ggml.tokens"] == ["<s>", "", "é", "��", "x" * 300]
        assert f.kv.raw_strings("tokenizer.ggml.tokens") == [b"<s>", b"", "é".encode(), b"\xff\xfe", b"x" * 300]
        assert f.kv["tokenizer.ggml.scores"].tolist() == [0.5, -1.5]
        assert f.kv["llama.flags"].tolist() == [True, False, True]
        assert f.kv.kind("tokenizer.ggml.tokens") == "ARRAY:STRING" and f.kv.n("tokenizer.ggml.tokens") == 5
        assert list(f.tensors) == ["a", "b", "c"]
        a, b, c = f.tensors.values()
        assert (a.ne, a.type, a.nbytes, a.shard) == ((4, 2), dtypes.F32, 32, 0)
        assert (b.type, b.nbytes, c.ne) == (dtypes.Q8_0, 34, (2, 1, 1, 3))
        assert a.data.view(np.float32).tolist() == list(range(8))
        assert b.data.tobytes() == bytes(range(34)) and b.address == b.data.ctypes.data
        assert c.data.view(np.float16).tolist() == list(range(6))
        with pytest.raises(ValueError, match="read-only"):
            a.data[0] = 1


@pytest.mark.parametrize(("kind", "value"), [
    ("UINT8", 255), ("INT8", -128), ("UINT16", 65535), ("INT16", -3), ("UINT32", 2**32 - 1), ("INT32", -1),
    ("FLOAT32", 0.5), ("BOOL", 1), ("UINT64", 2**64 - 1), ("INT64", -2**63), ("FLOAT64", 1e300)])
def test_scalars_and_arrays_of_each_kind(write: Write, kind: str, value: float) -> None:
    with gguf.File(write(build({"x": scalar(kind, value), "odd": text("z"), "y": numbers(kind, [value, 0])}))) as f:
        assert f.kv["x"] == value and f.kv.kind("x") == kind
        assert type(f.kv["x"]) is {"FLOAT": float, "BOOL": bool}.get(kind.rstrip("3264"), int)
        y = f.kv["y"]
        assert y.tolist() == [value, 0] and f.kv.kind("y") == f"ARRAY:{kind}"
        assert y.flags.aligned and not y.flags.writeable


def test_nested_arrays(write: Write) -> None:
    def inner(value: bytes) -> bytes:
        return value[4:]
    nested = struct.pack("<IIQ", 9, 9, 3) + inner(numbers("INT32", [1, 2])) + inner(strings(["a"])) + inner(strings([]))
    with gguf.File(write(build({"x": nested, "after": text("ok")}))) as f:
        numbers_, *others = f.kv["x"]
        assert numbers_.tolist() == [1, 2] and others == [["a"], []] and f.kv["after"] == "ok"


def test_agrees_with_the_package(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "package.gguf"
    writer = package.GGUFWriter(path, "qwen2")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "bc"])
    writer.add_float32("f", 0.25)
    writer.add_tensor("t", np.arange(5, dtype=np.float32))
    writer.add_tensor("u", np.arange(12, dtype=np.float16).reshape(3, 4))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with gguf.File(path) as f:
        assert (f.arch, f.alignment, f.kv["f"], f.kv["tokenizer.ggml.tokens"]) == ("qwen2", 64, 0.25, ["a", "bc"])
        assert f.tensors["u"].ne == (4, 3) and f.tensors["u"].data.view(np.float16).tolist() == list(range(12))


@pytest.mark.parametrize("kind", ["UINT8", "INT16", "UINT32", "INT64", "UINT64"])
def test_alignment_of_any_integer_type(write: Write, kind: str) -> None:
    for padding in range(32):       # G05: the data section starts at another remainder each time
        kv = {"general.alignment": scalar(kind, 16), "pad": text("x" * padding)}
        tensors = [tensor(name, (16,), 24, 16 * i) for i, name in enumerate("abc")]
        with gguf.File(write(build(kv, tensors, bytes(range(48)), alignment=16))) as f:
            assert [t.data[0] for t in f.tensors.values()] == [0, 16, 32]


def test_scalar_and_empty_tensors(write: Write) -> None:
    with gguf.File(write(build({}, [tensor("s", (), 0, 0), tensor("e", (0, 7), 0, 32)], bytes(32)))) as f:
        assert f.tensors["s"].ne == (1,) and f.tensors["s"].nbytes == 4
        assert f.tensors["e"].nbytes == 0 and f.tensors["e"].data.shape == (0,)


@pytest.mark.parametrize(("type_id", "says"), [(999, "type 999.*update ggraph"), (31, "Q4_0_4_4.*removed")])
def test_unknown_tensor_type_fails_only_when_used(write: Write, type_id: int, says: str) -> None:
    with gguf.File(write(build(KV, [tensor("new", (32,), type_id, 0), TENSORS[1]], bytes(66)))) as f:
        new = f.tensors["new"]
        assert f.arch == "llama" and new.ne == (32,) and not new.known and str(type_id) in repr(new)
        assert f.tensors["b"].data.shape == (34,)
        for use in ("type", "nbytes", "data"):
            with pytest.raises(GGUFError, match=f"'new'.*{says}"):
                getattr(new, use)


def test_close_keeps_what_was_handed_out(write: Write) -> None:
    f = gguf.File(write(GOOD))
    data, scores = f.tensors["a"].data, f.kv["tokenizer.ggml.scores"]
    f.close()
    f.close()
    assert data.view(np.float32)[7] == 7 and scores[0] == 0.5 and f.kv["tokenizer.ggml.scores"] is scores
    for use in (lambda: f.kv["tokenizer.ggml.tokens"], lambda: f.tensors["b"].data):
        with pytest.raises(GGUFError, match="closed"):
            use()


def test_missing_keys(write: Write) -> None:
    with gguf.File(write(build({"x": scalar("UINT8", 1)}))) as f:
        for look in (f.kv.__getitem__, f.kv.kind, f.kv.raw_strings):
            with pytest.raises(KeyError):
                look("y")
        with pytest.raises(GGUFError, match="x should be an array of strings but is UINT8"):
            f.kv.raw_strings("x")
        with pytest.raises(GGUFError, match=r"general\.architecture is missing"):
            _ = f.arch


def test_opens_a_large_vocabulary_quickly(write: Write) -> None:
    """The budget is 0.15 s to open and 1 s until the vocabulary is decoded; a quiet machine needs a fifth of it."""
    tokens = [b"token-%d" % i for i in range(262144)]
    path = write(build({"tokenizer.ggml.tokens": strings(tokens)}))

    def seconds() -> tuple[float, float]:
        t0 = time.process_time()
        with gguf.File(path) as f:
            t1 = time.process_time()
            assert f.kv.raw_strings("tokenizer.ggml.tokens") == tokens and len(f.kv["tokenizer.ggml.tokens"]) == 262144
            return t1 - t0, time.process_time() - t1
    times = [seconds() for _ in range(3)]
    assert min(t[0] for t in times) < 0.15 and min(t[1] for t in times) < 1.0


# Files that are something else

@pytest.mark.parametrize(("start", "says"), [
    (b"", "empty"), (b"GG", "starts with b'GG'"), (b"ABCD" * 9, "starts with b'ABCD'"),
    (b"\n<!DOCTYPE html><html>", "web page"), (b"<?xml version='1.0'?><Error/>", "web page"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
    (b"PK\x03\x04rest", "PyTorch"), (b"lmgg\0\0\0\0", "before GGUF"), (b"tjgg\0\0\0\0", "before GGUF"),
    (b'{"error": 1}', "JSON"), (bytes(64), "zeros"), (struct.pack("<Q", 99) + b'{"a":', "safetensors"),
    (b"\x1f\x8b\x08", "gzip"),
])
def test_says_what_the_file_looks_like(write: Write, start: bytes, says: str) -> None:
    refused(write(start), says)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    refused(tmp_path / "absent.gguf", "No such file")
    (tmp_path / "folder.gguf").mkdir()
    refused(tmp_path / "folder.gguf", "directory|denied")


@pytest.mark.parametrize(("version", "says"), [
    (0, "version 0"), (1, "version 1 "), (4, "version 4 .*update"), (3 << 24, "big-endian")])
def test_versions(write: Write, version: int, says: str) -> None:
    refused(write(build(KV, version=version)), says)


@pytest.mark.parametrize("name", [
    "m.gguf.part1of2", "m.gguf-split-a", "m.gguf.001", "m.gguf.part-aa", "m.Q8_0.gguf.part2of2"])
def test_raw_pieces_are_known_by_name(write: Write, name: str) -> None:
    for content in (GOOD[:-10], DATA):      # the first piece is a cut file, the others begin anywhere
        refused(write(content, name), r"raw piece.*join.*cat m.*> m(\.Q8_0)?\.gguf")
    gguf.File(write(GOOD, name)).close()    # a whole file may be called what it likes


# Damaged headers

def test_truncation_at_every_byte(write: Write) -> None:
    end = gguf.File(write(GOOD)).tensors["c"].offset + 12
    for size in range(end):
        refused(write(GOOD[:size]), "empty|not a GGUF|cut short|more than the file can hold")


def test_truncation_names_the_first_tensor_beyond_the_end(write: Write) -> None:
    with gguf.File(write(GOOD)) as f:
        start = f.tensors["a"].offset
    says = rf"cut short.*tensor 'b' ends at byte {start + 66}, the file has {start + 40} bytes"
    refused(write(GOOD[:start + 40]), says)
    refused(write(GOOD[:start + 100]), rf"tensor 'c' ends at byte {start + 108}")


@pytest.mark.parametrize(("content", "says"), [
    (build({}, [tensor("t", (1,) * 5, 0, 0)], bytes(32)), r"'t' has 5 dimensions \(at most 4\)"),
    (build({}, [string("t") + struct.pack("<I", 10**6)], bytes(99)), "1000000 dimensions"),
    (build({}, [tensor("t", (2**42 + 1, 2**42), 0, 0)], bytes(32)), "no file can hold"),
    (build({}, [tensor("t", (2**63,), 0, 0)], bytes(32)), "no file can hold"),
    (build({}, [tensor("t", (2**42 + 1,), 0, 0)], bytes(32)), "'t' ends at byte .* bytes"),
    (build({}, [tensor("t", (4,), 0, 2**64 - 32)], bytes(32)), "'t' ends at byte"),
    (build({}, [tensor("t", (4,), 0, 8)], bytes(64)), "'t' has offset 8, not a multiple of the alignment 32"),
    (build({}, [tensor("t", (30,), 8, 0)], bytes(64)), "'t' has rows of 30 elements, but Q8_0 comes in blocks of 32"),
    (build({}, [tensor("t", (4,), 0, 0)] * 2, bytes(64)), "two tensors are called 't'"),
    (build({}, [tensor("t", (16,), 0, 0), tensor("u", (4,), 0, 32)], bytes(64)), "'t' and 'u' overlap"),
    (build({}, [tensor(b"\xff", (4,), 0, 0)], bytes(64)), "not UTF-8"),
    (build({}, [tensor("t" * 70000, (4,), 0, 0)], bytes(64)), "length of 70000"),
    (build({}, n_tensors=2**63), "9223372036854775808 tensors"),
    (build({"x": scalar("UINT8", 1)}, n_kv=2**64 - 1), "18446744073709551615 key/values"),
    (build({"x": scalar("UINT8", 1)}, n_kv=2), "cut short|key 1 is empty"),
    (build({"": text("x")}), "key 0 is empty"),
    (build({}, [string("x") + text("a") + string("x") + text("b")], n_kv=2, n_tensors=0), "'x' for the second time"),
    (build({}, [string(b"\xc3") + text("a")], n_kv=1, n_tensors=0), "key 0 is not UTF-8"),
    (build({"x": struct.pack("<I", 13)}), "'x' has value type 13"),
    (build({"x": struct.pack("<IIQ", 9, 77, 1)}), "array of value type 77"),
    (build({"x": struct.pack("<IIQ", 9, 8, 2**60)}), "'x': array of 1152921504606846976 strings"),
    (build({"x": struct.pack("<IIQQ", 9, 8, 1, 2**64 - 1)}), "string 1 of 1 of 'x' claims"),
    (build({"x": struct.pack("<IIQQ", 9, 8, 1, 999)}), "cut short.*string 1 of 1 of 'x' needs bytes"),
    (build({"x": struct.pack("<IIQ", 9, 6, 2**60)}), "'x' claims 4611686018427387904 bytes"),
    (build({"x": struct.pack("<IIQ", 9, 0, 5000)}), "cut short.*'x' needs bytes"),
    (build({"x": struct.pack("<IIQ", 9, 9, 2**40)}), "array of 1099511627776 arrays"),
    (build({"x": struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5 + bytes(99)}), "nests arrays deeper than 4"),
    (build({"x": struct.pack("<IQ", 8, 2**50)}), "'x' claims 1125899906842624 bytes"),
    (build({"general.alignment": scalar("UINT32", 0)}), "general.alignment is 0"),
    (build({"general.alignment": scalar("INT32", -32)}), "general.alignment is -32"),
    (build({"general.alignment": scalar("UINT32", 48)}), "power of two"),
    (build({"general.alignment": scalar("FLOAT32", 32)}), "general.alignment is 32.0"),
    (build({"general.alignment": scalar("BOOL", 1)}), "general.alignment is True"),
    (build({"general.alignment": text("32")}), "general.alignment is '32'"),
    (build({"split.count": scalar("UINT16", 2), "split.no": scalar("UINT16", 2)}), "split.count is 2 and split.no 2"),
    (build({"split.count": scalar("UINT64", 2**60)}), "split.count"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_damaged_headers(write: Write, content: bytes, says: str) -> None:
    refused(write(content), says)


def test_too_many_entries_are_refused_before_they_are_walked(tmp_path: Path) -> None:
    """A sparse file makes absurd counts possible: 300 million empty strings, or arrays, in a file of 4 GB."""
    for item_type in (8, 9):
        path = tmp_path / f"sparse{item_type}.gguf"
        with path.open("wb") as file:
            file.write(build({"x": struct.pack("<IIQ", 9, item_type, 3 * 10**8)}))
            file.truncate(1 << 32)
        t0 = time.process_time()
        refused(path, "300000000 (strings|arrays)")
        assert time.process_time() - t0 < 1


# Split sets

def shard(no: int, count: int, *names: str, **more: bytes) -> bytes:
    kv = {"split.no": scalar("UINT16", no), "split.count": scalar("UINT16", count), **more}
    data = b"".join(bytes([no, i]) * 16 for i in range(len(names)))
    return build(kv, [tensor(name, (32,), 24, 32 * i) for i, name in enumerate(names)], data)


def part(no: int, count: int = 3) -> str:
    return f"big-{no + 1:05d}-of-{count:05d}.gguf"


@pytest.fixture
def split_set(write: Write) -> list[Path]:
    first = {"general.architecture": text("llama"), "split.tensors.count": scalar("INT32", 4)}
    return [write(shard(0, 3, **first), part(0)), write(shard(1, 3, "a", "b"), part(1)),
            write(shard(2, 3, "c", "d"), part(2))]


def test_split_sets_open_from_any_part(split_set: list[Path]) -> None:
    for path in split_set:
        with gguf.File(path) as f:
            assert f.path == path and f.paths == split_set and f.arch == "llama"
            assert f.size == sum(p.stat().st_size for p in split_set)
            assert [(t.name, t.shard, t.data[:2].tolist()) for t in f.tensors.values()] == [
                ("a", 1, [1, 0]), ("b", 1, [1, 1]), ("c", 2, [2, 0]), ("d", 2, [2, 1])]
            assert [t.address for t in f.tensors.values()] == [t.data.ctypes.data for t in f.tensors.values()]


def test_missing_parts_are_named(split_set: list[Path]) -> None:
    split_set[1].unlink()
    refused(split_set[0], f"1 of the 3 parts of the set are missing.*{part(1)}")
    split_set[0].unlink()
    refused(split_set[2], f"2 of the 3 parts.*{part(0)}, {part(1)}")


def test_a_set_of_99999_missing_parts_is_a_short_message(write: Write) -> None:
    path = write(shard(0, 60000), part(0, 60000))
    with pytest.raises(GGUFError, match="and 59979 more") as caught:
        gguf.File(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(("no", "content", "says"), [
    (2, shard(2, 3, "c", "a"), "'a' is also in an earlier part"),
    (2, shard(2, 3, "c"), "hold 3 tensors, 4 are promised"),
    (2, shard(1, 3, "c", "d"), "does not say that it is part 3 of 3"),
    (2, shard(2, 4, "c", "d"), "does not say that it is part 3 of 3"),
    (2, build({}), "does not say that it is part 3 of 3"),
    (1, b"<html>", "web page"),
    (1, shard(1, 3, "a", "b")[:-1], "cut short.*'b'"),
])
def test_wrong_parts(split_set: list[Path], no: int, content: bytes, says: str) -> None:
    split_set[no].write_bytes(content)
    with pytest.raises(GGUFError, match=says) as caught:
        gguf.File(split_set[0])
    assert re.search(r"big-0000\d-of-00003\.gguf", str(caught.value))


def test_a_renamed_part_says_how_it_should_be_called(split_set: list[Path]) -> None:
    refused(split_set[0].rename(split_set[0].with_name("x.gguf")), "name must end in '-00001-of-00003.gguf'")


# Any bytes at all: a typed error or a load in which everything can be touched

def touch(path: Path) -> None:
    try:
        f = gguf.File(path)
    except GGUFError:
        return
    with f:
        for key in f.kv:
            value: Any = f.kv[key]
            assert value is not None and f.kv.kind(key)
        for t in f.tensors.values():
            assert len(t.ne) <= 4 and (not t.known or t.data.shape == (t.nbytes,))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "fuzz.gguf"


SPLIT = shard(0, 1, "a", "b", **KV)
new_bytes = st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << 32)])
mutations = st.lists(st.tuples(st.integers(0, len(GOOD)), new_bytes), max_size=6)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=st.sampled_from([GOOD, SPLIT]), changes=mutations, size=st.integers(0, 2 * len(GOOD)))
def test_any_bytes_load_or_are_refused(scratch: Path, base: bytes, changes: list[tuple[int, bytes]], size: int) -> None:
    content = bytearray(base)
    for at, new in changes:
        content[at:at + len(new)] = new
    scratch.write_bytes(content[:size])
    tracemalloc.start()
    try:
        touch(scratch)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_every_single_byte_may_be_anything(scratch: Path) -> None:
    for at in range(GOOD.index(DATA[:32])):
        for new in (0, 1, 0x7F, 0xFF, GOOD[at] ^ 0x20):
            scratch.write_bytes(GOOD[:at] + bytes([new]) + GOOD[at + 1:])
            touch(scratch)
