"""A conversation on the terminal: lines in, answers out, and a few commands.

In: a Writer, lines from standard input. Out: answers; conversations saved as JSON. Knows nothing of tokens.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import ggraph

from ._answer import Writer

Message = dict[str, Any]
HELP = """\
/help           this list
/clear          forget the conversation, keep the system prompt
/regen          answer the last message once more
/save FILE      write the conversation to a file
/load FILE      go on with a saved conversation
/exit           leave; so do Ctrl-D, and Ctrl-C twice
A line that ends in \\ goes on with the next. Ctrl-C stops an answer."""


class Chat:
    """`messages` is the conversation in OpenAI's form; the last answer is part of it, even if it was stopped."""

    def __init__(self, writer: Writer, system: str | None = None, template_kwargs: dict[str, Any] | None = None):
        self.writer, self.kwargs = writer, template_kwargs or {}
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.system)
        self.terminal = sys.stdin.isatty()
        self.commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: say(HELP), "clear": self.clear, "regen": self.regen, "save": self.save, "load": self.load}

    def once(self, text: str | None) -> bool:
        """One message and its answer; False if Ctrl-C ended it."""
        text = self._ask() if text is None else text
        return text is None or self.send(text)

    def run(self, first: str | None) -> None:
        """Until the user leaves."""
        if self.terminal:
            say("/help lists the commands.")
        if first is not None:
            self._attempt(self.send, first)
        warned = False
        while True:
            try:
                text = self._ask()
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                if warned:
                    say("")
                    return
                warned = True
                say("\n(Ctrl-C again or Ctrl-D leaves)")
                continue
            warned = False
            if text is None or text.strip() in ("/exit", "/quit"):
                return
            if text.strip():
                self._attempt(self.obey, text)

    def _attempt(self, action: Callable[[str], object], text: str) -> None:
        """At a terminal an error is told and the chat goes on."""
        try:
            action(text)
        except (ggraph.Error, OSError) as e:
            if not self.terminal or isinstance(e, BrokenPipeError):
                raise
            say(f"error: {e.filename}: {e.strerror}" if isinstance(e, OSError) and e.filename else f"error: {e}")

    def obey(self, text: str) -> None:
        """Do what a line says: a command, or a message to answer."""
        found = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", text.strip())
        if not found:
            self.send(text)
        elif found[1] in self.commands:
            self.commands[found[1]](found[2] or "")
        else:
            say(f"there is no command /{found[1]}; /help lists them")

    # --- answers

    def send(self, text: str) -> bool:
        """Answer a message; False if Ctrl-C ended it. A message that gets no answer is forgotten."""
        self.messages.append({"role": "user", "content": text})
        try:
            return self._answer()
        finally:
            if self.messages[-1]["role"] == "user":
                self.messages.pop()

    def _answer(self) -> bool:
        g = self.writer.llm.chat(self.messages, template_kwargs=self.kwargs, **self.writer.options())
        self.writer.show_tokens(g.prompt)
        whole = self.writer.write(g)
        if whole or g.text:
            self.messages.append({"role": "assistant", "content": g.text})
        return whole

    def regen(self, _: str) -> None:
        if self.messages[-1:] != [] and self.messages[-1]["role"] == "assistant":
            answer = self.messages.pop()
            try:
                self._answer()
            finally:
                if self.messages[-1]["role"] != "assistant":
                    self.messages.append(answer)
        else:
            say("there is no answer yet")

    # --- the conversation as a whole

    def clear(self, _: str) -> None:
        self.messages = list(self.system)

    def save(self, name: str) -> None:
        """Whole or not at all."""
        if not name:
            say("say where to: /save FILE")
            return
        path = Path(name).expanduser()
        if path.is_dir() or not path.parent.is_dir():
            raise ggraph.Error(f"{path} is a folder, not a file" if path.is_dir() else f"there is no folder {path.parent}")
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as f:
                json.dump({"messages": self.messages}, f, ensure_ascii=False, indent=1)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        say(f"saved {len(self.messages)} messages to {path}")

    def load(self, name: str) -> None:
        if not name:
            say("say where from: /load FILE")
            return
        path = Path(name).expanduser()
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            good = all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages)
        except (ValueError, KeyError, TypeError) as e:
            raise ggraph.Error(f"{path} is no saved conversation ({e})") from e
        if not good:
            raise ggraph.Error(f"{path} is no saved conversation: a message lacks its role or content")
        self.messages = messages
        say(f"loaded {len(messages)} messages from {path}")

    # --- lines

    def _ask(self) -> str | None:
        """The next message, None at the end of input."""
        lines: list[str] = []
        while True:
            line = _line("> " if not lines else "  ") if self.terminal else sys.stdin.readline()
            if not line:
                return "\n".join(lines) if lines else None
            lines.append(line.rstrip("\n"))
            if not lines[-1].endswith("\\"):
                return "\n".join(lines)
            lines[-1] = lines[-1][:-1]


def say(text: str) -> None:
    """To the user, not into the text."""
    click.echo(text, err=True)


def _line(prompt: str) -> str:
    """A line typed at a terminal with its newline, "" at the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  editing and history, where the system has it
    if not sys.stdout.isatty():
        click.echo(prompt, nl=False, err=True)
        return sys.stdin.readline()
    try:
        return input(prompt) + "\n"
    except EOFError:
        click.echo()
        return ""
