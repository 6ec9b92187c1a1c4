"""ggraph-inspect: what is in a GGUF file, what it needs, and safe changes to it.

In: a file, or any part of a split set. Out: key/values, tensors, sizes by type and by layer, tokens, the chat template, the
memory for a context; or a new file with edits, a set of parts, one file out of a set. `inspect` is the same for programs.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

import ggraph
from ggraph import env, gguf, hub

from . import _edit, _mixes
from ._console import Bars, size
from ._input import read_text
from ._options import KV_TYPES, Command, IntRange, group, options

SHORT = 6               # elements shown of an array
LINE = 100              # characters shown of a text
TOKEN_TYPES = {1: "normal", 2: "unknown", 3: "control", 4: "user defined", 5: "unused", 6: "byte"}
LAYER = re.compile(r"blk\.(\d+)\.")

_show, _memory, _change, _out = group("What to show"), group("Memory for a context"), group("Changes"), group("Output")

SHOW = (
    _show("--kv", is_flag=True, help="Key/values.  [default, with --types]"),
    _show("--full", is_flag=True, help="Arrays and long texts whole."),
    _show("--tensors", is_flag=True, help="Every tensor: shape, type, bytes, place."),
    _show("--types", is_flag=True, help="Sizes by type."),
    _show("--layers", is_flag=True, help="Sizes by layer."),
    _show("--vocab", metavar="TEXT", help="Tokens that contain TEXT, or the one with this id, as #123."),
    _show("--template", is_flag=True, help="The chat template, as it stands."),
)
MEMORY = (
    _memory("--memory", is_flag=True, help="Bytes that a context needs: weights, KV cache, state, compute arena."),
    _memory("n_ctx", "-c", "--ctx-size", type=IntRange(min=0), default=0, metavar="N",
            help="Its tokens.  [default: the model's own]"),
    _memory("n_ubatch", "-ub", "--ubatch-size", type=IntRange(min=1), default=512, metavar="N",
            help="Tokens of a graph run.  [default: 512]"),
    _memory("n_seq_max", "-np", "--parallel", type=IntRange(min=1), default=1, metavar="N", help="Sequences.  [default: 1]"),
    _memory("type_k", "-ctk", "--cache-type-k", type=click.Choice(KV_TYPES), default="f16", metavar="TYPE",
            help="Type of K.  [default: f16]"),
    _memory("type_v", "-ctv", "--cache-type-v", type=click.Choice(KV_TYPES), default="f16", metavar="TYPE",
            help="Type of V.  [default: f16]"),
)
CHANGE = (
    _change("put", "--set", multiple=True, metavar="KEY=TYPE:VALUE",
            help=f"Set a key; types {', '.join(_edit.KINDS)}; TYPE[] takes JSON. Without TYPE: the type it has. May be repeated."),
    _change("put_file", "--set-file", multiple=True, metavar="KEY=FILE",
            help="Set a key to the text of a file, say the chat template."),
    _change("--remove", multiple=True, metavar="KEY", help="Remove a key. May be repeated."),
    _change("--rename", multiple=True, metavar="OLD=NEW", help="Rename a tensor. May be repeated."),
    _change("--split-max-size", metavar="N(M|G)",
            help="Split into parts with at most so many bytes of tensors; -o is their prefix."),
    _change("--split-max-tensors", type=IntRange(min=1), metavar="N",
            help="Split into parts with at most N tensors; -o is their prefix."),
    _change("--merge", is_flag=True, help="Write a split set as one file."),
    _change("output", "-o", "--output", metavar="FILE", help="Where changes go."),
    _change("--in-place", is_flag=True, help="Put the changed file in the place of the original."),
    _change("--force", is_flag=True, help="Overwrite FILE of -o."),
)
OUTPUT = (
    _out("--json", "as_json", is_flag=True, help="Everything that was asked for as JSON."),
    _out("-q", "--quiet", is_flag=True, help="No progress on standard error."),
)


@dataclass(frozen=True)
class Entry:
    """One key/value; `n` elements of an array."""
    key: str
    kind: str
    value: Any
    n: int


@dataclass(frozen=True)
class TensorRow:
    """One tensor; `shape` contiguous axis first; `offset` in part `part` (from 0)."""
    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    offset: int
    part: int


@dataclass(frozen=True)
class Share:
    """Tensors that have a type or a layer in common. `name`: the type, or the layer's number; "" is outside of layers."""
    name: str
    n_tensors: int
    n_elements: int
    nbytes: int
    types: tuple[str, ...] = ()

    @property
    def bpw(self) -> float:
        return 8 * self.nbytes / max(self.n_elements, 1)


@dataclass(frozen=True)
class Inspection:
    """What is in a file. `label`: the name of general.file_type."""
    path: str
    parts: tuple[str, ...]
    version: int
    alignment: int
    nbytes: int
    arch: str
    label: str
    n_params: int
    kv: tuple[Entry, ...]
    tensors: tuple[TensorRow, ...]
    types: tuple[Share, ...]
    layers: tuple[Share, ...]


def inspect(path: str | Path) -> Inspection:
    """Read a file, or the set that it is a part of. `GGUFError` if it is damaged."""
    with gguf.File(path) as file:
        tensors = list(file.tensors.values())
        mix = _mixes.BY_ID.get(file.kv.get("general.file_type", -1))
        kv = tuple(Entry(key, file.kv.kind(key), _plain(file.kv[key]), file.kv.n(key)) for key in file.kv)
        rows = tuple(TensorRow(t.name, t.ne, t.type.name, t.nbytes, t.offset, t.shard) for t in tensors)
        types, layers = tuple(_shares(tensors, _type)), tuple(_shares(tensors, _layer))
        return Inspection(str(path), tuple(str(p) for p in file.paths), file.version, file.alignment, file.size,
                          str(file.kv.get("general.architecture", "")), mix.name if mix else "",
                          sum(t.n_elements for t in tensors), kv, rows, types, layers)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _type(tensor: gguf.TensorInfo) -> str:
    return tensor.type.name


def _layer(tensor: gguf.TensorInfo) -> str:
    found = LAYER.match(tensor.name)
    return found[1] if found else ""


def _shares(tensors: Sequence[gguf.TensorInfo], key: Callable[[gguf.TensorInfo], str]) -> list[Share]:
    """Types by size, layers by number."""
    groups: dict[str, list[gguf.TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    shares = [Share(name, len(group), sum(t.n_elements for t in group), sum(t.nbytes for t in group),
                    tuple(sorted({t.type.name for t in group})) if key is _layer else ()) for name, group in groups.items()]
    return sorted(shares, key=lambda s: int(s.name or -1) if key is _layer else -s.nbytes)


@dataclass(frozen=True)
class Token:
    id: int
    text: str
    type: str
    score: float | None


def find_tokens(path: str | Path, text: str) -> list[Token]:
    """Tokens that contain `text`; "#123" is the one with that id."""
    with gguf.File(path) as file:
        tokens = file.kv.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            raise ggraph.VocabError(f"{path} has no tokens")
        wanted = [int(text[1:])] if re.fullmatch(r"#\d+", text) else [i for i, token in enumerate(tokens) if text in token]
        types, scores = (file.kv.get(f"tokenizer.ggml.{name}") for name in ("token_type", "scores"))
        return [Token(i, tokens[i], TOKEN_TYPES.get(int(types[i]), "?") if types is not None and i < len(types) else "",
                      float(scores[i]) if scores is not None and i < len(scores) else None) for i in wanted if i < len(tokens)]


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("file")
@options(SHOW, MEMORY, CHANGE, OUTPUT)
@click.version_option(ggraph.__version__)
def main(file: str, **o: Any) -> None:
    """Look into FILE, a GGUF file or any part of a split set, or make a changed copy of it.

    A change is written to a temporary file that takes its name at the end; the original stays as it is unless --in-place is given.
    """
    env.set_quiet(o["quiet"])
    path = hub.resolve(file)
    if any(o[name] for name in ("put", "put_file", "remove", "rename", "merge", "split_max_size", "split_max_tensors")):
        with Bars(o["quiet"]) as bars:
            for made in _changed(path, o, bars):
                click.echo(made)
        return
    if o["output"] or o["in_place"]:
        raise click.UsageError("there is no change to write: give --set, --remove, --rename, --merge or --split-max-*")
    result = _asked(path, o)
    click.echo(json.dumps(result, indent=1, ensure_ascii=False) if o["as_json"] else "\n".join(_text(path, result, o)))


def _asked(path: Path, o: dict[str, Any]) -> dict[str, Any]:
    """What was asked for, for JSON; the short form is what --kv and --types give."""
    seen = inspect(path)
    usual = not any(o[name] for name in ("kv", "tensors", "types", "layers", "template", "memory")) and o["vocab"] is None
    result: dict[str, Any] = {k: v for k, v in asdict(seen).items() if k not in ("kv", "tensors", "types", "layers")}
    if o["kv"] or usual:
        result["kv"] = {e.key: {"type": e.kind, "value": e.value if o["full"] else _short(e), "n": e.n} for e in seen.kv}
    for name in ("tensors", "types", "layers"):
        if o[name] or (usual and name == "types"):
            result[name] = [asdict(row) for row in getattr(seen, name)]
    if o["vocab"] is not None:
        result["vocab"] = [asdict(token) for token in find_tokens(path, o["vocab"])]
    if o["template"]:
        result["template"] = next((e.value for e in seen.kv if e.key == "tokenizer.chat_template"), None)
    if o["memory"]:
        with ggraph.Model(path) as model:
            sizes = {name: o[name] for name in ("n_ubatch", "n_seq_max", "type_k", "type_v")}
            needed = ggraph.memory_needed(model, n_ctx=o["n_ctx"] or model.hparams.n_ctx_train, **sizes)
            result["memory"] = {"n_ctx": o["n_ctx"] or model.hparams.n_ctx_train, **sizes, **needed, "total": sum(needed.values())}
    return result


def _short(entry: Entry) -> Any:
    value = entry.value
    if isinstance(value, list):
        return value[:SHORT]
    return value[:LINE] if isinstance(value, str) else value


def _text(path: Path, r: dict[str, Any], o: dict[str, Any]) -> Iterator[str]:
    """For people. The template alone comes as it stands."""
    if "template" in r and len(r) == 9:
        yield r["template"] if r["template"] else "there is no chat template"
        return
    parts = f", {len(r['parts'])} parts" if len(r["parts"]) > 1 else ""
    yield (f"{path.name}: {r['arch'] or 'no architecture'}, {r['label'] or 'no label'}, {r['n_params'] / 1e6:.2f} M parameters, "
           f"{size(r['nbytes'])}{parts}, GGUF {r['version']}")
    for name, lines in (("kv", _kv_lines), ("tensors", _tensor_lines), ("types", _share_lines), ("layers", _share_lines),
                        ("vocab", _token_lines), ("memory", _memory_lines)):
        if name in r:
            yield ""
            yield from lines(r[name])
    if r.get("template"):
        yield "\n" + r["template"]


def _kv_lines(kv: dict[str, Any]) -> Iterator[str]:
    wide = max(map(len, kv), default=0)
    for key, e in kv.items():
        value = e["value"]
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | list) else str(value)
        rest = e["n"] - len(value) if isinstance(value, list) else 0
        kind = e["type"].replace("ARRAY:", "") + (f"[{e['n']}]" if isinstance(value, list) else "")
        cut = " ..." if isinstance(value, str) and e["n"] > len(value.encode()) else ""
        yield f"{key:{wide}}  {kind:16}  {text}{f' ... and {rest} more' if rest else ''}{cut}"


def _tensor_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    wide = max((len(r["name"]) for r in rows), default=0)
    for r in rows:
        shape = "[" + ", ".join(map(str, r["shape"])) + "]"
        yield f"{r['name']:{wide}}  {shape:>22}  {r['type']:8} {r['nbytes']:>13}  part {r['part'] + 1} at {r['offset']}"


def _share_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    total = sum(r["nbytes"] for r in rows) or 1
    for r in rows:
        name = f"layer {r['name']}" if r["name"].isdigit() else r["name"] or "outside"
        bpw = 8 * r["nbytes"] / max(r["n_elements"], 1)
        yield (f"{name:10} {r['n_tensors']:5} tensors {size(r['nbytes']):>13} {100 * r['nbytes'] / total:6.2f}% "
               f"{bpw:7.4f} bits/weight  {' '.join(r['types'])}".rstrip())


def _token_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for r in rows:
        yield f"{r['id']:8}  {json.dumps(r['text'], ensure_ascii=False):30} {r['type']}"
    yield f"{len(rows)} tokens"


def _memory_lines(m: dict[str, Any]) -> Iterator[str]:
    yield f"context of {m['n_ctx']} tokens, {m['n_seq_max']} sequences, K {m['type_k']}, V {m['type_v']}, ubatch {m['n_ubatch']}"
    for name in ("weights", "kv", "state", "compute", "total"):
        yield f"{name:8} {size(m[name]):>14}"
    yield "repacked copies of weights (--repack) come on top, at most once more their size"


def _changed(path: Path, o: dict[str, Any], bars: Bars) -> Iterator[str]:
    """Make the change that was asked for; names of the files written."""
    if o["split_max_size"] or o["split_max_tensors"]:
        if o["put"] or o["put_file"] or o["remove"] or o["rename"] or o["merge"] or o["in_place"]:
            raise click.UsageError("--split-max-* goes with none of the other changes: make them one after the other")
        prefix = (o["output"] or str(path)).removesuffix(".gguf")
        yield from map(str, _edit.split(path, prefix, _bytes(o["split_max_size"]), o["split_max_tensors"] or 0, bars))
        return
    target = _target(path, o)
    with gguf.File(path) as file:
        if o["in_place"] and len(file.paths) > 1:
            raise ggraph.GGUFError(f"{path} is part of a set: --in-place cannot change it; write one file with --merge -o FILE")
        put = {key: _edit.value(file, text, key) for key, text in map(_pair, o["put"])}
    put |= {key: ("STRING", read_text(name)) for key, name in map(_pair, o["put_file"])}
    _edit.edit(path, target, put, o["remove"], dict(map(_pair, o["rename"])))
    yield str(target)


def _pair(text: str) -> tuple[str, str]:
    key, found, rest = text.partition("=")
    if not found or not key:
        raise click.UsageError(f"{text!r} is not NAME=VALUE")
    return key, rest


def _bytes(text: str | None) -> int:
    found = re.fullmatch(r"(\d+)([MG])", text or "0M")
    if not found or (text and not int(found[1])):
        raise click.BadParameter(f"{text!r} is not a number with M or G, as in 2G", param_hint="--split-max-size")
    return int(found[1]) * {"M": 10**6, "G": 10**9}[found[2]]


def _target(path: Path, o: dict[str, Any]) -> Path:
    if bool(o["output"]) == o["in_place"]:
        raise click.UsageError("give -o FILE for the changed copy, or --in-place")
    target = path if o["in_place"] else Path(o["output"])
    if not o["in_place"] and target.exists() and not o["force"]:
        raise ggraph.GGUFError(f"{target} is there already: give another -o, or --force")
    return target


if __name__ == "__main__":
    main()
