"""Typed errors: everything that ggraph raises on purpose derives from `Error` and says what to do.

Behind the errors: checks of arguments, for the outermost functions. Each names the argument, and what it must be.
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Real
from operator import index
from pathlib import Path
from reprlib import repr as short
from typing import Any, NoReturn


class Error(Exception):
    """Base class of all errors that ggraph raises on purpose."""


class ArgumentError(Error, TypeError):
    """An argument is of a type that the function does not take."""


class GGUFError(Error):
    """The file is not a GGUF, is damaged, or holds something that cannot be read."""


class VocabError(Error):
    """The tokenizer in the file is missing, unknown or inconsistent."""


class TemplateError(Error):
    """A chat template does not compile, refuses the conversation, or does something forbidden."""


class ModelError(Error):
    """The architecture is unknown, or its metadata or tensors do not fit it."""


class PlacementError(Error):
    """Weights, cache and compute buffers do not fit where they should go."""


class BatchError(Error):
    """A batch is malformed: token out of range, position not next in its sequence, too large."""


class ContextFull(Error):
    """No cells are left for this batch. `n_done` tokens of it were processed and stay."""

    def __init__(self, message: str, n_done: int = 0):
        super().__init__(message)
        self.n_done = n_done


class Aborted(Error):
    """`Context.abort()`, Ctrl-C or a hook stopped the step. `n_done` tokens were processed and stay."""

    def __init__(self, message: str, n_done: int = 0):
        super().__init__(message)
        self.n_done = n_done


class SamplerError(Error):
    """A sampler chain has an unknown word or a value out of range."""


class GrammarError(Error):
    """A grammar, JSON schema or regular expression does not compile, or became too complex while it was followed."""


class BackendError(Error):
    """A backend cannot be opened, or a kernel reported a failure."""


class Single:
    """What stands for something outside of Python (a mapped file, memory of a device) or would share what it must not: it is
    neither copied nor pickled. `instead`: what to do."""
    instead = "open another one"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise Error(f"a {type(self).__name__} cannot be copied, pickled or sent to another process: {self.instead}")


# --- checks of arguments

def wrong(what: str, value: Any, wanted: str) -> ArgumentError:
    return ArgumentError(f"{what} is {short(value)}; it must be {wanted}")


def expect(what: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """`ArgumentError`, which says what `wanted` is, unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise wrong(what, value, wanted)


def integer(what: str, value: Any) -> int:
    """`value` as an int. `ArgumentError`, which names `what`, unless it is one (of NumPy's, too; a float is none)."""
    try:
        return index(value)
    except TypeError:
        raise wrong(what, value, "an integer") from None


def integers(**values: Any) -> None:
    for what, value in values.items():
        integer(what, value)


def at_least(least: int, /, **values: Any) -> None:
    """Integers from `least` up."""
    for what, value in values.items():
        if integer(what, value) < least:
            raise Error(f"{what} is {value}; it must be at least {least}")


def numbers(**values: Any) -> None:
    """Integers or floats, not NaN."""
    for what, value in values.items():
        if not isinstance(value, Real) or value != value:
            raise wrong(what, value, "a number")


def flags(**values: Any) -> None:
    """True or False: a text such as "no" would count as true."""
    for what, value in values.items():
        if type(value).__name__ not in ("bool", "bool_"):       # NumPy's, too
            raise wrong(what, value, "True or False")


def function(what: str, value: Any) -> None:
    if not callable(value):
        raise wrong(what, value, "a function")


def functions(**values: Any) -> None:
    """Functions, or None."""
    for what, value in values.items():
        if value is not None:
            function(what, value)


def file_path(what: str, value: Any) -> Path:
    """A path as a `Path`."""
    if not isinstance(value, str | os.PathLike) or "\0" in str(value):
        raise wrong(what, value, "a path")
    return Path(value)


def named(what: str, value: Any) -> dict[str, Any]:
    """A mapping of names as a dict of its own; {} for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise wrong(what, value, "a mapping of names")
    return dict(value)


def texts(what: str, each: str, values: Any) -> list[str]:
    """A list of texts, each named `each` in an error; one text is none."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise wrong(what, values, "a list of texts")
    found = list(values)
    for value in found:
        expect(each, value, str, "a text")
    return found
