"""ggraph-check: is a GGUF file healthy? Scales, types, tensors, tokenizer, template, context; in seconds, for people and for CI.

In: a file. Out: findings, each with the tensor and block or the key it is about; exit code 1 if there is an error or a
warning. `check` is the same for programs. With --repair what can be mended safely goes into another file.
"""
from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

import ggraph
from ggraph import env, gguf, hub, writer

from . import _metadata, _mixes
from ._console import Bars
from ._finding import ERROR, NOTE, WARNING, Finding
from ._options import Command, group, options
from ._scales import Scan, scan

LABEL = "general.file_type"
HALF = 0.5
SHOWN = 4               # notes about scales, in the text
_out = group("Output")

OUTPUT = (
    _out("--repair", type=click.Path(dir_okay=False), metavar="FILE",
         help="Write a mended copy: a right label, no second copy of a tensor, the token that ends an answer."),
    _out("--notes/--no-notes", default=True, help="Show what is only good to know.  [default: on]"),
    _out("--json", "as_json", is_flag=True, help="The result as JSON on standard output."),
    _out("-q", "--quiet", is_flag=True, help="No progress on standard error."),
)


@dataclass
class Health:
    """What `check` found. `types`: bytes by type. `ok`: no errors and no warnings."""
    path: str
    nbytes: int = 0
    n_tensors: int = 0
    label: str = ""
    types: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(f.severity == NOTE for f in self.findings)

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def check(path: str | Path, progress: Any = None) -> Health:
    """Look at everything. Raises nothing for a bad file: that is a finding. `progress`: called with (what, done, total)."""
    start = time.perf_counter()
    health = Health(str(path))
    faults: list[gguf.Fault] = []
    try:
        with gguf.File(path, faults) as file:
            health.findings = list(_look(file, faults, health, progress))
    except ggraph.GGUFError as e:
        health.findings.append(Finding(ERROR, "file", str(e)))
    health.findings.sort(key=lambda f: (ERROR, WARNING, NOTE).index(f.severity))
    health.seconds = time.perf_counter() - start
    return health


def _look(file: gguf.File, faults: list[gguf.Fault], health: Health, progress: Any) -> Iterator[Finding]:
    health.nbytes, health.n_tensors = file.size, len(file.tensors)
    known = [t for t in file.tensors.values() if t.known]
    for tensor in known:
        health.types[tensor.type.name] = health.types.get(tensor.type.name, 0) + tensor.nbytes
    yield from _faults(file, faults)
    yield from (Finding(ERROR, "type", f"tensor {t.name!r} has type {t.type_id}, which ggraph does not know", t.name)
                for t in file.tensors.values() if not t.known)
    yield from _tensors(file)
    if "general.architecture" in file.kv:
        yield from _label(file, known, health)
        yield from _metadata.positions(file)
        yield from _metadata.tokenizer(file)
    for i, tensor in enumerate(known):
        yield from _scales(tensor, scan(tensor))
        if progress:
            progress("scales", i + 1, len(known))


def _faults(file: gguf.File, faults: Iterable[gguf.Fault]) -> Iterator[Finding]:
    twins = {t.name for t in file.twice if t.known and file.tensors[t.name].ne == t.ne and file.tensors[t.name].type == t.type
             and np.array_equal(file.tensors[t.name].data, t.data)}
    for name, message in faults:
        same = name in twins and message.startswith("two")
        yield Finding(ERROR, "tensor", message + (" (both are the same)" if same else ""), name, mend={} if same else None)


def _tensors(file: gguf.File) -> Iterator[Finding]:
    """Missing, misshapen and unknown ones."""
    try:
        found = ggraph.audit(file)
    except ggraph.Error as e:
        yield Finding(ERROR, "architecture", str(e), key="general.architecture")
        return
    for name, message in found:
        yield Finding(ERROR, "tensor", message, name)


def _label(file: gguf.File, tensors: list[gguf.TensorInfo], health: Health) -> Iterator[Finding]:
    """Does general.file_type say what the matrices are?

    Embeddings and output are left out, since everyone treats them in his own way. The label is wrong if less than half of
    the rest has the type that the label's mix gives it; single tensors of another type are only told.
    """
    said = file.kv.get(LABEL)
    mix = _mixes.BY_ID.get(said) if isinstance(said, int) else None
    health.label = mix.name if mix else "" if said is None else str(said)
    if said is None:
        yield Finding(NOTE, "label", f"{LABEL} is missing: the file does not say its type", key=LABEL)
        return
    if mix is None:
        yield Finding(WARNING, "label", f"{LABEL} is {said!r}, which names no type", key=LABEL)
        return
    matrices = [t for t in tensors if _mixes.quantizes(t) and t.name != "output.weight" and t.name not in _mixes.EMBEDDINGS]
    total = sum(t.n_elements for t in matrices)
    odd = _unlike(mix, tensors, matrices, file)
    n_odd = sum(t.n_elements for t in odd)
    if not odd or not total:
        return
    which = Counter[str]()
    for tensor in odd:
        which[tensor.type.name] += 1
    listed = ", ".join(f"{n} x {name}" for name, n in which.most_common())
    message = (f"{100 * n_odd / total:.1f}% of the layers' weights are not what {mix.name} gives them ({listed}; "
               f"first {odd[0].name})")
    if n_odd <= HALF * total:
        yield Finding(NOTE, "label", message, odd[0].name, key=LABEL)
        return
    better = [m for m in _mixes.MIXES.values() if not _unlike(m, tensors, matrices, file)]
    right = f": it is {better[0].name}" if better else ""
    yield Finding(ERROR, "label", f"the label {mix.name} is wrong{right}; {message}", odd[0].name, key=LABEL,
                  mend={LABEL: ("UINT32", better[0].id)} if better else None)


def _unlike(mix: _mixes.Mix, tensors: list[gguf.TensorInfo], matrices: list[gguf.TensorInfo],
            file: gguf.File) -> list[gguf.TensorInfo]:
    """The matrices whose type this mix gives neither with nor without an importance matrix."""
    sizes = _mixes.Sizes.read(file.kv)
    ways = [_mixes.choose(mix, tensors, sizes, importance=importance) for importance in (False, True)]
    return [t for t in matrices if all(way[t.name] != t.type for way in ways)]


def _scales(tensor: gguf.TensorInfo, found: Scan) -> Iterator[Finding]:
    block, row = tensor.type.block, max(tensor.ne[0] // tensor.type.block, 1)
    for (name, kind), n in found.n.items():
        first = found.first[name, kind]
        where = f"block {first} (row {first // row}, element {first % row * block})"
        more = f", and {n - 1} more" if n > 1 else ""
        label = "value" if name == "value" else f"scale {name}"
        message = f"{tensor.name} ({tensor.type}): {kind} {label} in {where}{more}"
        if kind in ("NaN", "infinite"):
            yield Finding(ERROR, "scale", message, tensor.name, first)
        elif kind == "zero" and n == found.n_blocks and name != "m":
            yield Finding(WARNING, "scale", f"{tensor.name} ({tensor.type}): all {n} blocks have {label} zero", tensor.name, first)
        elif name == "d":
            yield Finding(NOTE, "scale", f"{message} of {found.n_blocks}", tensor.name, first)


def repair(path: str | Path, target: str | Path, health: Health | None = None) -> list[Finding]:
    """Write what can be mended safely into `target`; the findings that are gone there. Nothing is written if there are none."""
    mended = [f for f in (health or check(path)).findings if f.mend is not None]
    if not mended:
        return []
    with gguf.File(path, []) as file:
        kv = writer.raw_kv(file)
        for finding in mended:
            kv |= {key: writer.encode(kind, value) for key, (kind, value) in (finding.mend or {}).items()}
        if any(len(t.data) < t.nbytes for t in file.tensors.values()):
            raise ggraph.GGUFError(f"{path} is cut short: that cannot be mended; download it again")
        writer.copy(file.tensors.values(), kv, target)
    return mended


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("file")
@options(OUTPUT)
@click.version_option(ggraph.__version__)
@click.pass_context
def main(ctx: click.Context, /, file: str, **o: Any) -> None:
    """Check the health of FILE, a GGUF file or any part of a split set.

    Exit code: 0 if there is nothing worse than a note, else 1; 2 for a wrong command line.
    """
    env.set_quiet(o["quiet"])
    path = hub.resolve(file)
    with Bars(o["quiet"]) as bars:
        health = check(path, bars)
    mended = repair(path, o["repair"], health) if o["repair"] else []
    if o["as_json"]:
        click.echo(json.dumps({**health.json(), "mended": [f.message for f in mended]}, indent=1))
    else:
        _print(health, o["notes"])
        if o["repair"]:
            click.echo(f"mended {len(mended)} findings in {o['repair']}" if mended else "nothing that could be mended safely")
    if not health.ok:
        ctx.exit(1)


def _print(health: Health, notes: bool) -> None:
    scales = [f for f in health.findings if f.what == "scale" and f.severity == NOTE]
    rest = scales[SHOWN:]
    for f in health.findings:
        if (notes or f.severity != NOTE) and f not in rest:
            click.echo(f"{f.severity:8}{f.what:13}{f.message}")
    if notes and rest:
        click.echo(f"{NOTE:8}{'scale':13}and the like in {len({f.tensor for f in rest})} more tensors: --json has them all")
    counts = Counter(f.severity for f in health.findings)
    told = ", ".join(f"{counts[kind]} {kind}s" for kind in (ERROR, WARNING, NOTE))
    click.echo(f"{Path(health.path).name}: {'healthy' if health.ok else 'NOT healthy'}; {told}; {health.label or 'no label'}, "
               f"{health.n_tensors} tensors, {health.nbytes / 2**20:.1f} MiB in {health.seconds:.1f} s")


if __name__ == "__main__":
    main()
