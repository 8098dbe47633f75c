"""Which bias of a Sequential's layers the caller's bias scales multiply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from octavo_torch.arrays.checks import brief
from octavo_torch.linear.module import GroupedLinear
from octavo_torch.mlp.activation_module import Activation
from octavo_torch.mlp.module import GroupedMLP

BiasScales = Tensor | Mapping[int, Tensor]
"""One number per row: for the one layer that it can be for, or by the number of the operation."""


def scales_by_operation(
    operations: Sequence[nn.Module], bias_scales: BiasScales | None, bias2_scales: Tensor | None
) -> dict[int, Tensor]:
    """Scales of a GroupedLinear's bias and of a GroupedMLP's second one, by the operation's number.

    Raises ValueError for scales that fit no layer, or more than one.
    """
    if bias_scales is None and bias2_scales is None:
        return {}
    layers = {at: _bias_of(operation) for at, operation in enumerate(operations) if _bias_of(operation)}
    found: dict[int, Tensor] = {}
    if isinstance(bias_scales, Mapping):
        for at, scales in bias_scales.items():
            if at not in layers:
                raise ValueError(f"bias_scales has operation {at!r}, which has no bias to scale; {_way_on(layers)}")
            found[at] = scales
    elif bias_scales is not None:
        linears = [at for at, bias in layers.items() if bias == "bias"]
        if len(linears) != 1:
            raise ValueError(
                f"bias_scales is {brief(bias_scales)} and {len(linears)} operations are a GroupedLinear with a bias; "
                f"{_way_on(layers)}"
            )
        found[linears[0]] = bias_scales
    if bias2_scales is not None:
        second = [at for at, bias in layers.items() if bias == "bias2" or _follows_activation(operations, at)]
        if len(second) != 1:
            raise ValueError(
                f"bias2_scales is {brief(bias2_scales)} and {len(second)} operations are a GroupedMLP, or a "
                f"GroupedLinear behind an Activation, with a bias; {_way_on(layers)}"
            )
        if second[0] in found:
            raise ValueError(f"bias_scales and bias2_scales are both for operation {second[0]}; give one of them")
        found[second[0]] = bias2_scales
    return found


def _bias_of(operation: nn.Module) -> str:
    """The name of the bias that scales multiply; "" without one."""
    if isinstance(operation, GroupedMLP):
        return "bias2" if operation.has("bias2") else ""
    return "bias" if isinstance(operation, GroupedLinear) and operation.has("bias") else ""


def _follows_activation(operations: Sequence[nn.Module], at: int) -> bool:
    return at > 0 and isinstance(operations[at - 1], Activation)


def _way_on(layers: Mapping[int, str]) -> str:
    if not layers:
        return "leave it out: no layer has a bias"
    return f"give bias_scales={{number: scales}} with numbers of layers with a bias: {', '.join(map(str, layers))}"
