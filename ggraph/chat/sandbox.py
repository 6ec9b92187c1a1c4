"""Somebody else's program: runs a Jinja template so that it can neither reach Python nor take unbounded time or memory.

In: a template's source, the values it sees. Out: text, or `TemplateError`. Must not know: what messages look like.
The immutable sandbox keeps templates away from Python. Time and memory it does not bound: here loops, calls and all
that makes or shows values pay from a budget. What templates find in the environment is what Hugging Face's renderer
offers (transformers, utils/chat_template_utils.py).
"""
from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ggraph.errors import TemplateError

BUDGET = 100_000_000    # what a rendering may cost, where a character of a value that is made or shown costs 1,
ITEM, TURN, CALL = 50, 100, 2000    # an item of a value, one turn of a loop and one call this much,
PER_INPUT = 100         # and each character or item of the input allows this much more
MAX_BITS = 4096         # of an integer


class Program:
    """A compiled template. `TemplateError` if the source does not compile."""

    def __init__(self, source: str):
        try:
            with _budget(BUDGET):       # the compiler computes constants
                self._template = _Environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template does not compile, line {error.lineno}: {error.message}") from None
        except (Exception, RecursionError) as error:
            raise TemplateError(f"the chat template does not compile: {error}") from None

    def run(self, values: Mapping[str, Any], share: float = 1.0) -> str:
        """The text for these values, at `share` of the full budget. `TemplateError` carries the words of a template
        that refuses, or names the line of one that fails."""
        try:
            with _budget(int(share * BUDGET) + PER_INPUT * _size(dict(values), BUDGET)):
                return self._template.render(values)
        except _Refused as error:
            raise TemplateError(str(error)) from None
        except (Exception, RecursionError, MemoryError) as error:
            raise TemplateError(f"the chat template failed{_line(error)}: {str(error) or type(error).__name__}") from None


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _line(error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


_left: ContextVar[list[int]] = ContextVar("left")


@contextmanager
def _budget(units: int) -> Iterator[None]:
    token = _left.set([units])
    try:
        yield
    finally:
        _left.reset(token)


def _spend(units: int) -> None:
    left = _left.get()
    left[0] -= units
    if left[0] < 0:
        raise SecurityError("it needs too much time or memory")


def _size(value: Any, limit: int) -> int:
    """Cost of all characters and items in a value, those in it counted as often as they occur; stops above `limit`."""
    size, found = 0, [value]
    while found and size <= limit:
        value = found.pop()
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, dict | list | tuple | set | frozenset):
            size += ITEM * len(value)
            if size <= limit:
                found += [*value, *value.values()] if isinstance(value, dict) else value
    return size


def _spend_values(*values: Any) -> None:
    _spend(_size(values, _left.get()[0]))


def _listed(value: Any) -> Any:
    """What is only made while somebody goes through it, as a list whose items are paid for."""
    if not isinstance(value, Iterator | range):
        return value
    items = []
    for item in value:
        _spend(ITEM)
        items.append(item)
    return items


def _growth(name: str, value: Any, args: Sequence[Any]) -> int:
    """How many characters or items a filter or a method of strings may make beyond those it is given."""
    numbers = sum(abs(n) for n in args if isinstance(n, int))
    texts = [v for v in args if isinstance(v, str)]
    text = value if isinstance(value, str) else ""
    if name == "replace" and len(texts) == 2:
        return text.count(texts[0]) * len(texts[1])
    if name == "join":
        n = max((len(v) for v in (value, *args) if isinstance(v, list | tuple)), default=0)
        return n * max(map(len, (text, *texts)))
    if name in ("indent", "expandtabs", "wordwrap"):
        return (len(text) + 1) * (sum(map(len, texts)) + 1) + (text.count("\n") + text.count("\t") + 1) * numbers
    if name == "tojson":
        return _size(value, BUDGET) // ITEM * (numbers + sum(map(len, texts)))
    if name in ("format", "format_map"):
        return numbers + sum(map(int, re.findall(r"\d{1,18}", text)))
    return numbers


class _CodeGenerator(CodeGenerator):
    """Compiles `~` and loops so that they pay."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("turn", lineno=node.lineno), lineno=node.lineno))
        super().visit_For(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=_shown,
                         extensions=["jinja2.ext.loopcontrols", _Generation])
        self.filters["tojson"] = _tojson
        self.filters = {name: _paying(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    @property
    def turn(self) -> None:
        _spend(TURN)

    def join_texts(self, *parts: Any) -> str:
        _spend_values(*parts)
        return "".join(map(str, parts))

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}, which is forbidden")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _spend_values(left, right)
        if operator == "%" and isinstance(left, str):
            _spend(_growth("format", left, right if isinstance(right, tuple) else (right,)))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise SecurityError("it works with numbers that are too large")
        elif operator == "*":
            value, times = (left, right) if isinstance(right, int) else (right, left)
            _spend(_size(value, BUDGET) * times if isinstance(times, int) and times > 0 else 0)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _spend(CALL)
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)     # the sandbox wraps `format`
        if isinstance(owner, str):
            args = tuple(map(_listed, args))
            given = (*args, *kwargs.values())
            _spend_values(owner, given)
            _spend(_growth(obj.__name__, owner, given))
        return super().call(context, obj, *args, **kwargs)


def _paying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, but it pays for what it is given, and first for what it may grow to."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def filter(*args: Any, **kwargs: Any) -> Any:
        if name == "join":
            args = (*args[:skip], _listed(args[skip]), *args[skip + 1:])
        value, given = args[skip], (*args[skip + 1:], *kwargs.values())
        _spend_values(value, given)
        _spend(_growth(name, value, given))
        return function(*args, **kwargs)
    return filter


class _Generation(Extension):
    """{% generation %} marks what an assistant wrote; for a prompt it changes nothing."""
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _shown(value: Any) -> Any:
    _spend_values(value)
    return value


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
