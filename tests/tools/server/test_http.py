"""The routes over a real connection: answers, errors, streams, cancellation, keys, files, signals."""
from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import ggraph
from tests import adapters, encoders, spec
from tests.tools.server.conftest import Server, running

GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 8}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the rain"}], "temperature": 0, "max_tokens": 8}


def post(client: httpx.Client, path: str, code: int = 200, **body: Any) -> Any:
    r = client.post(path, json=body)
    assert r.status_code == code, r.text
    if code != 200:
        error = r.json()["error"]
        assert error["code"] == code and error["message"] and error["type"]
        return error
    return r.json()


def frames(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    r = client.post(path, json={**body, "stream": True})
    assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream"), r.text
    lines = [line[6:] for line in r.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def idle(client: httpx.Client) -> bool:
    return not any(s["is_processing"] for s in client.get("/slots").json())


def soon(what: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- answers


def test_completion(client: httpx.Client, file: str) -> None:
    with ggraph.LLM(file, n_ctx=256, n_threads=1) as llm:
        want = llm.generate("the rain", max_tokens=8, temperature=0.0).read()
    answer = post(client, "/completion", prompt="the rain", **GREEDY)
    assert answer["content"] == want and answer["stop_type"] == "limit" and answer["tokens_predicted"] == 8
    assert answer["generation_settings"]["seed"] == 42 and answer["model"] == "tiny" and answer["prompt"] == "the rain"
    parts = frames(client, "/completion", prompt="the rain", **GREEDY)
    assert "".join(p["content"] for p in parts) == want and parts[-1]["stop"] and not any(p["stop"] for p in parts[:-1])
    two = post(client, "/completion", prompt=["the rain", "a cat"], **GREEDY)
    assert [a["index"] for a in two] == [0, 1] and two[0]["content"] == want
    ids = post(client, "/tokenize", content="the rain", add_special=True)["tokens"]
    assert post(client, "/completion", prompt=ids, **GREEDY)["content"] == want


def test_fields_of_completion(client: httpx.Client) -> None:
    nothing = post(client, "/completion", prompt="a", n_predict=0)
    assert (nothing["content"], nothing["tokens_predicted"]) == ("", 0)
    part = post(client, "/completion", prompt="a", response_fields=["content", "timings/prompt_n"], **GREEDY)
    assert set(part) == {"content", "timings/prompt_n"}
    probs = post(client, "/completion", prompt="a", n_probs=3, **GREEDY)["completion_probabilities"]
    assert len(probs) == 8 and all(len(p["top_logprobs"]) == 3 and p["top_logprobs"][0]["id"] == p["id"] for p in probs)
    tokens = post(client, "/completion", prompt="a", return_tokens=True, **GREEDY)["tokens"]
    assert [p["id"] for p in probs] == tokens
    banned = post(client, "/completion", prompt="a", logit_bias=[[tokens[0], False]], return_tokens=True, **GREEDY)["tokens"]
    assert tokens[0] not in banned
    assert len(post(client, "/completion", prompt="a", n=2, n_predict=2)) == 2
    same = [post(client, "/completion", prompt="a", seed=7, temperature=1.5, n_predict=20)["content"] for _ in range(2)]
    assert same[0] == same[1] != post(client, "/completion", prompt="a", seed=8, temperature=1.5, n_predict=20)["content"]


def test_probabilities_after_sampling(client: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "the rain", "n_predict": 5, "seed": 2, "n_probs": 8, "post_sampling_probs": True}
    for more in ({"temperature": 1.0, "top_k": 3, "min_p": 0}, {"temperature": 0}):
        items = post(client, "/completion", **{**body, **more})["completion_probabilities"]
        assert len(items) == 5
        for item in items:
            probs = {t["id"]: t["prob"] for t in item["top_probs"]}
            assert probs[item["id"]] == item["prob"] > 0 and sum(probs.values()) == pytest.approx(1)
            assert len(probs) == (3 if "top_k" in more else 1) and "logprob" not in item
    chat = post(client, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=2, post_sampling_probs=True)
    assert chat["choices"][0]["logprobs"]["content"][0]["prob"] == 1.0


def test_timings_per_token(client: httpx.Client) -> None:
    body = {**GREEDY, "max_tokens": 8, "prompt": "the rain", "messages": CHAT["messages"], "timings_per_token": True}
    for path in ("/completion", "/v1/completions", "/v1/chat/completions"):
        timed = [p["timings"] for p in frames(client, path, **body) if p != "[DONE]" and "timings" in p]
        counts = [t["predicted_n"] for t in timed]
        assert counts == sorted(counts) and counts[0] < counts[-1] == 8 and len(counts) > 4, path
        assert all(t["prompt_ms"] == timed[0]["prompt_ms"] >= 0 for t in timed)


def test_openai_completions(client: httpx.Client) -> None:
    answer = post(client, "/v1/completions", prompt=["the", "a"], n=2, max_tokens=3, temperature=0)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3] and answer["usage"]["completion_tokens"] == 12
    echo = post(client, "/v1/completions", prompt="the rain", echo=True, logprobs=1, max_tokens=1, temperature=0)["choices"][0]
    assert echo["text"].startswith("the rain") and echo["logprobs"]["token_logprobs"][0] is None
    assert len(echo["logprobs"]["tokens"]) == len(post(client, "/tokenize", content="the rain", add_special=True)["tokens"]) + 1
    assert all(v < 0 for v in echo["logprobs"]["token_logprobs"][1:])
    parts = frames(client, "/v1/completions", prompt="a", max_tokens=3, stream_options={"include_usage": True})
    assert parts[-1] == "[DONE]" and parts[-2]["usage"]["completion_tokens"] == 3 and parts[-2]["choices"][0]["finish_reason"]


def test_chat(client: httpx.Client) -> None:
    answer = post(client, "/v1/chat/completions", **CHAT)
    text = answer["choices"][0]["message"]["content"]
    parts = frames(client, "/v1/chat/completions", **CHAT, stream_options={"include_usage": True})
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "".join(p["choices"][0]["delta"].get("content") or "" for p in parts[:-2] if p["choices"]) == text
    assert parts[-3]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
    assert parts[-2]["choices"] == [] and parts[-2]["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
    assert parts[-1] == "[DONE]" and len({p["id"] for p in parts[:-1]}) == 1
    assert "usage" not in frames(client, "/v1/chat/completions", **CHAT)[-2]
    prompt = post(client, "/apply-template", messages=CHAT["messages"])["prompt"]
    assert prompt == "<|im_start|>user\nthe rain<|im_end|>\n<|im_start|>assistant\n"
    begun = [*CHAT["messages"], {"role": "assistant", "content": "in a"}]
    filled = post(client, "/v1/chat/completions", **{**CHAT, "messages": begun})
    assert filled["choices"][0]["message"]["content"].startswith("in a")


def test_a_message_that_goes_on(client: httpx.Client) -> None:
    body = {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "in a"}]}
    want = post(client, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    more = {**body, "continue_final_message": True}
    assert post(client, "/v1/chat/completions", **more, add_generation_prompt=False)["choices"][0]["message"]["content"] == want
    assert "add_generation_prompt" in post(client, "/v1/chat/completions", 400, **more)["message"]
    alone = {**CHAT, "continue_final_message": True, "add_generation_prompt": False}
    assert "assistant message" in post(client, "/v1/chat/completions", 400, **alone)["message"]


def test_text_is_whole_characters(client: httpx.Client) -> None:
    """The tiny model writes single bytes: what is sent piece by piece is what is sent at once."""
    body: dict[str, Any] = {"prompt": "the rain", "n_predict": 60, "temperature": 2.0, "seed": 3}
    parts = frames(client, "/completion", **body)
    assert "".join(p["content"] for p in parts) == post(client, "/completion", **body)["content"]


def test_tokenize(client: httpx.Client) -> None:
    ids = post(client, "/tokenize", content="the rain é")["tokens"]
    assert post(client, "/detokenize", tokens=ids)["content"] == "the rain é"
    pieces = post(client, "/tokenize", content="é", with_pieces=True)["tokens"]
    assert [195] in [p["piece"] for p in pieces]
    assert post(client, "/tokenize", content=[5, "a"])["tokens"][0] == 5


def test_responses_and_messages(client: httpx.Client) -> None:
    text = post(client, "/v1/chat/completions", **CHAT)["choices"][0]["message"]["content"]
    answer = post(client, "/v1/responses", input="the rain", temperature=0, max_output_tokens=8)
    assert answer["output"][0]["content"][0]["text"] == text and answer["usage"]["output_tokens"] == 8
    message = post(client, "/v1/messages", messages=CHAT["messages"], temperature=0, max_tokens=8)
    assert message["content"] == [{"type": "text", "text": text}] and message["stop_reason"] == "max_tokens"
    n = post(client, "/v1/messages/count_tokens", messages=CHAT["messages"])["input_tokens"]
    assert n == sum(message["usage"][k] for k in ("input_tokens", "cache_read_input_tokens"))
    assert post(client, "/v1/chat/completions/input_tokens", **CHAT)["input_tokens"] == n


def test_a_required_call_is_enforced(client: httpx.Client) -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}}}
    body = {**CHAT, "max_tokens": 200, "tools": [tool], "tool_choice": "required"}
    answer = post(client, "/v1/chat/completions", **body)["choices"][0]
    call = answer["message"]["tool_calls"][0]["function"]
    assert answer["finish_reason"] == "tool_calls" and call["name"] == "rain" and json.loads(call["arguments"])["n"] in range(10)
    parts = frames(client, "/v1/chat/completions", **body)
    deltas = [d for p in parts[:-1] for d in p["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(d["function"].get("arguments", "") for d in deltas) == call["arguments"]
    assert deltas[0]["function"]["name"] == "rain"
    named = post(client, "/v1/chat/completions", **{**body, "tool_choice": {"type": "function", "function": {"name": "rain"}}})
    assert named["choices"][0]["message"]["tool_calls"]
    used = post(client, "/v1/messages", messages=CHAT["messages"], max_tokens=200, temperature=0, tool_choice={"type": "any"},
                tools=[{"name": "rain", "input_schema": tool["function"]["parameters"]}])
    assert used["content"][0]["input"] == json.loads(call["arguments"]) and used["stop_reason"] == "tool_use"


def test_structured_output(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    answer = post(client, "/v1/chat/completions", **{**CHAT, "max_tokens": 100}, response_format=form)
    assert json.loads(answer["choices"][0]["message"]["content"])["c"] in ("red", "blue")
    assert post(client, "/completion", prompt="a", grammar='root ::= "rain"', temperature=0)["content"] == "rain"
    assert post(client, "/completion", prompt="a", regex="[ab]{4}", temperature=0)["content"].strip("ab") == ""


# --- what is wrong


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


# --- many clients


def test_isolation(server: Server, client: httpx.Client) -> None:
    """16 at a time, half of them leave: those who stay get what they get alone, and all slots are free at the end."""
    rng = random.Random(5)
    prompts = ["".join(rng.choice("etaoinshr ") for _ in range(rng.randrange(3, 80))) for _ in range(60)]

    async def one(c: httpx.AsyncClient, i: int, patience: float | None) -> str | None:
        body = {"prompt": prompts[i], "n_predict": 10, "temperature": 0, "stream": i % 3 == 0}
        try:
            r = await asyncio.wait_for(c.post("/completion", json=body), patience)
        except (asyncio.TimeoutError, TimeoutError):
            return None
        if not body["stream"]:
            return str(r.json()["content"])
        return "".join(json.loads(line[6:])["content"] for line in r.text.splitlines() if line.startswith("data: "))

    async def all_of_them() -> list[str | None]:
        gate = asyncio.Semaphore(16)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as c:
            async def go(i: int) -> str | None:
                async with gate:
                    return await one(c, i, rng.random() * 0.3 if i % 2 else None)
            return await asyncio.gather(*(go(i) for i in range(len(prompts))))
    got = asyncio.run(all_of_them())
    soon(lambda: idle(client))
    for prompt, text in zip(prompts, got):
        if text is not None:
            assert text == post(client, "/completion", prompt=prompt, n_predict=10, temperature=0, cache_prompt=False)["content"]
    assert sum(t is not None for t in got) >= 30


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(server: Server, client: httpx.Client, stream: bool) -> None:
    body = json.dumps({"prompt": "the rain", "n_predict": 500, "ignore_eos": True, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        soon(lambda: not idle(client))
    soon(lambda: idle(client), 2)


def test_health_during_a_prefill(server: Server, client: httpx.Client) -> None:
    async def busy() -> float:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as c:
            bodies = [{"prompt": "rain " * 80 + str(i), "n_predict": 1} for i in range(8)]
            work = [asyncio.create_task(c.post("/completion", json=body)) for body in bodies]
            worst = 0.0
            while not all(t.done() for t in work):
                start = time.perf_counter()
                assert (await c.get("/health")).status_code == 200
                worst = max(worst, time.perf_counter() - start)
            return worst
    assert asyncio.run(busy()) < 0.5


# --- the server itself


def test_what_it_says_of_itself(client: httpx.Client) -> None:
    model = client.get("/v1/models").json()["data"][0]
    assert model["id"] == "tiny" and model["meta"]["n_vocab"] > 256
    props = client.get("/props").json()
    assert props["total_slots"] == 4 and props["default_generation_settings"]["n_ctx"] == 512
    assert "im_start" in props["chat_template"]
    assert [s["id"] for s in client.get("/slots").json()] == [0, 1, 2, 3]
    assert client.get("/lora-adapters").json() == []
    metrics = client.get("/metrics").text
    assert "# TYPE llamacpp:prompt_tokens_total counter" in metrics and "llamacpp:requests_processing 0.0" in metrics
    paths = client.get("/openapi.json").json()["paths"]
    assert "prompt" in paths["/completion"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]


def test_slot_files(client: httpx.Client, slots_folder: Path) -> None:
    first = post(client, "/completion", prompt="the rain in spain", id_slot=1, **GREEDY)
    saved = post(client, "/slots/1?action=save", filename="s.bin")
    assert saved["n_saved"] == first["tokens_cached"] and saved["n_written"] == (slots_folder / "s.bin").stat().st_size
    assert post(client, "/slots/1?action=erase")["n_erased"] == saved["n_saved"]
    assert post(client, "/slots/2?action=restore", filename="s.bin")["n_restored"] == saved["n_saved"]
    again = post(client, "/completion", prompt="the rain in spain", id_slot=2, **GREEDY)
    assert again["content"] == first["content"] and again["timings"]["cache_n"] == again["tokens_evaluated"] - 1


def test_cors(client: httpx.Client) -> None:
    page = {"Origin": "http://localhost:3000", "Access-Control-Request-Headers": "authorization"}
    r = client.options("/v1/chat/completions", headers=page)
    assert r.status_code == 200 and r.headers["access-control-allow-origin"] == page["Origin"]
    assert r.headers["access-control-allow-headers"] == "authorization"
    assert "access-control-allow-origin" not in client.get("/health", headers={"Origin": "http://evil.example"}).headers


def test_keys_and_signals(file: str) -> None:
    """Only who has the key comes in; the first signal lets requests end, the second leaves at once."""
    with running("-m", file, "-c", "256", "-np", "1", "--api-key", "one,two") as server, \
            httpx.Client(base_url=server.url, timeout=30) as c:
        assert c.get("/health").status_code == 200 and c.options("/completion").status_code == 200
        for headers in ({}, {"Authorization": "Bearer three"}):
            r = c.post("/tokenize", json={}, headers=headers)
            assert r.status_code == 401 and r.json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": "Bearer one"}, {"X-Api-Key": "two"}):
            assert c.post("/tokenize", json={}, headers=headers).status_code == 200
        with c.stream("POST", "/completion", headers={"X-Api-Key": "two"},
                      json={"prompt": "a", "n_predict": 200, "stream": True, "ignore_eos": True}) as r:
            stream = r.iter_lines()
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            lines = [line for line in stream if line.startswith("data: ")]
        assert json.loads(lines[-1][6:])["stop"]
        assert server.process.wait(20) == 0


def test_a_slow_client_and_the_log(file: str) -> None:
    """Who does not send its request in time is told so; a line for each request names no prompt."""
    with running("-m", file, "-c", "256", "-np", "1", "--timeout", "1", "--log-requests") as server, \
            httpx.Client(base_url=server.url, timeout=30) as c:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as s:
            s.sendall(b'POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt": ')
            assert b" 408 " in s.recv(4096).splitlines()[0]
        post(c, "/completion", prompt="secret", n_predict=1)
        soon(lambda: any("POST /completion 200" in line for line in server.log))
        assert not any("secret" in line for line in server.log)


def stalled(url: str, sent: bytes) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.settimeout(20)
    s.connect((host, int(port)))
    s.sendall(sent)
    return s


def test_clients_that_stall(file: str) -> None:
    """In the head of a request, in that of a second one, and instead of reading a stream: their connections are closed."""
    with running("-m", file, "-c", "512", "-np", "1", "--timeout", "1") as server, httpx.Client(base_url=server.url) as c:
        for head in (b"", b"POST /completion HTTP/1.1\r\nHo", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"):
            with stalled(server.url, head) as s:
                answer = b""
                with contextlib.suppress(ConnectionResetError):
                    while part := s.recv(4096):
                        answer += part
                assert (b"200 OK" in answer) == head.startswith(b"GET")
        body = json.dumps({"prompt": "a", "n_predict": 250, "ignore_eos": True, "stream": True, "n_probs": 280}).encode()
        request = b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        with stalled(server.url, request) as s:
            soon(lambda: not idle(c))
            time.sleep(0.2)
            soon(lambda: idle(c))
            with pytest.raises(OSError):
                for _ in range(100):
                    s.sendall(b"x" * 1000)
                    time.sleep(0.05)
        assert post(c, "/completion", prompt="a", n_predict=1)["tokens_predicted"] == 1


def test_verbose(file: str) -> None:
    with running("-m", file, "-c", "256", "-np", "1", "-v") as server, httpx.Client(base_url=server.url) as c:
        for _ in range(2):
            post(c, "/completion", prompt="the rain in an air", n_predict=1)
        for said in ("slot was empty", "tokens kept", "POST /completion 200"):
            soon(lambda said=said: any(said in line for line in server.log))


def test_a_second_signal(file: str) -> None:
    with running("-m", file, "-c", "20000", "-np", "1") as server, httpx.Client(base_url=server.url, timeout=30) as c, \
            c.stream("POST", "/completion", json={"prompt": "a", "n_predict": -1, "stream": True, "ignore_eos": True}) as r:
        next(r.iter_lines())
        server.process.send_signal(signal.SIGINT)
        soon(lambda: any("stopping" in line for line in server.log))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(3) == 128 + signal.SIGINT


def test_embeddings(file: str) -> None:
    with running("-m", file, "-c", "256", "--embeddings", "--pooling", "mean") as server, \
            httpx.Client(base_url=server.url, timeout=30) as c:
        answer = post(c, "/v1/embeddings", input=["the rain", "a cat"])
        assert [d["index"] for d in answer["data"]] == [0, 1] and answer["usage"]["prompt_tokens"] > 0
        assert sum(x * x for x in answer["data"][0]["embedding"]) == pytest.approx(1, abs=1e-5)
        native = post(c, "/embeddings", input="the rain")
        assert native[0]["embedding"][0] == answer["data"][0]["embedding"]
        assert "too large to process" in post(c, "/v1/embeddings", 400, input="x" * 300)["message"]
        assert post(c, "/completion", 501, prompt="a")["type"] == "not_supported_error"


def test_reranking(tmp_path: Path) -> None:
    bert = encoders.SPECS["bert"]
    tokens = ["<unk>", "<s>", "</s>", "\N{LOWER ONE EIGHTH BLOCK}", *"abcdefghijklmnopqrstuvwxyz"]
    tokens += [f"<pad{i}>" for i in range(encoders.N_VOCAB - len(tokens))]
    kv = [row for row in bert["kv"] if not row[0].startswith("tokenizer.ggml")] + [
        ["tokenizer.ggml.token_type_count", "UINT32", 2], ["tokenizer.ggml.model", "STRING", "llama"],
        ["tokenizer.ggml.tokens", "ARRAY:STRING", tokens], ["tokenizer.ggml.bos_token_id", "UINT32", 1],
        ["tokenizer.ggml.eos_token_id", "UINT32", 2], ["tokenizer.ggml.add_eos_token", "BOOL", True],
        ["tokenizer.ggml.scores", "ARRAY:FLOAT32", [0.0] * len(tokens)],
        ["tokenizer.ggml.token_type", "ARRAY:INT32", [2, 3, 3, *[1] * (len(tokens) - 3)]]]
    file = spec.write({**bert, "kv": kv}, tmp_path / "bert.gguf")
    with running("-m", str(file), "--reranking") as server, httpx.Client(base_url=server.url, timeout=30) as c:
        documents = ["rain", "wind and snow", "sun"]
        answer = post(c, "/rerank", query="rain", documents=documents)
        scores = [r["relevance_score"] for r in answer["results"]]
        assert sorted(r["index"] for r in answer["results"]) == [0, 1, 2] and scores == sorted(scores, reverse=True)
        assert len(set(scores)) == 3 and answer["usage"]["prompt_tokens"] > 10
        best = post(c, "/v1/rerank", query="rain", documents=[{"text": d} for d in documents], top_n=1)["results"]
        assert best == answer["results"][:1]
        told = post(c, "/rerank", query="rain", texts=documents, return_text=True)
        assert [t["score"] for t in told] == scores and told[0]["text"] == documents[told[0]["index"]]
        assert "query" in post(c, "/rerank", 400, documents=documents)["message"]
        assert "non-empty" in post(c, "/rerank", 400, query="a", documents=[])["message"]


def test_a_model_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    server = Server("-m", str(tmp_path / "bad.gguf"))
    assert server.process.wait(30) == 1
    server._reader.join(5)
    assert any("bad.gguf" in line for line in server.log)


def test_lora_adapters(tmp_path: Path) -> None:
    """Scales change between requests, and what was cached with the old ones is not used."""
    model, loras = adapters.write(tmp_path, "llama-dense")
    ask = {"prompt": list(range(1, 60)), "return_tokens": True, **GREEDY}
    with running("-m", str(model), "-c", "256", "-np", "1", "--lora", str(loras[0])) as server, \
            httpx.Client(base_url=server.url, timeout=30) as c:
        loaded = c.get("/lora-adapters").json()
        assert [(a["id"], a["scale"], Path(a["path"]).name) for a in loaded] == [(0, 1.0, loras[0].name)]
        on = post(c, "/completion", **ask)["tokens"]
        assert c.post("/lora-adapters", json=[{"id": 0, "scale": 0.0}]).json() == {"success": True}
        off = post(c, "/completion", **ask)
        assert off["tokens"] != on and off["timings"]["cache_n"] == 0
        assert c.post("/lora-adapters", json=[{"id": 0, "scale": 1}]).json() == {"success": True}
        assert post(c, "/completion", **ask)["tokens"] == on
        wrong: list[Any] = [[{"id": 1, "scale": 1}], [{"id": 0}], {}, [0]]
        for bad in wrong:
            assert c.post("/lora-adapters", json=bad).status_code == 400
            assert not isinstance(bad, list) or post(c, "/completion", 400, **ask, lora=bad)


def test_requests_with_loras_of_their_own(tmp_path: Path) -> None:
    """Each at its own scale, at the same time: answers are those of requests alone, and caches are not mixed."""
    model, loras = adapters.write(tmp_path, "llama-dense")
    prompt = list(range(1, 90))
    bodies = [{"prompt": [*prompt, i], "return_tokens": True, **GREEDY, "n_predict": 24, "lora": lora}
              for i in range(3) for lora in ([], [{"id": 0, "scale": 1.0}], [{"id": 0, "scale": 3.0}], [{"id": 0, "scale": 0.0}])]
    with running("-m", str(model), "-c", "1024", "-np", "4", "-ub", "32", "--lora", str(loras[0])) as server:
        async def together() -> list[Any]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as c:
                return [r.json() for r in await asyncio.gather(*(c.post("/completion", json=b) for b in bodies))]
        found = [a["tokens"] for a in asyncio.run(together())]
        with httpx.Client(base_url=server.url, timeout=60) as c:
            alone = [post(c, "/completion", **b, cache_prompt=False)["tokens"] for b in bodies]
            assert found == alone and len({tuple(tokens) for tokens in found[:4]}) == 3 and found[0] == found[1]
            again = [post(c, "/completion", **b) for b in bodies]
            assert [a["tokens"] for a in again] == alone and any(a["timings"]["cache_n"] > 80 for a in again)
            assert c.get("/lora-adapters").json()[0]["scale"] == 1.0
            assert again[2]["generation_settings"]["lora"] == [{"id": 0, "scale": 3.0}]


def test_the_load_benchmark(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                            tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
    load = importlib.import_module("load")
    args = ["--url", server.url, "--peer-url", server.url, "--clients", "1,3", "--n-prompt", "20", "--n-predict", "4",
            "--n-vocab", "290", "--n-long", "200", "--out", str(tmp_path / "out.jsonl")]
    monkeypatch.setattr("sys.argv", ["load.py", *args])
    load.main()
    said = capsys.readouterr().out
    assert said.count("ratio") == 2 and said.count("no request waits while a slot is idle: ") == 2
    assert said.count("they grow by at most one ubatch: ") == 2
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and all(row["n_predict"] == 4 for row in rows) and rows[0]["tokens_per_second"] > 0
