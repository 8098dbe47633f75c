"""Tokens to rows sorted by expert, and back; no sum, of results or gradients, depends on an order of threads.

No shape depends on the routing and nothing is read back: T tokens with k choices are always M = T k rows. Choices that
are routed nowhere come after the sum of the sizes, where grouped layers read and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TypedDict

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octavo_torch.arrays.checks import BackendNames, HashableNames, backend_names, brief, check_count, on_another_device
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.operands import check_layout
from octavo_torch.compiler.tracing import one_call, register_tree
from octavo_torch.compiler.transforms import outside_transforms, transforms_active
from octavo_torch.moe.arguments import check_choices, check_weights
from octavo_torch.moe.rows.derivatives import ROWS, Places, check_contexts
from octavo_torch.moe.rows.derivatives import combine as combine_rows
from octavo_torch.moe.rows.derivatives import permute as permute_rows
from octavo_torch.moe.rows.moves import moves_for, route_for


@dataclass(eq=False)
class Routing:
    """Where the rows of `permute` come from: T tokens with k choices among G groups, as M = T k rows.

    group_sizes   int64 [G]: rows of each group
    order         int64 [M]: the choice t * k + j in each row; within a group in the order of choices
    position      int64 [T, k]: the row of each choice, the inverse of `order`; past the sum of the sizes, up to M - 1,
                  for choices that are routed nowhere
    routed        bool [T, k]: False for choices that are routed nowhere
    """

    group_sizes: Tensor
    order: Tensor
    position: Tensor
    routed: Tensor

    def to_rows(self, weights: Tensor, *, backend: BackendNames = None) -> Tensor:
        """The choices' weights [T, k] as fp32 [M], one per row, 0 past the sum: `probs` of `grouped_mlp`.

        Differentiable. `backend` as in `permute`. Raises ValueError for weights that do not fit.
        """
        _check_routing(self)
        check_weights(weights, self.position)
        return _weights_as_rows(weights, self.order, self.position, self.routed, **_named(backend))


def permute(
    x: Tensor, expert_index: Tensor, num_groups: int, *, backend: BackendNames = None
) -> tuple[Tensor, Tensor, Routing]:
    """Rows of x sorted by group, for grouped layers: each token's values once for each of its choices.

    x              [T, K] tokens; bf16, fp16 or fp32
    expert_index   [T, k] integers on x's device, the group of each choice; a number outside 0 to num_groups - 1, such
                   as -1, routes that choice nowhere: it costs no row of a GEMM
    num_groups     G
    backend        which backends may route and move rows, as in grouped_linear; torch's operations do it where none can

    Returns rows [T k, K] (zeros past the sum), group_sizes [G], and the `Routing` that `unpermute` needs. The order
    within a group is that of the choices. The gradient of a token is the sum over its choices in fp32, rounded once;
    rows past the sum are not read. Raises ValueError for arguments that do not fit.
    """
    _check_tokens(x, expert_index, num_groups)
    rows, *parts = _permuted(x, expert_index, num_groups, **_named(backend))
    routing = Routing(*parts)
    return rows, routing.group_sizes, routing


def unpermute(rows: Tensor, routing: Routing, weights: Tensor | None = None, *, backend: BackendNames = None) -> Tensor:
    """y [T, N]: for each token the sum over its choices of weight * row, in fp32 in the order of choices, rounded once.

    rows      [T k, N], as `permute` sorted them; not read past the sum of the sizes
    weights   [T, k]; None: the rows are already weighted, or all weights are 1
    backend   as in `permute`

    A token that is routed nowhere gets zeros. Differentiable in rows and weights. Raises ValueError for arguments that
    do not fit.
    """
    _check_rows(rows, routing)
    if weights is not None:
        check_weights(weights, routing.position)
    factors = () if weights is None else (weights,)
    return _unpermuted(rows, routing.order, routing.position, routing.routed, *factors, **_named(backend))


def through_rows(
    x: Tensor,
    expert_index: Tensor,
    weights: Tensor,
    num_groups: int,
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    recompute: bool = False,
    backend: BackendNames = None,
) -> Tensor:
    """y [T, N] of tokens x [T, K]: `permute`, then `experts(rows, group_sizes, probs)`, whose rows `unpermute` sums.

    expert_index, num_groups, backend   as in `permute`
    weights                             [T, k]: of them `probs` is fp32 [M], one per row, as grouped_mlp takes it
    recompute                           the backward computes all of it again, and keeps the arguments alone
    """

    def run(x: Tensor, weights: Tensor) -> Tensor:
        rows, sizes, routing = permute(x, expert_index, num_groups, backend=backend)
        return unpermute(experts(rows, sizes, routing.to_rows(weights, backend=backend)), routing, backend=backend)

    if not recompute or not torch.is_grad_enabled():
        return run(x, weights)
    y: Tensor = checkpoint(run, x, weights, use_reentrant=False)
    return y


class _Options(TypedDict, total=False):
    backend: HashableNames


def _named(backend: BackendNames) -> _Options:
    """`backend` as keyword arguments, none for None: a call out of traced code does not accept None."""
    names = backend_names(backend)
    return {} if names is None else {"backend": names}


@one_call
def _permuted(x: Tensor, expert_index: Tensor, groups: int, backend: HashableNames = None) -> tuple[Tensor, ...]:
    check_contexts(x)
    route = route_for(x, groups, backend)
    if transforms_active():  # choices have no derivative
        sizes, *places = outside_transforms(ROWS, route, expert_index, groups)
    else:
        sizes, *places = route(expert_index, groups)
    return permute_rows(x, None, Places(*places), moves_for(x, backend)), sizes, *places


@one_call
def _unpermuted(
    rows: Tensor,
    order: Tensor,
    position: Tensor,
    routed: Tensor,
    weights: Tensor | None = None,
    backend: HashableNames = None,
) -> Tensor:
    check_contexts(rows, weights)
    factors = None if weights is None else weights.float()
    return combine_rows(rows, factors, Places(order, position, routed), moves_for(rows, backend))


@one_call
def _weights_as_rows(
    weights: Tensor, order: Tensor, position: Tensor, routed: Tensor, backend: HashableNames = None
) -> Tensor:
    check_contexts(weights)
    # each choice becomes a token with one choice, and each row has one column
    values = weights.float().reshape(-1, 1)
    places = Places(order, position.view(-1, 1), routed.view(-1, 1))
    return permute_rows(values, None, places, moves_for(values, backend)).view(-1)


# ---- checks


def _check_tokens(x: object, expert_index: object, num_groups: object) -> None:
    if not isinstance(x, Tensor) or x.dim() != 2 or x.dtype not in DTYPE_NAMES:
        raise ValueError(f"x is {brief(x)}; give tokens [T, K] in bfloat16, float16 or float32")
    check_layout("x", x)
    check_choices("expert_index", expert_index, x)
    check_count("num_groups", num_groups)


def _check_rows(rows: object, routing: object) -> None:
    if not isinstance(routing, Routing):
        raise ValueError(f"routing is a {type(routing).__name__}; give what permute returned")
    _check_routing(routing)
    needed = routing.order.shape[0]
    if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.dtype not in DTYPE_NAMES or rows.shape[0] != needed:
        raise ValueError(f"rows is {brief(rows)}; give [{needed}, N] in bfloat16, float16 or float32")
    check_layout("rows", rows)
    if rows.device != routing.order.device:
        raise on_another_device("rows", rows.device, "routing", routing.order.device)


def _check_routing(routing: Routing) -> None:
    """ValueError for tensors that a caller has put together and that kernels, which get addresses, would misread."""
    order, position, routed = routing.order, routing.position, routing.routed
    if (
        order.dtype is position.dtype is torch.int64
        and routed.dtype is torch.bool
        and position.dim() == 2
        and routed.shape == position.shape
        and order.shape == (position.numel(),)
        and order.device == position.device == routed.device
    ):
        return
    parts = {"order": order, "position": position, "routed": routed}
    given = [f"{name} is {brief(part)} on {part.device}" for name, part in parts.items()]
    raise ValueError(
        f"routing's {', '.join(given)}; give what permute returned: int64 [T k], int64 [T, k] and bool [T, k], on one "
        "device"
    )


_FIELDS = tuple(field.name for field in fields(Routing))


def _flatten(routing: Routing) -> tuple[list[Tensor], None]:
    return [getattr(routing, name) for name in _FIELDS], None


def _unflatten(tensors: Iterable[Tensor], _: None) -> Routing:
    return Routing(*tensors)


register_tree(Routing, _flatten, _unflatten, _FIELDS)
torch.serialization.add_safe_globals([Routing])  # torch.export.load reads a program's example arguments with torch.load
