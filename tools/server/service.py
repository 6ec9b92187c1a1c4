"""One loaded model behind the routes: prompts to token ids, jobs to the engine, events back to the routes.

In: checked bodies. Out: `Run`s, whose events a route turns into answers. Must not know: what answers look like.
"""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import ggraph

from .problem import Problem, too_long
from .sampling import Settings, settings
from .schema import Sampling

T = TypeVar("T")
MAX_PROMPTS = 1024


@dataclass
class Options:
    """What the command line says of the server itself. `sampling` are the defaults of requests, `context` the arguments
    of the Context."""
    alias: str = ""
    api_keys: tuple[str, ...] = ()
    cors_origins: str = "localhost"
    prefix: str = ""
    timeout: float = 3600.0
    ping: float = 30.0
    ui: bool = True
    inspect: bool = False
    slots: bool = True
    metrics: bool = False
    props: bool = False
    slot_save_path: str | None = None
    cache_prompt: bool = True
    n_predict: int = -1
    stop: tuple[str, ...] = ()
    prefill_assistant: bool = True
    reasoning_format: str = "auto"
    embd_normalize: int = 2
    log_requests: bool = False
    spec_types: list[str] = field(default_factory=list)
    reasoning_budget: int = -1
    reasoning_budget_message: str = ""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)


@dataclass
class Job:
    """One prompt of a request. `text` is what answers repeat."""
    ids: list[int]
    text: str
    settings: Settings
    stop: list[str]
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def drawn(self) -> bool:
        """Whether log-probabilities are those of what the samplers left."""
        return self.settings.body.post_sampling_probs


@dataclass
class Happened:
    """An event of job `job` of a run."""
    job: int
    event: ggraph.Progress | ggraph.Piece | ggraph.Done


class Service:
    """A model with its engine, or with its embedder: the other is None."""

    def __init__(self, model: ggraph.Model, ctx: ggraph.Context, engine: ggraph.Engine | None, embedder: ggraph.Embedder | None,
                 template: ggraph.ChatTemplate | None, options: Options):
        self.model, self.ctx, self.template, self.options = model, ctx, template, options
        self.vocab = model.vocab
        self._engine, self._embedder, self._loaded = engine, embedder, ctx.adapters
        self.started = time.time()
        self.live: WeakValueDictionary[str, Run] = WeakValueDictionary()        # by the id of the answer

    @property
    def engine(self) -> ggraph.Engine:
        if self._engine is None:
            raise Problem(501, "This server does not support completions. Start it without `--embeddings`")
        return self._engine

    @property
    def embedder(self) -> ggraph.Embedder:
        if self._embedder is None:
            raise Problem(501, "This server does not support embeddings. Start it with `--embeddings`")
        return self._embedder

    def close(self) -> None:
        """Requests that are running fail."""
        for running in (self._engine, self._embedder):
            if running is not None:
                running.close()

    @property
    def n_slots(self) -> int:
        return self.ctx.n_seq_max

    @property
    def n_ctx_slot(self) -> int:
        return self.ctx.cparams.n_ctx_seq

    @cached_property
    def name(self) -> str:
        return self.options.alias or self.model.path.name

    def adapters(self) -> list[tuple[ggraph.Adapter, float]]:
        """LoRAs, each with its scale, 0 for those that are off."""
        scales = dict(self._engine.adapters if self._engine else self.ctx.adapters)
        return [(a, scales.get(a, 0.0)) for a, _ in self._loaded if a.pairs]

    def chosen(self, scales: list[Any]) -> list[tuple[ggraph.Adapter, float]]:
        """All adapters with the LoRAs at the scales of [{"id", "scale"}, ...]; those not listed are off."""
        loaded = self.adapters()
        wanted = dict.fromkeys(range(len(loaded)), 0.0)
        for entry in scales:
            id, scale = (entry.get("id"), entry.get("scale")) if isinstance(entry, dict) else (None, None)
            if isinstance(id, bool) or not isinstance(id, int) or id not in wanted:
                raise Problem(400, f"LoRA scales are an array of {{id, scale}}, with ids of the {len(loaded)} adapters loaded")
            if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= 1e6:
                raise Problem(400, f"the scale of adapter {id} must be a number")
            wanted[id] = float(scale)
        return [*((a, wanted[i]) for i, (a, _) in enumerate(loaded)), *self.vectors()]

    def vectors(self) -> list[tuple[ggraph.Adapter, float]]:
        """Control vectors, which stay as they are."""
        return [(a, scale) for a, scale in self._loaded if not a.pairs]

    # --- prompts

    def encode(self, prompt: Any, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """A text, ids, or a list of both."""
        parts = prompt if isinstance(prompt, list) else [prompt]
        ids: list[int] = []
        for i, part in enumerate(parts):
            if isinstance(part, str):
                ids += self.vocab.encode(part, add_special and i == 0, parse_special)
            elif isinstance(part, int) and not isinstance(part, bool) and 0 <= part < self.model.n_vocab:
                ids.append(part)
            else:
                raise Problem(400, f"a prompt is text or token ids from 0 to {self.model.n_vocab - 1}, not {str(part)[:80]}")
        return ids

    def prompts(self, given: Any) -> tuple[list[Any], bool]:
        """The prompts of a body, and whether it was an array of them."""
        if isinstance(given, list):
            if not given:
                raise Problem(400, '"prompt" must not be empty')
            if any(isinstance(p, int) for p in given):
                return [given], False
            if len(given) > MAX_PROMPTS:
                raise Problem(400, f"at most {MAX_PROMPTS} prompts at once")
            return [self._one(p) for p in given], True
        return [self._one(given)], False

    def _one(self, given: Any) -> Any:
        if isinstance(given, dict):
            if given.get("multimodal_data"):
                raise Problem(501, "images and audio are not supported")
            given = given.get("prompt_string")
        if not isinstance(given, str | list):
            raise Problem(400, '"prompt" must be a string, an array of token ids, a mix of both or an array of prompts')
        return given

    # --- jobs

    def settings(self, body: Sampling) -> Settings:
        if not 1 <= body.choices <= self.n_slots:
            raise Problem(400, f"Field 'n_cmpl': Value must be between 1 <= value <= {self.n_slots}, but got {body.choices}")
        made = settings(body, self.options.sampling, self.model)
        made.spec_types = self.options.spec_types
        return made

    def stops(self, body: Sampling) -> list[str]:
        given = [body.stop] if isinstance(body.stop, str) else body.stop
        return list(self.options.stop) if given is None else given

    def limit(self, body: Sampling) -> int:
        return body.limit if body.limit >= 0 else self.options.n_predict

    def check_length(self, ids: Sequence[int]) -> None:
        if len(ids) >= self.n_ctx_slot:
            raise too_long(len(ids), self.n_ctx_slot)
        if not ids:
            raise Problem(400, "the prompt is empty, and this tokenizer adds no token of its own; give at least one token")

    async def start(self, jobs: Sequence[Job]) -> Run:
        """Give the jobs to the engine."""
        engine = self.engine
        run = Run(engine, sum(job.n for job in jobs))
        run.requests += await in_thread(lambda: [self._request(job, run.sink(i)) for i, job in enumerate(jobs)])
        for request in run.requests:
            engine.submit(request)
        return run

    def _request(self, job: Job, sink: Callable[[Any], None]) -> ggraph.Request:
        self.check_length(job.ids)
        body = job.settings.body
        if body.id_slot < -1:
            raise Problem(400, f"Field 'id_slot': Value must be between -1 <= value < {self.n_slots}, but got {body.id_slot}")
        return ggraph.Request(
            job.ids, job.settings.samplers(self.model, job.n), sink, max_tokens=self.limit(body), stop=job.stop,
            logprobs=job.logprobs, prompt_logprobs=job.prompt_logprobs, preserved=job.settings.preserved,
            cache_prompt=self.options.cache_prompt if body.cache_prompt is None else body.cache_prompt,
            adapters=self.chosen(body.lora) if body.lora else None,
            cache_reuse=-1 if body.n_cache_reuse is None else body.n_cache_reuse,
            slot=body.id_slot % self.n_slots if body.id_slot >= 0 else -1, n_keep=body.n_keep, n_discard=body.n_discard,
            n_indent=body.n_indent, time_limit=body.t_max_predict_ms, progress=body.return_progress,
            timings=body.timings_per_token, post_sampling=body.post_sampling_probs)


class Run:
    """Requests of one client that run together. Iterate over `events`; `cancel` when the client has left."""

    def __init__(self, engine: ggraph.Engine, n_choices: int):
        self.requests: list[ggraph.Request] = []
        self._engine, self._left = engine, n_choices
        self._events: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def sink(self, job: int) -> Callable[[Any], None]:
        def put(event: Any) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (job, event))
        return put

    async def events(self) -> AsyncIterator[Happened]:
        """Until all choices are done. What fails is raised, after the others were cancelled."""
        try:
            while self._left:
                job, event = await self._events.get()
                if isinstance(event, ggraph.Failed):
                    raise event.error
                self._left -= isinstance(event, ggraph.Done)
                yield Happened(job, event)
        finally:
            self.cancel()

    @property
    def done(self) -> bool:
        return not self._left

    @property
    def limited(self) -> list[ggraph.ReasoningBudget]:
        """The limits on the thoughts of its choices."""
        made = [s.grammar for r in self.requests for s in r.samplers]
        return [limit for limit in made if isinstance(limit, ggraph.ReasoningBudget)]

    def cancel(self) -> None:
        """Nothing happens to what is done."""
        if self._left:
            for request in self.requests:
                self._engine.cancel(request)
            self._left = 0


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Work that may take long: templates, tokenizers, grammars, long lists."""
    return await asyncio.get_running_loop().run_in_executor(None, lambda: function(*args))
