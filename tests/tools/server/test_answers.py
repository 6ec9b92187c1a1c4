"""What the routes answer over a real connection, whole and as streams."""
from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import ggraph
from tests import tiny
from tests.tools.server.asking import CHAT, GREEDY, frames, post

NEWLINE, SPACE = tiny.TOKENS.index("\n"), tiny.TOKENS.index("▁")


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


def test_more_fields_of_completion(client: httpx.Client) -> None:
    newline, space = (post(client, "/tokenize", content=[t], with_pieces=True)["tokens"][0]["id"] for t in (NEWLINE, SPACE))
    lines = {"prompt": "a", "logit_bias": [[newline, 100], [space, 99]], "repeat_last_n": 1, "presence_penalty": 50, **GREEDY}
    assert post(client, "/completion", **lines)["content"].count("\n") == 4
    indented = post(client, "/completion", **lines, n_indent=2)
    assert (indented["content"], indented["stop_type"]) == ("\n ", "limit")
    assert post(client, "/completion", **lines, t_max_predict_ms=10**15)["tokens_predicted"] == 8
    kept = post(client, "/completion", prompt="a", n_probs=9, post_sampling_probs=True, temperature=1.0, top_p=1e-6, min_p=0,
                min_keep=3, n_predict=2)
    assert [len(p["top_probs"]) for p in kept["completion_probabilities"]] == [3, 3]
    assert kept["generation_settings"]["min_keep"] == 3


def test_verbose_answers(client: httpx.Client) -> None:
    """The native form comes along, whole and at the end of a stream."""
    native = post(client, "/completion", prompt="the rain", return_tokens=True, **GREEDY)
    body = {**GREEDY, "max_tokens": 8, "verbose": True, "return_tokens": True}
    told = post(client, "/v1/completions", prompt="the rain", **body)["__verbose"]
    assert told.keys() == native.keys() and all(told[k] == native[k] for k in ("content", "tokens", "prompt", "stop_type"))
    chat = post(client, "/v1/chat/completions", **{**CHAT, **body})
    assert chat["__verbose"]["content"] == chat["choices"][0]["message"]["content"]
    assert chat["__verbose"]["prompt"].startswith("<|im_start|>user")
    for path, more in (("/v1/completions", {"prompt": "the rain"}), ("/v1/chat/completions", CHAT)):
        parts = frames(client, path, **{**more, **body})
        assert [p["__verbose"]["tokens_predicted"] for p in parts[:-1] if "__verbose" in p] == [8]
        assert "__verbose" not in json.dumps(frames(client, path, **{**more, **body, "verbose": False}))


def test_progress_of_prompts(client: httpx.Client) -> None:
    body = {"prompt": "the rain " * 20, "messages": [{"role": "user", "content": "the rain " * 20}], "max_tokens": 1,
            "cache_prompt": False, "return_progress": True}
    for path in ("/completion", "/v1/completions", "/v1/chat/completions"):
        told = [p["prompt_progress"] for p in frames(client, path, **body) if p != "[DONE]" and "prompt_progress" in p]
        assert [told[0]["processed"], told[-1]["processed"]] == [0, told[0]["total"]] and len(told) > 2, path


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
