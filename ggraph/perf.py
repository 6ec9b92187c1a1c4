"""What a Context has done since it opened, in tokens and milliseconds."""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Perf:
    """Times in milliseconds and token counts since the Context opened or `reset`; `plans` counts built, resized, reused."""
    load_ms: float = 0.0
    prompt_ms: float = 0.0
    prompt_n: int = 0
    eval_ms: float = 0.0
    eval_n: int = 0
    plans: dict[str, int] = field(default_factory=lambda: {"built": 0, "resized": 0, "reused": 0})

    def add(self, n_tokens: int, ms: float) -> None:
        """As llama.cpp counts: a batch of one token is eval, more is prompt eval."""
        if n_tokens == 1:
            self.eval_ms, self.eval_n = self.eval_ms + ms, self.eval_n + 1
        else:
            self.prompt_ms, self.prompt_n = self.prompt_ms + ms, self.prompt_n + n_tokens

    @property
    def prompt_per_second(self) -> float:
        return 1e3 * self.prompt_n / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def eval_per_second(self) -> float:
        return 1e3 * self.eval_n / self.eval_ms if self.eval_ms else 0.0

    def reset(self) -> None:
        self.__init__(load_ms=self.load_ms)  # type: ignore[misc]
