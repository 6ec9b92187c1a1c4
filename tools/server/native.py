"""/completion and /infill: llama-server's own form of requests and answers.

In: `Completion` bodies. Out: JSON or event streams. The parts that other forms share are here too: `Choice`, timings,
log-probabilities.
"""
from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import ggraph

from .problem import JSON, Problem
from .sampling import Thoughts
from .schema import Completion, Infill
from .service import Job, Run, Service, in_thread
from .stream import EventStream, frame, while_connected


@dataclass
class Choice:
    """What has come of one choice so far."""
    job: Job
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[ggraph.TokenLogprob] = field(default_factory=list)
    n_generated: int = 0
    done: ggraph.Done | None = None

    def take(self, event: ggraph.Progress | ggraph.Piece | ggraph.Done) -> None:
        if isinstance(event, ggraph.Piece):
            self.text += event.text
            self.tokens += event.tokens
            self.logprobs += event.logprobs
            self.n_generated = event.n_generated
        elif isinstance(event, ggraph.Done):
            self.done = event

    @property
    def end(self) -> ggraph.Done:
        assert self.done is not None
        return self.done


async def collect(run: Run, jobs: list[Job]) -> list[Choice]:
    """All choices of all jobs, when they are done."""
    choices = [[Choice(job) for _ in range(job.n)] for job in jobs]
    async for h in run.events():
        if not isinstance(h.event, ggraph.Progress):
            choices[h.job][h.event.index].take(h.event)
    return [choice for group in choices for choice in group]


def timings(done: ggraph.Done | ggraph.Times) -> dict[str, Any]:
    """Rates of zero where nothing was measured; generation counts the steps after the first token."""
    guessed = {"draft_n": done.draft_n, "draft_n_accepted": done.draft_n_accepted} if done.draft_n else {}
    return {"cache_n": done.n_cached, **_rate("prompt", done.n_evaluated, done.prompt_ms, done.n_evaluated),
            **_rate("predicted", done.n_generated, done.generated_ms, max(done.n_generated - 1, 0)), **guessed}


def _rate(name: str, n: int, ms: float, steps: int) -> dict[str, Any]:
    return {f"{name}_n": n, f"{name}_ms": ms, f"{name}_per_token_ms": ms / steps if steps else 0.0,
            f"{name}_per_second": 1e3 * steps / ms if ms else 0.0}


def finite(logprob: float) -> float:
    """Of what cannot come: a number that JSON has, as in llama-server."""
    return max(logprob, -3.4e38)


def logprob_items(service: Service, items: list[ggraph.TokenLogprob], drawn: bool) -> list[dict[str, Any]]:
    """`drawn`: probabilities as the samplers left them, in place of the model's log-probabilities."""
    def one(id: int, value: float) -> dict[str, Any]:
        piece = service.vocab.piece(id)
        number = {"prob": math.exp(value)} if drawn else {"logprob": finite(value)}
        return {"id": id, "token": piece.decode(errors="replace"), "bytes": list(piece), **number}
    top = "top_probs" if drawn else "top_logprobs"
    return [{**one(t.token, t.logprob), top: [one(*pair) for pair in t.top]} for t in items]


def final(service: Service, choice: Choice, index: int, tokens: bool, stream: bool) -> dict[str, Any]:
    """The whole native answer of one choice; at the end of a stream without its text."""
    done, job = choice.end, choice.job
    n_probs = job.logprobs or 0
    answer = {
        "index": index, "content": "" if stream else choice.text, "tokens": choice.tokens if tokens and not stream else [],
        "id_slot": done.slot, "stop": True, "model": service.name, "tokens_predicted": done.n_generated,
        "tokens_evaluated": done.n_prompt, "generation_settings": job.settings.described(job.stop, n_probs), "prompt": job.text,
        "has_new_line": "\n" in choice.text, "truncated": done.truncated,
        "stop_type": "limit" if done.stop_type == "context" else done.stop_type or "none",
        "stopping_word": done.stopping_word or "", "tokens_cached": done.n_past, "timings": timings(done)}
    if n_probs and not stream:
        answer["completion_probabilities"] = logprob_items(service, choice.logprobs, job.drawn)
    return answer


def selected(answer: dict[str, Any], fields: list[str] | None) -> dict[str, Any]:
    """Only the fields asked for; "a/b" names a field inside another."""
    if not fields:
        return answer
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for part in path.split("/"):
            value = value.get(part, found) if isinstance(value, dict) else found
        if value is not found:
            found[path] = value
    return found


def jobs(service: Service, body: Completion, given: Any) -> tuple[list[Job], bool]:
    """The jobs of a body, and whether its answer is an array."""
    if given is None:
        raise Problem(400, "'prompt' is required")
    n_probs = body.n_probs if body.n_probs is not None else body.logprobs
    if body.suffix:
        raise Problem(400, "suffix is not supported; /infill fills in between two texts")
    settings, prompts = service.settings(body), service.prompts(given)
    settings.thoughts = _thoughts(body)
    logprobs = int(n_probs) if n_probs is not None and n_probs is not False else None
    if logprobs is not None and not (body.logprobs is not None and body.n_probs is None):
        logprobs = logprobs or None             # n_probs 0 is off, logprobs 0 wants the chosen tokens' alone
    made = []
    for prompt in prompts[0]:
        ids = service.encode(prompt)
        service.check_length(ids)
        text = prompt if isinstance(prompt, str) else service.vocab.decode(ids)
        made.append(Job(ids, text, settings, service.stops(body), body.choices, logprobs,
                        logprobs if body.echo and logprobs is not None else None))
    return made, prompts[1] or body.choices > 1


def _thoughts(body: Completion) -> Thoughts | None:
    """A limit on thoughts, where a body says how they are marked."""
    ends = [tag for tag in [*(body.reasoning_budget_end_tags or []), body.reasoning_budget_end_tag] if tag]
    budget = -1 if body.reasoning_budget_tokens is None else body.reasoning_budget_tokens
    if not body.reasoning_budget_start_tag or not ends or not (budget >= 0 or body.reasoning_control):
        return None
    return Thoughts(body.reasoning_budget_start_tag, tuple(ends), budget, body.reasoning_budget_message or "")


async def completion(service: Service, request: Request, body: Completion) -> Response:
    work, many = await in_thread(jobs, service, body, body.prompt)
    return await respond(service, request, body, work, many)


async def respond(service: Service, request: Request, body: Completion, work: list[Job], many: bool) -> Response:
    run = await service.start(work)
    if body.stream:
        ping = service.options.ping if body.sse_ping_interval is None else body.sse_ping_interval
        return EventStream(_stream(service, body, run, work), run.cancel, ping)
    choices = await while_connected(request, collect(run, work))

    def told() -> Response:
        answers = [selected(final(service, c, i, body.return_tokens, False), body.response_fields) for i, c in enumerate(choices)]
        return JSON(answers if many else answers[0])
    return await in_thread(told)


async def _stream(service: Service, body: Completion, run: Run, work: list[Job]) -> AsyncGenerator[bytes, None]:
    choices = [[Choice(job) for _ in range(job.n)] for job in work]
    first = [sum(job.n for job in work[:i]) for i in range(len(work))]
    async for h in run.events():
        if isinstance(h.event, ggraph.Progress):
            yield frame(_progress(h.event, first[h.job]))
            continue
        choice, index = choices[h.job][h.event.index], first[h.job] + h.event.index
        choice.take(h.event)
        if isinstance(h.event, ggraph.Done):
            yield frame(selected(final(service, choice, index, False, True), body.response_fields))
        else:
            yield frame(_partial(service, choice, h.event, index))


def _partial(service: Service, choice: Choice, piece: ggraph.Piece, index: int) -> dict[str, Any]:
    answer = {"index": index, "content": piece.text, "tokens": piece.tokens, "stop": False, "id_slot": -1,
              "tokens_predicted": piece.n_generated, "tokens_evaluated": len(choice.job.ids)}
    if choice.job.logprobs:
        answer["completion_probabilities"] = logprob_items(service, piece.logprobs, choice.job.drawn)
    return {**answer, **timed(piece.times)}


def timed(times: ggraph.Times | None) -> dict[str, Any]:
    """For requests with `timings_per_token`."""
    return {} if times is None else {"timings": timings(times)}


def _progress(event: ggraph.Progress, index: int) -> dict[str, Any]:
    return {"index": index, "content": "", "tokens": [], "stop": False, "id_slot": -1, "tokens_predicted": 0,
            "tokens_evaluated": event.total, "prompt_progress": progress_of(event)}


def progress_of(event: ggraph.Progress) -> dict[str, Any]:
    return {"total": event.total, "cache": event.cache, "processed": event.processed, "time_ms": round(event.ms)}


# --- infill


async def infill(service: Service, request: Request, body: Infill) -> Response:
    work = await in_thread(_infill_job, service, body)
    return await respond(service, request, body, [work], False)


def _infill_job(service: Service, body: Infill) -> Job:
    vocab = service.vocab
    lacks = [name for name, id in (("prefix", vocab.fim_pre), ("suffix", vocab.fim_suf), ("middle", vocab.fim_mid)) if id is None]
    if lacks:
        raise Problem(501, "Infill is not supported by this model: " + "".join(f"{name} token is missing. " for name in lacks))
    if body.input_prefix is None or body.input_suffix is None:
        raise Problem(400, '"input_prefix" and "input_suffix" are required')
    ids = infill_ids(service, body)
    service.check_length(ids)
    return Job(ids, service.vocab.decode(ids), service.settings(body), service.stops(body), body.choices, body.n_probs or None)


def infill_ids(service: Service, body: Infill) -> list[int]:
    """Other files, then prefix and suffix, cut to what a batch holds at 3:1, as llama.cpp orders them."""
    vocab = service.vocab

    def ids(text: str) -> list[int]:
        return vocab.encode(text, add_special=False, parse_special=False)
    n_batch, n_predict = service.ctx.cparams.n_batch, max(body.limit, 0)
    prefix = ids(body.input_prefix or "")
    middle = service.encode(body.prompt, add_special=False) if body.prompt is not None else []
    prefix = (prefix + middle)[-max(3 * n_batch // 4 - 3, 1):]
    suffix = ids(body.input_suffix or "")[:max(n_batch // 4 - 2 - len(middle), 0)]
    extra: list[int] = []
    for item in body.input_extra:
        name, text = item.get("filename", "tmp"), item.get("text")
        if not isinstance(name, str) or not isinstance(text, str):
            raise Problem(400, "extra_context chunk must contain a \"text\" field with a string value")
        head = [vocab.fim_sep, *ids(f"{name}\n")] if vocab.fim_sep is not None else ids(f"\n\n--- snippet ---\n\n{name}\n")
        extra += [id for id in head if id is not None] + ids(text)
    room = max(service.n_ctx_slot - n_batch - 2 * n_predict, 0)
    start = [vocab.bos] if vocab.add_bos else []
    made = [*start, *(extra[-room:] if room else []), vocab.fim_pre, *prefix, vocab.fim_suf, *suffix, vocab.fim_mid]
    return [id for id in made if id is not None]
