"""Chat templates: messages in OpenAI's form -> prompt text.

In: a Jinja source from a model file, messages, tools. Out: text, or `TemplateError` with the template's own message.
Must not know: vocabularies, models; how a template is run (`sandbox`).
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ggraph.errors import TemplateError, expect, flags

Message = Mapping[str, Any]

MEDIA = re.compile("image|audio|video|file")
NEEDLE = "ggraphneedle"
TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {
    "type": "object", "properties": {"y": {"type": "string", "description": "x"}}, "required": ["y"]}}}
TRIAL = 0.05            # of the budget


class ChatTemplate:
    """A compiled template. `bos_token` and `eos_token` are what it finds under these names.

    Errors: `TemplateError` if the source does not compile.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = ""):
        from .sandbox import Program

        for name, text in {"source": source, "bos_token": bos_token, "eos_token": eos_token}.items():
            expect(name, text, str, "a text")
        self.source, self.bos_token, self.eos_token = source, bos_token, eos_token
        self._program = Program(source)

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, str, str]]:
        return ChatTemplate, (self.source, self.bos_token, self.eos_token)      # a copy compiles its own program

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt for a conversation; `kwargs` are further variables of the template (`enable_thinking=False`).

        Tool-call arguments may be JSON text, as clients send them. Errors: `TemplateError` where the template refuses
        the conversation (with its own words), fails, or does something forbidden, and for arguments that are no JSON.
        """
        expect("messages", messages, Sequence, "a list of messages")
        expect("tools", [] if tools is None else tools, (list, tuple), "a list of tools")
        flags(add_generation_prompt=add_generation_prompt)
        fitted = [self._fit(i, message) for i, message in enumerate(messages)]
        return self._render(fitted, tools or None, add_generation_prompt, kwargs)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None,
                add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None,
                share: float = 1.0) -> str:
        values = {"messages": messages, "tools": tools, "documents": None, "bos_token": self.bos_token,
                  "eos_token": self.eos_token, "add_generation_prompt": add_generation_prompt}
        return self._program.run({**values, **(variables or {})}, share)

    def _fit(self, i: int, message: Message) -> dict[str, Any]:
        """The message in the form that this template reads."""
        if not isinstance(message, Mapping):
            raise TemplateError(f"messages[{i}] is not an object with a role and a content")
        fitted = {**message, "content": self._fit_content(i, message.get("content"))}
        calls = message.get("tool_calls") or []
        if not isinstance(calls, Sequence):
            raise TemplateError(f"messages[{i}].tool_calls is not a list")
        if calls and self._wants_parsed_arguments:
            fitted["tool_calls"] = [_parsed(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(calls)]
        return fitted

    def _fit_content(self, i: int, content: Any) -> Any:
        if content is None:
            return None if self._reads_none else ""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if not self._reads_text and self._reads_parts else content
        if not isinstance(content, Sequence):
            raise TemplateError(f"messages[{i}].content is neither text nor a list of parts")
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if not isinstance(kind, str) or MEDIA.search(kind):
                raise TemplateError(f"messages[{i}].content has a part of type {kind!r}: only text is supported")
        if self._reads_parts:
            return content
        return "\n".join(str(part.get("text", "")) for part in content)

    # What a template reads is found out by trying: each of these renders a small conversation, once.

    @cached_property
    def _reads_text(self) -> bool:
        return NEEDLE in self._try([{"role": "user", "content": NEEDLE}])

    @cached_property
    def _reads_parts(self) -> bool:
        text = self._try([{"role": "user", "content": [{"type": "text", "text": NEEDLE}]}])
        return NEEDLE in text and not re.search("""['"]type['"]""", text)

    @cached_property
    def _reads_none(self) -> bool:
        """It expects no content beside a tool call, and does not print it as "None"."""
        text = self._try_call({NEEDLE: "x"}, None) or self._try_call(json.dumps({NEEDLE: "x"}), None)
        return NEEDLE in text and "None" not in text

    @cached_property
    def _wants_parsed_arguments(self) -> bool:
        """It iterates arguments, or writes them as JSON itself; a template that prints them as they are wants text."""
        content, text = None if self._reads_none else "", json.dumps({NEEDLE: "x"})
        return text not in self._try_call(text, content) and NEEDLE in self._try_call({NEEDLE: "x"}, content)

    def _try_call(self, arguments: Any, content: str | None) -> str:
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return self._try([{"role": "user", "content": "x"},
                          {"role": "assistant", "content": content, "tool_calls": [call]},
                          {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "x"}])

    def _try(self, messages: Sequence[Message]) -> str:
        for tools in (None, [TOOL]):
            try:
                return self._render(messages, tools, share=TRIAL)
            except TemplateError:
                continue
        return ""


def _parsed(call: Any, where: str) -> Any:
    """The tool call with its arguments as a value."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise TemplateError(f"{where} is not an object with a function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = {**function, "arguments": json.loads(arguments) if arguments.strip() else {}}
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{where}.function.arguments is not valid JSON: {error}") from None
    return {**call, "function": parsed} if "function" in call else parsed
