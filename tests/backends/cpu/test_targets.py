"""Choosing a lowering, and the instructions in the code for each: also for targets that cannot run here."""
from __future__ import annotations

import re

import llvmlite.binding as llvm
import pytest

from ggraph.backends.cpu import targets
from ggraph.backends.cpu.kernel import kernel, simd, template
from ggraph.errors import BackendError, Error

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@template
def dot(name: str):
    fn = getattr(simd, name)

    def body(p, ith, nth):
        u, s = simd.load_bytes(simd.word(p, 0)), simd.load_bytes(simd.word(p, 1))
        simd.store_i32(simd.word(p, 2), fn(simd.load_i32(simd.word(p, 2)), u, s))
    return body


@template
def lookup():
    table = simd.table(*range(16))

    def body(p, ith, nth):
        simd.store_bytes(simd.word(p, 1), simd.lookup(table(), simd.load_bytes(simd.word(p, 0)) & 15))
    return body


@kernel
def floats(p, ith, nth):
    x = simd.load_f16(simd.word(p, 0))
    simd.store_f16(simd.word(p, 1), simd.fma(x, x, x))


# Per lowering: dot4 | dot4_small | lookup | f16 and fma.
EXPECTED = {
    "avx512vnni": (r"vpdpbusd.*%zmm", r"vpdpbusd.*%zmm", r"vpshufb.*%zmm", r"vcvtph2ps vfmadd vcvtps2ph"),
    "avxvnni": (r"{vex}\tvpdpbusd.*%ymm", r"{vex}\tvpdpbusd.*%ymm", r"vpshufb.*%ymm", r"vcvtph2ps vfmadd vcvtps2ph"),
    "avx2": (r"vpmaddwd.*%ymm", r"vpmaddubsw.*%ymm", r"vpshufb.*%ymm", r"vcvtph2ps vfmadd vcvtps2ph"),
    "neon": (r"sdot\tv", r"sdot\tv", r"tbl\tv", r"fcvtl fmla fcvtn"),
    "generic": (r"pm.*%xmm", r"pm.*%xmm", r"pcmpeqb", r"mulps addps"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_assembly_for_each_target_holds_its_instructions(name: str) -> None:
    for made, instructions in zip((dot("dot4"), dot("dot4_small"), lookup(), floats), EXPECTED[name]):
        assembly = made.assembly(targets.LEAST[name])
        assert all(re.search(instruction, assembly) for instruction in instructions.split()), (made, assembly)
        assert "call" not in assembly and "\tbl\t" not in assembly


def test_the_best_lowering_that_runs_comes_first() -> None:
    names = targets.runnable()
    assert names[-1] == "generic" and targets.host().lowering == names[0]
    assert targets.host().cpu == llvm.get_host_cpu_name()


def test_forcing_a_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGRAPH_CPU", "generic")
    assert targets.current().lowering == "generic"
    absent = next(name for name in targets.LEAST if name not in targets.runnable())
    monkeypatch.setenv("GGRAPH_CPU", absent)
    with pytest.raises(BackendError, match=f"{absent} cannot run on this machine.*generic"):
        targets.current()
    monkeypatch.setenv("GGRAPH_CPU", "mmx")
    with pytest.raises(Error, match="mmx"):
        targets.current()
