"""The end of every graph: logits, or hidden states pooled into one vector per sequence.

In: the hidden states of the last layer. Out: the graph's output, "logits" or "embd". Models without an output head give hidden
states only; what they have behind the pooling (a classifier, two matrices) is named here.
"""
from __future__ import annotations

from collections.abc import Callable

from .. import inputs, ops
from ..drawing import Drawing
from ..errors import Error
from ..size import Size
from ..tensor import Tensor
from ..weights import Param
from .core import Core


class Output(Core):
    def finish(self, x: Tensor, possible: Callable[[Tensor], Tensor] | None = None, *, norm: bool = True) -> None:
        """The final norm, pooled embeddings where asked for, else the output head with its scale and soft cap. `possible` makes
        tokens impossible that are never meant."""
        last = x
        if norm:
            x = self.norm(x, self.w.output_norm, "result_norm")
        if self.cp.embeddings:
            self.g.output("embd", self._project(self._pool(x)))
            if self.cp.pooling != "none" or not self.hp.head:
                return
            x = ops.get_rows(x, self.input(inputs.OutputIds, self.dims.n_outputs)[0])
        elif self.cp.hidden:
            self.g.output("hidden", x if self.hp.nextn_normed else last)
            x = ops.get_rows(x, self.input(inputs.OutputIds, self.dims.n_outputs)[0])
        x = self.linear(self.w.output, x, "result_output_no_bias" if self.w.output.bias else "")
        x = self._pad_vocab(x)
        self.logits(possible(x) if possible else x)

    def _pad_vocab(self, x: Tensor) -> Tensor:
        """An output of fewer rows than the vocabulary covers its end: the tokens before it are impossible."""
        missing, n = self.hp.n_vocab - x.ne[0], x.ne[1]
        if not missing:
            return x
        one = ops.view(x, (1, n), (x.nb[1],))
        return ops.concat(ops.fill(ops.repeat(one, (missing, n)), float("-inf")), x, 0)

    def logits(self, x: Tensor) -> None:
        if self.hp.f_logit_scale:
            x = ops.scale(x, self.hp.f_logit_scale)
        if cap := self.hp.f_final_logit_softcapping:
            x = ops.scale(ops.tanh(ops.scale(x, 1.0 / cap)), cap)
        x = self.cb(x, "result_output")
        if self.drawing is None:
            self.g.output("logits", x)
        else:
            self._draw(x, self.drawing)

    def _draw(self, x: Tensor, drawing: Drawing) -> None:
        """A token of each row; the first also stays where the next step finds it."""
        steps, uniform = self.input(inputs.Draw, drawing, self.dims.n_outputs)
        token = self.cb(ops.sample(x, steps, uniform), "drawn")
        self.g.output("drawn", token)
        self.g.expand(ops.cpy(ops.view(token, (1,)), drawing.token))

    def _pool(self, x: Tensor) -> Tensor:
        """F32 [n_embd, n_pooled] of each sequence ([n_cls_out, n_pooled] of a classifier), or of each output row."""
        pooling = self.cp.pooling
        if pooling == "none":
            return self.cb(ops.get_rows(x, self.input(inputs.OutputIds, self.dims.n_outputs)[0]), "result_embd")
        n_pooled = Size.variable("n_pooled", self.cp.n_seq_max)
        if pooling == "mean" or (pooling == "rank" and self.hp.rank_pooling == "mean"):
            mean, = self.input(inputs.PoolMean, self.n_tokens, n_pooled)
            x = ops.mul_mat(ops.cont(ops.transpose(x)), mean)
        else:
            rows, = self.input(inputs.PoolRows, n_pooled, pooling == "last")
            x = ops.get_rows(x, rows)
        return self.cb(self._classify(x) if pooling == "rank" else x, "result_embd_pooled")

    def _classify(self, x: Tensor) -> Tensor:
        """A reranker's score of each sequence."""
        dense, norm, out = (self._maybe(name) for name in ("cls", "cls_norm", "cls_output"))
        if dense is None and out is None:
            raise Error("this model has no classifier, so it cannot rank; choose another pooling")
        if dense is not None:
            x = (ops.gelu if self.hp.rank_act == "gelu" else ops.tanh)(self.linear(dense, x))
            x = self.layer_norm(x, norm) if norm is not None else x
        return self.linear(out, x) if out is not None else x

    def _project(self, x: Tensor) -> Tensor:
        """The matrices that EmbeddingGemma has behind the pooling."""
        for p in (self._maybe("dense_2"), self._maybe("dense_3")):
            x = self.mm(p, x) if p is not None else x
        return x

    def _maybe(self, name: str) -> Param | None:
        """A weight of the whole model that most architectures do not declare."""
        p: Param | None = vars(self.w).get(name)
        return p
