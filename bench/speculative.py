"""How much faster texts become with guesses: plain and guessed in alternating pairs, the same text each time.

In: a model, and maybe a smaller one. Out: one line per way to guess: tokens drafted, accepted, the median speed-up. `mtp` is
tried where the model has a block for it. Run it on an idle machine.
"""
from __future__ import annotations

import statistics
import time
from typing import Any

import click

import ggraph

SENTENCE = "The quick brown fox jumps over the lazy dog near the old mill by the river. "


@click.command()
@click.argument("model")
@click.option("-md", "--draft", metavar="MODEL", help="A smaller model of the same vocabulary.")
@click.option("-p", "--prompt", default=SENTENCE * 6, help="[default: a sentence six times]")
@click.option("-n", "--tokens", default=128, show_default=True)
@click.option("-r", "--pairs", default=5, show_default=True)
@click.option("-t", "--threads", type=int, help="[default: all cores]")
@click.option("--n-draft", default=8, show_default=True, help="Guesses in a row, at most.")
@click.option("--n-branch", default=1, show_default=True, help="Branches of guesses.")
@click.option("--temp", default=0.0, show_default=True)
def main(model: str, draft: str | None, prompt: str, tokens: int, pairs: int, threads: int | None, n_draft: int, n_branch: int,
         temp: float) -> None:
    """Measure MODEL with all that can guess for it."""
    with ggraph.LLM(model, n_ctx=2048, n_threads=threads, n_rollback=n_draft, n_seq_max=n_branch) as llm:
        ways: dict[str, Any] = {"ngram": "ngram"} | ({"draft": ggraph.Model(draft)} if draft else {})
        ways |= {"mtp": "mtp"} if llm.model.has_nextn else {}
        options = {"max_tokens": tokens, "temperature": temp, "seed": 1, "ignore_eos": True}
        for name, way in ways.items():
            guessed = {"draft": way, "n_draft": n_draft, "n_branch": n_branch}
            measure(llm, prompt, options, guessed)                                  # warm up
            found = [(measure(llm, prompt, options, {}), measure(llm, prompt, options, guessed)) for _ in range(pairs)]
            assert all(plain[0] == fast[0] for plain, fast in found), "another text"
            drafted, accepted = found[0][1][1].draft_n, found[0][1][1].draft_n_accepted
            speedup = [plain[2] / fast[2] for plain, fast in found]
            click.echo(f"{name}: {drafted} drafted, {accepted} accepted ({100 * accepted / max(drafted, 1):.0f}%), "
                       f"{statistics.median(speedup):.2f}x ({min(speedup):.2f} to {max(speedup):.2f}, {pairs} pairs)")


def measure(llm: ggraph.LLM, prompt: str, options: dict[str, Any], guessed: dict[str, Any]) -> tuple[str, Any, float]:
    """The text, its timings, and the seconds from the first token to the last."""
    g = llm.generate(prompt, **guessed, **options)
    first = next(g)
    start = time.perf_counter()
    rest = "".join(g)
    return first + rest, g.timings, time.perf_counter() - start


if __name__ == "__main__":
    main()
