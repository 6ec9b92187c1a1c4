"""One thing that a file is found to have: how bad it is, where it is, and how it can be mended."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True)
class Finding:
    """`severity`: an error spoils answers, a warning may, a note is for knowing. `tensor`, `block` (from 0) or `key` say where.

    `mend`: key -> (kind, value) that puts it right; empty where rewriting the file is enough; None where nothing safe is known.
    """
    severity: str
    what: str
    message: str
    tensor: str = ""
    block: int | None = None
    key: str = ""
    mend: Mapping[str, tuple[str, Any]] | None = field(default=None, compare=False)
