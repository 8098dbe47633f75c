"""MoeCall: one call of a MoE layer, which is a call of its experts' MLP between two moves of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from octavo_registry.contract import moves as contract
from octavo_torch.mlp.call import MlpCall
from octavo_torch.mlp.plan import MlpPlan
from octavo_torch.moe.forms import Form, WeightCodes
from octavo_torch.moe.moves import Moves
from octavo_torch.moe.parallel.group import ExpertGroup
from octavo_torch.moe.parallel.options import Exchange
from octavo_torch.moe.parallel.token_exchange import TokenExchange
from octavo_torch.moe.permutation_autograd import Places
from octavo_torch.moe.plan import MoePlan
from octavo_torch.scaling.delayed_state import DelayedState


class MoeOperands(NamedTuple):
    """The tensors of a call that may take a gradient, in the order in which autograd takes them; see moe_mlp."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    weights: Tensor
    bias1: Tensor | None
    bias2: Tensor | None


class MoveSet(NamedTuple):
    """What moves rows: of tokens, of results, and of the choices' weights, each in its dtype."""

    route: contract.Route[Tensor]
    tokens: Moves
    results: Moves
    weights: Moves


@dataclass(slots=True, eq=False)
class MoeCall(MlpCall):
    """One call of a MoE layer: its options, and what `apply` resolves before the forward runs.

    form, weight_codes   what is kept for the backward, see moe_mlp
    ep, exchange         the ranks that share the experts, and how tokens reach them; ep is None for this process alone

    moe       the resolved layer; `plan` is what its forward runs
    moves     what moves rows
    token_exchange   what carries tokens to other ranks; None within a process
    """

    form: Form = "standard"
    weight_codes: WeightCodes = "keep"
    ep: ExpertGroup | None = None
    exchange: Exchange | None = None
    moe: MoePlan = field(init=False)
    moves: MoveSet = field(init=False)
    token_exchange: TokenExchange | None = field(default=None, init=False)

    def place(self, choices: Tensor) -> tuple[Places, Tensor]:
        """Where each choice's row is, and the experts' sizes, which the call's layers have from now on."""
        sizes, *parts = self.moves.route(choices, self.plan.fc1.groups)
        places = Places(*parts)
        if self.token_exchange is not None:
            sizes, places = self.token_exchange.bound(sizes, places)
        self.set_sizes(sizes, places.order.shape[0])
        return places, sizes

    def combine(self, moves: Moves, rows: Tensor, places: Places) -> Callable[[], Tensor]:
        """The experts' rows, summed by token: of this process, or at each token's home, to where they are on their way
        until the result is asked for."""
        if self.token_exchange is not None:
            return self.token_exchange.combine(moves, rows, places)
        sums = moves.combine_rows(rows, places.position, places.routed, None)
        return lambda: sums

    def set_sizes(self, sizes: Tensor, rows: int) -> None:
        """Both layers have these sizes from now on."""
        prepare = self.moe.prepare
        self.fc1.sizes = self.fc2.sizes = sizes if prepare is None else prepare(sizes, rows, sizes)

    def forget_sizes(self) -> None:
        """Drops the sizes: backward finds them again."""
        del self.fc1.sizes, self.fc2.sizes

    def again(self, plan: MlpPlan, scales: Sequence[Tensor] | None) -> MoeCall:
        """This call for what backward computes a second time: nothing is recorded, and scales are forward's.

        scales   of delayed scaling, fc1's and fc2's, as they were
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
