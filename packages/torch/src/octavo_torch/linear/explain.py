"""What a grouped linear layer runs for given operands."""

from __future__ import annotations

from torch import Tensor

from octavo import Recipe
from octavo_registry.dispatch.layer_plan import LayerPlan
from octavo_torch.arrays.operands import check_operands
from octavo_torch.arrays.per_group import Weights
from octavo_torch.arrays.sizes import GroupSizes, as_sizes
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.dispatch.layer import layer_for
from octavo_torch.linear.prepare import parameters_of


def explain_linear(
    x: Tensor, weight: Weights, group_sizes: GroupSizes, recipe: Recipe, backend: str | tuple[str, ...] | None
) -> LayerPlan:
    """The plan of `grouped_linear` for these operands and the gradients that they require."""
    w = parameters_of(weight, None).weight
    check_operands(x, w)
    _, at_host = as_sizes(group_sizes, x.shape[0], w.shape[0], x)
    return layer_for(recipe, x, w, at_host, x.requires_grad, w.requires_grad, backend, wants_graph(x)).plan
