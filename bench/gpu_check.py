"""All that a machine with a GPU can tell in under ten minutes: does everything compile, is it right, how fast is it.

In: a GPU with its driver, CUDA 13 and CuPy 14 (no network; `--wheels DIR` installs what is missing from files), or `--emulator`,
which goes through the same steps with tiny models on the host. Out: a report on standard output, a JSON file; exit code 1 if
something was wrong. Each stage has a share of the time, and what it leaves goes to those after it; what there was no time for is
said.

    python bench/gpu_check.py --wheels wheels --models models
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Stage -> its share of the time, in the order in which they run.
SHARES = {"doctor": 0.03, "compile": 0.15, "copy": 0.02, "ops": 0.2, "goldens": 0.2, "speed": 0.4}


class Clock:
    """Until when the stage at hand may take."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds
        self.left = dict(SHARES)
        self.stage_end = self.end

    def begin(self, stage: str) -> None:
        """A share of what is left, so that what earlier stages did not need is not lost."""
        now = time.monotonic()
        self.stage_end = now + max(0.0, self.end - now) * self.left[stage] / sum(self.left.values())
        del self.left[stage]

    def up(self) -> bool:
        return time.monotonic() > self.stage_end


def arguments(args: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--wheels", type=Path, metavar="DIR", help="install the wheels in this folder first, into a folder of their own")
    p.add_argument("--models", type=Path, metavar="DIR", help="where model files are, or are written (default: a temporary folder)")
    p.add_argument("--minutes", type=float, default=9.0, metavar="N", help="all stages together (default: 9)")
    p.add_argument("--stages", default=",".join(SHARES), metavar="LIST", help=f"of these: {', '.join(SHARES)} (default: all)")
    p.add_argument("--only", default="", metavar="REGEX", help="kernels, ops, goldens and models whose name has this alone")
    p.add_argument("--output", type=Path, metavar="FILE", help="the JSON file (default: bench/results/DATE-gpu-NAME.json)")
    p.add_argument("--emulator", action="store_true", help="a dry run on the host, with tiny models")
    return p.parse_args(args)


def install(folder: Path) -> None:
    """Install all wheels of a folder beside the environment, and start over with them on the path."""
    target = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    wheels = [str(w) for w in sorted(folder.glob("*.whl"))]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target), *wheels]
    subprocess.run(command, check=True)
    at = sys.argv.index("--wheels") if "--wheels" in sys.argv else None
    rest = sys.argv[:at] + sys.argv[at + 2:] if at is not None else [a for a in sys.argv if not a.startswith("--wheels=")]
    path = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
    os.execve(sys.executable, [sys.executable, *rest], {**os.environ, "PYTHONPATH": path})


def main(args: list[str] | None = None) -> int:
    o = arguments(args)
    if o.wheels:
        install(o.wheels)
    sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
    os.environ["GGRAPH_BACKEND"] = "cuda"
    os.environ["GGRAPH_CUDA_DEVICE"] = "emulator" if o.emulator else "gpu"
    import gpu_stages
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report: dict[str, Any] = {"date": now, "emulator": o.emulator, "stages": {}}
    clock, failed = Clock(60 * o.minutes), []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        check = gpu_stages.Check(clock, o.emulator, o.only, o.models or Path(temporary))
        for stage in [s for s in SHARES if s in o.stages.split(",")]:
            clock.begin(stage)
            done = run(getattr(check, stage))
            report["stages"][stage] = done
            failed += [stage] if done["wrong"] else []
        report["device"] = check.device_name
    path = o.output or ROOT / "bench/results" / f"{report['date'][:10]}-gpu-{report['device'].replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{'wrong: ' + ', '.join(failed) if failed else 'all is well'}; {path}", flush=True)
    return 1 if failed else 0


def run(stage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a stage found, with its time; what it raises is one more wrong thing."""
    print(f"\n== {stage.__name__}", flush=True)
    start = time.monotonic()
    try:
        found = stage()
    except Exception as e:
        traceback.print_exc()
        found = {"wrong": [f"{type(e).__name__}: {e}"]}
    found["seconds"] = round(time.monotonic() - start, 1)
    for line in found["wrong"][:20]:
        print("  wrong:", line)
    print(f"  {found['seconds']} s{', out of time' if found.get('left_out') else ''}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
