"""Inside of a request: /ggraph/inspect runs a text of its own, step by step, and tells what ggraph-trace tells of it.

In: a prompt or a conversation. Out: JSON with the five variables, the times of nodes and the likeliest tokens of every step. It
has a Context of its own, beside the one that serves: slots and their memory stay as they are, though both share the cores.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

import ggraph

from .._record import Recorder, layer_of
from .chat import converse
from .problem import JSON, Problem
from .schema import Inspect
from .service import Service, in_thread
from .stream import ClientLeft, while_connected

MAX_PROMPT, MAX_STEPS, N_UBATCH, N_TOP = 512, 32, 128, 10
FLOWS = ("inp_embd", "l_out", "result_norm")            # hidden states from the first to the last
_running = threading.Lock()


def limits(service: Service) -> Response:
    _wanted(service)
    return JSON({"max_prompt": MAX_PROMPT, "max_steps": MAX_STEPS})


def _wanted(service: Service) -> None:
    if not service.options.inspect:
        raise Problem(501, "This server does not show what happens inside. Start it with `--inspect`")
    _ = service.engine                                  # and it must be one that writes


async def inspect(service: Service, request: Request, body: Inspect) -> Response:
    """`answer` is what is written first, token by token; then the sampler goes on, up to `max_tokens` in all."""
    _wanted(service)
    look = await in_thread(Look, service, body)
    try:
        return JSON(await while_connected(request, in_thread(look.run)))
    except ClientLeft:
        look.left = True
        raise


class Look:
    """One text, checked when this is made."""

    def __init__(self, service: Service, body: Inspect):
        self.service, self.left = service, False
        if body.prompt is not None:
            text, self.ids, self.settings = body.prompt, service.encode(body.prompt), service.settings(body)
        else:
            job = converse(service, body).job
            text, self.ids, self.settings = job.text, job.ids, job.settings
        service.check_length(self.ids)
        if len(self.ids) > MAX_PROMPT:
            raise Problem(400, f"the prompt has {len(self.ids)} tokens; at most {MAX_PROMPT} can be looked into")
        self.n_steps = min(body.limit if body.limit >= 0 else 8, MAX_STEPS)
        self.given = self._tokens(text, body.answer)[:self.n_steps] if body.answer else []

    def _tokens(self, text: Any, answer: str) -> list[int]:
        """Of the answer, cut as they are behind the prompt; where the border moves, as they are alone."""
        whole, n = self.service.encode(text + answer) if isinstance(text, str) else [], len(self.ids)
        return whole[n:] if whole[:n] == self.ids else self.service.encode(answer, add_special=False)

    def run(self) -> dict[str, Any]:
        if not _running.acquire(blocking=False):
            raise Problem(503, "another request is being looked into; try again when it is done")
        try:
            arguments = {**self.service.options.context, "n_ctx": MAX_PROMPT + MAX_STEPS, "n_batch": MAX_PROMPT,
                         "n_ubatch": N_UBATCH, "n_seq_max": 1,
                         "adapters": [*self.service.adapters(), *self.service.vectors()]}
            with ggraph.Context(self.service.model, **arguments) as ctx:
                return self._told(ctx)
        finally:
            _running.release()

    def _told(self, ctx: ggraph.Context) -> dict[str, Any]:
        ctx.process("decode", _batch(self.ids[:1]))         # what runs for the first time takes longer
        ctx.memory.clear()
        recorder = Recorder(ctx, N_TOP)
        sampler, = self.settings.samplers(self.service.model, 1)
        for token in self.ids:
            sampler.accept(token, generated=False)
        batches, chosen = [self.ids], list[dict[str, Any]]()
        recorder.process("prompt", _batch(self.ids))
        while len(chosen) < self.n_steps and not self.left:
            n = len(chosen)
            row = _sound(ctx.logits[-1])
            token = self.given[n] if n < len(self.given) else sampler.sample(row)
            sampler.accept(token)
            chosen.append({"id": token, "text": recorder.text(token), "p": _probability(row, token),
                           "given": n < len(self.given)})
            if self.service.vocab.is_eog(token) or len(chosen) == self.n_steps:
                break
            batches.append([token])
            recorder.process(f"token {n + 1}", _batch([token]))
        ctx.on_step = None
        hidden = list(self._hidden(ctx, batches))
        steps = [{**asdict(step), "hidden": flow} for step, flow in zip(recorder.steps, hidden)]
        return {"model": self.service.name, "n_prompt": len(self.ids), "steps": steps, "chosen": chosen,
                "graphs": [asdict(graph) for graph in recorder.graphs]}

    def _hidden(self, ctx: ggraph.Context, batches: list[list[int]]) -> Iterator[list[dict[str, Any]]]:
        """The size of the last token's hidden states through the layers, for each step. In a second run: looking at values cuts
        the plan, and its times would not be those of the first."""
        flows: list[dict[str, Any]] = []

        def see(name: str, array: np.ndarray, node: Any) -> None:
            if not flows or name in flows[-1]:
                flows.append({})
            if not array.size:                          # no row of this ubatch was asked for
                return
            last = _sound(array.reshape(-1, array.shape[-1])[-1])
            flows[-1][name] = float(np.sqrt(np.square(last, dtype=np.float64).mean()))
        ctx.memory.clear()
        ctx.hook = ggraph.Hook(lambda node: node.op != "none" and node.name.partition("-")[0] in FLOWS, see)
        for ids in batches:
            if self.left:
                return
            ctx.process("decode", _batch(ids))
        yield from ([{"name": name, "layer": layer_of(name), "rms": rms} for name, rms in flow.items()] for flow in flows)


def _batch(ids: list[int]) -> ggraph.Batch:
    batch = ggraph.Batch()
    for i, token in enumerate(ids):
        batch.add(token, None, 0, output=i == len(ids) - 1)
    return batch


def _sound(row: np.ndarray) -> np.ndarray:
    if not np.isfinite(row.max()):
        raise ggraph.Error("the model computed NaN or inf for this text: look at the model file")
    return row


def _probability(row: np.ndarray, token: int) -> float:
    x = np.exp(row.astype(np.float64) - row.max())
    return float(x[token] / x.sum())
