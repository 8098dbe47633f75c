"""The token exchange of a call: what its ranks have to agree on, read off the call, and where none can start."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, ParamSpec

import torch
from torch import Tensor

from octavo_torch.arrays.checks import on_another_device
from octavo_torch.arrays.per_group import leaves_of
from octavo_torch.compiler.transforms import transforms_active
from octavo_torch.mlp.experts import Experts
from octavo_torch.moe.arguments import check_choices, check_weights
from octavo_torch.moe.call import MoeCall
from octavo_torch.moe.parallel.agreement import Signature, dtype_number, fingerprint, gradient_bits, number_or_none
from octavo_torch.moe.parallel.options import RETURNS, ROUTES, check_exchange
from octavo_torch.moe.parallel.own_experts import check_wrapper
from octavo_torch.moe.parallel.token_exchange import TokenExchange


class Sides(NamedTuple):
    """Of a layer over ranks; `experts` are a rank's own."""

    in_features: int
    hidden_features: int
    out_features: int
    experts: int


_P = ParamSpec("_P")
_OUTSIDE_GRAPH = (
    "ep was given, and a traced graph holds no exchange between ranks; call the layer outside of what is traced, or "
    "compile with fullgraph=False, which runs this call outside the graph"
)


def beside_graph(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """`function`, which exchanges tokens, for callers that dynamo traces: torch.compile leaves it out of its graph."""
    beside: Callable[_P, Tensor] = torch.compiler.disable(function, reason=_OUTSIDE_GRAPH)  # type: ignore[no-untyped-call]
    return beside


def check_eager(call: MoeCall) -> None:
    """ValueError where tokens would have to travel from inside of torch.export's trace, or a transform."""
    if call.ep is None:
        return
    if torch.compiler.is_compiling():
        raise ValueError(_OUTSIDE_GRAPH)
    if transforms_active():
        raise ValueError(
            "ep was given inside of torch.func's transforms, which carry no tokens; use autograd's backward"
        )


def token_exchange_for(call: MoeCall, x: Tensor, sides: Sides, choices: int, gradients: int) -> TokenExchange:
    """What carries the tokens x of a call to the other ranks' experts.

    choices     k, the experts of a token
    gradients   of `gradient_bits`
    """
    group, exchange = call.ep, check_exchange(call.exchange)
    assert group is not None
    if x.is_meta:
        raise ValueError("x is on meta and has no values to exchange; give tokens on the ranks' device")
    left_out = exchange.left_out
    if left_out is not None and left_out.device != x.device:
        raise on_another_device("left_out", left_out.device, "x", x.device)
    signature = Signature(
        **sides._asdict(),
        choices=choices,
        dtype=dtype_number(x.dtype),
        recipe=fingerprint(call.recipe),
        payload=fingerprint(exchange.travels_as),
        returns=RETURNS.index(exchange.returns),
        route=number_or_none(None if exchange.route is None else ROUTES.index(exchange.route)),
        rows=number_or_none(exchange.rows),
        pair_rows=number_or_none(exchange.pair_rows),
        tokens=number_or_none(None if exchange.rows is None else x.shape[0]),
        gradients=gradients,
    )
    return TokenExchange(group, exchange, signature, call.backend)


def token_exchange_apart(
    call: MoeCall, layer: Experts, routed: tuple[Tensor, Tensor, Tensor], trains: bool
) -> TokenExchange:
    """That of a layer whose operations run apart, because it has adapters.

    routed   tokens [T, K], choices [T, k] and weights [T, k]
    trains   whether anything in the layer takes a gradient

    Raises as moe_mlp does. The call counts experts from the first rank's on, for random bits.
    """
    check_eager(call)
    x, choices, weights = routed
    check_choices("choices", choices, x)
    check_weights(weights, choices)
    assert call.ep is not None
    own = [parameter for name, parameter in layer.named_parameters() if name != "router"]
    check_wrapper(call.ep, [*own, *(leaf for weight in layer.weights for leaf in leaves_of(weight))])
    call.group_offset += call.ep.rank * layer.num_groups
    sides = Sides(layer.in_features, layer.hidden_features, layer.out_features, layer.num_groups)
    enabled = torch.is_grad_enabled()
    needs = [enabled and x.requires_grad, enabled and weights.requires_grad, enabled and trains]
    gradients = gradient_bits(x=needs[0], weights=needs[1], any_input=any(needs))
    return token_exchange_for(call, x, sides, choices.shape[1], gradients)
