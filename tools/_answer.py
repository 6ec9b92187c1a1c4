"""One answer on standard output: streamed as text, or as one line of JSON; Ctrl-C ends it in good order.

In: an LLM, what the user asked for, `ggraph.Generation`s. Out: text; sums of timings.
"""
from __future__ import annotations

import json
import secrets
from typing import Any

import click

import ggraph
from ggraph import env

from ._console import Bars, Interrupt, timings_json
from ._input import read_text
from ._options import Params, sampling_arguments, unescape


class Writer:
    """Starts no generation itself: `options` are the arguments for the next one, `write` brings it to the user."""

    def __init__(self, llm: ggraph.LLM, p: Params, bars: Bars, load_ms: float, draft: Params):
        self.llm, self.bars, self.load_ms = llm, bars, load_ms
        self.json, self.verbose = p["json"], p["verbose_prompt"]
        self.sampling = sampling_arguments(p, p["escape"])
        self.grammar = _grammar(p, llm.vocab)
        asked = self.sampling.pop("seed")
        self.seed = secrets.randbelow(2**32 - 1) if asked in (None, -1) else asked
        self.n_answers = 0
        self.timings: Any = None
        self.fixed = {**draft, "max_tokens": max(p["n_predict"], -1), "special": p["special"], "n_keep": p["keep"],
                      "context_shift": p["context_shift"] and p["n_predict"] != -2,
                      "stop": [unescape(r) if p["escape"] else r for r in p["reverse_prompt"]], "progress": self._progress}
        try:                                                # what is wrong with it shows before anything is written
            llm.sampler(**self.sampling, seed=self.seed)
        except ggraph.SamplerError as e:
            raise click.UsageError(str(e)) from e

    def options(self) -> Params:
        """Arguments of the next `generate` or `chat`. Each answer has a seed of its own, the first one the user's."""
        seed, self.n_answers = (self.seed + self.n_answers) % (2**32 - 1), self.n_answers + 1
        grammar = self.grammar.clone() if self.grammar else None
        return {**self.fixed, **self.sampling, "seed": seed, "grammar": grammar}

    def _progress(self, done: int, total: int) -> None:
        if total > self.llm.ctx.cparams.n_ubatch:
            self.bars("prompt", done, total)

    def write(self, g: ggraph.Generation) -> bool:
        """Run a generation to its end; False if Ctrl-C ended it."""
        with Interrupt(g.stop) as ctrl_c:
            try:
                for piece in g:
                    if not self.json:
                        click.echo(piece, nl=False)
            except ggraph.Error:
                if not self.json:
                    click.echo()        # what is said about it begins a line
                raise
        self.bars.close()
        if self.json:
            click.echo(json.dumps(self._record(g), ensure_ascii=False))
        elif not g.text.endswith("\n"):
            click.echo()
        if g.stop_type == "context":
            env.log(f"the context of {self.llm.ctx.n_ctx} tokens is full: -c makes it larger, --context-shift drops the oldest")
        self._count(g)
        return not ctrl_c.pressed

    def _count(self, g: ggraph.Generation) -> None:
        if self.timings is None:
            self.timings = g.timings
        else:
            self.timings.add(g.timings)

    def _record(self, g: ggraph.Generation) -> Params:
        return {"text": g.text, "tokens": g.tokens, "finish_reason": g.finish_reason, "stop_type": g.stop_type,
                "stopping_word": g.stopping_word, "prompt_tokens": len(g.prompt), "completion_tokens": len(g.tokens),
                "seed": g.sampler.seed, "timings": timings_json(self.load_ms, g.timings)}

    def show_tokens(self, ids: list[int]) -> None:
        """What --verbose-prompt asks for, before anything is written."""
        if not self.verbose:
            return
        click.echo(f"number of tokens in prompt = {len(ids)}", err=True)
        for i in ids:
            click.echo(f"{i:6d} -> {self.llm.vocab.piece(i).decode(errors='replace')!r}", err=True)


def _grammar(p: Params, vocab: ggraph.Vocab) -> ggraph.Grammar | None:
    """What the text has to be, if the user said so; `GrammarError` where that cannot be read."""
    gbnf = read_text(p["grammar_file"]) if p["grammar_file"] else p["grammar"]
    schema = read_text(p["json_schema_file"]) if p["json_schema_file"] else p["json_schema"]
    if schema is not None:
        try:
            return ggraph.Grammar.json_schema(vocab, json.loads(schema))
        except ValueError as e:
            raise ggraph.GrammarError(f"the JSON schema is no JSON: {e}") from None
    return ggraph.Grammar.gbnf(vocab, gbnf) if gbnf is not None else None
