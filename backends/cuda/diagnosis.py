"""What a GPU needs, looked at in order: CuPy, the driver, a device, NVRTC. Each problem with the command that mends it.

In: nothing. Out: `Finding`s for a report, and `check`, which raises the first problem before a device is opened. `Facts` are
gathered once and judged apart from that, so that a machine without a GPU can be asked about others.
"""
from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from ggraph import env
from ggraph.backend import Finding
from ggraph.errors import BackendError

from . import driver as cuda_driver
from . import nvrtc

WHEEL = re.compile(r"cupy(?:-cuda(\d+)\w*)?", re.IGNORECASE)
INSTALL = "pip install 'ggraph-runtime[cuda13]'"
INSTALL_12 = "pip install 'ggraph-runtime[cuda12]'"
OLDEST = (7, 0)                                     # compute capability
OLDEST_13 = (7, 5)                                  # that CUDA 13 compiles for


@dataclass
class Facts:
    """What is on this machine. Errors are texts, empty where there are none."""
    wheels: dict[str, str] = field(default_factory=dict)            # CuPy distributions with their versions
    cupy_error: str = ""                                            # of importing it
    driver: tuple[int, int] | None = None                           # the newest CUDA that it runs
    driver_error: str = ""
    gpus: list[cuda_driver.Gpu] = field(default_factory=list)
    nvrtc: tuple[int, int] | None = None
    nvrtc_error: str = ""                                           # of compiling for the first device
    headers: str = ""                                               # folder
    wanted: bool = False                                            # GGRAPH_BACKEND=cuda
    number: int = 0                                                 # the device that is asked for

    @property
    def gpu(self) -> cuda_driver.Gpu | None:
        return self.gpus[self.number] if self.number < len(self.gpus) else None


def gather(number: int = 0) -> Facts:
    facts = Facts(wheels(), wanted=env.get("GGRAPH_BACKEND") == "cuda", headers=headers(), number=number)
    try:
        lib = cuda_driver.library()
        facts.driver = cuda_driver.version(lib)
        facts.gpus = cuda_driver.gpus(lib)
    except BackendError as e:
        facts.driver_error = str(e)
    if len(facts.wheels) == 1:
        facts.cupy_error = _import_error()
    try:
        facts.nvrtc = nvrtc.version()
        major, minor = facts.gpu.capability if facts.gpu else (9, 0)
        nvrtc.trial(f"sm_{major}{minor}")
    except BackendError as e:
        facts.nvrtc_error = str(e)
    return facts


def wheels() -> dict[str, str]:
    """Installed CuPy distributions: name -> version."""
    named = ((d.metadata["Name"] or "", d.version) for d in metadata.distributions())
    return {name.lower(): version for name, version in named if WHEEL.fullmatch(name)}


def headers() -> str:
    """The first folder that has CUDA's headers; ggraph's own kernels need none."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [path for folder in sys.path if folder for path in sorted(Path(folder).glob("nvidia/*/include"))]
    folders += [Path(home, "include") for home in homes if home]
    return next((str(path) for path in folders if (path / "cuda_fp16.h").is_file()), "")


def _import_error() -> str:
    try:
        import cupy  # noqa: F401
    except Exception as e:
        return str(e).strip().split("\n")[0] or type(e).__name__
    return ""


def problems(facts: Facts) -> Iterator[Finding]:
    """What keeps a GPU from being used, the first thing to mend first."""
    yield from _driver_problems(facts)
    yield from _wheel_problems(facts)
    if facts.nvrtc is None:
        yield Finding("cuda", "NVRTC", "CUDA's compiler NVRTC is not found", "broken", _install(facts))
    elif facts.nvrtc_error:
        yield Finding("cuda", "NVRTC", f"NVRTC {_dotted(facts.nvrtc)} compiles nothing: {facts.nvrtc_error}", "broken",
                      f"pip install --upgrade --force-reinstall nvidia-cuda-nvrtc{'-cu12' if facts.nvrtc[0] == 12 else ''}")


def _driver_problems(facts: Facts) -> Iterator[Finding]:
    if facts.driver is None:
        yield Finding("cuda", "driver", facts.driver_error, "broken",
                      "install NVIDIA's driver (Debian, Ubuntu: apt install nvidia-driver)"
                      + (", or unset GGRAPH_BACKEND" if facts.wanted else ""))
    elif facts.driver_error:
        yield Finding("cuda", "driver", facts.driver_error, "broken",
                      "nvidia-smi tells more; after an update of the driver: reboot")
    elif not facts.gpus:
        yield Finding("cuda", "device", "the driver finds no CUDA device", "broken",
                      "nvidia-smi tells more; in a container: --gpus all")
    elif facts.gpu is None:
        yield Finding("cuda", "device", f"there is no CUDA device {facts.number}; {len(facts.gpus)} are found", "broken",
                      "name one of those that ggraph-doctor lists")
    elif facts.gpu.capability < OLDEST:
        yield Finding("cuda", "device", f"{facts.gpu.name} is too old: compute capability {_dotted(facts.gpu.capability)}, "
                      f"ggraph needs {_dotted(OLDEST)}", "broken", "export GGRAPH_BACKEND=cpu")


def _wheel_problems(facts: Facts) -> Iterator[Finding]:
    if not facts.wheels:
        yield Finding("cuda", "CuPy", "CuPy is not installed", "broken", _install(facts))
        return
    if len(facts.wheels) > 1:
        yield Finding("cuda", "CuPy", f"{len(facts.wheels)} CuPy wheels are installed at once ({', '.join(sorted(facts.wheels))}), "
                      "which overwrite one another", "broken",
                      f"pip uninstall -y {' '.join(sorted(facts.wheels))} && {_install(facts)}")
        return
    made_for = _made_for(facts)
    if facts.driver is not None and made_for > facts.driver[0]:
        other = f", or {INSTALL_12}" if facts.driver[0] == 12 else ""
        wheel = next(iter(facts.wheels))
        yield Finding("cuda", "driver", f"the NVIDIA driver is too old: it runs CUDA {_dotted(facts.driver)}, {wheel} is for CUDA "
                      f"{made_for}", "broken", "install a newer driver" + (other and f"{other} after pip uninstall -y {wheel}"))
    elif made_for >= 13 and facts.gpu is not None and facts.gpu.capability < OLDEST_13:
        wheel = next(iter(facts.wheels))
        yield Finding("cuda", "CuPy", f"{wheel} is for CUDA {made_for}, which knows {facts.gpu.name} no more (compute capability "
                      f"{_dotted(facts.gpu.capability)})", "broken", f"pip uninstall -y {wheel} && {_install(facts)}")
    elif facts.cupy_error:
        yield Finding("cuda", "CuPy", f"CuPy cannot be imported: {facts.cupy_error}", "broken",
                      f"pip uninstall -y {next(iter(facts.wheels))} && {_install(facts)}")


def _made_for(facts: Facts) -> int:
    """CUDA's major version of the only wheel; 0 where its name does not tell."""
    found = WHEEL.fullmatch(next(iter(facts.wheels)))
    return int(found[1]) if found and found[1] else 0


def _install(facts: Facts) -> str:
    old = facts.gpu is not None and facts.gpu.capability < OLDEST_13
    return INSTALL_12 if old or (facts.driver is not None and facts.driver[0] == 12) else INSTALL


def judge(facts: Facts) -> Iterator[Finding]:
    """All of it for a report. Without CuPy, and without GGRAPH_BACKEND=cuda, nothing here uses a GPU: then nothing is broken."""
    found = list(problems(facts))
    used = facts.wanted or bool(facts.wheels)
    wrong = {f.name for f in found}
    for name, value in _good(facts):
        if name not in wrong:
            yield Finding("cuda", name, value)
    for f in found:
        yield f if used else f._replace(state="missing")
    yield Finding("cuda", "headers", facts.headers or "none are found, and ggraph's kernels need none (CuPy's own do)")


def _good(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.driver is not None:
        yield "driver", f"runs CUDA {_dotted(facts.driver)}"
    for i, gpu in enumerate(facts.gpus):
        yield "device", (f"CUDA{i}: {gpu.name}, compute capability {_dotted(gpu.capability)}, "
                         f"{gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB free")
    if facts.wheels:
        yield "CuPy", ", ".join(f"{name} {version}" for name, version in facts.wheels.items())
    if facts.nvrtc is not None:
        yield "NVRTC", _dotted(facts.nvrtc)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def diagnose() -> Iterator[Finding]:
    yield from judge(gather())


def check(number: int = 0) -> None:
    """`BackendError` with the first problem, and what mends it."""
    for problem in problems(gather(number)):
        raise BackendError(f"{problem.value}; {problem.remedy}")
