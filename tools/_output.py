"""Files that a command writes: whole or not at all, and refused before any work where they cannot be written."""
from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import click

from ggraph import writer


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 to a temporary file beside it, then put it in its place; - is standard output."""
    if str(path) == "-":
        click.echo(text)
        return
    with writer.replacing(path) as f:
        f.write(text.encode())


def check_target(path: str | Path | None) -> None:
    """`OSError` where no file of this name can be made: a folder, a folder that is not there, no permission. None, -: fine."""
    if path is None or str(path) == "-":
        return
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(target)) from e
