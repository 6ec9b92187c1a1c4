"""Next-token prediction (MTP): the block behind the layers that guesses a token from the last hidden state and the token after it.

In: a block's weights and the function that builds one layer of the architecture. Out: logits of the token after the next, and
the block's own hidden states, from which it can go on guessing.
"""
from __future__ import annotations

from collections.abc import Callable

from .. import inputs, ops
from ..tensor import Tensor
from ..weights import Group
from .output import Output


class NextToken(Output):
    def nextn(self, layer: Callable[..., Tensor], norm: Callable[..., Tensor] | None = None) -> None:
        """The whole graph of the block; `layer(b, weights, x, il)` is what runs between its two ends. `norm`: the last one, if it
        is of another kind than the model's."""
        (il, w), = self.layers()
        x = layer(self, w, self._nextn_input(w, il), il)
        normed = (norm or self.norm)(x, w.nextn_shared_head_norm or self.w.output_norm, "h_nextn")
        self.logits(self.mm(w.nextn_shared_head_head or self.w.output, normed))
        self.g.output("hidden", normed if self.hp.nextn_normed else x)

    def _nextn_input(self, w: Group, il: int) -> Tensor:
        """F32 [n_embd, n_tokens] of each token and of the hidden state before it, each normed, in one matrix's view."""
        tokens, = self.input(inputs.Tokens, self.hp.n_embd, self.n_tokens, False)
        h, = self.input(inputs.Hidden, self.hp.n_embd, self.n_tokens)
        e = self._embed((w.nextn_embed_tokens or self.w.token_embd).weight, tokens)
        e, h = self.norm(e, w.nextn_enorm, "mtp_enorm", il), self.norm(h, w.nextn_hnorm, "mtp_hnorm", il)
        return self.cb(self.mm(w.nextn_eh_proj, self.cb(ops.concat(e, h, 0), "mtp_concat", il)), "mtp_eh_proj", il)
