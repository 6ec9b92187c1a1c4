"""Bodies made to break something: each gives an answer or an error of the client's, soon, and the server lives."""
from __future__ import annotations

import json
import random
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests import spec, tiny
from tests.tools.server.conftest import running

N = 60_000          # nested brackets

GRAMMARS = {
    "brackets": f"root ::= {'(' * N}\"a\"{')' * N}",
    "open brackets": f"root ::= {'(' * N}",
    "closing brackets": f"root ::= {')' * N}",
    "square brackets": f"root ::= {'[' * N}",
    "braces": f"root ::= \"a\"{'{' * N}",
    "optional": f"root ::= \"a\"{'?' * N}",
    "alternatives": f"root ::= {'|' * N}",
    "left recursion": 'root ::= root "a" | "a"',
    "left recursion by another": 'root ::= x\nx ::= y "b"\ny ::= x "a" | "c"',
    "nothing but recursion": "root ::= root",
    "a loop of empty rules": 'root ::= x*\nx ::= y*\ny ::= ""',
    "no root": 'x ::= "a"',
    "unknown rule": "root ::= nope",
    "repeated without end": 'root ::= "a"{1000000000}',
    "repeated nested": 'root ::= ((("a"{1,900}){1,900}){1,900}){1,900}',
    "negative": 'root ::= "a"{-1}',
    "a range the wrong way": "root ::= [z-a]",
    "no end of a string": 'root ::= "a',
    "bad escapes": 'root ::= "\\x" "\\u12" "\\U99999999"',
    "binary": "root ::= \x00\x01\ufffe",
    "a long chain of rules": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(5000)) + '\nr5000 ::= "a"',
    "many alternatives": "root ::= " + " | ".join(f'"w{i}"' for i in range(20_000)),
    "lark": 'start: "a"',
    "whitespace": " \n\t " * 1000}

REGEXES = {"brackets": "(" * N + "a" + ")" * N, "repeated nested": "((((a{1000}){1000}){1000}){1000})",
           "exponential": "(a|a?)*b" * 50, "classes": "[" * N, "lookaround": "(?=a)b", "backreference": r"(a)\1",
           "unicode": r"\p{Nope}", "alternatives": "|" * N}


def nested(key: str, n: int = N) -> str:
    """The JSON text of a schema in a schema."""
    return f'{{"{key}":' * n + "{}" + "}" * n


SCHEMAS: dict[str, Any] = {
    "itself": {"$ref": "#"}, "a loop": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "elsewhere": {"$ref": "http://127.0.0.1:1/x.json"}, "a file": {"$ref": "file:///etc/passwd"},
    "unknown reference": {"$ref": "#/$defs/none"}, "long": {"type": "string", "minLength": 10**9, "maxLength": 10**9},
    "a chain": {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(9000)}},
    "a chain of arrays": {"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(9000)}},
    "many": {"type": "array", "items": {"type": "integer"}, "minItems": 10**8},
    "a pattern": {"type": "string", "pattern": "(" * 1000},
    "a slow pattern": {"type": "string", "pattern": "^((((a{1000}){1000}){1000}){1000})$"},
    "numbers": {"minimum": 1e308, "maximum": -1}, "parts": {"enum": [[] for _ in range(50_000)]},
    "enum": {"enum": list(range(20_000))}, "enum of all": {"enum": [None, 1.5, "a", [], {}]}, "empty enum": {"enum": []},
    "types": {"type": ["string", "nope", 3]}, "no type": {"type": 17}, "properties": {"properties": [1, 2]},
    "wide": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}, "required": ["p1"]},
    "powers": {"$defs": {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
               | {"d40": {"type": "null"}}, "$ref": "#/$defs/d0"},
    "a type nobody can meet": {"allOf": [{"type": "string"}, {"type": "integer"}]}, "not": {"not": {}}}


@pytest.fixture(scope="module")
def client(file: str) -> Iterator[httpx.Client]:
    with running("-m", file, "-c", "512", "-np", "2") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
        assert server.process.poll() is None, server.log
        assert not [line for line in server.log if "unexpected" in line or "Traceback" in line], server.log


def refused_or_answered(client: httpx.Client, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
    r = client.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())
    assert r.status_code in (200, 400), (r.status_code, r.text[:300])
    assert r.status_code == 200 or (r.json()["error"]["message"] and len(r.text) < 5000)
    assert client.get("/health", timeout=5).status_code == 200
    return r


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(client: httpx.Client, name: str) -> None:
    refused_or_answered(client, "/completion", {"prompt": "a", "n_predict": 4, "grammar": GRAMMARS[name]})


@pytest.mark.parametrize("name", REGEXES)
def test_regexes(client: httpx.Client, name: str) -> None:
    refused_or_answered(client, "/completion", {"prompt": "a", "n_predict": 4, "regex": REGEXES[name]})


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(client: httpx.Client, name: str) -> None:
    refused_or_answered(client, "/completion", {"prompt": "a", "n_predict": 4, "json_schema": SCHEMAS[name]})


@pytest.mark.parametrize("key", ["items", "properties", "anyOf", "not", "additionalProperties", "a"])
@pytest.mark.parametrize("n", [300, 900, N])
def test_deep_schemas(client: httpx.Client, key: str, n: int) -> None:
    text = nested(key, n)
    refused_or_answered(client, "/completion", b'{"prompt":"a","n_predict":4,"json_schema":%s}' % text.encode())
    tool = b'[{"type":"function","function":{"name":"f","parameters":%s}}]' % text.encode()
    for choice in (b"required", b"auto"):
        refused_or_answered(client, "/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2,'
                            b'"tools":%s,"tool_choice":"%s"}' % (tool, choice))


def test_deep_values(client: httpx.Client) -> None:
    """Wherever a body takes anything."""
    fields = {"/completion": ("prompt", "logit_bias", "lora", "stop"), "/tokenize": ("content",),
              "/v1/chat/completions": ("messages", "chat_template_kwargs", "tool_choice", "response_format"),
              "/v1/messages": ("system", "thinking", "metadata"), "/v1/responses": ("input", "reasoning", "text")}
    for n in (200, 950, N):
        for deep in ("[" * n + "]" * n, '{"a":' * n + "1" + "}" * n):
            for path, name in ((path, name) for path, names in fields.items() for name in names):
                body = f'{{"messages":[],"input":"a","max_tokens":1,"{name}":{deep}}}'
                refused_or_answered(client, path, body.encode())


def mutated(rng: random.Random, text: str) -> str:
    """A few characters changed, doubled or taken out."""
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(text) + 1)
        odd = rng.choice("()[]{}|*+?\"\\:=-<>^$.,\u00e9\U0001f600")
        piece = rng.choice((rng.choice(string.printable), odd, text[at:at + 9] * 3, ""))
        text = text[:at] + piece + text[at + rng.randrange(3):]
    return text


@pytest.mark.parametrize("n", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutated_sources(client: httpx.Client, n: int) -> None:
    """Grammars, schemas, expressions and whole bodies that were right before somebody fell on the keyboard."""
    rng = random.Random(n)
    grammar = 'root ::= ("the " | word{2,3} [a-z0-9]* "\\x41")+ "."\nword ::= "a" | [^b]? # a comment\n'
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, "x"]}, "minItems": 1},
                                               "b": {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"$ref": "#/$defs/c"}]}},
              "required": ["a"], "$defs": {"c": {"type": "number", "minimum": 0}}}
    body = json.dumps({"prompt": "the rain", "n_predict": 2, "json_schema": schema, "stop": ["."], "logit_bias": [[5, 1.5]]})
    for _ in range(n):
        kind = rng.randrange(4)
        if kind == 3:
            refused_or_answered(client, "/completion", mutated(rng, body).encode(errors="surrogatepass"))
            continue
        field, text = (("grammar", grammar), ("regex", "(a|[b-z]{2,3})+\\d?x"), ("json_schema", json.dumps(schema)))[kind]
        value: Any = mutated(rng, text)
        if field == "json_schema":
            try:
                value = json.loads(value)
            except ValueError:
                continue
        refused_or_answered(client, "/completion", {"prompt": "a", "n_predict": 3, "temperature": 1, field: value})


@pytest.mark.parametrize("n", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_bytes_that_are_no_text(client: httpx.Client, n: int) -> None:
    rng = random.Random(n)
    for _ in range(n):
        odd = (0x22, 0x5c, 0xc3, 0xa9, 0xf0, 0x9f, 0xed, 0xa0, 0x80, 0xff, 0, 0x61, 0x75)
        raw = bytes(rng.choice(odd) for _ in range(rng.randrange(30)))
        for path in ("/completion", "/tokenize"):
            refused_or_answered(client, path, b'{"n_predict":1,"stop":["%s"],"prompt":"%s","content":"%s"}' % (raw, raw, raw))


@pytest.mark.slow
@pytest.mark.parametrize("args", [["--metrics", "--props", "--slot-save-path", "."], ["--embedding", "--pooling", "mean"]],
                         ids=["completions", "embeddings"])
def test_schemathesis(file: str, tmp_path: Path, args: list[str]) -> None:
    """Ten minutes (half of them with embeddings) of requests made from the OpenAPI description: no 5xx but 501 and 503."""
    pytest.importorskip("schemathesis")
    config = tmp_path / "schemathesis.toml"
    config.write_text('[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", 501, 503]\n')
    args = [str(tmp_path) if arg == "." else arg for arg in args]
    with running("-m", file, "-c", "512", "-np", "4", "-ub", "64", "-cram", "16", *args) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{server.url}/openapi.json",
                   "-c", "not_a_server_error", "--request-timeout", "60", "--continue-on-failure", "--max-time",
                   "300" if "--embedding" in args else "600"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1200)
        print(done.stdout[done.stdout.find("= SUMMARY"):])
        assert "generated" in done.stdout and "FAILURES" not in done.stdout, done.stdout[-5000:]
        assert httpx.get(f"{server.url}/health").status_code == 200 and server.process.poll() is None
        assert not [line for line in server.log if "unexpected" in line or "Traceback" in line], server.log


# --- a model that computes nonsense


def nan_model(path: Path, name: str, rows: slice) -> Path:
    """The tiny model with NaN in some rows of a matrix."""
    delta = np.zeros((tiny.N_VOCAB, tiny.N_EMBD), np.float32)
    delta[rows] = np.nan
    return spec.write(tiny.tiny(), path, deltas={name: delta})


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {}), ("/completion", {"temperature": 0}), ("/completion", {"n_probs": 3}), ("/completion", {"mirostat": 2}),
    ("/completion", {"grammar": 'root ::= "a"'}), ("/completion", {"n": 2}),
    ("/v1/completions", {"echo": True, "logprobs": 2, "max_tokens": 1}),
    ("/v1/completions", {"echo": True, "logprobs": 2, "max_tokens": 0}), ("/v1/chat/completions", {**CHAT, "logprobs": True}),
    ("/v1/responses", {"input": "a"}), ("/v1/messages", CHAT)]


@pytest.mark.parametrize("flash", ["on", "off"])
def test_logits_of_nan(tmp_path: Path, flash: str) -> None:
    """An error for each request, told in a stream too; the server goes on."""
    path = str(nan_model(tmp_path / "nan.gguf", "output.weight", slice(9, 10)))
    with (running("-m", path, "-c", "512", "-np", "2", "-fa", flash) as server,
          httpx.Client(base_url=server.url, timeout=60) as c):
        for path, body in ASKED:
            r = c.post(path, json={"prompt": "a", "n_predict": 3, **body})
            assert r.status_code == 400 and "nan" in r.json()["error"]["message"].lower(), (path, body, r.text)
            r = c.post(path, json={"prompt": "a", "n_predict": 3, **body, "stream": True})
            assert r.status_code == 400 or '"error"' in r.text, (path, body, r.text)
        assert not any(s["is_processing"] for s in c.get("/slots").json()) and server.process.poll() is None


@pytest.mark.parametrize("flash", ["on", "off"])
def test_nan_stays_with_the_sequence_that_has_it(tmp_path: Path, flash: str) -> None:
    """A token whose embedding is NaN spoils its own text, not the cells that others get after it, nor those beside it."""
    path = nan_model(tmp_path / "nan.gguf", "token_embd.weight", slice(20, 21))
    with (running("-m", str(path), "-c", "256", "-np", "2", "-fa", flash, "-cram", "0") as server,
          httpx.Client(base_url=server.url, timeout=60) as c):
        bias = {"logit_bias": [[20, False]], "temperature": 0, "n_predict": 8, "cache_prompt": False}
        want = c.post("/completion", json={"prompt": [1, 270, 280], **bias}).json()["content"]
        for _ in range(3):
            assert c.post("/completion", json={"prompt": [1, 20, 280] * 20, **bias}).status_code == 400
            for slot in (0, 1):
                assert c.post("/completion", json={"prompt": [1, 270, 280], "id_slot": slot, **bias}).json()["content"] == want


def test_vectors_of_nan(tmp_path: Path, file: str) -> None:
    path = nan_model(tmp_path / "nan.gguf", "token_embd.weight", slice(0, tiny.N_VOCAB))
    with (running("-m", str(path), "-c", "256", "--embedding", "--pooling", "mean") as server,
          httpx.Client(base_url=server.url, timeout=60) as c):
        for path_ in ("/v1/embeddings", "/embedding"):
            r = c.post(path_, json={"input": "a", "content": "a"})
            assert r.status_code == 400 and "nan" in r.json()["error"]["message"].lower(), r.text
