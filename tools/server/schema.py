"""The fields of requests: names, types, ranges. What is not named here is ignored, null is the same as absent.

In: parsed JSON. Out: models whose fields are None where nothing was said. Must not know: what a server does with them.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

INT_MAX = 2**31 - 1
MAX_PROBS = 10_000          # likeliest tokens that are told with each token


def _number(value: Any) -> Any:
    """Whole floats are integers in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _between(low: float, high: float) -> AfterValidator:
    def check(value: float) -> float:
        if not low <= value <= high:
            raise ValueError(f"Value must be between {low} <= value <= {high}, but got {value}")
        return value
    return AfterValidator(check)


def _clamped(low: float, high: float) -> AfterValidator:
    return AfterValidator(lambda value: type(value)(min(max(value, low), high)))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be finite")
    return value


def _at_most(n: int) -> Callable[[list[str]], list[str]]:
    def check(values: list[str]) -> list[str]:
        if len(values) > n:
            raise ValueError(f"at most {n} texts are possible, but there are {len(values)}")
        return values
    return check


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, AfterValidator(_finite)]
Count = Annotated[Int, _between(0, INT_MAX)]
Limit = Annotated[Int, _between(-1, INT_MAX)]
Any32 = Annotated[Int, _between(-2**31, INT_MAX)]
Share = Annotated[Float, _clamped(0.0, 1.0)]
Positive = Annotated[Float, _clamped(0.0, math.inf)]
Prompt = Annotated[Any, Field(description="text, token ids, a mix of both, or an array of such prompts", json_schema_extra={
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}]})]
Conversation = Annotated[Any, Field(description="messages, oldest first", json_schema_extra={"type": "array", "items": {
    "type": "object", "properties": {"role": {"enum": ["system", "user", "assistant", "tool"]}, "content": {"type": "string"}},
    "required": ["role", "content"]}})]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool = False


class Sampling(Body):
    """What says how tokens are chosen, and when to stop: the fields that all generating routes share."""
    seed: Annotated[Int, _between(-2**63, 2**64 - 1)] | None = None
    temperature: Positive | None = None
    dynatemp_range: Float | None = None
    dynatemp_exponent: Float | None = None
    top_k: Annotated[Any32, _clamped(0, INT_MAX)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    top_n_sigma: Float | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    typical_p: Float | None = None
    repeat_last_n: Count | None = None
    repeat_penalty: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    dry_multiplier: Float | None = None
    dry_base: Float | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: Count | None = None
    dry_sequence_breakers: Annotated[list[str], AfterValidator(_at_most(256))] | None = None
    mirostat: Annotated[Int, _clamped(0, 2)] | None = None
    mirostat_tau: Float | None = None
    mirostat_eta: Float | None = None
    adaptive_target: Annotated[Float, _clamped(-math.inf, 1.0)] | None = None
    adaptive_decay: Annotated[Float, _between(0, 0.99)] | None = None
    samplers: list[str] | str | None = None
    logit_bias: list[Any] | dict[str, Any] | None = None
    ignore_eos: bool = False
    n_predict: Limit | None = None
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    n_cmpl: Int | None = None
    n: Int | None = None
    n_keep: Limit = 0
    n_discard: Count = 0
    n_indent: Count = 0
    t_max_predict_ms: Annotated[Int, _between(-1, 2**63 - 1)] = -1
    min_keep: Count | None = None
    stop: list[str] | str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_prompt: bool | None = None
    n_cache_reuse: Count | None = None
    id_slot: Any32 = -1
    return_tokens: bool = False
    return_progress: bool = False
    verbose: bool = False
    timings_per_token: bool = False
    post_sampling_probs: bool = False
    sse_ping_interval: Limit | None = None
    lora: list[Any] = []
    grammar: str | None = None
    grammar_lazy: bool = False
    regex: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    preserved_tokens: list[str] = []
    reasoning_budget_tokens: Limit | None = None
    reasoning_budget_message: str | None = None
    reasoning_control: bool = False

    @property
    def limit(self) -> int:
        """Tokens to generate at most; -1: no limit."""
        given = (self.n_predict, self.max_completion_tokens, self.max_tokens)
        return next((n for n in given if n is not None), -1)

    @property
    def choices(self) -> int:
        return next((n for n in (self.n_cmpl, self.n) if n is not None), 1)


class Completion(Sampling):
    prompt: Prompt = None
    n_probs: Annotated[Int, _between(0, MAX_PROBS)] | None = None
    logprobs: Annotated[Int, _between(0, MAX_PROBS)] | bool | None = None
    response_fields: list[str] | None = None
    echo: bool = False
    suffix: str | None = None
    reasoning_budget_start_tag: str | None = None
    reasoning_budget_end_tag: str | None = None
    reasoning_budget_end_tags: list[str] | None = None


class Infill(Completion):
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[dict[str, Any]] = []


class Chat(Sampling):
    messages: Conversation = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, _between(0, 1000)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    thinking_budget_tokens: Limit | None = None
    parse_tool_calls: bool = True


class Inspect(Chat):
    prompt: Prompt = None
    answer: str | None = None


class Responses(Sampling):
    input: Prompt = None
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Messages(Body):
    messages: Conversation = None
    system: str | list[dict[str, Any]] | None = None
    max_tokens: Limit = 4096
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    temperature: Positive | None = None
    top_p: Share | None = None
    top_k: Annotated[Any32, _clamped(0, INT_MAX)] | None = None
    stream: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class Control(Body):
    id: str | None = None
    action: str | None = None


class Tokenize(Body):
    content: Prompt = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Detokenize(Body):
    tokens: list[Int] = []


class Embeddings(Body):
    input: Any = None
    content: Any = None
    encoding_format: str = "float"
    embd_normalize: Any32 | None = None
    dimensions: Int | None = None


class Rerank(Body):
    query: str | None = None
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    top_n: Annotated[Int, _between(0, INT_MAX)] | None = None
    return_text: bool = False


class SlotFile(Body):
    filename: str | None = None


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """How the OpenAPI description tells of a body."""
    schema = model.model_json_schema()
    return {"requestBody": {"content": {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}}}


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """Without references, which would point outside of where the schema is put."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
        return {k: _inlined(v, parts) for k, v in schema.items()}
    return [_inlined(v, parts) for v in schema] if isinstance(schema, list) else schema


