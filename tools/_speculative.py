"""Speculative decoding on a command line: options under llama.cpp's names, and the drafter that they describe.

In: checked options. Out: arguments of `ggraph.Context` for going back, of `ggraph.LLM.generate` for guessing.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

import ggraph
from ggraph import env, hub

from ._console import Bars
from ._options import Params, context_arguments, group

_speculative = group("Speculative decoding")
MAX_ROLLBACK = 8        # each step back costs the memory of a state
_count, _probability = click.IntRange(min=1), click.FloatRange(0, 1)

SPECULATIVE = (
    _speculative("--spec-type", type=click.Choice(["none", "ngram-simple", "draft-simple", "draft-mtp"]), default="none",
                 show_default=True, help="Guess tokens and evaluate them together: where the text repeats itself, with a draft "
                 "model, or with the block that some models have for it (MTP)."),
    _speculative("-md", "--spec-draft-model", "--model-draft", metavar="MODEL",
                 help="A smaller model of the same vocabulary, for draft-simple; as -m."),
    _speculative("--spec-draft-n-max", type=_count, default=3, show_default=True, metavar="N",
                 help="Tokens that the draft model or block guesses, at most."),
    _speculative("--spec-draft-n-min", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
                 help="Fewer guesses of it are not tried."),
    _speculative("--spec-draft-p-min", "--draft-p-min", type=_probability, default=0.0, show_default=True, metavar="P",
                 help="It stops before a token that it thinks less probable."),
    _speculative("--spec-ngram-simple-size-n", type=_count, default=12, show_default=True, metavar="N",
                 help="Last tokens that must have stood earlier in the text, for ngram-simple."),
    _speculative("--spec-ngram-simple-size-m", type=_count, default=48, show_default=True, metavar="N",
                 help="Tokens that are then guessed, at most."),
)
TREE = (
    _speculative("--spec-draft-n-branch", type=_count, default=1, show_default=True, metavar="N",
                 help="Different guesses that are evaluated at once, as a tree: where another token was likely, too, or the text "
                 "went on differently before."),
)


def n_guesses(p: Params) -> int:
    """How many tokens are guessed at once."""
    kind = p["spec_type"]
    return 0 if kind == "none" else int(p["spec_ngram_simple_size_m" if kind == "ngram-simple" else "spec_draft_n_max"])


def n_rollback(p: Params) -> int:
    """How far the state of recurrent layers, should there be some, must be able to go back."""
    return min(n_guesses(p), MAX_ROLLBACK)


def limits(p: Params) -> Params:
    """Below which a draft ends, or is not tried."""
    return {"n_min": p["spec_draft_n_min"], "p_min": p["spec_draft_p_min"]}


@contextlib.contextmanager
def drafting(p: Params, llm: ggraph.LLM, bars: Bars) -> Iterator[Params]:
    """Arguments of `generate`, with the draft model open if there is one."""
    kind, n = p["spec_type"], n_guesses(p)
    more = {"n_draft": n, "n_branch": p["spec_draft_n_branch"]}
    if p["spec_draft_model"] and kind != "draft-simple":
        env.log("the draft model is not used: give --spec-type draft-simple")
    if kind == "none":
        yield {}
    elif kind == "ngram-simple":
        size = p["spec_ngram_simple_size_n"]
        yield {"draft": ggraph.NgramDraft(size, n, least=size), **more}
    elif kind == "draft-mtp":
        yield {"draft": ggraph.MtpDraft(llm.nextn, **limits(p)), **more}
    else:
        placed = {"n_gpu_layers": p["n_gpu_layers"] if p["n_gpu_layers"] == "0" else "auto", "device": p["device"]}
        path = hub.resolve(p["spec_draft_model"], lambda done, total: bars("fetch", done, total))
        options = {**context_arguments(p), "n_ctx": llm.ctx.cparams.n_ctx_seq, "adapters": [], "n_rollback": n, "progress": bars}
        with ggraph.Model(path, **placed, repack=p["repack"]) as model, ggraph.Context(model, **options) as ctx:
            bars.close()
            yield {"draft": ggraph.ModelDraft(ctx, **limits(p)), **more}
