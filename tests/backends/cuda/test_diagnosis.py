"""Machines that are not at hand: what is found on them, in which words, and what mends it."""
from __future__ import annotations

import ctypes
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ggraph.backends import cuda
from ggraph.backends.cuda import diagnosis, driver, nvrtc
from ggraph.backends.cuda.diagnosis import Facts, check, judge, problems
from ggraph.errors import BackendError

H200 = driver.Gpu("NVIDIA H200", (9, 0), 140 << 30, 141 << 30)
SOUND = {"wheels": {"cupy-cuda13x": "14.0.1"}, "driver": (13, 0), "gpus": [H200], "nvrtc": (13, 0)}


def facts(**other: Any) -> Facts:
    return Facts(**{**SOUND, **other})


CASES: dict[str, tuple[Facts, str, str]] = {
    "no driver": (facts(driver=None, driver_error="there is no NVIDIA driver (libcuda.so.1 cannot be loaded)", gpus=[]),
                  "there is no NVIDIA driver", "install NVIDIA's driver"),
    "a driver that fails": (facts(driver_error="the NVIDIA driver cannot start: unknown error", gpus=[]), "cannot start", "reboot"),
    "no GPU": (facts(gpus=[]), "finds no CUDA device", "nvidia-smi"),
    "no such GPU": (facts(number=2), "there is no CUDA device 2; 1 are found", "ggraph-doctor"),
    "old GPU": (facts(gpus=[H200._replace(name="Tesla P100", capability=(6, 0))]), "compute capability 6.0", "GGRAPH_BACKEND=cpu"),
    "old driver": (facts(driver=(12, 4)), "runs CUDA 12.4, cupy-cuda13x is for CUDA 13",
                   "pip install 'ggraph-runtime[cuda12]' after pip uninstall -y cupy-cuda13x"),
    "very old driver": (facts(driver=(11, 2)), "runs CUDA 11.2", "install a newer driver"),
    "no CuPy": (facts(wheels={}), "CuPy is not installed", "pip install 'ggraph-runtime[cuda13]'"),
    "no CuPy, driver for CUDA 12": (facts(wheels={}, driver=(12, 8)), "not installed", "pip install 'ggraph-runtime[cuda12]'"),
    "two wheels": (facts(wheels={"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.0.1"}),
                   "2 CuPy wheels are installed at once (cupy-cuda12x, cupy-cuda13x)",
                   "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'ggraph-runtime[cuda13]'"),
    "broken CuPy": (facts(cupy_error="libcudart.so.13: cannot open"), "cannot be imported: libcudart.so.13",
                    "pip uninstall -y cupy-cuda13x"),
    "a GPU that CUDA 13 has left out": (facts(gpus=[H200._replace(name="Tesla V100", capability=(7, 0))]),
                                        "cupy-cuda13x is for CUDA 13, which knows Tesla V100 no more (compute capability 7.0)",
                                        "pip uninstall -y cupy-cuda13x && pip install 'ggraph-runtime[cuda12]'"),
    "an old GPU without CuPy": (facts(wheels={}, gpus=[H200._replace(capability=(7, 0))]), "CuPy is not installed",
                                "pip install 'ggraph-runtime[cuda12]'"),
    "no NVRTC": (facts(nvrtc=None, nvrtc_error="x"), "NVRTC is not found", "pip install 'ggraph-runtime[cuda13]'"),
    "half of NVRTC": (facts(nvrtc=(12, 9), nvrtc_error="failed to open libnvrtc-builtins.so.12.9"), "NVRTC 12.9 compiles nothing",
                      "nvidia-cuda-nvrtc-cu12"),
}


def test_what_nobody_set_need_not_be_unset() -> None:
    found, _, _ = CASES["no driver"]
    assert "GGRAPH_BACKEND" not in next(problems(found)).remedy
    assert "unset GGRAPH_BACKEND" in next(problems(replace(found, wanted=True))).remedy


@pytest.mark.parametrize("name", CASES)
def test_each_problem_is_a_sentence_with_a_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, sentence, remedy = CASES[name]
    first = next(problems(found))
    assert sentence in first.value and remedy in first.remedy and first.state == "broken"
    monkeypatch.setattr(diagnosis, "gather", lambda number: found)
    with pytest.raises(BackendError) as e:
        check()
    assert str(e.value) == f"{first.value}; {first.remedy}"


def test_a_sound_machine() -> None:
    assert not list(problems(facts()))
    found = {f.name: f for f in judge(facts())}
    assert {f.state for f in found.values()} == {"ok"}
    assert found["device"].value == "CUDA0: NVIDIA H200, compute capability 9.0, 140.0 of 141.0 GiB free"
    assert found["CuPy"].value == "cupy-cuda13x 14.0.1" and found["driver"].value == "runs CUDA 13.0"
    assert "need none" in found["headers"].value


def test_without_a_gpu_nothing_is_broken_unless_it_is_asked_for() -> None:
    nothing: dict[str, Any] = {"wheels": {}, "driver": None, "driver_error": "no driver", "gpus": []}
    assert {f.state for f in judge(facts(**nothing))} == {"ok", "missing"}
    assert "broken" in {f.state for f in judge(facts(**nothing, wanted=True))}
    assert "broken" in {f.state for f in judge(facts(**{**nothing, "wheels": {"cupy-cuda12x": "13"}}))}


class FakeDriver:
    """libcuda, as far as `driver` calls it: one device, or a status to fail with."""

    def __init__(self, status: int = 0, n: int = 1):
        self.status, self.n = status, n

    def cuDriverGetVersion(self, number: Any) -> int:
        number._obj.value = 12040
        return 0

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, number: Any) -> int:
        number._obj.value = self.n
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDeviceGetName(self, name: Any, n: int, device: Any) -> int:
        name.value = b"GPU %d" % device.value
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = {driver.MAJOR: 8, driver.MINOR: 9}[attribute]
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value, total._obj.value = 5, 7
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"out of order"
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


def test_the_driver_is_asked() -> None:
    assert driver.version(FakeDriver()) == (12, 4)
    assert driver.gpus(FakeDriver(n=2)) == [driver.Gpu(f"GPU {i}", (8, 9), 5, 7) for i in range(2)]
    assert driver.gpus(FakeDriver(driver.NO_DEVICE)) == []
    with pytest.raises(BackendError, match="the NVIDIA driver cannot start: out of order"):
        driver.gpus(FakeDriver(999))


def test_what_is_here_is_gathered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a driver, two wheels and no compiler in place of this machine's own."""
    for name in ("cupy-cuda12x", "cupy_cuda13x"):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    monkeypatch.setattr(metadata, "distributions", lambda: metadata.Distribution.discover(path=[str(tmp_path)]))
    monkeypatch.setattr(driver, "library", FakeDriver)
    monkeypatch.setattr(nvrtc, "candidates", lambda: [])
    nvrtc.library.cache_clear()
    try:
        found = diagnosis.gather()
    finally:
        nvrtc.library.cache_clear()
    assert found.wheels == {"cupy-cuda12x": "1.0", "cupy-cuda13x": "1.0"} and found.driver == (12, 4) and len(found.gpus) == 1
    assert [p.name for p in problems(found)] == ["CuPy", "NVRTC"]


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise OSError(name)
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(BackendError, match="there is no NVIDIA driver"):
        driver.library()


def test_opening_a_gpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGRAPH_CUDA_DEVICE", raising=False)
    monkeypatch.setattr(diagnosis, "gather", lambda number: CASES["old driver"][0])
    with pytest.raises(BackendError, match="the NVIDIA driver is too old"):
        cuda.open()
