"""What is wrong with a request is told to its client, in the one shape of errors; the server goes on."""
from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from tests.tools.server.asking import CHAT, post


@pytest.mark.parametrize("path, body, code, said", [
    ("/completion", {"n_predict": 2}, 400, "'prompt' is required"),
    ("/completion", {"prompt": "a", "repeat_last_n": -1}, 400,
     "Field 'repeat_last_n': Value must be between 0 <= value <= 2147483647, but got -1"),
    ("/completion", {"prompt": "a", "temperature": "hot"}, 400, "Field 'temperature': type must be float, but is string"),
    ("/completion", {"prompt": "a", "repeat_penalty": 0}, 400, "Failed to initialize samplers"),
    ("/completion", {"prompt": "a", "grammar": "root ::= ("}, 400, "Failed to initialize samplers: failed to parse grammar"),
    ("/completion", {"prompt": "a", "json_schema": {"type": "nope"}}, 400, "Failed to initialize samplers"),
    ("/completion", {"prompt": []}, 400, "must not be empty"),
    ("/completion", {"prompt": [9999]}, 400, "token ids from 0 to"),
    ("/completion", {"prompt": "a", "n": 9}, 400, "between 1 <= value <= 4"),
    ("/completion", {"prompt": "x" * 600}, 400, "exceeds the available context size (512 tokens)"),
    ("/v1/chat/completions", {}, 400, "'messages' is required"),
    ("/v1/chat/completions", {"messages": "hi"}, 400, "Expected 'messages' to be an array"),
    ("/v1/chat/completions", {"messages": [{"content": "hi"}]}, 400, "Missing 'role'"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, "no tools"),
    ("/v1/chat/completions", {**CHAT, "tools": [{}]}, 400, "Failed to parse tools"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "xml"}}, 400, "response_format type must be"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400, "requires logprobs"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "this server takes text"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "this server takes text"),
    ("/v1/responses", {"input": "a", "previous_response_id": "x"}, 400, "previous_response_id"),
    ("/v1/embeddings", {"input": "a"}, 501, "--embeddings"),
    ("/rerank", {}, 501, "--reranking"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, 501, "prefix token is missing"),
    ("/v1/audio/transcriptions", {}, 501, "does not support audio"),
    ("/completion", {"prompt": "a", "grammar_lazy": True}, 400, "grammar_lazy is not supported"),
    ("/completion", {"prompt": "a", "n_indent": -1}, 400, "Field 'n_indent': Value must be between 0 <= value"),
    ("/props", {}, 501, "--props"),
    ("/slots/9?action=erase", {}, 404, "there is no slot 9"),
    ("/slots/x?action=erase", {}, 400, "Invalid slot ID"),
    ("/slots/0?action=dance", {}, 400, "Invalid action"),
    ("/slots/0?action=restore", {"filename": "../x"}, 400, "Invalid filename"),
    ("/slots/0?action=restore", {"filename": "missing"}, 400, "Unable to restore slot"),
    ("/nope", {}, 404, "File Not Found"),
])
def test_errors(client: httpx.Client, path: str, body: dict[str, Any], code: int, said: str) -> None:
    assert said in post(client, path, code, **body)["message"]


@pytest.mark.parametrize("raw", [b"{bad", b"[1]", b'"x"', b"NaN", b'{"prompt": NaN}', b"\xff", b"[" * 100_000, b'{"a":' * 100_000,
                                 b'{"prompt": ' + b"1" * 10_000 + b"}"], ids=range(9))
def test_bodies_that_are_no_json(client: httpx.Client, raw: bytes) -> None:
    for path in ("/completion", "/v1/chat/completions"):
        assert client.post(path, content=raw).status_code == 400


def test_odd_text_is_answered(client: httpx.Client) -> None:
    r = client.post("/completion", content=b'{"prompt": "\\ud83d\\ude00 \\ud800 \\u0000", "n_predict": 1}')
    assert r.status_code == 200 and "\N{GRINNING FACE} �" in r.json()["prompt"]
    assert post(client, "/v1/chat/completions", **{**CHAT, "n": None, "stop": None})["choices"]


def test_fuzz(client: httpx.Client) -> None:
    """Any value in any field: an answer, or an error that is the client's."""
    rng = random.Random(1)
    odd: list[Any] = [None, True, 0, -1, 2**31, 2**70, 1e308, 1.5, "", "x", [], [[]], {}, {"a": 1}, ["a"], [1], [None], [{}],
                      [[1, "x"]], {"1": 2}]
    good: dict[str, dict[str, Any]] = {
        "/completion": {"prompt": "a"}, "/v1/completions": {"prompt": "a"}, "/v1/chat/completions": CHAT,
        "/v1/responses": {"input": "a"}, "/v1/messages": {"messages": CHAT["messages"]}, "/tokenize": {}, "/detokenize": {},
        "/apply-template": CHAT, "/infill": {}, "/slots/3?action=save": {}, "/lora-adapters": {}}
    from ggraph.tools.server import schema
    bodies = (schema.Infill, schema.Chat, schema.Responses, schema.Messages, schema.Tokenize, schema.SlotFile)
    names = sorted({name for body in bodies for name in body.model_fields})
    for _ in range(400):
        path = rng.choice(list(good))
        sent = {**good[path], **{rng.choice(names): rng.choice(odd) for _ in range(rng.randrange(1, 4))}}
        sent |= dict.fromkeys(("n_predict", "max_tokens", "max_output_tokens"), 2)
        code = client.post(path, json=sent).status_code
        assert code < 500 or code == 501, (path, sent)
    assert client.get("/health").json() == {"status": "ok"}
