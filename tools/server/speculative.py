"""Speculative decoding of all slots: options beside those of ggraph-run, and the guesser that they describe.

In: checked options, the model's open Context. Out: what `ggraph.Engine` takes as `guesser` and `n_draft`.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

import ggraph
from ggraph import env, hub

from .._console import Bars
from .._options import KV_TYPES, Params, context_arguments, group
from .._speculative import MAX_ROLLBACK, limits, n_guesses

_speculative = group("Speculative decoding")
ADAPTERS = ("lora", "lora_scaled", "control_vector", "control_vector_scaled")       # which are for the large model

DRAFT = (
    _speculative("spec_draft_ngl", "-ngld", "--spec-draft-ngl", "--gpu-layers-draft", "--n-gpu-layers-draft", default="auto",
                 metavar="N", help="Layers of the draft model on the GPU: a number, all, or auto.  [default: auto]"),
    _speculative("spec_draft_type_k", "-ctkd", "--spec-draft-type-k", "--cache-type-k-draft", type=click.Choice(KV_TYPES),
                 default="f16", metavar="TYPE", help="Type of K in the draft model's cache.  [default: f16]"),
    _speculative("spec_draft_type_v", "-ctvd", "--spec-draft-type-v", "--cache-type-v-draft", type=click.Choice(KV_TYPES),
                 default="f16", metavar="TYPE", help="Type of V in the draft model's cache.  [default: f16]"),
    _speculative("spec_draft_threads", "-td", "--spec-draft-threads", "--threads-draft", type=int, default=-1, metavar="N",
                 help="Threads of the draft model.  [default: as --threads]"),
    _speculative("spec_draft_threads_batch", "-tbd", "--spec-draft-threads-batch", "--threads-batch-draft", type=int, default=-1,
                 metavar="N", help="Threads of the draft model for several tokens at once.  [default: as --threads-batch]"),
)


class Types(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """One or more of the choices of another type, joined by commas; the result is such a list."""
    name = "list"

    def __init__(self, one: click.Choice[str]):
        self.one = one

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return ",".join(dict.fromkeys(self.one.convert(part.strip(), param, ctx) for part in value.split(",")))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return self.one.get_metavar(param, ctx)


def types(p: Params) -> list[str]:
    return [t for t in p["spec_type"].split(",") if t != "none"]


def most(p: Params) -> int:
    """How many tokens are guessed at once, whoever guesses."""
    return max((n_guesses({**p, "spec_type": t}) for t in types(p)), default=0)


def n_rollback(p: Params) -> int:
    """How far the state of recurrent layers, should there be some, must be able to go back."""
    return min(most(p), MAX_ROLLBACK)


def guesser(p: Params, ctx: ggraph.Context, bars: Bars, closing: list[Callable[[], None]]) -> Any:
    """None without speculative decoding. What was opened for it is added to `closing`. Guesses without a model come first, as in
    llama.cpp."""
    kinds = types(p)
    if p["spec_draft_model"] and "draft-simple" not in kinds:
        env.log("the draft model is not used: give --spec-type draft-simple")
    found: list[Any] = []
    if "ngram-simple" in kinds:
        size = p["spec_ngram_simple_size_n"]
        found.append(ggraph.EachAlone([ggraph.NgramDraft(size, p["spec_ngram_simple_size_m"], least=size)]))
    if "draft-mtp" in kinds:
        nextn = ggraph.Nextn(ctx)
        closing.append(nextn.ctx.close)
        found.append(ggraph.EachAlone([ggraph.MtpDraft(nextn, seq, **limits(p)) for seq in range(ctx.n_seq_max)]))
    if "draft-simple" in kinds:
        found.append(_model(p, ctx, bars, closing))
    return ggraph.FirstOf(found) if len(found) > 1 else next(iter(found), None)


def _model(p: Params, ctx: ggraph.Context, bars: Bars, closing: list[Callable[[], None]]) -> ggraph.ModelGuesser:
    path = hub.resolve(p["spec_draft_model"], lambda done, total: bars("fetch", done, total))
    model = ggraph.Model(path, n_gpu_layers=p["spec_draft_ngl"], device=p["device"], repack=p["repack"])
    closing.append(model.close)
    threads = {name: p[f"spec_draft_{name.removeprefix('n_')}"] for name in ("n_threads", "n_threads_batch")}
    own = {**p, **dict.fromkeys(ADAPTERS, ()), **{name: n for name, n in threads.items() if n > 0}}
    options = {**context_arguments(own), "n_seq_max": ctx.n_seq_max, "n_ctx": ctx.n_ctx, "type_k": p["spec_draft_type_k"],
               "type_v": p["spec_draft_type_v"], "n_rollback": p["spec_draft_n_max"], "progress": bars}
    draft = ggraph.Context(model, **options)
    closing.append(draft.close)
    made = ggraph.ModelGuesser(draft, **limits(p))
    made.check(ctx)
    return made
