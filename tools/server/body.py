"""The body of a request: bytes in, a checked model out, or a `Problem` that names the field.

The content type is not looked at, as clients get it wrong. Must not know: what the fields mean.
"""
from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from .problem import Problem

M = TypeVar("M", bound=BaseModel)
MAX_BYTES = 64 << 20
MAX_DEPTH = 256
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read(request: Request, timeout: float) -> dict[str, Any]:
    """A JSON object; an empty body is {}."""
    value = await read_any(request, timeout)
    if not isinstance(value, dict):
        raise Problem(400, f"the body must be a JSON object, not {kind(value)}")
    return value


async def read_any(request: Request, timeout: float) -> Any:
    """A JSON value; an empty body is {}."""
    try:
        raw = await asyncio.wait_for(_bytes(request), timeout)
    except (asyncio.TimeoutError, TimeoutError):
        raise Problem(408, f"the body did not arrive within {timeout:g} seconds") from None
    except ClientDisconnect:
        raise Problem(400, "the client left before its request was complete") from None
    if not raw.strip():
        return {}
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise Problem(400, f"the body is not valid JSON: {e}") from None
    if _deeper(value, MAX_DEPTH):
        raise Problem(400, f"the body is nested too deeply: more than {MAX_DEPTH} arrays and objects in one another")
    return _paired(value) if _SURROGATE.search(raw) else value


def _deeper(value: Any, n: int) -> bool:
    """Whether it is nested more than n times. Whatever walks through a body later can then recurse."""
    level = [value]
    for _ in range(n + 1):
        level = [v for one in level if isinstance(one, list | dict) for v in (one if isinstance(one, list) else one.values())]
        if not level:
            return False
    return True


async def _bytes(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BYTES:
            raise Problem(413, f"the body is larger than {MAX_BYTES >> 20} MiB")
        chunks.append(chunk)
    return b"".join(chunks)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _paired(value: Any) -> Any:
    """Surrogates that JSON escapes leave: pairs become characters, single ones U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_paired(v) for v in value]
    if isinstance(value, dict):
        return {_paired(k): _paired(v) for k, v in value.items()}
    return value


def check(model: type[M], value: dict[str, Any]) -> M:
    """The body as `model`; null is the same as absent."""
    try:
        return model.model_validate({k: v for k, v in value.items() if v is not None})
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise Problem(400, _told(first)) from None
    except RecursionError:
        raise Problem(400, "the body is nested too deeply") from None


def _told(error: Any) -> str:
    """One sentence about the first thing that is wrong."""
    where = ".".join(str(part) for part in error["loc"] if not str(part).startswith(("function-", "constrained", "is-")))
    if error["type"] == "missing":
        return f"'{where}' is required"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"]) if where in str(error["ctx"]["error"]) else f"Field '{where}': {error['ctx']['error']}"
    if error["type"].endswith("_type"):
        return f"Field '{where}': type must be {error['type'].removesuffix('_type')}, but is {kind(error['input'])}"
    return f"Field '{where}': {error['msg']}"


def kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")
