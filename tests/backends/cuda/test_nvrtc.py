"""Every kernel compiles for a GPU. NVRTC needs none; where it is not installed the tests are skipped."""
from __future__ import annotations

import struct
from typing import Any

import pytest

from ggraph.backends.cuda import nvrtc, source
from ggraph.backends.cuda.cupy_device import STATIC_SHARED
from ggraph.backends.cuda.ops_attention import TILE_WIDTHS, WIDTHS
from ggraph.errors import BackendError
from tests.backends.optable import WEIGHTS

PLAIN = {"F32", "F16", "BF16"}
QUANTIZED = [t.name for t in WEIGHTS if t.name not in PLAIN]
PACKED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"]
CACHES = ["Plain<0>", "Plain<1>", "Plain<30>", *PACKED]
TYPES = {"unpack": QUANTIZED, "pack": PACKED, "matfloat": sorted(PLAIN)}
MIXED = (("TYPE_0", "Q4_K"), ("TYPE_1", "Q5_K"), ("TYPE_2", "Q6_K"))                # as in files of mixed types
QUICK = {"1", "4", "Q4_K", "F16", "Q8_0", "Plain<1>"}


def variants(file: str) -> list[source.Defines]:
    if file in ("matvec", "gated", "experts"):
        return [*((("TYPE_0", t),) for t in QUANTIZED), MIXED]
    if file in ("attention", "attention_tile", "heads"):
        widths = {"attention": WIDTHS, "attention_tile": TILE_WIDTHS}.get(file)
        return [(("K_TYPE", t), ("V_TYPE", t), *((("WIDTH", str(w)),) if widths else ())) for t in CACHES for w in widths or (0,)]
    if file in ("delta", "recurrent"):
        return [(("LANES", n),) for n in "1248"]
    if file == "matmul":
        return [*((("TYPE", t),) for t in QUANTIZED), (("TYPE", "Q4_K"), ("DP4A", "1"))]
    return [(("TYPE", t),) for t in TYPES[file]] if file in TYPES else [()]


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        nvrtc.library()
    except BackendError:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12")


TARGETS: list[Any] = [pytest.param("sm_80", marks=pytest.mark.slow), pytest.param("sm_89", marks=pytest.mark.slow), "sm_90"]
FILES: list[Any] = [
    pytest.param(file, d, id="-".join([file, *(v for _, v in d)]),
                 marks=[] if all(v in QUICK for _, v in d) else [pytest.mark.slow])
    for file in source.files() for d in variants(file)]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("file", "defines"), FILES)
def test_kernels_compile(file: str, defines: source.Defines, target: str) -> None:
    cubin = nvrtc.compiled(file, defines, target)
    assert cubin[:4] == b"\x7fELF"
    if "DYNAMIC_SHARED" in source.source(file):
        assert max(n for name, n in sections(cubin) if name.startswith(".nv.shared.")) <= RESERVED + STATIC_SHARED


RESERVED = 1024                         # bytes of shared memory of each block that are CUDA's own


def sections(elf: bytes) -> list[tuple[str, int]]:
    """(name, bytes) of each section of an ELF file of 64 bits."""
    start, = struct.unpack_from("<Q", elf, 0x28)
    n, of_names = struct.unpack_from("<HH", elf, 0x3c)
    rows = [struct.unpack_from("<IIQQQQ", elf, start + 64 * i) for i in range(n)]
    names = rows[of_names][4]
    return [(elf[names + row[0]:elf.index(b"\0", names + row[0])].decode(), row[5]) for row in rows]
