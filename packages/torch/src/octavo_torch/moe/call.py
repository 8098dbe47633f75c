"""MoeCall: one call of a MoE layer, which moves rows to the experts, calls their MLP, and moves its rows back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from octavo_torch.dispatch.prepared_sizes import PrepareFunction
from octavo_torch.mlp.call import MlpCall
from octavo_torch.mlp.plan import MlpPlan
from octavo_torch.moe.forms import Form, WeightCodes
from octavo_torch.moe.parallel.group import ExpertGroup
from octavo_torch.moe.parallel.options import Exchange
from octavo_torch.moe.parallel.token_exchange import TokenExchange
from octavo_torch.moe.plan import MoePlan
from octavo_torch.moe.rows.derivatives import Places
from octavo_torch.moe.rows.moves import Moves, MoveSet
from octavo_torch.scaling.delayed_state import DelayedState


class MoeOperands(NamedTuple):
    """The tensors of a call that may take a gradient, in the order in which autograd takes them; see moe_mlp."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    weights: Tensor
    bias1: Tensor | None
    bias2: Tensor | None


@dataclass(slots=True, eq=False)
class MoeCall(MlpCall):
    """One call of a MoE layer: its options, and what `apply` resolves before the forward runs.

    form, weight_codes   what is kept for the backward, see moe_mlp
    ep, exchange         the ranks that share the experts, and how tokens reach them; ep is None for this process alone

    moe       the resolved layer; `plan` is what its forward runs
    moves     the functions that move rows
    token_exchange   carries tokens to the ranks of their experts and back; None if this process has all experts
    """

    form: Form = "standard"
    weight_codes: WeightCodes = "keep"
    ep: ExpertGroup | None = None
    exchange: Exchange | None = None
    moe: MoePlan = field(init=False)
    moves: MoveSet = field(init=False)
    token_exchange: TokenExchange | None = field(default=None, init=False)

    def place(self, choices: Tensor) -> tuple[Places, Tensor]:
        """The places of the choices' rows, and the experts' sizes, which are set in the calls of both layers, too."""
        sizes, *parts = self.moves.route(choices, self.plan.fc1.groups)
        places = Places(*parts)
        if self.token_exchange is not None:
            sizes, places = self.token_exchange.bound(sizes, places)
        self.set_sizes(sizes, places.order.shape[0], sizes)
        return places, sizes

    def combine(self, moves: Moves, rows: Tensor, places: Places) -> Callable[[], Tensor]:
        """Starts summing the experts' rows by token, on the rank that the token is from. Returns a function that waits
        for the sums."""
        if self.token_exchange is not None:
            return self.token_exchange.combine(moves, rows, places)
        sums = moves.combine_rows(rows, places.position, places.routed, None)
        return lambda: sums

    @property
    def prepare(self) -> PrepareFunction | None:
        """See MlpCall.prepare: that of everything that both passes run."""
        return self.moe.prepare

    def forget_sizes(self) -> None:
        """Drops the sizes, which backward sets again."""
        del self.fc1.sizes, self.fc2.sizes

    def again(self, plan: MlpPlan, scales: Sequence[Tensor] | None) -> MoeCall:
        """A copy of this call for what backward computes a second time, by `plan`: it records nothing.

        scales   the scales of delayed scaling with which forward quantized, fc1's and fc2's; None for other recipes
        """
        call = copy(self)
        call.plan, call.record = plan, False
        call.fc1, call.fc2 = copy(self.fc1), copy(self.fc2)
        for layer_call, layer in ((call.fc1, plan.fc1), (call.fc2, plan.fc2)):
            layer_call.layer, layer_call.record, layer_call.probe = layer, False, None
        if scales is not None:
            for layer_call, scale in zip((call.fc1, call.fc2), scales, strict=True):
                assert layer_call.state is not None  # of a stateful recipe
                layer_call.state = DelayedState(layer_call.state.recipe, layer_call.state.history, scale)
        return call
