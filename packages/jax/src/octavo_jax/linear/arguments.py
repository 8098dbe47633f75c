"""Arguments that every layer takes: checked where they come in, with a sentence that says what to do."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo import DelayedScaling, Recipe
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.linear.operands import Context
from octavo_jax.quantizers.arguments import check_group_offset
from octavo_jax.scaling.delayed_state import DelayedState, check_history, check_state_arrays
from octavo_jax.scaling.seeds import seed_words
from octavo_jax.sharding.placement import Placement
from octavo_registry import Weight


def as_array(name: str, x: Array | np.ndarray) -> Array:
    """x as a jax.Array; ValueError unless it is one, or jnp.asarray takes it. `name`: what messages call it."""
    # jnp.asarray of an array costs 10 microseconds.
    if isinstance(x, jax.Array):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        hint = " of high precision: layers quantize it themselves" if isinstance(x, GroupedTensor) else ""
        raise ValueError(f"{name} is a {type(x).__name__}; give an array{hint}") from None


def check_operands(
    x: Array, kernel: Array, weight: Weight, bias: Array | None, placement: Placement | None = None
) -> tuple[int, int, int]:
    """(G, K, N) of x [..., K], the kernel and bias [G, N]; ValueError where they do not go together.

    placement   where the caller's shard_map has cut the kernel along fsdp, G, K and N are those of its shards together
    """
    axes = "[G, K, N]" if weight == "kn" else "[G, N, K]"
    if x.ndim < 2 or kernel.ndim != 3:
        raise ValueError(
            f"x has shape {list(x.shape)} and kernel {list(kernel.shape)}; they are [M, K], or [..., M, K], and {axes}"
        )
    if 0 in kernel.shape:
        raise ValueError(f"kernel has shape {list(kernel.shape)}; every axis is one or more")
    groups, k, n = kernel.shape if weight == "kn" else (kernel.shape[0], kernel.shape[2], kernel.shape[1])
    shape = list(kernel.shape)
    if placement is not None:
        groups, k, n = placement.whole_size("g", groups), placement.whole_size("k", k), placement.whole_size("n", n)
    if x.shape[-1] != k:
        other = "((-1,), (2,))" if weight == "kn" else "((-1,), (1,))"
        hint = f"contract with contracting_dims={other}" if x.shape[-1] == n else f"give x [..., {k}]"
        raise ValueError(f"x has {x.shape[-1]} features and kernel {axes} = {shape} takes K = {k}; {hint}")
    if bias is not None:
        if bias.shape != (groups, n):
            raise ValueError(
                f"bias has shape {list(bias.shape)}; kernel {axes} = {shape} needs [G, N] = [{groups}, {n}]"
            )
        dtype_name(bias.dtype, "bias")
    return groups, k, n


def check_sizes_fit(
    group_sizes: Array, groups: int, placement: Placement | None = None, kernel: str = "kernel"
) -> None:
    """ValueError unless there is one size per matrix, or per matrix of each expert block.

    kernel   what messages call the argument that has the matrices
    """
    if placement is not None and "e" in placement.block_letters:
        experts, here = placement.block_count("e"), group_sizes.shape[-1]
        if experts * here != groups:
            raise ValueError(
                f"group_sizes has {here} entries for each of {experts} expert blocks and {kernel} {groups} matrices; "
                f"give [*B, G] and {kernel} of E * G matrices"
            )
    elif group_sizes.shape[-1] != groups:
        raise ValueError(
            f"group_sizes has {group_sizes.shape[-1]} entries and {kernel} {groups} matrices; give one per matrix"
        )


def check_state(recipe: Recipe | None, state: DelayedState | None, groups: int) -> None:
    """ValueError unless there is a state where the recipe keeps one, of `groups` groups and the recipe's steps."""
    stateful = recipe is not None and recipe.stateful
    if stateful and state is None:
        raise ValueError("state is None and the recipe scales by history; give octavo_jax.init_delayed(recipe, groups)")
    if state is not None and not stateful:
        kind = "high_precision" if recipe is None else recipe.kind
        raise ValueError(f"state was given and the recipe {kind!r} keeps none; leave it out")
    if state is None:
        return
    check_state_arrays(state)
    shapes = {operand: getattr(state, operand).scale.shape for operand in ("x", "kernel", "grad")}
    others = [operand for operand, shape in shapes.items() if shape != (groups,)]
    if others:
        name, found = "state" if len(others) == len(shapes) else f"state.{others[0]}", shapes[others[0]]
        has = found[0] if len(found) == 1 else list(found)
        raise ValueError(f"{name} is for {has} groups and kernel has {groups}; make it for {groups}")
    if isinstance(recipe, DelayedScaling):
        check_history(state, recipe)


def context_of(
    recipe: Recipe | None, group_sizes: Array, seed: int | Array | None, group_offset: int | Array
) -> Context:
    """The arguments that have no gradient; ValueError for a seed that is missing or an offset that does not fit."""
    words = None
    if recipe is not None and recipe.stochastic:
        if seed is None:
            raise ValueError(
                "seed is None and the recipe rounds stochastically; give an integer seed, another each step"
            )
        words = seed_words(seed)
    return Context(group_sizes, words, _offset(group_offset, math.prod(group_sizes.shape)))


def _offset(group_offset: int | Array, groups: int) -> Array | np.uint32:
    checked = check_group_offset(group_offset, groups)
    return checked.astype(jnp.uint32) if isinstance(checked, jax.Array) else np.uint32(checked)
