"""docs/models.md has a row for every architecture that can be run, and says of each what its file says."""
from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (\S+) \| (.*?) \| (\d+|\*\*not verified\*\*) \|", re.M)


def test_every_architecture_has_a_row() -> None:
    """Where this fails: python scripts/models_doc.py"""
    found = importlib.util.spec_from_file_location("models_doc", ROOT / "scripts/models_doc.py")
    assert found and found.loader
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    doc = (ROOT / "docs/models.md").read_text()
    assert script.unsupported() in doc
    rows = {name: title for name, title, _ in ROW.findall(doc)}
    assert rows == {name: script.title(name) for name in script.names(set(rows))}
