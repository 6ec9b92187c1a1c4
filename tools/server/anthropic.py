"""Anthropic's messages, on top of chat.

In: `Messages` bodies. Out: message objects, whole or as their events; the number of tokens of a conversation.
"""
from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import ggraph

from .chat import Conversation, Turn, converse, follow, turns_of
from .openai import new_id
from .problem import JSON, Problem
from .replies import Delta
from .schema import INT_MAX, Chat, Messages
from .service import Run, Service, in_thread
from .stream import EventStream, frame, while_connected


async def create(service: Service, request: Request, body: Messages) -> Response:
    conversation = await in_thread(lambda: converse(service, as_chat(body)))
    run = await service.start([conversation.job])
    if body.stream:
        return EventStream(_stream(service, run, conversation), run.cancel, service.options.ping, "error")
    turn, = await while_connected(request, turns_of(run, conversation))
    return JSON({**shell(service), "content": content_of(turn), **_stopped(turn), "usage": usage(turn.end, turn.end.n_generated)})


async def count_tokens(service: Service, request: Request, body: Messages) -> Response:
    conversation = await in_thread(lambda: converse(service, as_chat(body)))
    return JSON({"input_tokens": len(conversation.job.ids)})


def shell(service: Service) -> dict[str, Any]:
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": [], "model": service.name, "stop_reason": None,
            "stop_sequence": None}


def usage(done: ggraph.Done, n: int) -> dict[str, Any]:
    return {"cache_read_input_tokens": done.n_cached, "input_tokens": done.n_prompt - done.n_cached, "output_tokens": n}


def content_of(turn: Turn) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if turn.reasoning:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    if turn.content:
        blocks.append({"type": "text", "text": turn.content})
    return blocks + [{"type": "tool_use", "id": c.id, "name": c.name, "input": _parsed(c.arguments)} for c in turn.calls]


def _parsed(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}           # cut off by the token limit
    return value if isinstance(value, dict) else {}


def _stopped(turn: Turn) -> dict[str, Any]:
    done = turn.end
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    word = done.stopping_word
    return {"stop_reason": "stop_sequence" if word else reasons.get(turn.finish_reason, "end_turn"), "stop_sequence": word}


# --- the body as chat


def as_chat(body: Messages) -> Chat:
    chat = Chat.model_construct(n_predict=body.max_tokens, stop=body.stop_sequences, stream=body.stream,
                                chat_template_kwargs=body.chat_template_kwargs)
    for name in ("temperature", "top_p", "top_k"):
        setattr(chat, name, getattr(body, name))
    chat.messages = _messages(body)
    chat.tools = [_tool(i, t) for i, t in enumerate(body.tools or [])] or None
    choice = body.tool_choice or {}
    kind = choice.get("type", "auto")
    if kind not in ("auto", "any", "tool", "none"):
        raise Problem(400, f"tool_choice.type must be auto, any, tool or none, not {str(kind)[:40]!r}")
    chat.tool_choice = {"any": "required", "tool": {"name": choice.get("name")}}.get(kind, kind)
    _think(chat, body.thinking or {})
    return chat


def _think(chat: Chat, thinking: dict[str, Any]) -> None:
    if thinking.get("type") == "disabled":
        chat.chat_template_kwargs = {"enable_thinking": False, **(chat.chat_template_kwargs or {})}
    elif thinking.get("type") == "enabled":
        budget = thinking.get("budget_tokens", 10_000)
        if not isinstance(budget, int) or not 0 <= budget <= INT_MAX:
            raise Problem(400, f"thinking.budget_tokens must be a whole number from 0 to {INT_MAX}")
        chat.thinking_budget_tokens = budget


def _tool(i: int, tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        raise Problem(400, f"tools[{i}] has no name")
    schema = tool.get("input_schema", {"type": "object"})
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": schema}
    return {"type": "function", "function": function}


def _messages(body: Messages) -> list[dict[str, Any]]:
    if body.messages is None:
        raise Problem(400, "'messages' is required")
    if not isinstance(body.messages, list):
        raise Problem(400, "Expected 'messages' to be an array")
    system = body.system if isinstance(body.system, str) else "\n".join(str(b.get("text", "")) for b in body.system or [])
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for i, m in enumerate(body.messages):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            raise Problem(400, f"messages[{i}] must be an object with a role")
        messages += _blocks(i, m)
    return messages


def _blocks(i: int, m: dict[str, Any]) -> list[dict[str, Any]]:
    """One message in chat's form, and one more for each tool result in it."""
    content = m.get("content")
    if not isinstance(content, list):
        return [{"role": m["role"], "content": content}]
    texts, calls, results, thoughts = [], [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append({"type": "text", "text": block.get("text")})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block.get("content"))})
        else:
            raise Problem(400, f"messages[{i}]: unsupported content block {str(kind)[:40]!r}; this server takes text")
    message: dict[str, Any] = {"role": m["role"], "content": texts if texts else None}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [*results, message] if texts or calls or not results else results


def _result(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(b.get("text", "")) for b in content if isinstance(b, dict))
    return "" if content is None else str(content)


# --- events


async def _stream(service: Service, run: Run, conversation: Conversation) -> AsyncGenerator[bytes, None]:
    writer = _Writer()
    ids, started = conversation.job.ids, False
    async for told in follow(run, conversation):
        if told.progress is not None:
            continue
        if not started:
            started = True
            first = {**shell(service), "usage": {"cache_read_input_tokens": 0, "input_tokens": len(ids), "output_tokens": 0}}
            yield frame({"type": "message_start", "message": first}, "message_start")
        for delta in told.deltas:
            for body in writer.take(delta, told.turn):
                yield body
        if told.turn.done is not None:
            for body in writer.close():
                yield body
            done = told.turn.done
            yield frame({"type": "message_delta", "delta": _stopped(told.turn), "usage": usage(done, done.n_generated)},
                        "message_delta")
            yield frame({"type": "message_stop"}, "message_stop")


class _Writer:
    """Content blocks, one open at a time."""

    def __init__(self) -> None:
        self._kind, self._index = "", -1

    def take(self, delta: Delta, turn: Turn) -> list[bytes]:
        kind = "call" if delta.kind == "arguments" else delta.kind
        out = []
        if kind != self._kind or delta.kind == "call":
            out += self.close()
            self._kind, self._index = kind, self._index + 1
            out.append(self._frame("content_block_start", content_block=self._block(kind, delta, turn)))
        if delta.kind == "call":
            return out
        what = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
                "arguments": ("input_json_delta", "partial_json")}[delta.kind]
        return [*out, self._frame("content_block_delta", delta={"type": what[0], what[1]: delta.text})]

    def _block(self, kind: str, delta: Delta, turn: Turn) -> dict[str, Any]:
        if kind == "call":
            call = turn.calls[delta.call]
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        return {"type": "text", "text": ""} if kind == "content" else {"type": "thinking", "thinking": "", "signature": ""}

    def close(self) -> list[bytes]:
        if not self._kind:
            return []
        out = []
        if self._kind == "reasoning":
            out.append(self._frame("content_block_delta", delta={"type": "signature_delta", "signature": ""}))
        self._kind = ""
        return [*out, self._frame("content_block_stop")]

    def _frame(self, kind: str, **fields: Any) -> bytes:
        return frame({"type": kind, "index": self._index, **fields}, kind)
