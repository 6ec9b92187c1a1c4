"""Thoughts: how long they may be, and how they are ended, continued and told, in every route that has them."""
from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.tools.server.asking import frames, post
from tests.tools.server.conftest import Server, running

TEMPLATE = tiny.TEMPLATE + "{% if add_generation_prompt and enable_thinking is not defined %}{{ '<think>\n' }}{% endif %}"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "the rain"}], "temperature": 0, "max_tokens": 40,
                       "ignore_eos": True}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model whose answers begin inside of a thought, which it does not end by itself."""
    folder = tmp_path_factory.mktemp("thinking")
    file = tiny.write(folder / "m.gguf", llama__context_length=16384, tokenizer__chat_template=TEMPLATE)
    with running("-m", str(file), "-c", "16384", "-np", "2", "--temp", "0", "--reasoning-budget-message", " enough") as server:
        yield server


@pytest.fixture(scope="module")
def c(thinking: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=thinking.url, timeout=60) as c:
        yield c


def said(c: httpx.Client, **more: Any) -> tuple[str, str]:
    """Thought and content; whole and as a stream they are the same."""
    message = post(c, "/v1/chat/completions", **{**ASK, **more})["choices"][0]["message"]
    deltas = [p["choices"][0]["delta"] for p in frames(c, "/v1/chat/completions", **{**ASK, **more})[:-1]]
    streamed = ["".join(d.get(k) or "" for d in deltas) for k in ("reasoning_content", "content")]
    assert streamed == [message.get("reasoning_content", ""), message["content"]]
    return streamed[0], streamed[1]


def test_a_budget(c: httpx.Client) -> None:
    thought, content = said(c)
    assert len(thought) > 20 and content == ""
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens"):
        short, content = said(c, **{name: 5})
        assert short.endswith(" enough") and thought.startswith(short.removesuffix(" enough")) and content
    assert said(c, reasoning_budget_tokens=5, reasoning_budget_message="")[0] == short.removesuffix(" enough")
    assert said(c, reasoning_budget_tokens=0, reasoning_budget_message="")[0] == ""
    assert said(c, reasoning_budget_tokens=-1) == (thought, "")
    error = post(c, "/v1/chat/completions", 400, **ASK, reasoning_budget_tokens=-2)
    assert "Field 'reasoning_budget_tokens': Value must be between -1" in error["message"]


def test_a_budget_and_a_schema(c: httpx.Client) -> None:
    """The grammar of the answer begins where the thought was ended."""
    schema = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
    thought, content = said(c, reasoning_budget_tokens=4, max_tokens=200, ignore_eos=False, json_schema=schema)
    assert thought.endswith(" enough") and json.loads(content)["c"] in ("red", "blue")


def test_the_other_routes(c: httpx.Client) -> None:
    message = post(c, "/v1/messages", messages=ASK["messages"], temperature=0, max_tokens=60,
                   thinking={"type": "enabled", "budget_tokens": 5})
    assert message["content"][0]["type"] == "thinking" and message["content"][0]["thinking"].endswith(" enough")
    answer = post(c, "/v1/responses", input="the rain", temperature=0, max_output_tokens=60, reasoning_budget_tokens=5)
    assert answer["output"][0]["content"][0]["text"].endswith(" enough") and answer["output"][1]["type"] == "message"
    native: dict[str, Any] = {"prompt": "<think>", "n_predict": 60, "temperature": 0, "reasoning_budget_tokens": 5,
                              "ignore_eos": True, "reasoning_budget_message": "!", "reasoning_budget_start_tag": "<think>"}
    assert "</think>" not in post(c, "/completion", **native)["content"]        # no tag that ends it
    for tags in ({"reasoning_budget_end_tags": ["</think>", "x"]}, {"reasoning_budget_end_tag": "</think>"}):
        bias = [["<think>", 9]]                                                 # the model begins one of its own
        text = post(c, "/completion", **native, **tags, regex="<think>(?s:.*)", logit_bias=bias)["content"]
        assert text.index("!</think>") < 20


def test_a_thought_is_ended_while_it_is_written(thinking: Server, c: httpx.Client) -> None:
    async def run(**more: Any) -> tuple[list[Any], dict[str, Any]]:
        async with httpx.AsyncClient(base_url=thinking.url, timeout=60) as a, \
                a.stream("POST", "/v1/chat/completions", json={**ASK, "max_tokens": 3000, "stream": True, **more}) as r:
            lines, answer, seen = r.aiter_lines(), {}, list[Any]()
            async for line in lines:
                if line.startswith("data: {"):
                    seen.append(json.loads(line[6:]))
                    if len(seen) == 4:
                        asked = {"id": seen[0]["id"], "action": "reasoning_end"}
                        answer = (await a.post("/v1/chat/completions/control", json=asked)).json()
                    if len(seen) > 4 and (not answer["success"] or seen[-1]["choices"][0]["delta"].get("content")):
                        break
            return seen, answer
    seen, answer = asyncio.run(run(reasoning_control=True))
    assert answer == {"success": True} and seen[-1]["choices"][0]["delta"]["content"]
    assert "".join(p["choices"][0]["delta"].get("reasoning_content", "") for p in seen).endswith(" enough")
    _, answer = asyncio.run(run())
    assert answer == {"success": False, "message": "reasoning control not enabled for this completion"}
    gone = post(c, "/v1/chat/completions/control", id=seen[0]["id"], action="reasoning_end")
    assert gone == {"success": False, "message": "no active completion for this id"}
    assert "missing completion id" in post(c, "/v1/chat/completions/control", 400, action="reasoning_end")["message"]
    assert "unknown control action" in post(c, "/v1/chat/completions/control", 400, id="x", action="dance")["message"]


def test_a_thought_goes_on(c: httpx.Client) -> None:
    whole, _ = said(c)
    begun = {"role": "assistant", "content": "", "reasoning_content": whole[:10]}
    more = {"messages": [*ASK["messages"], begun], "continue_final_message": "reasoning_content", "add_generation_prompt": False}
    assert said(c, **more)[0].startswith(whole[:10])
    answer = {"role": "assistant", "content": "in a"}
    thought, content = said(c, messages=[*ASK["messages"], answer])
    assert thought == "" and content.startswith("in a")


def test_formats(c: httpx.Client) -> None:
    assert said(c, reasoning_format="none")[0] == ""
    assert said(c, reasoning_format="deepseek-legacy") == said(c)
    assert "reasoning_format" in post(c, "/v1/chat/completions", 400, **ASK, reasoning_format="loud")["message"]
    assert said(c, reasoning_effort="none")[0] == ""
