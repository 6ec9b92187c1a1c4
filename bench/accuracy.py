"""How far log-probabilities are from exact arithmetic: ours, and llama.cpp's as a golden file holds them.

    python bench/accuracy.py MODEL.gguf GOLDEN.json

In: a real model, and texts with llama.cpp's log-probabilities (`perplexity` in the goldens). Out: for each text the mean
|difference| to `ref` with GGRAPH_REF=exact (f32 arithmetic over the unpacked weights), of the CPU backend and of llama.cpp.
Exit code 1 if over all texts ours is the larger one by more than chance makes it (two standard errors).
"""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

import ggraph

Array = Any


@click.command(help=__doc__)
@click.argument("model")
@click.argument("golden", type=click.Path(exists=True, path_type=Path))
@click.option("-fa", "--flash-attn", default="off", show_default=True, help="The goldens were made without.")
def main(model: str, golden: Path, flash_attn: str) -> None:
    os.environ["GGRAPH_REF"] = "exact"
    texts = json.loads(golden.read_text())["perplexity"]
    exact, cpu = (list(logprobs(ggraph.Model(model, backend=name), texts, flash_attn)) for name in ("ref", "cpu"))
    ours, theirs = [], []
    for text, e, c in zip(texts, exact, cpu):
        ours.append(np.abs(c - e))
        theirs.append(np.abs(np.array(text["logprob"]) - e))
        click.echo(_line(f"{len(e)} tokens", ours[-1], theirs[-1]))
    click.echo(_line("all", np.concatenate(ours), np.concatenate(theirs)))
    more = np.concatenate(ours) - np.concatenate(theirs)
    error = more.std(ddof=1) / len(more) ** 0.5
    click.echo(f"ours less llama.cpp's, token by token: {more.mean():+.5f} +- {error:.5f} (standard error)")
    sys.exit(int(more.mean() > 2 * error))


def logprobs(model: ggraph.Model, texts: list[dict[str, Any]], flash_attn: str) -> Any:
    """float64 [n_tokens - 1] of each text: the log-probability of every token after the first."""
    for text in texts:
        tokens = text["tokens"]
        with ggraph.Context(model, n_ctx=len(tokens), flash_attn=flash_attn) as ctx:
            batch = ggraph.Batch()
            for pos, token in enumerate(tokens):
                batch.add(token, pos, 0, output=True)
            ctx.process("decode", batch)
            rows = np.asarray(ctx.logits, np.float64)[:-1]
        rows -= rows.max(-1, keepdims=True)
        yield rows[np.arange(len(rows)), tokens[1:]] - np.log(np.exp(rows).sum(-1))


def _line(what: str, ours: Array, theirs: Array) -> str:
    return f"{what}: mean |log-probability difference| to exact arithmetic: {ours.mean():.5f}, llama.cpp {theirs.mean():.5f}"


if __name__ == "__main__":
    main()
