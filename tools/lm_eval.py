"""A model of lm-evaluation-harness (package lm_eval): its requests in, log-probabilities and texts out.

`lm_eval.simple_evaluate(model=GgraphLM("model.gguf"), tasks=[...])`, or `ggraph-eval`. Rows are batched by what they have in
common, so lm_eval's batch_size means nothing here.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import ggraph

from ._choices import common, score
from ._console import Bars

N_SEQ_MAX = 16          # continuations of one context that are scored together
MAX_LENGTH = 4096
Request = tuple[tuple[str, str], list[int], list[int]]      # texts, tokens of the context, tokens of the continuation


class GgraphLM(TemplateLM):  # type: ignore[misc]
    """`pretrained`: a GGUF file or known name. `max_length`: tokens of context, at most 4096 and what the model was trained with
    unless given. `max_gen_toks`: of a generated text. `context`: more options of `ggraph.Context`."""

    def __init__(self, pretrained: str = "smollm2", max_length: int | None = None, max_gen_toks: int = 256, batch_size: Any = None,
                 max_batch_size: Any = None, device: str | None = None, **context: Any):
        super().__init__()
        self.model = ggraph.Model(pretrained)
        self.max_length = int(max_length or min(MAX_LENGTH, self.model.hparams.n_ctx_train))
        self.max_gen_toks = int(max_gen_toks)
        self._options = {**context, "n_ctx": self.max_length}
        self._ctx: ggraph.Context | None = None
        self._llm: ggraph.LLM | None = None

    @property
    def ctx(self) -> ggraph.Context:
        """For scoring; the one for writing is another."""
        if self._ctx is None:
            self._ctx = ggraph.Context(self.model, **{**self._options, "n_seq_max": N_SEQ_MAX, "kv_unified": True})
        return self._ctx

    @property
    def llm(self) -> ggraph.LLM:
        if self._llm is None:
            self._llm = ggraph.LLM(self.model, **self._options)
        return self._llm

    @property
    def eot_token_id(self) -> int:
        eos = self.model.vocab.eos
        return 0 if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        bos = self.model.vocab.bos
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.path.name)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Special tokens in the text (of a chat template) are tokens; BOS is not doubled."""
        vocab = self.model.vocab
        written = add_special_tokens is None and vocab.bos is not None and string.startswith(vocab.text(vocab.bos))
        return vocab.encode(string, add_special=not written and add_special_tokens is not False, parse_special=True)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.llm.render(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return str(self.model.kv.get("tokenizer.chat_template", "")) if chat_template else None

    # --- scores

    def _loglikelihood_tokens(self, requests: Sequence[Request], disable_tqdm: bool = False,
                              **kwargs: Any) -> list[tuple[float, bool]]:
        """Of each continuation: its log-probability, and whether each of its tokens is the likeliest."""
        answers: list[tuple[float, bool]] = []
        with Bars(disable_tqdm) as bars:
            for group in self._groups(requests):
                whole = [self._end(context + continuation) for _, context, continuation in group]
                starts = [len(tokens) - len(request[2]) for tokens, request in zip(whole, group)]
                for request, scores in zip(group, score(self.ctx, whole, starts)):
                    answers.append((float(scores.log_p.sum()), bool(scores.greedy.all())))
                    self.cache_hook.add_partial("loglikelihood", request[0], answers[-1])
                bars("windows", len(answers), len(requests))
        return answers

    def _end(self, tokens: list[int]) -> list[int]:
        """As much of the end as fits; the last token is predicted and not read."""
        return tokens[-(self.max_length + 1):]

    def _groups(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Neighbours whose context is the same, as many as the cells and sequences are for."""
        group: list[Request] = []
        for request in requests:
            if group and (request[1] != group[0][1] or len(group) == N_SEQ_MAX or not self._fits([*group, request])):
                yield group
                group = []
            group.append(request)
        if group:
            yield group

    def _fits(self, group: Sequence[Request]) -> bool:
        whole = [self._end(context + continuation) for _, context, continuation in group]
        shared = min(common(whole), *(len(w) - 1 for w in whole))
        return shared + sum(len(w) - 1 - shared for w in whole) <= self.max_length

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of `max_length` tokens."""
        answers = []
        for (text,) in (request.args for request in requests):
            tokens = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(token_list=tokens, prefix_token=self.prefix_token_id, max_seq_len=self.max_length,
                                                context_len=1)
            parts = [(("", text), *make_disjoint_window(window)) for window in windows]
            answers.append(sum(log_p for log_p, _ in self._loglikelihood_tokens(parts, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answers[-1])
        return answers

    # --- texts

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy, unless a request asks for samples; stop strings are not part of the text."""
        answers: list[str] = []
        with Bars(disable_tqdm) as bars:
            for context, options in (request.args for request in requests):
                answers.append(self._generate(context, dict(options)))
                self.cache_hook.add_partial("generate_until", (context, options), answers[-1])
                bars("windows", len(answers), len(requests))
        return answers

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        max_tokens = min(int(options.get("max_gen_toks", self.max_gen_toks)), self.max_length - 1)
        sampled = options.get("do_sample", False) and options.get("temperature", 1.0) > 0
        how: dict[str, Any] = {"sampler": ggraph.Sampler("greedy", n_vocab=self.model.n_vocab)}
        if sampled:
            how = {name: options[name] for name in ("top_p", "top_k", "min_p") if name in options}
            how["temperature"] = options.get("temperature", 1.0)
        ids = self.tok_encode(context)[-(self.max_length - max_tokens):]
        return self.llm.generate(ids, max_tokens=max_tokens, stop=until, **how).read()

    def close(self) -> None:
        for one in (self._llm, self._ctx, self.model):
            if one is not None:
                one.close()
