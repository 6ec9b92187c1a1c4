"""What an engine has done since it started, in numbers. Must not know: slots, contexts."""
from __future__ import annotations

from dataclasses import dataclass, field

from .task import Done, Task


@dataclass
class Stats:
    """`n_busy`: sum over rounds of the slots that took part. `n_drafts`: runs that judged guesses; `accepted`: how often the first
    guess of a run was right, the second, and so on."""
    prompt_n: int = 0
    cached_n: int = 0
    prompt_ms: float = 0.0
    generated_n: int = 0
    generated_ms: float = 0.0
    n_decode: int = 0
    n_busy: int = 0
    n_tokens_max: int = 0
    n_preempted: int = 0
    n_drafts: int = 0
    draft_n: int = 0
    accepted: list[int] = field(default_factory=list)

    def done(self, done: Done) -> None:
        """A choice has come to its end."""
        self.prompt_n += done.n_evaluated
        self.cached_n += done.n_cached
        self.prompt_ms += done.prompt_ms
        self.generated_n += done.n_generated
        self.generated_ms += done.generated_ms
        self.n_tokens_max = max(self.n_tokens_max, done.n_past)

    def guessed(self, task: Task, n: int, right: int, ended: bool) -> None:
        """Of n guesses the first ones were right; those behind the end of the text do not count."""
        n = right if ended else n
        task.draft_n += n
        task.draft_n_accepted += right
        self.n_drafts += 1
        self.draft_n += n
        self.accepted += [0] * (right - len(self.accepted))
        for i in range(right):
            self.accepted[i] += 1
