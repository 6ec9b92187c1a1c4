"""OpenAI's completions and chat completions.

In: checked bodies. Out: their JSON, whole or as events with [DONE] at the end.
"""
from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import ggraph

from .chat import Conversation, Told, Turn, converse, follow, turns_of
from .info import BUILD
from .native import Choice, collect, final, finite, jobs, logprob_items, progress_of, timed, timings
from .problem import JSON, Problem
from .replies import Delta
from .schema import Chat, Completion, Control, Sampling
from .service import Job, Run, Service, in_thread
from .stream import DONE, EventStream, frame, while_connected


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def head(service: Service, kind: str) -> dict[str, Any]:
    """What is the same in all chunks of an answer."""
    return {"created": int(time.time()), "model": service.name, "system_fingerprint": BUILD, "object": kind,
            "id": new_id("chatcmpl-")}


def usage(ends: list[ggraph.Done]) -> dict[str, Any]:
    """The prompt of several choices counts once."""
    n_prompt = sum(d.n_prompt for d in ends if d.index == 0)
    n = sum(d.n_generated for d in ends)
    cached = sum(d.n_cached for d in ends if d.index == 0)
    return {"completion_tokens": n, "prompt_tokens": n_prompt, "total_tokens": n_prompt + n,
            "prompt_tokens_details": {"cached_tokens": cached}}


def ping_of(service: Service, body: Sampling) -> float:
    return service.options.ping if body.sse_ping_interval is None else body.sse_ping_interval


def wants_usage(body: Sampling) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


# --- completions


async def completions(service: Service, request: Request, body: Completion) -> Response:
    work, _ = await in_thread(jobs, service, body, body.prompt)
    run = await service.start(work)
    if body.stream:
        return EventStream(_completion_stream(service, body, run, work), run.cancel, ping_of(service, body))
    return await in_thread(_completed, service, body, await while_connected(request, collect(run, work)))


def _completed(service: Service, body: Completion, done: list[Choice]) -> Response:
    choices = [{"text": (c.job.text if body.echo else "") + c.text, "index": i, "logprobs": _logprobs(service, c, body.echo),
                "finish_reason": c.end.finish_reason} for i, c in enumerate(done)]
    answer = {"choices": choices, **head(service, "text_completion"), "usage": usage([c.end for c in done]),
              **_verbose(service, body, done[0]), "timings": timings(done[-1].end)}
    return JSON(answer)


async def _completion_stream(service: Service, body: Completion, run: Run, work: list[Job]) -> AsyncGenerator[bytes, None]:
    same = head(service, "text_completion")
    choices = [[Choice(job) for _ in range(job.n)] for job in work]
    first = [sum(job.n for job in work[:i]) for i in range(len(work))]
    ends: list[ggraph.Done] = []

    def chunk(text: str, index: int, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}], **same}
    if body.echo:
        for i, job in enumerate(work):
            for k in range(job.n):
                yield frame(chunk(job.text, first[i] + k))
    async for h in run.events():
        if isinstance(h.event, ggraph.Progress):
            yield frame({**chunk("", first[h.job]), "prompt_progress": progress_of(h.event)})
            continue
        index = first[h.job] + h.event.index
        choices[h.job][h.event.index].take(h.event)
        if isinstance(h.event, ggraph.Piece):
            part = Choice(work[h.job], h.event.text, h.event.tokens, h.event.logprobs)
            yield frame({**chunk(h.event.text, index, _logprobs(service, part, False)), **timed(h.event.times)})
            continue
        ends.append(h.event)
        last = {**chunk("", index, None, h.event.finish_reason), **_verbose(service, body, choices[h.job][h.event.index], True)}
        if len(ends) == sum(job.n for job in work):
            last |= {"usage": usage(ends)} if wants_usage(body) else {}
            last["timings"] = timings(h.event)
        yield frame(last)
    yield DONE


def _logprobs(service: Service, choice: Choice, echo: bool) -> dict[str, Any] | None:
    """The items of the newer form under `content`, and the lists of the older one, which have the prompt as well."""
    job, items = choice.job, choice.logprobs
    if job.logprobs is None:
        return None
    tokens, values, tops = [t.token for t in items], [finite(t.logprob) for t in items], [t.top for t in items]
    if echo:
        scored = choice.end.prompt_logprobs
        tokens, tops = job.ids + tokens, [(), *(t.top for t in scored), *tops]
        values = [None, *(finite(t.logprob) for t in scored), *values]  # type: ignore[list-item]

    def text(id: int) -> str:
        return service.vocab.piece(id).decode(errors="replace")
    offsets, at = [], 0
    for id in tokens:
        offsets.append(at)
        at += len(text(id))
    return {"content": logprob_items(service, items, job.drawn), "tokens": [text(t) for t in tokens], "token_logprobs": values,
            "top_logprobs": [{text(t): finite(v) for t, v in top} if top else None for top in tops], "text_offset": offsets}


# --- chat


async def chat(service: Service, request: Request, body: Chat) -> Response:
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem(400, "top_logprobs requires logprobs to be set to true")
    conversation = await in_thread(converse, service, body)
    same = head(service, "chat.completion.chunk" if body.stream else "chat.completion")
    run = service.live[same["id"]] = await service.start([conversation.job])
    if body.stream:
        return EventStream(_chat_stream(service, body, run, conversation, same), run.cancel, ping_of(service, body))
    turns = await while_connected(request, turns_of(run, conversation))
    return await in_thread(_answered, service, body, conversation, same, turns)


def _answered(service: Service, body: Chat, conversation: Conversation, same: dict[str, Any], turns: list[Turn]) -> Response:
    choices = [{"finish_reason": t.finish_reason, "index": i, "message": message(t),
                **_items(service, conversation, t.whole.logprobs)} for i, t in enumerate(turns)]
    return JSON({"choices": choices, **same, "usage": usage([t.end for t in turns]),
                 **_verbose(service, body, turns[0].whole), "timings": timings(turns[-1].end)})


async def control(service: Service, request: Request, body: Control) -> Response:
    """Something about an answer that is being written: "reasoning_end" ends its thought."""
    if not body.id:
        raise Problem(400, "missing completion id")
    if body.action != "reasoning_end":
        raise Problem(400, "unknown control action")
    run = service.live.get(body.id)
    if run is None or run.done:
        return JSON({"success": False, "message": "no active completion for this id"})
    limits = run.limited
    if not limits:
        return JSON({"success": False, "message": "reasoning control not enabled for this completion"})
    await asyncio.wrap_future(service.engine.call(lambda: [limit.finish() for limit in limits]))
    return JSON({"success": True})


def _verbose(service: Service, body: Sampling, choice: Choice, stream: bool = False) -> dict[str, Any]:
    """The native form of the same answer, for those who look for a mistake."""
    return {"__verbose": final(service, choice, 0, body.return_tokens, stream)} if body.verbose else {}


def message(turn: Turn) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        answer["reasoning_content"] = turn.reasoning
    if turn.calls:
        answer["tool_calls"] = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}, "id": c.id}
                                for c in turn.calls]
    return answer


def _items(service: Service, conversation: Conversation, items: list[ggraph.TokenLogprob]) -> dict[str, Any]:
    job = conversation.job
    return {} if job.logprobs is None else {"logprobs": {"content": logprob_items(service, items, job.drawn)}}


async def _chat_stream(service: Service, body: Chat, run: Run, conversation: Conversation,
                       same: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    n, ends = conversation.job.n, list[ggraph.Done]()

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        return {"choices": [{"finish_reason": reason, "index": index, "delta": delta, **more}], **same}
    for i in range(n):
        yield frame(chunk(i, {"role": "assistant", "content": None}))
    async for told in follow(run, conversation):
        if told.progress is not None:
            yield frame({**chunk(0, {}), "prompt_progress": progress_of(told.progress)})
            continue
        more = _items(service, conversation, told.logprobs) if told.logprobs else {}
        for delta in told.deltas or ([Delta("content", "")] if more else []):
            yield frame({**chunk(told.index, _delta(told, delta), **more), **timed(told.times)})
            more = {}
        if told.turn.done is None:
            continue
        ends.append(told.turn.done)
        last = {**chunk(told.index, {}, told.turn.finish_reason), **_verbose(service, body, told.turn.whole, True)}
        if len(ends) == n and not wants_usage(body):
            last["timings"] = timings(told.turn.done)
        yield frame(last)
    if wants_usage(body):
        yield frame({"choices": [], **same, "usage": usage(ends), "timings": timings(ends[-1])})
    yield DONE


def _delta(told: Told, delta: Delta) -> dict[str, Any]:
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "call":
        return {"tool_calls": [{"index": delta.call, "id": told.turn.calls[delta.call].id, "type": "function",
                                "function": {"name": delta.text, "arguments": ""}}]}
    return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}
