"""What can be wrong with a request, in the one shape that clients know: {"error": {"code", "message", "type"}}.

In: exceptions. Out: `Problem`s and JSON answers. Must not know: routes.
"""
from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

import ggraph
from ggraph import env

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         405: "not_found_error", 408: "timeout_error", 413: "invalid_request_error", 500: "server_error",
         501: "not_supported_error", 503: "unavailable_error"}


class Problem(Exception):
    """An answer other than 200. `more` are further fields of the error."""

    def __init__(self, code: int, message: str, kind: str = "", **more: Any):
        super().__init__(message)
        self.code, self.message, self.kind, self.more = code, message, kind or TYPES[code], more

    def body(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": self.message, "type": self.kind, **self.more}}


class JSON(Response):
    """A JSON answer; what is no Unicode becomes "?"."""
    media_type = "application/json; charset=utf-8"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def dumps(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


def too_long(n_prompt: int, n_ctx: int) -> Problem:
    message = f"request ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it"
    return Problem(400, message, "exceed_context_size_error", n_prompt_tokens=n_prompt, n_ctx=n_ctx)


def problem_of(error: BaseException) -> Problem:
    """What to answer where this was raised."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ggraph.Aborted):
        return Problem(503, str(error))
    if isinstance(error, ggraph.ContextFull):
        return Problem(400, str(error), "exceed_context_size_error")
    if isinstance(error, ggraph.Error):
        return Problem(400, str(error))
    if isinstance(error, RecursionError):
        return Problem(400, "the request is nested too deeply")
    env.log(f"unexpected {type(error).__name__}: {error}")
    return Problem(500, f"unexpected {type(error).__name__}: {error}")


def answer(error: BaseException) -> JSON:
    problem = problem_of(error)
    return JSON(problem.body(), status_code=problem.code)
