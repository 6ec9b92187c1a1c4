"""Answers taken apart: content, thoughts, tool calls; the same wherever the text was cut."""
from __future__ import annotations

import json
import random

import pytest

from ggraph.tools.server.calls import SYNTAXES, TAGGED, Syntax, explained, forced, syntax_of
from ggraph.tools.server.replies import Delta, Reader, value_end

MISTRAL, COMMAND, FENCED, BARE = SYNTAXES[1], SYNTAXES[2], SYNTAXES[3], SYNTAXES[-1]
CALL = '{"name": "f", "arguments": {"x": "a } \\" b", "y": [1, {"z": 2}]}}'
ARGUMENTS = '{"x": "a } \\" b", "y": [1, {"z": 2}]}'


def read(pieces: list[str], syntax: Syntax | None, thinking: bool = False, open: bool = False) -> tuple[str, str, list[list[str]]]:
    """Content, reasoning, [name, arguments] of each call."""
    reader, found = Reader(syntax, thinking, open), {"content": "", "reasoning": ""}
    calls: list[list[str]] = []
    deltas: list[Delta] = [d for piece in pieces for d in reader.push(piece)] + reader.finish()
    for d in deltas:
        if d.kind == "call":
            assert d.call == len(calls)
            calls.append([d.text, ""])
        elif d.kind == "arguments":
            calls[d.call][1] += d.text
        else:
            found[d.kind] += d.text
    return found["content"], found["reasoning"], calls


def cuts(text: str) -> list[list[str]]:
    """Whole, character by character, and cut at random."""
    rng = random.Random(3)
    at = [sorted(rng.sample(range(len(text) + 1), min(4, len(text)))) for _ in range(6)]
    return [[text], list(text), *([text[a:b] for a, b in zip([0, *c], [*c, len(text)])] for c in at)]


@pytest.mark.parametrize("syntax, text, content, calls", [
    (TAGGED, f"<tool_call>\n{CALL}\n</tool_call>", "", [["f", ARGUMENTS]]),
    (TAGGED, f"I look.<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "I look.", [["f", ARGUMENTS]] * 2),
    (TAGGED, "a < b <tool", "a < b <tool", []),
    (TAGGED, "<tool_call>no call</tool_call> and on", "<tool_call>no call</tool_call> and on", []),
    (TAGGED, f"<tool_call>{CALL}", "", [["f", ARGUMENTS]]),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {"x": "cut', "", [["f", '{"x": "cut']]),
    (TAGGED, "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\na b\n</parameter>\n</function>\n"
     "</tool_call>", "", [["f", '{"x": 1, "y": "a b"}']]),
    (TAGGED, "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>", "", [["f", '{"x": [1]}']]),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]", "", [["f", json.dumps(json.loads(ARGUMENTS))]] * 2),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x": 1}', "", [["f", '{"x": 1}']]),
    (COMMAND, '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}]<|END_ACTION|>', "",
     [["f", '{"x": 1}']]),
    (FENCED, '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>', "", [["f", '{"x": 1}']]),
    (BARE, ' {"name": "f", "parameters": {"x": 1}}', "", [["f", '{"x": 1}']]),
    (BARE, '{"no": "call"}', '{"no": "call"}', []),
    (BARE, 'text {"name": "f"}', 'text {"name": "f"}', []),
    (None, f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>", []),
])
def test_calls(syntax: Syntax | None, text: str, content: str, calls: list[list[str]]) -> None:
    for pieces in cuts(text):
        assert read(pieces, syntax) == (content, "", calls), pieces


@pytest.mark.parametrize("text, open, content, reasoning", [
    ("<think>\nhm\n</think>\n\nyes", False, "yes", "hm\n"),
    ("hm</think>yes", True, "yes", "hm"),
    ("hm", True, "", "hm"),
    ("plain", False, "plain", ""),
    ("<think></think>yes", False, "yes", ""),
    ("a <thin", False, "a <thin", ""),
])
def test_thoughts(text: str, open: bool, content: str, reasoning: str) -> None:
    for pieces in cuts(text):
        assert read(pieces, None, True, open) == (content, reasoning, []), pieces


def test_a_thought_then_a_call() -> None:
    for pieces in cuts(f"<think>hm</think>\n\n<tool_call>\n{CALL}\n</tool_call>"):
        assert read(pieces, TAGGED, True) == ("", "hm", [["f", ARGUMENTS]])


def test_arguments_come_as_they_are_written() -> None:
    reader = Reader(TAGGED)
    deltas = [d for c in f"<tool_call>{CALL}</tool_call>" for d in reader.push(c)]
    assert [d.kind for d in deltas][:3] == ["call", "arguments", "arguments"] and len(deltas) > 20


def test_value_end() -> None:
    assert value_end(ARGUMENTS + "} more") == len(ARGUMENTS) and value_end('{"a": "}') == 8


@pytest.mark.parametrize("source, syntax", [
    ("{% if tools %}<tool_call>", TAGGED), ("tools [TOOL_CALLS]", MISTRAL), ("{{ messages }}", TAGGED),
    ("tools <|start_header_id|>", BARE), ("tools", TAGGED)])
def test_syntax_of(source: str, syntax: Syntax) -> None:
    assert syntax_of(source) is syntax


def test_forced_calls_are_read_back() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for syntax in SYNTAXES:
        grammar = forced(syntax, tools, lambda text: json.dumps(text, ensure_ascii=False) if text else "", True, "</think>")
        name, arguments = syntax.keys
        text = f"{syntax.begin}{syntax.before}{json.dumps({name: 'f', arguments: {'x': 1}})}{syntax.after}{syntax.end}"
        assert syntax.begin in grammar and read([text], syntax) == ("", "", [["f", '{"x": 1}']]), syntax


def test_tools_for_a_template_that_knows_none() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    told = explained([{"role": "system", "content": "s"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                      {"role": "tool", "content": "r"}], tools)
    assert told[0]["content"].startswith("s\n\n") and '{"name": "f"}' in told[0]["content"]
    assert told[1] == {"role": "assistant", "content": '<tool_call>{"name": "f"}</tool_call>'}
    assert told[2] == {"role": "user", "content": "<tool_response>r</tool_response>"}
    assert explained([{"role": "user", "content": "x"}], tools)[0]["role"] == "system"
