"""Typed errors: everything that ggraph raises on purpose derives from `Error` and says what to do."""


from __future__ import annotations

from operator import index
from reprlib import repr as short
from typing import Any


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


def integer(what: str, value: Any) -> int:
    """`value` as an int. `ArgumentError`, which names `what`, unless it is one (of NumPy's, too; a float is none)."""
    try:
        return index(value)
    except TypeError:
        raise ArgumentError(f"{what} is {short(value)}; it must be an integer") from None


def expect(what: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """`ArgumentError`, which says what `wanted` is, unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{what} is {short(value)}; it must be {wanted}")
