"""Feed-forward blocks of dense layers. In: normed hidden states. Out: the block's result, named as llama.cpp does."""
from __future__ import annotations

from collections.abc import Callable

from .. import ops
from ..tensor import Tensor
from ..weights import Group, Param
from .core import Core, split

# activation -> (with a parallel gate, alone)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]] = {
    "silu": (ops.swiglu, ops.silu), "gelu": (ops.geglu, ops.gelu),
    "gelu_erf": (ops.geglu_erf, ops.gelu_erf), "relu": (ops.reglu, ops.relu),
    "relu_sqr": (None, lambda x: ops.sqr(ops.relu(x))),
    "swiglu_oai": (lambda gate, up: ops.swiglu_oai(gate, up, 1.702, 7.0), None)}       # gpt-oss's
Activation = str | Callable[[Tensor, Tensor], Tensor]           # a name, or a function of gate and up


class FeedForward(Core):
    def ffn(self, w: Group, x: Tensor, il: int, act: Activation = "silu", suffix: str = "") -> Tensor:
        """down(act(gate x) * up x), or down(act(up x)) for layers without a gate.

        A gate and an up that the file holds as one matrix `ffn_up` of twice the rows are split (first half: gate).
        `suffix` "_shexp": the shared expert.
        """
        gate: Param | None = vars(w).get("ffn_gate" + suffix)
        up, down = getattr(w, "ffn_up" + suffix), getattr(w, "ffn_down" + suffix)
        y = self.linear(up, x, "ffn_up", il)
        if gate is not None:
            y = self.gated(self.linear(gate, x, "ffn_gate", il), y, act)
        elif up.weight.ne[1] == 2 * down.weight.ne[0]:
            n = down.weight.ne[0]
            first, second = split(y, (n, n))
            y = self.gated(first, second, act)
        else:
            y = self.activate(y, act)
            scales: Param | None = vars(w).get("ffn_act")
            y = ops.div(y, scales.weight) if scales else y
        return self.linear(down, self.cb(y, "ffn_act", il), "ffn" + (suffix or "_out"), il)

    def gated(self, gate: Tensor, up: Tensor, act: Activation) -> Tensor:
        if callable(act):
            return act(gate, up)
        pair = ACTIVATIONS[act][0]
        return pair(gate, up) if pair else ops.mul(self.activate(gate, act), up)

    def activate(self, x: Tensor, act: Activation) -> Tensor:
        single = None if callable(act) else ACTIVATIONS[act][1]
        assert single, f"{act} needs a gate"
        return single(x)
