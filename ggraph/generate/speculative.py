"""Speculative decoding: guess the next tokens cheaply, evaluate all in one run, keep those that the sampler takes anyway.

In: a text's History, a drafter, the text's own sampler. Out: rows of logits as plain decoding would have them, so that the text
is the same to the token. A draft is judged by sampling from the model's row before each of its tokens and comparing.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..context import Context
from ..errors import Error, ModelError, at_least, expect, integers, numbers
from ..model import Model
from ..sampling import Sampler
from ..vocab import Vocab
from .history import History

N_FIRST, N_MORE = 5, 128            # as llama.cpp: the first tokens may differ in their texts, and the sizes by so much
TOP = 10                            # a draft's probability is one among the so many likeliest tokens
P_SPLIT = 0.1                       # as llama.cpp: a token is worth a branch of its own from this probability on


@runtime_checkable
class Drafter(Protocol):
    def propose(self, tokens: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        """At most n tokens that may follow. `sampler` is a twin of the text's own, to be used up."""

    def abort(self) -> None:
        """Stop a running `propose` soon, from another thread; it raises `Aborted`."""


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    def branches(self, tokens: Sequence[int], n: int, most: int, sampler: Sampler) -> list[list[int]]:
        """At most so many guesses at what may follow, of at most n tokens, the likeliest first. They may begin alike."""


class NgramDraft:
    """Guesses that the text repeats itself: it looks for where its last tokens stood before, at most `size_n` and at least
    `least` of them, and proposes the `size_m` tokens that came then, over and over if the text ends before."""

    def __init__(self, size_n: int = 12, size_m: int = 48, least: int = 3):
        at_least(1, size_n=size_n, size_m=size_m, least=least)
        self.size_n, self.size_m, self.least = size_n, size_m, min(least, size_n)

    def propose(self, tokens: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        return next(iter(self.branches(tokens, n, 1, sampler)), [])

    def branches(self, tokens: Sequence[int], n: int, most: int, sampler: Sampler) -> list[list[int]]:
        """After each of several tokens that came there, what followed the last time; the longest match first."""
        text = np.asarray(tokens, np.int32)
        ends, matches = np.arange(1, len(text)), list[np.ndarray]()         # where what stood before may have ended
        for length in range(1, self.size_n + 1):
            ends = ends[ends >= length]
            ends = ends[text[ends - length] == text[-length]]
            if not len(ends):
                break
            if length >= self.least:
                matches.append(ends[::-1])
        starts: dict[int, int] = {}                                         # next token -> where it stood last
        for ends in reversed(matches):
            _, first = np.unique(text[ends], return_index=True)
            for end in ends[np.sort(first)[:most]].tolist():
                starts.setdefault(int(text[end]), end)
        return [np.resize(text[end:], min(n, self.size_m)).tolist() for end in list(starts.values())[:most]]

    def abort(self) -> None:
        """There is nothing to wait for."""


class ModelDraft:
    """Guesses with a smaller model, whose `history` follows the text. It draws as the text's sampler would, with the same random
    numbers, and stops before a token of less probability than `p_min`; less than `n_min` tokens are not worth a run.
    """

    def __init__(self, ctx: Context | History, *, n_min: int = 0, p_min: float = 0.0):
        expect("ctx", ctx, (Context, History), "a Context")
        integers(n_min=n_min)
        numbers(p_min=p_min)
        self.history = ctx if isinstance(ctx, History) else History(ctx)
        self.n_min, self.p_min = n_min, p_min
        self._fits: Vocab | None = None

    def check(self, vocab: Vocab) -> None:
        """`ModelError` if this is not the vocabulary, by llama.cpp's rule."""
        if self._fits is not vocab:
            model = self.history.ctx.model
            if why := _difference(vocab, model.vocab):
                raise ModelError(f"{model.path.name} cannot draft for this model, whose vocabulary is another: {why}")
            self._fits = vocab

    def propose(self, tokens: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        return next(iter(self.branches(tokens, n, 1, sampler)), [])

    def branches(self, tokens: Sequence[int], n: int, most: int, sampler: Sampler) -> list[list[int]]:
        """What it drew, and instead of each of its tokens another one that is likely."""
        history, known = self.history, self.history.ctx.model.n_vocab
        n = min(n, history.n_ctx - len(tokens))
        if n < max(self.n_min, 1) or max(tokens) >= known:
            return []

        news = list(tokens[history.reuse(tokens):-1])

        def row(token: int) -> np.ndarray:
            history.add([*news, token])
            news.clear()
            logits: np.ndarray = history.ctx.logits[-1]
            return logits
        return guesses(row, tokens[-1], n, most, sampler, history.ctx.model, self.n_min, self.p_min)

    def abort(self) -> None:
        self.history.ctx.abort()


def guesses(row: Callable[[int], np.ndarray], token: int, n: int, most: int, sampler: Sampler, model: Model, n_min: int = 0,
            p_min: float = 0.0) -> list[list[int]]:
    """At most n tokens after `token`, drawn one by one from `row(token)`, the logits after it, until the text ends or one is less
    probable than `p_min`; and up to `most` branches in all, which end with another token that was likely in the place of one of
    these. None if less than `n_min` were drawn.
    """
    drawn, others, reached = list[int](), list[tuple[float, list[int]]](), 1.0
    while len(drawn) < n and token < model.n_vocab and not model.vocab.is_eog(token):
        logits = fitted(row(token), sampler.n_vocab)
        token = sampler.sample(logits)
        p = probability(logits, token)
        if p < p_min:
            break
        if most > 1:
            others += [(reached * q, [*drawn, t]) for t, q in likely(logits) if t != token and q >= P_SPLIT]
        sampler.accept(token)
        drawn.append(token)
        reached *= p
    others.sort(key=lambda other: -other[0])
    return [drawn, *(branch for _, branch in others[:most - 1])] if len(drawn) >= max(n_min, 1) else []


def _difference(a: Vocab, b: Vocab) -> str:
    if a is b:
        return ""
    for what in ("kind", "add_bos", "add_eos", "bos", "eos"):
        if (x := getattr(a, what)) != (y := getattr(b, what)):
            return f"{what} {x} and {y}"
    if abs(a.n_vocab - b.n_vocab) > N_MORE:
        return f"{a.n_vocab} and {b.n_vocab} tokens"
    texts = range(N_FIRST, min(a.n_vocab, b.n_vocab)) if a.kind not in ("none", "test") else ()
    return next((f"token {i} is {a.text(i)!r} and {b.text(i)!r}" for i in texts if a.text(i) != b.text(i)), "")


def fitted(row: np.ndarray, n: int) -> np.ndarray:
    """Logits [n_vocab] for a sampler of n tokens; those that the row does not know are impossible."""
    return row[:n] if len(row) >= n else np.append(row, np.full(n - len(row), -np.inf, np.float32))


def probability(row: np.ndarray, token: int) -> float:
    """Of a token, among the likeliest."""
    top = np.partition(row, -min(TOP, len(row)))[-TOP:]
    return float(np.exp(row[token] - top.max()) / np.exp(top - top.max()).sum())


def likely(row: np.ndarray) -> list[tuple[int, float]]:
    """The likeliest tokens, each with its probability among them."""
    ids = np.argpartition(row, -min(TOP, len(row)))[-TOP:]
    p = np.exp(row[ids] - row[ids].max())
    return list(zip(ids.tolist(), (p / p.sum()).tolist()))


class Guess:
    """A node of the tree of guesses: `text` are the tokens from its root, the token that was sampled, to this one; the sequences
    `seqs` hold it, its logits are in `row`, and `next` are the guesses that follow."""
    __slots__ = ("next", "row", "seqs", "text")

    def __init__(self, row: int, text: list[int]):
        self.row, self.text, self.seqs, self.next = row, text, list[int](), dict[int, Guess]()

    @staticmethod
    def tree(token: int, branches: Sequence[Sequence[int]], seqs: Sequence[int]) -> list[Guess]:
        """The root and all guesses, those before a guess before it; each of the sequences holds one branch."""
        nodes = [Guess(0, [token])]
        for seq, branch in zip(seqs, branches):
            node = nodes[0]
            node.seqs.append(seq)
            for guess in branch:
                if guess not in node.next:
                    node.next[guess] = Guess(len(nodes), [*node.text, guess])
                    nodes.append(node.next[guess])
                node = node.next[guess]
                node.seqs.append(seq)
        return nodes

    def count(self) -> int:
        """How many guesses follow, on all branches."""
        return sum(1 + node.count() for node in self.next.values())


class Speculation:
    """Evaluates a text's next token together with `n_draft` guesses in a row at most; with recurrent layers, no more than the
    Context's n_rollback, and where that is 0 a wrong guess costs a run over the whole text.

    `spare`: sequences of the Context that nobody else uses. With them guesses can be a tree: each branch is a sequence, and
    branches share the cells of what they have in common. `row` are the logits for the next token. `n_drafted` and `n_accepted`
    count guesses; those that stood behind the end of the text are not counted.
    """

    def __init__(self, history: History, drafter: Drafter | None = None, n_draft: int = 0, spare: Sequence[int] = ()):
        if isinstance(drafter, ModelDraft):
            if drafter.history.ctx is history.ctx:
                raise Error("a text cannot be guessed in its own context; use another one, or the model (draft=llm.model)")
            drafter.check(history.ctx.model.vocab)
        if spare and not history.ctx.cparams.kv_unified:
            raise Error("branches share cells, but here each sequence has cells of its own; open the context with kv_unified=True")
        back = history.ctx.cparams.n_rollback if history.ctx.memory.rs is not None else 0
        self.history, self.drafter, self.n_draft, self.spare = history, drafter, min(n_draft, back or n_draft), list(spare)
        self.n_drafted = self.n_accepted = 0
        self._here: Guess | None = None             # how far the guesses were right
        self._before: list[int] = []                # the text before their root

    @property
    def row(self) -> Any:
        """Logits [n_vocab] for the next token."""
        return self.history.ctx.logits[-1 if self._here is None else self._here.row]

    def judge(self, token: int) -> bool:
        """The sampler took this token: was it among the next guesses, evaluated already? If not, all guesses are taken back."""
        if self._here is None:
            return False
        if token in self._here.next:
            self._here = self._here.next[token]
            self.n_accepted += 1
            return True
        kept = self._leave()
        if rest := kept[len(self.history.tokens):]:         # memory cannot go back that far
            self.history.add(rest)
        return False

    def _leave(self) -> list[int]:
        """End with the guesses: memory keeps, if it can, the text up to the last right one, which is returned."""
        here, self._here = self._here, None
        if here is None:
            return self.history.tokens
        text = self._before + here.text
        self.history.adopt(here.seqs[0], text)
        self._clear_spare()
        return text

    def _clear_spare(self) -> None:
        for seq in self.spare:
            self.history.ctx.memory.seq_rm(seq, -1, -1)

    def draft(self, token: int, n: int, sampler: Sampler) -> list[list[int]]:
        """Guesses at what follows the text and `token`: one branch or several, of at most n."""
        history = self.history
        room = min(history.n_ctx - len(history.tokens) - 2, history.ctx.cparams.n_ubatch - 1)
        n = min(n, self.n_draft, room)
        if self.drafter is None or n < 1:
            return []
        text, twin = [*history.tokens, token], sampler.clone()
        if self.spare and isinstance(self.drafter, TreeDrafter):
            branches = self.drafter.branches(text, n, len(self.spare) + 1, twin)
        else:
            branches = [self.drafter.propose(text, n, twin)]
        known, found = history.ctx.model.n_vocab, list[list[int]]()
        for branch in branches[:len(self.spare) + 1]:
            branch = branch[:next((i for i, t in enumerate(branch) if not 0 <= t < known), n)]
            room -= len(branch)
            if branch and room >= 0:
                found.append(branch)
        return found

    def evaluate(self, token: int, branches: Sequence[Sequence[int]] = ()) -> None:
        """One run over the token and the guesses, with logits after each; a failed one changes nothing."""
        history, seqs = self.history, [self.history.seq, *self.spare]
        nodes = Guess.tree(token, branches or [[]], seqs)
        self._before, self._here = list(history.tokens), nodes[0]
        try:
            if len(branches) > 1:
                history.branch(self.spare[:len(branches) - 1])
            history.process_tree([(node.text[-1], len(node.text) - 1, node.seqs) for node in nodes])
        except BaseException:
            self._here = None
            self._clear_spare()
            raise
        self.n_drafted += len(nodes) - 1

    def end(self) -> None:
        """The text is complete: memory shall hold what plain decoding had left there."""
        if self._here is not None:
            self.n_drafted -= self._here.count()
        self._leave()
