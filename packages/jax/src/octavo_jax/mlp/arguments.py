"""Arguments of an MLP: checked where they come in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax import Array

from octavo import Recipe
from octavo_jax.arrays.checks import check_arrays
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.functions.activations import check_per_row, features
from octavo_jax.linear.arguments import check_state
from octavo_jax.mlp.autograd import MlpArrays
from octavo_jax.mlp.plan import Placements
from octavo_jax.scaling.delayed_state import DelayedState
from octavo_jax.sharding import specs
from octavo_jax.sharding.explicit_placement import explicit_axes, placed, placed_state
from octavo_jax.sharding.placement import Letter, Placement
from octavo_registry.contract.cards import GATED, Activation


def check_mlp_operands(
    x: Array,
    wi: Array,
    wo: Array,
    bi: Array | None,
    bo: Array | None,
    activation: Activation,
    placements: Placements = (None, None),
) -> int:
    """G of x [..., K], wi [*G, K, C] and wo [*G, F, N], 1 without an axis of groups; ValueError unless they and their
    biases fit.

    placements   of fc1 and fc2: what the caller's shard_map has cut along fsdp counts as its shards together
    """
    biases = {name: bias for name, bias in (("bi", bi), ("bo", bo)) if bias is not None}
    check_arrays(wi=wi, wo=wo, **biases)
    for name, kernel in (("wi", wi), ("wo", wo)):
        dtype_name(kernel.dtype, name)
    if 0 in (*wi.shape, *wo.shape) or wo.ndim != wi.ndim:
        raise ValueError(
            f"wi has shape {list(wi.shape)} and wo {list(wo.shape)}; they have as many axes, each one or more"
        )
    *group, k, c = _whole(wi, placements[0])
    *others, inner, n = _whole(wo, placements[1])
    f = features(c, activation, f"wi {list(wi.shape)}")
    if x.ndim < 2 or x.shape[-1] != k:
        turned = x.ndim > 1 and x.shape[-1] == c  # as PyTorch's w1 is
        hint = f"swap wi's last two axes: [..., {c}, {k}]" if turned else f"x is [..., M, {k}]"
        raise ValueError(f"x has shape {list(x.shape)} and wi {list(wi.shape)} takes K = {k}; {hint}")
    if others != group or inner != f:
        needed = ", ".join(map(str, (*group, f, "N")))
        raise ValueError(f"wo has shape {list(wo.shape)}; wi {list(wi.shape)} with {activation} needs [{needed}]")
    for name, bias, columns in (("bi", bi, c), ("bo", bo, n)):
        if bias is not None and list(bias.shape) != [*group, columns]:
            raise ValueError(f"{name} has shape {list(bias.shape)}; it is {[*group, columns]}")
        if bias is not None:
            dtype_name(bias.dtype, name)
    return group[0] if group else 1


def check_bo_scales(scales: Array | None, bo: Array | None, shape: tuple[int, ...]) -> None:
    """ValueError unless scales are None, or float32 of this shape beside a bias."""
    if scales is not None and bo is None:
        raise ValueError("bo_scales was given and bo is None; give the bias that it scales, or neither")
    check_per_row("bo_scales", scales, shape)


def _whole(kernel: Array, placement: Placement | None) -> list[int]:
    """The shape of a kernel once the shards of the caller's shard_map along fsdp are gathered."""
    if placement is None:
        return list(kernel.shape)
    letters: tuple[Letter, ...] = ("g", "k", "n")
    sides = zip(letters[-kernel.ndim :], kernel.shape, strict=True)
    return [placement.whole_size(letter, size) for letter, size in sides]


def y_columns(wo: Array, placement: Placement | None) -> int:
    """N of wo [*G, F, N]."""
    return _whole(wo, placement)[-1]


def mlp_placements(placement: Placement | None, activation: Activation) -> Placements:
    """Of fc1, whose C tp cuts, and of fc2, whose F it cuts; fsdp cuts the other dimension of each, unless `fsdp_dim`
    says which.

    ValueError where tp_dim is not "N", or a mesh would put a gate and its partner on two devices.
    """
    if placement is None:
        return None, None
    axes = placement.axes
    if axes.tp_dim != "N":
        raise ValueError(
            f"tp_dim is {axes.tp_dim!r}; an MLP's first layer is column-parallel and its second row-parallel, so leave "
            "tp_dim at 'N'"
        )
    free = placement.non_manual(placement.cutting_axes("o"))
    if free and activation in GATED:
        raise ValueError(
            f"tp={axes.tp!r} cuts wi's columns and {activation} multiplies columns F apart, a gate and its partner, so "
            "that these would be on two devices; call this inside jax.shard_map on local kernels with the gate and the "
            "partner of the same features, or take tp for layers without a gate"
        )
    return placement, replace(placement, axes=replace(axes, tp_dim="K"))


def placed_mlp(
    placements: Placements, a: MlpArrays, states: tuple[DelayedState, DelayedState] | None, group_sizes: Array
) -> tuple[MlpArrays, tuple[DelayedState, DelayedState] | None, Array]:
    """The arguments as Explicit axes of a mesh want them; see `octavo_jax.sharding.explicit_placement`."""
    first, second = placements
    if first is None or second is None or not explicit_axes(first.mesh):
        return a, states, group_sizes
    per_row = specs.per_row(first)
    targets = {
        "x": specs.rows(first, "i"),
        "wi": specs.kernel(first, "kn"),
        "wo": specs.kernel(second, "kn"),
        "bi": specs.groups(first, columns="o"),
        "bo": specs.groups(second, columns="o"),
        "probs": per_row,
        "bo_scales": per_row,
    }
    placed_arrays = {
        name: placed(first.mesh, name, array, spec, tokens=name in ("x", "probs", "bo_scales"))
        for name, spec in targets.items()
        if (array := getattr(a, name)) is not None
    }
    if states is not None:
        states = placed_state(first, "state[0]", states[0]), placed_state(second, "state[1]", states[1])
    sizes = placed(first.mesh, "group_sizes", group_sizes, specs.sizes(first))
    return a._replace(**placed_arrays), states, sizes


def check_states(recipe: Recipe | None, state: Any, groups: int) -> None:
    """ValueError unless there is a pair of states exactly where the recipe keeps them."""
    pair = isinstance(state, tuple) and len(state) == 2
    if state is not None and not pair:
        raise ValueError(
            f"state is a {type(state).__name__}; give a pair of DelayedState, fc1's and fc2's "
            "(octavo_jax.init_delayed makes one)"
        )
    for one in state if pair else (None,):
        check_state(recipe, one, groups)
