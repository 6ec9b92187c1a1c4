"""docs/ARCHITECTURE.md lists every module, in reading order, with the first line of its docstring.

`python tests/test_reading_map.py` brings its lines up to date; a new module lands behind the last of its folder.
"""
from __future__ import annotations

import ast
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAP = ROOT / "docs/ARCHITECTURE.md"
LINE = re.compile(r"^- `([a-z0-9_/]+\.py)`: .*$")


def lines_in_source() -> dict[str, str]:
    """Path -> its line. Links are not followed; an empty `__init__.py` says nothing and is not listed."""
    found = {}
    for top in ("ggraph", "backends", "models", "tools"):
        for folder, _, names in os.walk(ROOT / top):
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                if path.stat().st_size:
                    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
                    name = path.relative_to(ROOT).as_posix()
                    found[name] = f"- `{name}`: {doc.partition(chr(10))[0]}"
    return found


def lines_in_map(text: str) -> dict[str, str]:
    return {m[1]: m[0] for line in text.splitlines() if (m := LINE.match(line))}


def test_the_map_is_the_source() -> None:
    source = lines_in_source()
    assert not [line for line in source.values() if line.endswith(": ")], "a module has no docstring"
    assert lines_in_map(MAP.read_text()) == source, "run: python tests/test_reading_map.py"


def test_no_module_is_listed_twice() -> None:
    text = MAP.read_text()
    assert sum(bool(LINE.match(line)) for line in text.splitlines()) == len(lines_in_map(text))


def updated(text: str, source: dict[str, str]) -> str:
    lines = [line for line in text.splitlines() if not (m := LINE.match(line)) or m[1] in source]
    for name, line in sorted(source.items()):
        listed = [(m[1] if (m := LINE.match(old)) else "") for old in lines]
        if name in listed:
            lines[listed.index(name)] = line
        else:
            near = [i for i, other in enumerate(listed) if Path(other).parent == Path(name).parent and other]
            lines.insert(near[-1] + 1 if near else len(lines), line)
    return "\n".join(lines) + "\n"


def test_updated() -> None:
    text = "# Map\n\n- `ggraph/b.py`: old\n- `ggraph/gone.py`: x\n\nEnd\n"
    source = {name: f"- `{name}`: new" for name in ("ggraph/a.py", "ggraph/b.py", "tools/t.py")}
    assert updated(text, source) == \
        "# Map\n\n- `ggraph/b.py`: new\n- `ggraph/a.py`: new\n\nEnd\n- `tools/t.py`: new\n"


if __name__ == "__main__":
    MAP.write_text(updated(MAP.read_text(), lines_in_source()))
