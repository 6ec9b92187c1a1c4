"""The cases that ggraph-trace shows: one text alone, texts that share a batch, guesses that are verified.

In: a recorder and prompts as tokens. Out: its steps. Each case is written as a program would do it, with `process`, `seq_cp` and
`seq_rm`; every next token is the likeliest.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import ggraph

from ._record import Recorder, StepTrace

Prompts = Sequence[Sequence[int]]


def plain(rec: Recorder, prompts: Prompts, n_predict: int, n_draft: int) -> None:
    """A prompt, then one token after the other."""
    steps = rec.process("prefill", rows((0, prompts[0])))
    for i in range(n_predict):
        steps = rec.process(f"decode {i + 1}", rows((0, [best(steps, 0)])))


def mixed(rec: Recorder, prompts: Prompts, n_predict: int, n_draft: int) -> None:
    """A text is being written while another one's prompt comes in; then the first one branches, and all three go on together."""
    first, second = prompts[0], prompts[1]
    steps = rec.process("prefill of 0", rows((0, first)))
    steps = rec.process("decode of 0, prefill of 1", rows((0, [best(steps, 0)]), (1, second)))
    rec.ctx.memory.seq_cp(0, 2)
    steps[-1].after.append("memory.seq_cp(0, 2): sequence 2 continues from all that sequence 0 holds")
    nexts = [best(steps, 0), best(steps, 1), best(steps, 0, rank=1)]
    for i in range(n_predict):
        steps = rec.process(f"decode of 0, 1, 2 ({i + 1})", rows(*((seq, [t]) for seq, t in enumerate(nexts))))
        nexts = [best(steps, seq) for seq in range(3)]


def verify(rec: Recorder, prompts: Prompts, n_predict: int, n_draft: int) -> None:
    """Speculative decoding: a draft is evaluated in one run and taken back from the first wrong guess on.

    The guesses are the model's own next tokens, found in a context beside, and the last one is the runner-up: so a reader sees
    some taken and one refused.
    """
    steps = rec.process("prefill", rows((0, prompts[0])))
    tokens = list(prompts[0])
    for i in range(n_predict):
        token = best(steps, 0)
        guesses = draft(rec.ctx, [*tokens, token], n_draft)
        steps = rec.process(f"verify {i + 1}", rows((0, [token, *guesses]), outputs=len(guesses) + 1))
        n = judge(rec, steps, guesses)
        tokens += [token, *guesses[:n]]
        wrong = len(guesses) - n
        if wrong:
            rec.ctx.memory.seq_rm(0, len(tokens), -1)
            steps[-1].after.append(f"memory.seq_rm(0, {len(tokens)}, -1): {wrong} of {len(guesses)} guesses taken back")


SCENES: dict[str, Callable[[Recorder, Prompts, int, int], None]] = {"plain": plain, "mixed": mixed, "verify": verify}
N_SEQ = {"plain": 1, "mixed": 3, "verify": 1}


def rows(*parts: tuple[int, Sequence[int]], outputs: int = 1) -> ggraph.Batch:
    """A batch of (sequence, tokens); the last `outputs` of each have logits."""
    batch = ggraph.Batch()
    for seq, tokens in parts:
        for i, token in enumerate(tokens):
            batch.add(token, None, seq, output=i >= len(tokens) - outputs)
    return batch


def best(steps: Sequence[StepTrace], seq: int, rank: int = 0) -> int:
    """The likeliest token after the last accepted output row of a sequence, or the one of that rank."""
    found = [row for step in steps for row in step.outputs if seq in row.seqs and "refused" not in row.note]
    return found[-1].top[rank][0]


def judge(rec: Recorder, steps: Sequence[StepTrace], guesses: Sequence[int]) -> int:
    """Write to each output row what became of the guess behind it; how many were right."""
    outputs, n = [row for step in steps for row in step.outputs], 0
    while n < len(guesses) and outputs[n].top[0][0] == guesses[n]:
        n += 1
    notes = {row.row: note(rec, i, guesses, n) for i, row in enumerate(outputs)}
    for step in steps:
        step.outputs[:] = [replace(row, note=notes[row.row]) for row in step.outputs]
    return n


def note(rec: Recorder, i: int, guesses: Sequence[int], n: int) -> str:
    if i > n:
        return "refused: it stands behind a wrong guess"
    if i == len(guesses):
        return "all guesses were right; this one comes free"
    told = f"guess {rec.text(guesses[i])!r}"
    return f"{told} is right" if i < n else f"{told} is wrong; the likeliest token is taken"


def draft(ctx: ggraph.Context, tokens: Sequence[int], n: int) -> list[int]:
    """n greedy tokens, the last one replaced by the runner-up."""
    with ggraph.Context(ctx.model, n_ctx=len(tokens) + n, n_batch=len(tokens) + n) as beside:
        guesses: list[int] = []
        news = list(tokens)
        for i in range(n):
            beside.process("decode", rows((0, news)))
            order = beside.logits[-1].argsort()[::-1]
            news = [int(order[1 if i == n - 1 else 0])]
            guesses += news
    return guesses
