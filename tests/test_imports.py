"""Who may import whom: the layers of docs/ARCHITECTURE.md, read from the source without running it."""
from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ggraph

ROOT = Path(__file__).parents[1]

# Each layer sees those above it. Modules of one layer do not see each other; a package sees itself.
LAYERS = """
errors
env
hub
dtypes
quants
gguf
writer
hparams vocab chat
cparams
size
tensor
ops
graph
backend
weights
placement diagnosis
adapters
model
batch perf drawing hook turn
memory
inputs
build
schedule
observe
shift state debug
fit
context
sampling grammar
generate
serve
"""
RANK = {name: rank for rank, line in enumerate(LAYERS.split("\n")) for name in line.split()}
OUTSIDE = {
    "backends": {"errors", "env", "dtypes", "quants", "size", "tensor", "ops", "backend"},
    "models": {"errors", "hparams", "tensor", "ops", "weights", "build"},
    "tools": {"env", "hub", "dtypes", "quants", "gguf", "writer"},
}
TOOL_LIBRARIES = {"click", "jinja2", "llama_cpp", "lm_eval", "markupsafe", "matplotlib", "numpy", "pytest", "rich"}
SERVER_LIBRARIES = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}        # tools/server/ only


def sources(*folders: str) -> list[Path]:
    """Python files at their real place; the links in ggraph/ are not followed."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [p for p in found if p.parts[len(ROOT.parts) + 1] not in OUTSIDE or p.parts[len(ROOT.parts)] != "ggraph"]


def module(path: Path) -> list[str]:
    """`ggraph/memory/kv.py` -> [memory, kv]; `backends/cpu/__init__.py` -> [backends, cpu, __init__]."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts[1:] if parts[0] == "ggraph" else parts


def imports(path: Path) -> Iterator[list[str]]:
    """Every name imported anywhere in the file, as parts: `from ggraph.errors import Error` -> [ggraph, errors, Error].

    Relative imports are made absolute.
    """
    package = ["ggraph", *module(path)[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) + 1 - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            yield from ([*base, alias.name] for alias in node.names)


def targets(path: Path) -> Iterator[str]:
    """The modules and packages directly below ggraph that the file imports; public names count as their home."""
    for parts in imports(path):
        if parts[0] == "ggraph":
            name = parts[1] if len(parts) > 1 else "ggraph"
            yield ggraph._HOME.get(name, "errors" if name in ggraph.__all__ else name)


@pytest.mark.parametrize("path", sources("ggraph"), ids=lambda p: "/".join(module(p)))
def test_core_imports_only_from_the_layers_above(path: Path) -> None:
    own = module(path)[0]
    if own == "__init__":
        return   # the public names: everything, lazily
    assert own in RANK, f"{own} has no place in LAYERS yet"
    for target in targets(path):
        assert target == own or RANK.get(target, 99) < RANK[own], f"{own} must not import {target}"


@pytest.mark.parametrize("path", sources("backends", "models"), ids=lambda p: "/".join(module(p)))
def test_backends_and_models_see_little_of_the_core(path: Path) -> None:
    own = module(path)[0]
    for target in targets(path):
        assert target in OUTSIDE[own] | {own}, f"{own}/ must not import {target}"


@pytest.mark.parametrize("path", sources("tools"), ids=lambda p: "/".join(module(p)))
def test_tools_stand_on_public_names(path: Path) -> None:
    public = {*ggraph.__all__, *OUTSIDE["tools"], "tools"}
    for parts in imports(path):
        if parts[0] == "ggraph":
            assert len(parts) == 1 or parts[1] in public, f"tools/ must not import {'.'.join(parts)}"
        else:
            libraries = TOOL_LIBRARIES | (SERVER_LIBRARIES if path.parent.name == "server" else set())
            assert parts[0] in libraries | set(sys.stdlib_module_names), f"tools/ must not import {parts[0]}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ggraph":
            assert node.attr in public, f"ggraph.{node.attr} is not public"


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    named = {p.stem if p.stem != "__init__" else p.parent.name: p for p in sources("ggraph", *OUTSIDE)}
    assert not named.keys() & set(sys.stdlib_module_names)


def architectures() -> set[str]:
    names = {p.stem for p in sources("models")} - {"__init__"}
    return names | {name.replace("_", "-") for name in names}


def strings(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value}


def asks_the_architecture(node: ast.AST) -> bool:
    """A comparison with a string where something named `arch` takes part: `hparams.arch == "llama"`."""
    names = {n.attr if isinstance(n, ast.Attribute) else n.id for n in ast.walk(node)
             if isinstance(n, ast.Attribute | ast.Name)}
    return bool({"arch", "architecture"} & names and strings(node))


@pytest.mark.parametrize("path", sources("ggraph", "backends", "tools"), ids=lambda p: "/".join(module(p)))
def test_no_architecture_is_compared_by_name(path: Path) -> None:
    # Tokenizer kinds share names with architectures (gpt2, bert), so in vocab/ only `arch` itself gives it away.
    names = set() if module(path)[0] == "vocab" else architectures()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare | ast.match_case):
            assert not asks_the_architecture(node) and not strings(node) & names, \
                f"{path.name}:{getattr(node, 'lineno', '?')} compares an architecture's name; only models/ may"
