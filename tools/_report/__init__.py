"""The skeleton of all HTML pages that commands write: one style, light and dark, nothing fetched from anywhere.

In: the name of a template in this folder and its values. Out: one page as text.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

import ggraph


def render(template: str, /, **values: Any) -> str:
    """The page of `template`.html.jinja. Values are escaped; `Markup` is not."""
    return environment().get_template(f"{template}.html.jinja").render(version=ggraph.__version__, **values)


@cache
def environment() -> jinja2.Environment:
    def load(name: str) -> str | None:
        found = files(__package__) / name
        return found.read_text(encoding="utf-8") if found.is_file() else None

    env = jinja2.Environment(loader=jinja2.FunctionLoader(load), autoescape=True, undefined=jinja2.StrictUndefined,
                             trim_blocks=True, lstrip_blocks=True)
    env.filters.update(size=size, compact=compact, visible=visible)
    return env


def data(value: Any) -> Markup:
    """JSON that may stand in a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def size(nbytes: float) -> str:
    """Bytes for people: 1.5 MiB."""
    n, unit = _scaled(nbytes, 1024, (" B", " KiB", " MiB", " GiB"))
    return f"{n:.0f}{unit}" if unit == " B" or n >= 100 else f"{n:.1f}{unit}"


def compact(n: float) -> str:
    """134515008 as 135 M."""
    n, unit = _scaled(n, 1000, ("", " k", " M", " G"))
    return f"{n:.3g}{unit}"


def _scaled(n: float, step: int, units: Sequence[str]) -> tuple[float, str]:
    i = 0
    while n >= step and i < len(units) - 1:
        n, i = n / step, i + 1
    return n, units[i]


def visible(text: str) -> str:
    """A token whose white space can be seen."""
    return text.replace("\n", "⏎").replace(" ", "·") or "∅"
