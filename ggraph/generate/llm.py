"""The short way: text in, text out. `LLM` is a Model with one Context and the rules of llama.cpp around it.

In: a model's name or path, prompts, conversations. Out: `Generation`s, embeddings, log-probabilities.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import env
from ..batch import Batch
from ..chat import ChatTemplate
from ..context import Context
from ..cparams import POOLING
from ..errors import ContextFull, Error, Single, TemplateError, expect, flags, functions, integer, named, numbers
from ..errors import texts as checked_texts
from ..model import Model
from ..sampling import DEFAULTS, Grammar, Sampler, default_chain
from .generation import Generation
from .history import History, Report
from .mtp import MtpDraft, Nextn
from .output import TokenLogprob, logprob
from .speculative import Drafter, ModelDraft, NgramDraft

# Keys of a GGUF that replace llama.cpp's defaults of sampling parameters.
MODEL_DEFAULTS = {"general.sampling." + key: name for key, name in {
    "sequence": "samplers", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold", "temp": "temp", "penalty_last_n": "repeat_last_n", "mirostat": "mirostat",
    "penalty_repeat": "repeat_penalty", "mirostat_tau": "mirostat_ent", "mirostat_eta": "mirostat_lr"}.items()}
N_EMBED = 2048          # tokens of a text to embed, at most: it must be one ubatch


def own_defaults(model: Model) -> dict[str, Any]:
    """The sampling parameters that the file itself names."""
    return {name: model.kv[key] for key, name in MODEL_DEFAULTS.items() if key in model.kv}


class LLM(Single):
    """Generates, chats, embeds and scores with one model.

    `model` is a `Model`, a path or a known name; `context` are options of `Context`. `chat_template` replaces the
    model's own. One text at a time: what the next prompt shares with the last text is not evaluated again.
    """

    SAMPLING: Mapping[str, Any] = DEFAULTS      # parameters of `generate` for the sampler, with llama.cpp's defaults

    def __init__(self, model: Model | str | Path = "smollm2", *, chat_template: ChatTemplate | None = None, **context: Any):
        expect("chat_template", chat_template, (ChatTemplate, NoneType), "a ChatTemplate")
        self.model = model if isinstance(model, Model) else Model(model)
        self._owned: list[Model | Context] = [] if self.model is model else [self.model]
        try:
            self.vocab = self.model.vocab
            self.chat_template = chat_template or self.model.chat_template
            self.ctx = Context(self.model, **context)
        except BaseException:
            self.close()
            raise
        self._owned.insert(0, self.ctx)
        self._context = context
        self._embedders: dict[str | None, Context] = {}
        self._history = History(self.ctx)
        self._drafts: dict[tuple[Model | LLM, int], ModelDraft] = {}
        self._nextn: Nextn | None = None

    def generate(self, prompt: str | Sequence[int], *, max_tokens: int = -1, stop: str | Iterable[str] = (),
                 logprobs: int | None = None, special: bool = False, context_shift: bool = False, n_keep: int = 0,
                 progress: Report | None = None, draft: str | Drafter | Model | LLM | None = None, n_draft: int = 8,
                 n_branch: int = 1, sampler: Sampler | None = None, **sampling: Any) -> Generation:
        """Continue a text (or token ids) until the model ends it, a `stop` string comes up, `max_tokens` or the context
        is full. The stop string is not part of the answer.

        `sampling`: see `sampler`. `logprobs`: log-probabilities of the tokens, with those of so many likeliest ones.
        `special`: control tokens appear as text. `context_shift`: when full, keep `n_keep` tokens of the prompt (-1: all)
        and drop half of the rest. `progress(done, total)` is called while the prompt is evaluated. `draft`: what guesses the
        next `n_draft` tokens, which are then evaluated together: "ngram" (the text repeats itself), "mtp" (the model's own block
        for it) or a smaller model of the same vocabulary. The text stays the same. A model with recurrent layers needs a Context
        with `n_rollback` for it. `n_branch`: so many different guesses at once, each in a sequence of its own (n_seq_max).
        """
        ids, text = self._ids("prompt", prompt), list[int]()
        if (hp := self.model.hparams).encoder is not None:
            ids, text = [hp.decoder_start if hp.decoder_start >= 0 else self.vocab.bos or 0], ids
        if not 1 <= integer("n_branch", n_branch) <= self.ctx.n_seq_max:
            raise Error(f"n_branch is {n_branch}; the context has {self.ctx.n_seq_max} sequences for branches (n_seq_max)")
        expect("sampler", sampler, (Sampler, NoneType), "a Sampler")
        return Generation(self._history, self.vocab, ids, sampler or self.sampler(**sampling), max_tokens=max_tokens,
                          stop=stop, logprobs=logprobs, special=special, context_shift=context_shift, n_keep=n_keep,
                          progress=progress, drafter=self._drafter(draft, n_draft), n_draft=n_draft,
                          spare=range(1, n_branch), text=text)

    def _ids(self, what: str, text: str | Sequence[int]) -> list[int]:
        if isinstance(text, str):
            return self.vocab.encode(text)
        expect(what, text, Iterable, "a text or token ids")
        return [integer(f"a token of the {what}", i) for i in text]

    def _drafter(self, draft: str | Drafter | Model | LLM | None, n_draft: int) -> Drafter | None:
        if draft is None or integer("n_draft", n_draft) < 1:
            return None
        if self.ctx.memory.rs is not None and not self.ctx.cparams.n_rollback:
            env.log(f"a wrong guess costs a run over the whole text: open the context with n_rollback={n_draft}")
        if isinstance(draft, str):
            if draft not in ("ngram", "mtp"):
                raise Error(f"draft is {draft!r}; it must be 'ngram', 'mtp', a model or a drafter")
            return NgramDraft() if draft == "ngram" else MtpDraft(self.nextn)
        if isinstance(draft, Model | LLM):
            return self._model_draft(draft, n_draft)
        expect("draft", draft, Drafter, "'ngram', 'mtp', a model or a drafter")
        return draft

    @property
    def nextn(self) -> Nextn:
        """The model's block for next-token prediction, which follows this LLM from the first use on. ModelError if it has none."""
        if self._nextn is None:
            self._nextn = Nextn(self.ctx)
            self._owned.insert(0, self._nextn.ctx)
        return self._nextn

    def _model_draft(self, draft: Model | LLM, n_draft: int) -> ModelDraft:
        """Made once; a Model gets a Context that lives as long as this LLM."""
        key = draft, n_draft
        if key not in self._drafts:
            if isinstance(draft, Model):
                cp = self.ctx.cparams
                ctx = Context(draft, n_ctx=cp.n_ctx_seq, n_batch=cp.n_batch, n_ubatch=cp.n_ubatch, n_threads=cp.n_threads,
                              n_threads_batch=cp.n_threads_batch, n_rollback=n_draft)
                self._owned.insert(0, ctx)
                self._drafts[key] = ModelDraft(ctx)
            else:
                self._drafts[key] = ModelDraft(draft._history)
        return self._drafts[key]

    def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
             template_kwargs: Mapping[str, Any] | None = None, **options: Any) -> Generation:
        """Answer a conversation of OpenAI-form messages; `options` are those of `generate`."""
        return self.generate(self.render(messages, tools=tools, **named("template_kwargs", template_kwargs)), **options)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               **kwargs: Any) -> str:
        """The prompt that the chat template makes of a conversation, without the BOS that `encode` adds."""
        if self.chat_template is None:
            raise TemplateError("this model has no chat template: give one (chat_template=), or let it continue a text")
        text = self.chat_template.render(messages, tools=tools, **kwargs)
        if self.vocab.add_bos and self.vocab.bos is not None:
            text = text.removeprefix(self.vocab.text(self.vocab.bos))
        return text

    def sampler(self, *, temperature: float | None = None, ignore_eos: bool = False, grammar: Grammar | None = None,
                dry_breakers: Sequence[str] = ("\n", ":", '"', "*"), **params: Any) -> Sampler:
        """llama.cpp's chain. `params` are named in `SAMPLING` (`temperature` is another name of `temp`); what is not
        given comes from the file's general.sampling.* keys, then from `SAMPLING`. `ignore_eos`: the text never ends."""
        given = {name: value for name, value in params.items() if value is not None}
        flags(ignore_eos=ignore_eos)
        if temperature is not None:
            numbers(temperature=temperature)
            given["temp"] = temperature
        if ignore_eos:
            given["logit_bias"] = {**given.get("logit_bias", {}), **dict.fromkeys(sorted(self.vocab.eog), float("-inf"))}
        chain = default_chain(**{**own_defaults(self.model), **given})
        return Sampler(chain, n_vocab=self.model.n_vocab, vocab=self.vocab, grammar=grammar, dry_breakers=dry_breakers)

    def score(self, text: str | Sequence[int], progress: Report | None = None) -> list[TokenLogprob]:
        """The log-probability of each token after those before it. The first token (BOS where there is one) has none.

        Logits of one ubatch exist at a time. `ContextFull` if the text is longer than the context.
        """
        ids = self._ids("text", text)
        functions(progress=progress)
        if len(ids) > self._history.n_ctx:
            raise ContextFull(f"the text has {len(ids)} tokens, the context holds {self._history.n_ctx}; raise n_ctx")
        self._history.clear()
        scores: list[TokenLogprob] = []
        step = self.ctx.cparams.n_ubatch
        for start in range(0, len(ids), step):
            part = ids[start:start + step]
            self._history.process(part, outputs=len(part))
            scores += [logprob(row, token) for row, token in zip(self.ctx.logits, ids[start + 1:start + step + 1])]
            if progress:
                progress(start + len(part), len(ids))
        return scores

    def embed(self, texts: Sequence[str], pooling: str | None = None, normalize: bool = True) -> npt.NDArray[np.float32]:
        """float32 [n_texts, n_embd]: one vector per text, of length 1 if `normalize`.

        `pooling` ("mean", "cls", "last"): the model's own if it names one, else "mean". `ContextFull` if a text is too long.
        """
        given = checked_texts("texts", "a text of texts", texts)
        flags(normalize=normalize)
        if pooling not in (None, *POOLING[1:]):
            raise Error(f"pooling is {pooling!r}; to make one vector of each text it must be one of {', '.join(POOLING[1:])}")
        ctx = self._embedder(pooling)
        out = np.zeros((len(given), self.model.hparams.n_embd), np.float32)
        for row, text in zip(out, given):
            row[:] = self._embed(ctx, self.vocab.encode(text))
        if normalize:
            out /= np.maximum(np.linalg.norm(out, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return out

    def _embedder(self, pooling: str | None) -> Context:
        """A second Context, whose only task is embeddings; the same adapters are on."""
        if pooling not in self._embedders:
            n = min(self.ctx.n_ctx, N_EMBED)
            options = {**self._context, "n_ctx": n, "n_batch": n, "n_ubatch": n, "n_seq_max": 1, "embeddings": True}
            ctx = Context(self.model, **options, pooling=pooling)
            if ctx.cparams.pooling == "none":
                ctx.close()
                ctx = Context(self.model, **options, pooling="mean")
            self._embedders[pooling] = ctx
            self._owned.insert(0, ctx)
        self._embedders[pooling].set_adapters(self.ctx.adapters)
        return self._embedders[pooling]

    def _embed(self, ctx: Context, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        if not 0 < len(ids) <= ctx.n_ctx:
            raise ContextFull(f"a text to embed has {len(ids)} tokens; 1 to {ctx.n_ctx} are possible")
        ctx.memory.clear()
        batch = Batch()
        for pos, token in enumerate(ids):
            batch.add(token, pos, 0, output=True)
        ctx.process("decode" if self.model.hparams.causal else "encode", batch)
        row: npt.NDArray[np.float32] = ctx.embeddings[0]
        return row

    def close(self) -> None:
        """Free the Contexts, and the Model if it was opened here."""
        while self._owned:
            self._owned.pop(0).close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
