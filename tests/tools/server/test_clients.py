"""The `openai` and `anthropic` Python clients as their users have them: chat, streams, tools, structured output, errors."""
from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tools.server.conftest import Server

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

MESSAGES: list[Any] = [{"role": "user", "content": "the rain"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "rain", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def gpt(server: Server) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Server) -> Any:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat(gpt: Any) -> None:
    ask: Any = dict(model="tiny", messages=MESSAGES, max_tokens=8, temperature=0)
    answer = gpt.chat.completions.create(**ask, logprobs=True, top_logprobs=2, n=2)
    assert len(answer.choices) == 2 and answer.usage.completion_tokens == 16
    assert len(answer.choices[0].logprobs.content) == 8 and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(gpt.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content and chunks[-1].usage.completion_tokens == 8


def test_openai_tools(gpt: Any) -> None:
    ask: Any = dict(model="tiny", messages=MESSAGES, max_tokens=200, temperature=0, tools=TOOLS, tool_choice="required")
    call = gpt.chat.completions.create(**ask).choices[0].message.tool_calls[0]
    assert call.function.name == "rain" and json.loads(call.function.arguments)["n"] in range(10)
    with gpt.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments
    told = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "wet"}]
    assert gpt.chat.completions.create(model="tiny", messages=told, tools=TOOLS, max_tokens=2).choices


def test_openai_structured_output(gpt: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    answer = gpt.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=100, temperature=0, response_format=form)
    assert json.loads(answer.choices[0].message.content)["n"] in range(10)


def test_openai_completions(gpt: Any) -> None:
    echo = gpt.completions.create(model="tiny", prompt="the rain", max_tokens=1, echo=True, logprobs=1, temperature=0).choices[0]
    assert len(echo.logprobs.token_logprobs) == len(echo.logprobs.tokens) and echo.logprobs.token_logprobs[0] is None
    chunks = gpt.completions.create(model="tiny", prompt="the rain", max_tokens=1, temperature=0, stream=True)
    assert "the rain" + "".join(c.choices[0].text for c in chunks) == echo.text


def test_openai_responses(gpt: Any) -> None:
    ask: Any = dict(model="tiny", input="the rain", max_output_tokens=8, extra_body={"temperature": 0})
    answer = gpt.responses.create(**ask)
    assert answer.output_text and answer.usage.output_tokens == 8 and answer.status == "completed"
    with gpt.responses.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == answer.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    called = gpt.responses.create(model="tiny", input="the rain", max_output_tokens=200, extra_body={"temperature": 0},
                                  tools=[{"type": "function", **TOOLS[0]["function"]}], tool_choice="required")
    assert called.output[0].type == "function_call" and json.loads(called.output[0].arguments)["n"] in range(10)


def test_openai_errors(gpt: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        gpt.completions.create(model="tiny", prompt="x" * 600)
    with pytest.raises(openai.APIStatusError) as caught:
        gpt.embeddings.create(model="tiny", input="x")
    assert caught.value.status_code == 501
    with pytest.raises(openai.NotFoundError):
        gpt.get("/nope", cast_to=object)
    assert gpt.models.list().data[0].id == "tiny"


def test_anthropic(claude: Any) -> None:
    ask: Any = dict(model="tiny", messages=MESSAGES, max_tokens=8, extra_body={"temperature": 0}, system="be terse")
    message = claude.messages.create(**ask)
    assert message.content[0].type == "text" and message.stop_reason == "max_tokens" and message.usage.output_tokens == 8
    with claude.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == message.content[0].text
        final = stream.get_final_message()
    assert final.usage.output_tokens == 8
    counted = claude.messages.count_tokens(model="tiny", messages=MESSAGES, system="be terse").input_tokens
    assert counted == final.usage.input_tokens + final.usage.cache_read_input_tokens
    stopped = claude.messages.create(**ask, stop_sequences=[message.content[0].text[2:4]])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == message.content[0].text[2:4]


def test_anthropic_tools(claude: Any) -> None:
    ask: Any = dict(model="tiny", max_tokens=200, extra_body={"temperature": 0}, tools=[{"name": "rain", "input_schema": SCHEMA}],
                    tool_choice={"type": "tool", "name": "rain"})
    message = claude.messages.create(**ask, messages=MESSAGES)
    use = message.content[0]
    assert use.type == "tool_use" and use.input["n"] in range(10) and message.stop_reason == "tool_use"
    with claude.messages.stream(**ask, messages=MESSAGES) as stream:
        assert stream.get_final_message().content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "wet"}
    told = [*MESSAGES, {"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
    assert claude.messages.create(model="tiny", max_tokens=2, messages=told).content is not None


def test_anthropic_errors(claude: Any) -> None:
    picture = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match="this server takes text"):
        claude.messages.create(model="tiny", max_tokens=2, messages=picture)
