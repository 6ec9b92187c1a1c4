"""Files that a command writes: whole or not at all."""
from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 to a temporary file beside it, then put it in its place."""
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.absolute().parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
