"""Tool calls as models write them: the syntaxes in use, found by the marks in a chat template.

In: a template's source, tools, a model's text. Out: a `Syntax`, calls with name and JSON arguments, a grammar that forces
a call. A new syntax is a row of `SYNTAXES` and, if its body is of a new kind, a reader.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ggraph

Tool = dict[str, Any]
Call = tuple[str, str]          # name, arguments as JSON text


@dataclass(frozen=True)
class Syntax:
    """A call stands between `begin` and `end`; an empty `end` is the end of the text. `before` and `after` surround the JSON
    of one call where a call is forced; `keys` are the names of its name and its arguments."""
    begin: str
    end: str
    read: Callable[[str], list[Call]]
    keys: tuple[str, str] = ("name", "arguments")
    before: str = ""
    after: str = ""
    marks: tuple[str, ...] = ()     # further texts of which a template with this syntax has one


def _from_json(value: Any) -> list[Call]:
    """One call or a list of them, under any of the names in use."""
    found = []
    for one in value if isinstance(value, list) else [value]:
        one = one.get("function", one) if isinstance(one, dict) and isinstance(one.get("function"), dict) else one
        name = next((one[k] for k in ("name", "tool_name") if k in one), None) if isinstance(one, dict) else None
        if not isinstance(name, str):
            raise ValueError("no name")
        arguments: Any = next((one[k] for k in ("arguments", "parameters") if k in one), {})
        found.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
    return found


def read_json(body: str) -> list[Call]:
    """One value, or several one after the other."""
    decoder, found, at = json.JSONDecoder(), list[Call](), 0
    body = body.strip()
    while at < len(body):
        value, at = decoder.raw_decode(body, at)
        found += _from_json(value)
        at += len(body[at:]) - len(body[at:].lstrip(" \n;,"))
    return found


def read_tagged(body: str) -> list[Call]:
    """<function=f><parameter=x>1</parameter></function>, or f<arg_key>x</arg_key><arg_value>1</arg_value>, or JSON."""
    if function := re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", body, re.DOTALL):
        pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
        return [(function[1].strip(), _arguments(pairs))]
    if keyed := re.fullmatch(r"\s*([\w.-]+)\s*((?:<arg_key>.*)?)", body, re.DOTALL):
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", keyed[2], re.DOTALL)
        return [(keyed[1], _arguments(pairs))]
    return read_json(body)


def read_named(body: str) -> list[Call]:
    """f[ARGS]{"x": 1}, or f{"x": 1}, or a JSON array."""
    if not (named := re.fullmatch(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})\s*", body, re.DOTALL)):
        return read_json(body)
    json.loads(named[2])
    return [(named[1], named[2])]


def read_fenced(body: str) -> list[Call]:
    """function<|tool_sep|>f, then JSON in a fence; or f<|tool_sep|>{...}."""
    head, _, rest = body.partition("<｜tool▁sep｜>")
    name, _, fenced = rest.partition("\n")
    if head.strip() != "function":
        name, fenced = head, rest
    arguments = fenced.strip().removeprefix("```json").removesuffix("```").strip()
    json.loads(arguments)
    return [(name.strip(), arguments)]


def _arguments(pairs: Sequence[tuple[str, str]]) -> str:
    """Values that are JSON keep their type, the others are text."""
    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text
    return json.dumps({name.strip(): value(text) for name, text in pairs}, ensure_ascii=False)


TAGGED = Syntax("<tool_call>", "</tool_call>", read_tagged, before="\n", after="\n")
SYNTAXES = (
    TAGGED,
    Syntax("[TOOL_CALLS]", "", read_named, before="[", after="]"),
    Syntax("<|START_ACTION|>", "<|END_ACTION|>", read_json, ("tool_name", "parameters"), "[", "]"),
    Syntax("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read_fenced),
    Syntax("<|tool_call|>", "", read_json, before="[", after="]"),
    Syntax("<|tool_call_start|>", "<|tool_call_end|>", read_json, before="[", after="]"),
    Syntax("<|python_tag|>", "", read_json, ("name", "parameters"), marks=("<|eom_id|>",)),
    Syntax("", "", read_json, ("name", "parameters"), marks=('"parameters":', '"name":', "<|start_header_id|>")),
)
PROMPT = """You may call functions. These are available, each as a JSON object in a line of its own:
{tools}
To call one, answer with nothing but <tool_call>{{"name": "function name", "arguments": {{"argument": "value"}}}}</tool_call>"""


def syntax_of(source: str) -> Syntax:
    """The one that a template uses; `TAGGED` where it uses none."""
    found = (s for s in SYNTAXES if (s.begin and s.begin in source) or any(mark in source for mark in s.marks))
    return next(found, TAGGED) if "tools" in source else TAGGED


def explained(messages: list[dict[str, Any]], tools: list[Tool]) -> list[dict[str, Any]]:
    """For templates that know no tools: the conversation with the tools in its system message, calls and results as text."""
    text = PROMPT.format(tools="\n".join(json.dumps(t.get("function", t), ensure_ascii=False) for t in tools))
    told = [_told(m) for m in messages]
    if told and told[0].get("role") == "system" and isinstance(told[0].get("content"), str):
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _told(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>{message.get('content')}</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    bodies = [json.dumps(c.get("function", c) if isinstance(c, dict) else c, ensure_ascii=False) for c in calls]
    content = message.get("content")
    text = (content if isinstance(content, str) else "") + "".join(f"<tool_call>{body}</tool_call>" for body in bodies)
    return {"role": "assistant", "content": text}


def forced(syntax: Syntax, tools: list[Tool], mark: Callable[[str], str], parallel: bool, thinking: str) -> str:
    """A Lark grammar: one call of one of the tools, or several. `mark` writes a mark, which may be one token; `thinking` is
    the mark that ends a thought in which the text begins, if it does."""
    name, arguments = syntax.keys
    calls = [{"type": "object", "properties": {name: {"const": t["function"]["name"]},
                                               arguments: t["function"].get("parameters") or {"type": "object"}},
              "required": [name, arguments], "additionalProperties": False} for t in tools]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    # A list of calls has one end; elsewhere each call has its own.
    inner = f"{_quoted(syntax.before)} call {_quoted(syntax.after)}"
    one = f"{mark(syntax.begin)} {inner} {mark(syntax.end)}"
    start = "one (/\\n*/ one)*" if parallel and syntax.end and syntax.before != "[" else "one"
    thought = ""
    if thinking:
        start = f"thought /\\s{{0,8}}/ {start}"
        thought = f"thought[suffix={json.dumps(thinking)}]: /(?s:.*)/\n"
    return f"start: {start}\n{thought}one: {one}\ncall: %json {json.dumps(ggraph.Grammar.as_read(schema))}\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
