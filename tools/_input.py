"""Text that a command reads: UTF-8, from a file or standard input.

In: a path, or - for standard input. Out: the text, or an `Error` that says where it is none.
"""
from __future__ import annotations

from pathlib import Path

import click

import ggraph


def read_text(name: str | Path) -> str:
    """The text without its last newline, as llama.cpp reads it. `Error` where it is not UTF-8, `OSError` where there is none."""
    try:
        with click.open_file(str(name), "rb") as f:
            return str(f.read(), "utf-8").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as e:
        raise ggraph.Error(f"{name} is not UTF-8 text ({e.reason} at byte {e.start})") from e
