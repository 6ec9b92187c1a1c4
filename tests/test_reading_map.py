"""docs/ARCHITECTURE.md lists every module, in reading order, with the first line of its docstring."""
from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^- `([a-z0-9_/]+\.py)`: (.+)$", re.MULTILINE)


def lines_in_source() -> dict[str, str]:
    """Path -> first docstring line. An empty `__init__.py` says nothing and is not listed."""
    found = {}
    for folder in ("ggraph", "backends", "models", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            linked = name.startswith(("ggraph/backends/", "ggraph/models/", "ggraph/tools/"))
            if not linked and path.stat().st_size:
                found[name] = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    return found


def test_the_map_is_the_source() -> None:
    listed = dict(LINE.findall((ROOT / "docs/ARCHITECTURE.md").read_text()))
    source = lines_in_source()
    assert all(source.values()), f"no docstring: {[name for name, line in source.items() if not line]}"
    wrong = sorted(f"- `{name}`: {line}" for name, line in source.items() if listed.get(name) != line)
    assert not wrong, "lines that docs/ARCHITECTURE.md should have:\n" + "\n".join(wrong)
    assert not listed.keys() - source.keys(), "docs/ARCHITECTURE.md lists modules that do not exist"


def test_no_module_is_listed_twice() -> None:
    names = [name for name, _ in LINE.findall((ROOT / "docs/ARCHITECTURE.md").read_text())]
    assert len(names) == len(set(names))
