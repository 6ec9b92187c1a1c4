"""A conversation made into a job, and its answer taken apart: what all chat-like routes share.

In: checked `Chat` bodies in OpenAI's form. Out: a `Conversation`, then `Turn`s: deltas while they come, answers when done.
"""
from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import ggraph

from .calls import Tool, explained, forced, syntax_of
from .native import Choice
from .problem import Problem
from .replies import THINK, Delta, Reader
from .sampling import Thoughts, controls
from .schema import Chat
from .service import Job, Run, Service

RESERVED = {"self", "messages", "tools", "add_generation_prompt"}


@dataclass
class Conversation:
    """A job, what the answer begins with, and how its text is to be read."""
    job: Job
    prefill: Delta | None
    syntax: Any
    thinking: bool
    open: bool

    def reader(self) -> Reader:
        return Reader(self.syntax, self.thinking, self.open)


@dataclass
class ToolCall:
    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))


@dataclass
class Turn:
    """One choice of an answer so far; `whole` is as it was written."""
    whole: Choice
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def take(self, delta: Delta) -> None:
        if delta.kind == "content":
            self.content += delta.text
        elif delta.kind == "reasoning":
            self.reasoning += delta.text
        elif delta.kind == "call":
            self.calls.append(ToolCall(delta.text))
        else:
            self.calls[delta.call].arguments += delta.text

    @property
    def done(self) -> ggraph.Done | None:
        return self.whole.done

    @property
    def end(self) -> ggraph.Done:
        return self.whole.end

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls and self.end.finish_reason == "stop" else self.end.finish_reason


@dataclass(frozen=True)
class Told:
    """What happened in turn `index`: its deltas, and its end if this is it; or how far the prompt is."""
    index: int
    turn: Turn
    deltas: list[Delta]
    logprobs: list[ggraph.TokenLogprob] = field(default_factory=list)
    progress: ggraph.Progress | None = None
    times: ggraph.Times | None = None


async def follow(run: Run, conversation: Conversation) -> AsyncIterator[Told]:
    """The events of a run as deltas."""
    n = conversation.job.n
    turns, readers = [Turn(Choice(conversation.job)) for _ in range(n)], [conversation.reader() for _ in range(n)]
    for i, turn in enumerate(turns):
        if conversation.prefill:
            turn.take(conversation.prefill)
            yield Told(i, turn, [conversation.prefill])
    async for h in run.events():
        event = h.event
        if isinstance(event, ggraph.Progress):
            yield Told(0, turns[0], [], progress=event)
            continue
        turn, logprobs = turns[event.index], list[ggraph.TokenLogprob]()
        turn.whole.take(event)
        if isinstance(event, ggraph.Piece):
            deltas, logprobs = readers[event.index].push(event.text), event.logprobs
        else:
            deltas = readers[event.index].finish()
        for delta in deltas:
            turn.take(delta)
        yield Told(event.index, turn, deltas, logprobs, times=event.times if isinstance(event, ggraph.Piece) else None)


async def turns_of(run: Run, conversation: Conversation) -> list[Turn]:
    """All choices, when they are done."""
    turns = {told.index: told.turn async for told in follow(run, conversation)}
    return [turns[i] for i in range(conversation.job.n)]


# --- from a body to a job


def converse(service: Service, body: Chat) -> Conversation:
    """Render and encode; everything that can be wrong with the body is told here."""
    messages, tools = checked_messages(body.messages), checked_tools(body.tools)
    choice, tools = chosen(body.tool_choice, tools)
    if tools and body.parse_tool_calls and (body.grammar or body.json_schema is not None):
        raise Problem(400, "Cannot use custom grammar constraints with tools.")
    apply_format(body)
    messages, prefill = _prefill(service, body, messages)
    prompt = render(service, body, messages, tools)
    source = service.template.source if service.template else ""
    how = body.reasoning_format or service.options.reasoning_format
    opened = prompt.rstrip().endswith(THINK[0])
    if prefill and opened != (prefill.kind == "reasoning"):
        prompt, opened = prompt + (f"\n{THINK[1]}\n\n" if opened else f"{THINK[0]}\n"), not opened
    thinking = how != "none" and (THINK[0] in source or opened)
    syntax = syntax_of(source) if tools and body.parse_tool_calls else None
    schema, body.json_schema = (body.json_schema, None) if thinking and opened else (None, body.json_schema)
    settings = service.settings(body)
    if syntax is not None and choice == "required":
        lark = forced(syntax, tools, lambda m: _mark(service, m), bool(body.parallel_tool_calls), THINK[1] if opened else "")
        settings.grammar = _compiled(service, lark)
    elif schema is not None:
        settings.grammar = _compiled(service, f'start: thought /\\s{{0,8}}/ value\nthought[suffix="{THINK[1]}"]: /(?s:.*)/\n'
                                              f"value: %json {json.dumps(ggraph.Grammar.as_read(schema))}\n")
    ids = service.encode(prompt + (prefill.text if prefill else ""))
    service.check_length(ids)
    marks = [syntax.begin, syntax.end] if syntax else []
    settings.preserved |= controls(service.vocab, [*marks, *THINK] if thinking else marks)
    settings.thoughts = _thoughts(service, body, opened) if thinking else None
    logprobs = (20 if body.top_logprobs is None else body.top_logprobs) if body.logprobs else None
    job = Job(ids, prompt, settings, service.stops(body), body.choices, logprobs)
    return Conversation(job, prefill, syntax, thinking, opened)


def _compiled(service: Service, lark: str) -> ggraph.Grammar:
    try:
        return ggraph.Grammar.lark(service.vocab, lark)
    except ggraph.GrammarError as e:
        raise Problem(400, f"the parameters of a tool, or the schema, do not compile: {e}") from None


def _mark(service: Service, text: str) -> str:
    """A mark in Lark: the control token that it is, or its text."""
    ids = service.vocab.encode(text, add_special=False) if text else []
    if len(ids) == 1 and service.vocab.is_control(ids[0]):
        return f"<[{ids[0]}]>"
    return json.dumps(text, ensure_ascii=False) if text else ""


def _thoughts(service: Service, body: Chat, opened: bool) -> Thoughts | None:
    """The limit on thoughts that the request asks for, or else the server has."""
    asked = (body.reasoning_budget_tokens, body.thinking_budget_tokens)
    budget = next((n for n in asked if n is not None and n >= 0), service.options.reasoning_budget)
    if budget < 0 and not body.reasoning_control:
        return None
    message = body.reasoning_budget_message
    return Thoughts(THINK[0], THINK[1:], budget, service.options.reasoning_budget_message if message is None else message, opened)


def render(service: Service, body: Chat, messages: list[dict[str, Any]], tools: list[Tool]) -> str:
    """The prompt, without the BOS that `encode` adds."""
    template = service.template
    if template is None:
        raise Problem(400, "this model has no chat template: start the server with --chat-template-file")
    kwargs = {**service.options.template_kwargs, **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    kwargs = {k: v for k, v in kwargs.items() if k not in RESERVED}
    if (tools or any(m.get("tool_calls") or m["role"] == "tool" for m in messages)) and "tools" not in template.source:
        messages, tools = explained(messages, tools), []
    text = template.render(messages, tools=tools or None, add_generation_prompt=body.add_generation_prompt, **kwargs)
    vocab = service.vocab
    return text.removeprefix(vocab.text(vocab.bos)) if vocab.add_bos and vocab.bos is not None else text


def _prefill(service: Service, body: Chat, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Delta | None]:
    """An assistant's message at the end is the start of the answer, by the server's rule or as the request says."""
    ends = bool(messages) and messages[-1]["role"] == "assistant"
    if body.continue_final_message:
        if body.continue_final_message not in (True, "content", "reasoning_content"):
            raise Problem(400, "continue_final_message must be true, \"content\" or \"reasoning_content\"")
        if body.add_generation_prompt:
            raise Problem(400, "continue_final_message needs add_generation_prompt to be false")
        if not ends:
            raise Problem(400, "continue_final_message needs an assistant message at the end")
        body.add_generation_prompt = True       # behind it the message goes on
    elif not (ends and service.options.prefill_assistant and body.add_generation_prompt):
        return messages, None
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise Problem(400, "Cannot have 2 or more assistant messages at the end of the list.")
    if messages[-1].get("tool_calls"):
        raise Problem(400, "Cannot continue an assistant message that has tool calls.")
    if body.continue_final_message == "reasoning_content":
        return messages[:-1], Delta("reasoning", str(messages[-1].get("reasoning_content") or ""))
    content = messages[-1].get("content") or ""
    if isinstance(content, list):
        content = "\n\n".join(str(part.get("text", "")) for part in content)
    return messages[:-1], Delta("content", str(content)) if content else None


def checked_messages(given: Any) -> list[dict[str, Any]]:
    if given is None:
        raise Problem(400, "'messages' is required")
    if not isinstance(given, list):
        raise Problem(400, "Expected 'messages' to be an array")
    return [_message(i, m) for i, m in enumerate(given)]


def _message(i: int, m: Any) -> dict[str, Any]:
    if not isinstance(m, dict):
        raise Problem(400, f"messages[{i}] must be an object")
    if not isinstance(m.get("role"), str):
        raise Problem(400, f"Failed to parse messages: Missing 'role' in message {i}")
    content, calls = m.get("content"), m.get("tool_calls")
    if m["role"] != "assistant" and "content" not in m:
        raise Problem(400, "All non-assistant messages must contain 'content'")
    if m["role"] == "assistant" and content is None and not calls:
        raise Problem(400, "Assistant message must contain either 'content' or 'tool_calls'!")
    if content is not None and not isinstance(content, str | list):
        raise Problem(400, "Expected 'content' to be a string or an array")
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
            raise Problem(400, f"messages[{i}]: unsupported content[].type; this server takes text")
        if not isinstance(part.get("text"), str):
            raise Problem(400, f"messages[{i}]: a text part must contain 'text'")
    if calls is not None and not isinstance(calls, list):
        raise Problem(400, f"messages[{i}].tool_calls must be an array")
    told: dict[str, Any] = {**m, "role": "system"} if m["role"] == "developer" else m
    if isinstance(content, list):
        told = {**told, "content": [{**part, "type": "text"} for part in content]}
    return told


def checked_tools(given: list[Any] | None) -> list[Tool]:
    for i, tool in enumerate(given or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Problem(400, f"Failed to parse tools: tools[{i}] has no function with a name")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise Problem(400, f"Failed to parse tools: tools[{i}].function.parameters must be an object")
    return list(given or [])


def chosen(choice: Any, tools: list[Tool]) -> tuple[str, list[Tool]]:
    """auto, none or required; a function that is named is required, alone."""
    if isinstance(choice, dict):
        name = (choice.get("function") or choice).get("name") if isinstance(choice.get("function") or choice, dict) else None
        named = [t for t in tools if t["function"]["name"] == name]
        if not named:
            raise Problem(400, f"tool_choice names a function that is not among the tools: {name!r}")
        return "required", named
    if choice not in (None, "auto", "none", "required"):
        raise Problem(400, f"Invalid tool_choice: {choice}")
    if choice == "none":
        return "none", []
    if choice == "required" and not tools:
        raise Problem(400, "tool_choice is required, but there are no tools")
    return choice or "auto", tools


def apply_format(body: Chat) -> None:
    """response_format into json_schema."""
    given = body.response_format
    if not given:
        return
    kind = given.get("type")
    if kind == "json_object":
        body.json_schema = given.get("schema") or {"type": "object"}
    elif kind == "json_schema":
        wrapped = given.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
        if not isinstance(schema, dict | bool):
            raise Problem(400, "response_format.json_schema.schema must be a JSON schema")
        body.json_schema = schema
    elif kind is not None and kind != "text":
        raise Problem(400, f'response_format type must be one of "text" or "json_object", but got: {kind}')
    if not isinstance(body.json_schema, dict | bool | None):
        raise Problem(400, "response_format.schema must be a JSON schema")
