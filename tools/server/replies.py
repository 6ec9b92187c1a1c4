"""A model's text, taken apart while it comes: content, reasoning, tool calls.

In: pieces of text. Out: `Delta`s; joined, they are the same wherever the text was cut. Must not know: JSON forms of answers.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .calls import Syntax

THINK = ("<think>", "</think>")
# A call in JSON whose name stands before its arguments, which can then be told as they come.
_HEAD = re.compile(r'\s*\{\s*"(?:name|tool_name)"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class Delta:
    """`kind` is "content", "reasoning", "call" (text is the name) or "arguments"; `call` counts the tool calls."""
    kind: str
    text: str
    call: int = 0


class Reader:
    """`thinking`: whether thoughts are taken out; `open`: the text begins inside one. `syntax`: None where no tools are."""

    def __init__(self, syntax: Syntax | None = None, thinking: bool = False, open: bool = False):
        self._syntax, self._thinking = syntax, thinking
        self._state = "reasoning" if thinking and open else "content"
        self._text = ""             # not told yet
        self._told = 0              # of the arguments of the call that is open
        self._named = False
        self._trim = True           # whitespace at the start of a part is not told
        self.n_calls = 0

    def push(self, piece: str) -> list[Delta]:
        """What has become certain."""
        self._text += piece
        return list(self._advance(False))

    def finish(self) -> list[Delta]:
        """What is left at the end of the text."""
        return list(self._advance(True))

    def _advance(self, last: bool) -> Iterator[Delta]:
        while True:
            before = (self._state, len(self._text))
            yield from {"content": self._content, "reasoning": self._reasoning, "call": self._call}[self._state](last)
            if before == (self._state, len(self._text)):
                return

    def _content(self, last: bool) -> Iterator[Delta]:
        s = self._syntax
        if s is not None and not s.begin and self._trim:           # a call without a mark: the whole text is JSON
            start = self._text.lstrip()
            if start.startswith("{"):
                self._state = "call"
                return
            if not start and not last:
                return
        marks = [s.begin] if s is not None and s.begin else []
        if self._thinking:
            marks.append(THINK[0])
        text, mark = self._until(marks, last)
        yield from self._tell("content", text)
        if mark:
            self._state, self._trim = ("reasoning" if mark == THINK[0] else "call"), True

    def _reasoning(self, last: bool) -> Iterator[Delta]:
        text, mark = self._until([THINK[1]], last)
        yield from self._tell("reasoning", text)
        if mark:
            self._state, self._trim = "content", True

    def _tell(self, kind: str, text: str) -> Iterator[Delta]:
        if self._trim and (kind == "reasoning" or self._thinking or self.n_calls):
            text = text.lstrip()
        if text:
            self._trim = False
            yield Delta(kind, text)

    def _until(self, marks: list[str], last: bool) -> tuple[str, str]:
        """Text up to the first mark, and the mark; or all that cannot be the start of one."""
        found = min(((at, m) for m in marks if (at := self._text.find(m)) >= 0), default=None)
        if found:
            at, mark = found
            text, self._text = self._text[:at], self._text[at + len(mark):]
            return text, mark
        n = 0 if last else max((_overlap(self._text, m) for m in marks), default=0)
        cut = len(self._text) - n
        text, self._text = self._text[:cut], self._text[cut:]
        return text, ""

    def _call(self, last: bool) -> Iterator[Delta]:
        s = self._syntax
        assert s is not None
        at = self._text.find(s.end) if s.end else -1
        complete = at >= 0 or last
        body = self._text[:at] if at >= 0 else self._text
        yield from self._running(body)
        if not complete:
            return
        self._text = self._text[at + len(s.end):] if at >= 0 else ""
        yield from self._whole(s, body)
        self._state, self._trim, self._named, self._told = "content", True, False, 0

    def _running(self, body: str) -> Iterator[Delta]:
        """The arguments of a call that is still being written, as far as they are."""
        if not (head := _HEAD.match(body)):
            return
        if not self._named:
            self._named = True
            yield Delta("call", json.loads(head[1], strict=False), self.n_calls)
        arguments = body[head.end():head.end() + value_end(body[head.end():])]
        if len(arguments) > self._told:
            yield Delta("arguments", arguments[self._told:], self.n_calls)
            self._told = len(arguments)

    def _whole(self, s: Syntax, body: str) -> Iterator[Delta]:
        """The calls of a body that is complete; what is no call is content."""
        try:
            calls = s.read(body)
        except (ValueError, RecursionError):
            calls = []
        if self._named:                 # told already, whatever came of its end
            self.n_calls += 1
            calls = calls[1:]
        elif not calls and body.strip():
            yield Delta("content", s.begin + body + s.end)
        for name, arguments in calls:
            yield Delta("call", name, self.n_calls)
            yield Delta("arguments", arguments, self.n_calls)
            self.n_calls += 1


def value_end(text: str) -> int:
    """Length of the JSON object that a text begins with, or of all of it where it is not complete."""
    depth, quoted, skip = 0, False, False
    for i, c in enumerate(text):
        if skip:
            skip = False
        elif quoted:
            skip, quoted = c == "\\", c != '"'
        elif c == '"':
            quoted = True
        elif c in "{[":
            depth += 1
        elif c in "}]":
            depth -= 1
            if not depth:
                return i + 1
    return len(text)


def _overlap(text: str, mark: str) -> int:
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
