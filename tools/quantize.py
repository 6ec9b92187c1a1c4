"""ggraph-quantize: write a model with other tensor types, each chosen as llama.cpp's mix of that name chooses it.

In: a GGUF file of any types, or any part of a split set. Out: a new file, whole or not at all, and a summary of how many bytes have
which type. `quantize` is the same for programs, `plan` says what it would do.
"""
from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import ggraph
from ggraph import dtypes, env, gguf, hub, quants, writer

from . import _imatrix, _mixes
from ._console import Bars, size
from ._input import read_text
from ._options import Command, IntRange, group, options, overrides

KINDS = {int: "UINT32", float: "FLOAT32", bool: "BOOL", str: "STRING"}     # of --override-kv, as llama.cpp writes them
TASK = 1 << 19              # elements that one thread converts at a time
_types, _how, _out = group("Types"), group("How"), group("Output")


def _type(ctx: click.Context, param: click.Parameter, value: str | None) -> dtypes.DType | None:
    return None if value is None else _known(value)


def _patterns(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[tuple[str, dtypes.DType]]:
    found = []
    for value in values:
        pattern, _, name = value.rpartition("=")
        try:
            re.compile(pattern)
        except re.error as e:
            raise click.BadParameter(f"{pattern!r} is no regular expression: {e}") from None
        if not pattern:
            raise click.BadParameter(f"{value!r} is not PATTERN=TYPE, as in ffn_down=q6_k")
        found.append((pattern, _known(name)))
    return found


def _pattern_file(ctx: click.Context, param: click.Parameter, path: str | None) -> list[tuple[str, dtypes.DType]]:
    return _patterns(ctx, param, read_text(path).split()) if path else []


def _known(name: str) -> dtypes.DType:
    known = {t.name: t for t in quants.QUANTIZABLE}
    if name.upper() not in known:
        raise click.BadParameter(f"{name!r} is no type that can be written; there are {', '.join(known)}")
    return known[name.upper()]


TYPES = (
    _types("tensor_types", "--tensor-type", multiple=True, callback=_patterns, metavar="PATTERN=TYPE",
           help="The type of tensors whose names have this regular expression in them; the first that fits. May be repeated."),
    _types("more_types", "--tensor-type-file", callback=_pattern_file, type=click.Path(exists=True, dir_okay=False), metavar="FILE",
           help="A file with such PATTERN=TYPE, separated by spaces or newlines."),
    _types("output", "--output-tensor-type", callback=_type, metavar="TYPE", help="The type of output.weight."),
    _types("token_embedding", "--token-embedding-type", callback=_type, metavar="TYPE", help="The type of token_embd.weight."),
    _types("leave_output", "--leave-output-tensor", is_flag=True, help="Leave output.weight as it is."),
    _types("--pure", is_flag=True, help="One type for all matrices instead of the mix."),
)
HOW = (
    _how("--imatrix", multiple=True, type=click.Path(exists=True, dir_okay=False), metavar="FILE",
         help="An importance matrix (ggraph-imatrix makes one). Several are summed up."),
    _how("include", "--include-weights", multiple=True, metavar="TEXT",
         help="Take importance for tensors with TEXT in their names only. May be repeated."),
    _how("exclude", "--exclude-weights", multiple=True, metavar="TEXT",
         help="Take no importance for tensors with TEXT in their names. May be repeated."),
    _how("kv", "--override-kv", multiple=True, callback=overrides, metavar="KEY=TYPE:VALUE",
         help="Write this key/value; types int, float, bool, str. Several: repeat, or join by commas."),
    _how("--allow-requantize", is_flag=True, help="Also from quantized types: loses more than from F16 or F32."),
    _how("--keep-split", is_flag=True, help="As many parts as the input has; the output names their prefix."),
    _how("--dry-run", is_flag=True, help="Only say what each tensor would become."),
    _how("n_threads", "-t", "--threads", type=IntRange(min=1), metavar="N", help="Threads.  [default: all cores]"),
)
OUTPUT = (
    _out("--json", "as_json", is_flag=True, help="The result as JSON on standard output."),
    _out("-q", "--quiet", is_flag=True, help="No progress on standard error."),
)


@dataclass(frozen=True)
class Row:
    """What becomes of one tensor."""
    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    nbytes_before: int
    nbytes_after: int


@dataclass
class Result:
    """`types`: bytes by type in the new file. `without_importance`: tensors that are not in the importance matrix, or that need
    one in a dry run without. `displaced`: those whose rows are no whole blocks of the mix's type, and so have another."""
    paths: list[str]
    mix: str
    rows: list[Row]
    types: dict[str, int] = field(default_factory=dict)
    without_importance: list[str] = field(default_factory=list)
    displaced: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def bpw(self) -> float:
        return 8 * sum(r.nbytes_after for r in self.rows) / max(sum(int(np.prod(r.shape)) for r in self.rows), 1)


@dataclass
class Job:
    """A plan: the type of each tensor of an open file, and what importance there is."""
    file: gguf.File
    mix: _mixes.Mix
    types: dict[str, dtypes.DType]
    importance: dict[str, npt.NDArray[np.float32]]
    without: list[str]
    displaced: list[str]

    def rows(self) -> list[Row]:
        made = [(t, writer.Spec(t.name, t.ne, self.types[t.name])) for t in self.file.tensors.values()]
        return [Row(t.name, t.ne, t.type.name, s.type.name, t.nbytes, s.nbytes) for t, s in made]


def plan(file: gguf.File, mix: str, wishes: _mixes.Wishes | None = None, matrix: _imatrix.Matrix | None = None,
         allow_requantize: bool = False, dry_run: bool = False) -> Job:
    """What `quantize` would do. `ggraph.Error` if it cannot: a type needs importance that is not there, or requantizing that was
    not allowed. `dry_run`: say it all the same."""
    chosen = _mixes.mix(mix)
    displaced: list[str] = []
    types = _mixes.choose(chosen, list(file.tensors.values()), _mixes.Sizes.read(file.kv), wishes, matrix is not None, displaced)
    job = Job(file, chosen, types, {}, [], displaced)
    for info in file.tensors.values():
        kind = types[info.name]
        if kind == info.type:
            continue
        if kind not in quants.QUANTIZABLE:
            raise ggraph.Error(f"{info.name} would become {kind}, which cannot be written; --tensor-type can give it another")
        if info.type.quantized and not allow_requantize and not dry_run:
            raise ggraph.Error(f"{info.name} is {info.type} already: start from F16, BF16 or F32, or allow it with "
                               "--allow-requantize")
        _find_importance(job, info, kind, matrix, dry_run)
    return job


def _find_importance(job: Job, info: gguf.TensorInfo, kind: dtypes.DType, matrix: _imatrix.Matrix | None, dry_run: bool) -> None:
    entry = matrix.entries.get(info.name) if matrix else None
    if entry is not None:
        job.importance[info.name] = _imatrix.importance(entry, info.name, info.ne)
    elif kind.quantized and info.name not in (*_mixes.EMBEDDINGS, "output.weight"):
        needed = kind in _mixes.NEEDS_IMPORTANCE or (kind == dtypes.Q2_K and job.mix.name == "Q2_K_S")
        if needed and not dry_run:
            raise ggraph.Error(f"{info.name} would become {kind}, which needs an importance matrix"
                               + (" that has it" if matrix else "") + ": make one with ggraph-imatrix and give --imatrix")
        if matrix or needed:
            job.without.append(info.name)


def quantize(source: str | Path, target: str | Path, mix: str, *, wishes: _mixes.Wishes | None = None,
             imatrix: Sequence[str | Path] = (), include: Sequence[str] = (), exclude: Sequence[str] = (),
             kv: Mapping[str, Any] | None = None, allow_requantize: bool = False, keep_split: bool = False, dry_run: bool = False,
             n_threads: int | None = None, progress: Any = None) -> Result:
    """Write `source` as `mix` into `target`. `include`, `exclude`: parts of names, whose tensors alone (not) take importance.
    `kv`: key/values to write. `progress`: called with (what, done, total). Raises `ggraph.Error`."""
    start = time.perf_counter()
    matrix = _imatrix.merged(imatrix) if imatrix else None
    if matrix:
        matrix.entries = {name: entry for name, entry in matrix.entries.items()
                          if (not include or any(part in name for part in include)) and not any(part in name for part in exclude)}
    with gguf.File(source) as file:
        job = plan(file, mix, wishes, matrix, allow_requantize, dry_run)
        result = Result([], job.mix.name, job.rows(), without_importance=job.without, displaced=job.displaced)
        for row in result.rows:
            result.types[row.after] = result.types.get(row.after, 0) + row.nbytes_after
        if not dry_run:
            keys = _keys(job, imatrix, matrix) | _overridden(file, kv or {})
            result.paths = [str(p) for p in _write(job, keys, Path(target), keep_split, n_threads or os.cpu_count() or 1, progress)]
    result.seconds = time.perf_counter() - start
    return result


def _overridden(file: gguf.File, kv: Mapping[str, Any]) -> dict[str, bytes]:
    """Key/values to write instead of those of the file, which must stay what readers take them for: text, a number or a truth."""
    for key, x in kv.items():
        old = file.kv.get(key, x)
        if _kind(old) != _kind(x):
            raise ggraph.Error(f"--override-kv {key}: the file has {_kind(old)} there, {x!r} is {_kind(x)}")
    return {key: writer.encode(KINDS[type(x)], x) for key, x in kv.items()}


def _kind(x: Any) -> str:
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number"}
    return next((name for kind, name in kinds.items() if isinstance(x, kind)), "an array")


def _keys(job: Job, paths: Sequence[str | Path], matrix: _imatrix.Matrix | None) -> dict[str, bytes]:
    kv = writer.raw_kv(job.file)
    kv["general.quantization_version"] = writer.encode("UINT32", 2)
    kv["general.file_type"] = writer.encode("UINT32", job.mix.id)
    if matrix:
        kv["quantize.imatrix.file"] = writer.encode("STRING", ", ".join(Path(p).name for p in paths))
        kv["quantize.imatrix.dataset"] = writer.encode("STRING", ", ".join(matrix.datasets))
        kv["quantize.imatrix.entries_count"] = writer.encode("UINT32", len(matrix.entries))
        kv["quantize.imatrix.chunks_count"] = writer.encode("UINT32", matrix.chunk_count)
    return kv


def _write(job: Job, kv: Mapping[str, bytes], target: Path, keep_split: bool, n_threads: int, progress: Any) -> list[Path]:
    tensors = list(job.file.tensors.values())
    parts = [[t for t in tensors if t.shard == i] for i in range(len(job.file.paths))] if keep_split else [tensors]
    prefix = str(target).removesuffix(".gguf")
    paths = [writer.part_path(prefix, i, len(parts)) for i in range(len(parts))] if len(parts) > 1 else [target]
    done, total = 0, sum(t.n_elements for t in tensors)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(n_threads))
        for no, (part, path) in enumerate(zip(parts, paths)):
            out = stack.enter_context(writer.replacing(path))
            keys = writer.part_kv(kv, no, len(parts), len(tensors)) if len(parts) > 1 else kv
            made = writer.Writer(out, keys, [writer.Spec(t.name, t.ne, job.types[t.name]) for t in part])
            for info in part:
                made.write_parts(_converted(job, info, pool, n_threads))
                done += info.n_elements
                if progress:
                    progress("quantize", done, total)
            made.finish()
    return paths


def _converted(job: Job, info: gguf.TensorInfo, pool: ThreadPoolExecutor, n_threads: int) -> Iterator[npt.NDArray[np.uint8]]:
    """The new bytes of a tensor, piece by piece: threads work a little ahead."""
    kind = job.types[info.name]
    if kind == info.type:
        yield info.data
        return
    n, data = info.ne[0], info.data.reshape(info.n_elements // info.ne[0], -1)
    importance = job.importance.get(info.name)
    n_rows = info.ne[1] if len(info.ne) > 1 else 1
    step = max(TASK // n, 1)

    def convert(start: int, stop: int, column: npt.NDArray[np.float32] | None) -> npt.NDArray[np.uint8]:
        try:
            return quants.quantize(quants.unpack(data[start:stop], info.type), kind, column)
        except ValueError as e:
            raise ggraph.Error(f"{info.name}: {e}; ggraph-check says where") from e
    tasks: list[Callable[[], Future[npt.NDArray[np.uint8]]]] = []
    for first in range(0, len(data), n_rows):           # a matrix, or expert after expert
        column = None if importance is None else importance[first // n_rows]
        for start in range(first, first + n_rows, step):
            stop = min(start + step, first + n_rows)
            tasks.append(lambda a=start, b=stop, c=column: pool.submit(convert, a, b, c))   # type: ignore[misc]
    yield from _ahead(tasks, 2 * n_threads)


def _ahead(tasks: Iterable[Callable[[], Future[npt.NDArray[np.uint8]]]], n: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Results in order, with at most `n` tasks begun and not taken."""
    waiting: deque[Future[npt.NDArray[np.uint8]]] = deque()
    for begin in tasks:
        waiting.append(begin())
        if len(waiting) >= n:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
               epilog="TYPE is one of " + ", ".join(_mixes.MIXES) + ".")
@click.argument("words", nargs=-1, required=True, metavar="IN [OUT] TYPE [THREADS]")
@options(TYPES, HOW, OUTPUT)
@click.version_option(ggraph.__version__)
def main(words: tuple[str, ...], **o: Any) -> None:
    """Write the model IN with the tensor types of TYPE into OUT.  [default: IN with the name of the type]"""
    env.set_quiet(o["quiet"])
    files, chosen, n_threads = _arguments(words)
    source = hub.resolve(files[0])
    target = Path(files[1]) if len(files) > 1 else Path(f"{source.name.removesuffix('.gguf')}-{chosen.name}.gguf")
    if target.exists() and target.samefile(source):
        raise ggraph.Error(f"{target} is the input: give another OUT")
    wishes = _mixes.Wishes(o["pure"], o["leave_output"], o["output"], o["token_embedding"],
                           o["tensor_types"] + o["more_types"])
    with Bars(o["quiet"]) as bars:
        same = {name: o[name] for name in ("imatrix", "include", "exclude", "kv", "allow_requantize", "keep_split", "dry_run")}
        result = quantize(source, target, chosen.name, wishes=wishes, n_threads=o["n_threads"] or n_threads, progress=bars, **same)
    if result.without_importance:
        what = "are not in the importance matrix" if o["imatrix"] else "need an importance matrix (--imatrix)"
        env.log(f"{len(result.without_importance)} tensors {what}: {result.without_importance[0]}, ...")
    if result.displaced:
        env.log(f"{len(result.displaced)} tensors have rows that are no whole blocks of the type that {result.mix} has for them, "
                f"and take a larger one: {result.displaced[0]}, ...")
    if o["as_json"]:
        click.echo(json.dumps({**asdict(result), "bpw": result.bpw}, indent=1))
    else:
        click.echo("\n".join(_text(result, o["dry_run"])))


def _arguments(words: Sequence[str]) -> tuple[Sequence[str], _mixes.Mix, int | None]:
    """IN and OUT, the mix, and the threads that may stand behind it as llama-quantize has it."""
    n_threads = None
    if len(words) > 2 and words[-1].isdigit() and int(words[-1]) and _mixes.find(words[-2]):
        words, n_threads = words[:-1], int(words[-1])
    if not 2 <= len(words) <= 3:
        raise click.UsageError("give IN, OUT and TYPE" if len(words) > 3 else "give IN and TYPE")
    return words[:-1], _mixes.mix(words[-1]), n_threads


def _text(result: Result, every: bool) -> Iterator[str]:
    wide = max(len(r.name) for r in result.rows)
    for r in result.rows if every else []:
        shape = "[" + ", ".join(map(str, r.shape)) + "]"
        sizes = f"{size(r.nbytes_before):>13} -> {size(r.nbytes_after):>13}"
        yield f"{r.name:{wide}}  {shape:>20}  {r.before:>7} -> {r.after:7} {sizes}"
    before, after = (sum(getattr(r, name) for r in result.rows) for name in ("nbytes_before", "nbytes_after"))
    for name, nbytes in sorted(result.types.items(), key=lambda pair: -pair[1]):
        n = sum(r.after == name for r in result.rows)
        yield f"{name:8} {n:5} tensors {size(nbytes):>13} {100 * nbytes / max(after, 1):6.2f}%"
    yield (f"{result.mix}: {size(before)} -> {size(after)}, {result.bpw:.4f} bits/weight, in {result.seconds:.1f} s"
           + "".join(f"\n{path}" for path in result.paths))


if __name__ == "__main__":
    main()
