"""OpenAI's Responses API, on top of chat.

In: `Responses` bodies. Out: response objects, whole or as their events. Nothing is stored: each request brings all of its past.
"""
from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import ggraph

from .chat import Conversation, Turn, converse, follow, turns_of
from .native import progress_of, timings
from .openai import new_id, ping_of
from .problem import JSON, Problem
from .replies import Delta
from .schema import Chat, Responses
from .service import Run, Service, in_thread
from .stream import EventStream, frame, while_connected


async def create(service: Service, request: Request, body: Responses) -> Response:
    conversation = await in_thread(lambda: converse(service, as_chat(body)))
    run = await service.start([conversation.job])
    answer = Answer(service, body)
    if body.stream:
        return EventStream(_stream(answer, run, conversation), run.cancel, ping_of(service, body), "error")
    turn, = await while_connected(request, turns_of(run, conversation))
    for item in items_of(turn):
        answer.output.append(item)
    return JSON(answer.whole(turn))


# --- the body as chat


def as_chat(body: Responses) -> Chat:
    if body.previous_response_id:
        raise Problem(400, "llama.cpp does not support 'previous_response_id'.")
    if body.choices != 1:
        raise Problem(400, "a response has one choice")
    shared = {name: getattr(body, name) for name in body.model_fields_set if name in Chat.model_fields and name != "tools"}
    chat = Chat.model_construct(**{**shared, "messages": messages_of(body)})
    chat.tools = _tools(body.tools)
    if body.max_output_tokens is not None:
        chat.n_predict = body.max_output_tokens
    if body.reasoning and isinstance(effort := body.reasoning.get("effort"), str):
        chat.reasoning_effort = effort
    form = (body.text or {}).get("format")
    if isinstance(form, dict):
        chat.response_format = {"type": "json_schema", "json_schema": form} if form.get("type") == "json_schema" else form
    return chat


def messages_of(body: Responses) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not isinstance(body.input, list):
        raise Problem(400, "'input' must be a string or array of objects")
    for i, item in enumerate(body.input):
        if not isinstance(item, dict):
            raise Problem(400, f"input[{i}] must be an object")
        _add(messages, i, item)
    return messages


def _add(messages: list[dict[str, Any]], i: int, item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind != "reasoning":
        raise Problem(400, f"input[{i}] is of type {str(kind)[:40]!r}, which is not supported")


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions, in chat's form; tools that a service would run are left out."""
    functions = [t for t in given or [] if t.get("type") == "function"]
    return [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in functions] or None


# --- the answer


class Answer:
    """A response object in the making."""

    def __init__(self, service: Service, body: Responses):
        self.id, self.created, self.body = new_id("resp_"), int(time.time()), body
        self.name = service.name
        self.output: list[dict[str, Any]] = []

    def shell(self, status: str, **more: Any) -> dict[str, Any]:
        body = self.body
        return {"id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.name,
                "output": self.output, "error": None, "incomplete_details": None, "instructions": body.instructions,
                "metadata": {}, "parallel_tool_calls": bool(body.parallel_tool_calls), "tool_choice": body.tool_choice or "auto",
                "tools": body.tools or [], "temperature": body.temperature, "top_p": body.top_p, **more}

    def whole(self, turn: Turn) -> dict[str, Any]:
        done = turn.end
        usage = {"input_tokens": done.n_prompt, "output_tokens": done.n_generated, "total_tokens": done.n_prompt + done.n_generated,
                 "input_tokens_details": {"cached_tokens": done.n_cached}, "output_tokens_details": {"reasoning_tokens": 0}}
        return self.shell("completed", completed_at=int(time.time()), usage=usage)


def items_of(turn: Turn) -> list[dict[str, Any]]:
    items = []
    if turn.reasoning:
        items.append(item("reasoning", turn.reasoning))
    if turn.content or not turn.calls:
        items.append(item("content", turn.content))
    return items + [item("call", c.arguments, c.name, c.id) for c in turn.calls]


def item(kind: str, text: str, name: str = "", call_id: str = "", id: str = "", status: str = "completed") -> dict[str, Any]:
    """An entry of `output`."""
    if kind == "reasoning":
        return {"id": id or new_id("rs_"), "type": "reasoning", "summary": [], "status": status,
                "content": [{"type": "reasoning_text", "text": text}], "encrypted_content": ""}
    if kind == "call":
        return {"id": id or new_id("fc_"), "type": "function_call", "status": status, "call_id": call_id, "name": name,
                "arguments": text}
    return {"id": id or new_id("msg_"), "type": "message", "status": status, "role": "assistant", "content": [part(text)]}


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


# --- events


class _Open:
    """The output item that is being written."""

    def __init__(self, index: int, kind: str, name: str = "", call_id: str = ""):
        self.index, self.kind, self.name, self.call_id, self.text = index, kind, name, call_id, ""
        self.id = new_id({"reasoning": "rs_", "call": "fc_"}.get(kind, "msg_"))

    def started(self) -> dict[str, Any]:
        made = item(self.kind, "", self.name, self.call_id, self.id, "in_progress")
        return {**made, "content": []} if "content" in made else made

    def done(self) -> dict[str, Any]:
        return item(self.kind, self.text, self.name, self.call_id, self.id)


async def _stream(answer: Answer, run: Run, conversation: Conversation) -> AsyncGenerator[bytes, None]:
    writer = _Writer(answer)
    yield writer.frame("response.created", response=answer.shell("in_progress"))
    yield writer.frame("response.in_progress", response=answer.shell("in_progress"))
    async for told in follow(run, conversation):
        if told.progress is not None:
            yield writer.frame("response.in_progress", response=answer.shell("in_progress"),
                               prompt_progress=progress_of(told.progress))
        for delta in told.deltas:
            for body in writer.take(delta, told.turn):
                yield body
        if told.turn.done is not None:
            for body in writer.end(told.turn, told.turn.done):
                yield body


class _Writer:
    def __init__(self, answer: Answer):
        self.answer, self._n = answer, -1
        self.open: _Open | None = None

    def frame(self, kind: str, **fields: Any) -> bytes:
        self._n += 1
        return frame({"type": kind, "sequence_number": self._n, **fields}, kind)

    def take(self, delta: Delta, turn: Turn) -> list[bytes]:
        kind = "call" if delta.kind == "arguments" else delta.kind
        out = []
        if self.open is None or self.open.kind != kind or delta.kind == "call":
            out += self.finish()
            out += self._begin(kind, delta, turn)
        if delta.kind == "call":
            return out
        opened = self.open
        assert opened is not None
        opened.text += delta.text
        where = {"item_id": opened.id, "output_index": opened.index, "delta": delta.text}
        if kind == "call":
            return [*out, self.frame("response.function_call_arguments.delta", **where)]
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return [*out, self.frame(name, content_index=0, **where, **more)]

    def _begin(self, kind: str, delta: Delta, turn: Turn) -> list[bytes]:
        call = turn.calls[delta.call] if kind == "call" else None
        self.open = opened = _Open(len(self.answer.output), kind, call.name if call else "", call.id if call else "")
        out = [self.frame("response.output_item.added", output_index=opened.index, item=opened.started())]
        if kind == "content":
            out.append(self.frame("response.content_part.added", item_id=opened.id, output_index=opened.index, content_index=0,
                                  part=part("")))
        return out

    def finish(self) -> list[bytes]:
        """Close the item that is open."""
        opened, self.open = self.open, None
        if opened is None:
            return []
        where, done = {"item_id": opened.id, "output_index": opened.index}, opened.done()
        self.answer.output.append(done)
        out = []
        if opened.kind == "content":
            out.append(self.frame("response.output_text.done", content_index=0, text=opened.text, logprobs=[], **where))
            out.append(self.frame("response.content_part.done", content_index=0, part=part(opened.text), **where))
        elif opened.kind == "call":
            out.append(self.frame("response.function_call_arguments.done", arguments=opened.text, name=opened.name, **where))
        else:
            out.append(self.frame("response.reasoning_text.done", content_index=0, text=opened.text, **where))
        return [*out, self.frame("response.output_item.done", output_index=opened.index, item=done)]

    def end(self, turn: Turn, done: ggraph.Done) -> list[bytes]:
        out = [] if self.open or self.answer.output else self._begin("content", Delta("content", ""), turn)
        out += self.finish()
        return [*out, self.frame("response.completed", response={**self.answer.whole(turn), "timings": timings(done)})]
