"""observed: what quantization does to x, the kernel and dy of a grouped layer, as the "gradient" of a tap.

dy exists in the backward pass alone, and a jitted function has no side effects. So a tap is a differentiable argument
on which the loss does not depend, and whose cotangent is not a derivative but what was counted:

    def loss(params, taps, batch):
        y = octavo_jax.observed(taps["fc1"], x, params["fc1"], sizes, recipe=recipe)
        ...

    taps = {"fc1": octavo_jax.new_tap(experts)}
    value, (grads, seen) = jax.value_and_grad(loss, argnums=(0, 1))(params, taps, batch)
    wandb.log(octavo_jax.observations(seen))

Jit the step twice, once with taps and once with None for each of them, and call the first in one step of a hundred.
Give each call a tap of its own, and a layer inside `jax.lax.scan` its tap from the scanned inputs, one for each layer.
Where several calls or the examples of a `jax.vmap` take one tap, JAX adds up what they counted: that is right for all
fields but amax, which is then a sum of maxima.

Inside `jax.shard_map`, where group g of a tap stands for group g of every shard:

- A tap that shards share gets the counts of all of them and the largest of their amaxes. A kernel that they share, too,
  is counted once.
- A tap that in_specs cut gets what its own shard counted.
- With check_vma=False, cut the tap if the gradient is taken outside of the shard_map, because JAX adds up what shards
  share. A gradient that is taken inside has what its own shard counted, even of a shared tap, and out_specs=P() would
  return the counts of one shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo import HighPrecision, Recipe
from octavo.health import FIELDS, numbers_of
from octavo.quantizer import Operand
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arrays.checks import as_count
from octavo_jax.arrays.exportable import exportable
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.arrays.sizes import GroupSizes, as_group_sizes
from octavo_jax.arrays.varying import varying_axes, varying_over
from octavo_jax.linear.grouped import grouped_dense
from octavo_jax.quantizers.stats import TensorStats, check_rows, counted
from octavo_jax.scaling.delayed_state import DelayedState
from octavo_jax.scaling.seeds import seed_words
from octavo_jax.sharding.axes import roles_in_force


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tap:
    """What one call counted of x, the kernel and dy: float32 [8, G] each, in the order of the fields of TensorStats.

    A new tap holds zeros. Taps of several layers or shards are stacked, with their axes in front of these.
    """

    x: Array
    kernel: Array
    grad: Array

    def stats(self) -> dict[str, TensorStats]:
        """The counts by operand: "x", "kernel" and "grad". Where no call had the operand, `elements` is 0."""
        return {name: TensorStats(*getattr(self, name)) for name in ("x", "kernel", "grad")}


def new_tap(groups: int) -> Tap:
    """A tap that has counted nothing. ValueError for anything but an integer of at least 1."""
    groups = as_count("groups", groups)
    # one array each: a program cannot be given one buffer twice, and a training step's arguments are donated
    return Tap(*(jnp.zeros((len(FIELDS), groups), jnp.float32) for _ in range(3)))


def observed(
    tap: Tap | None,
    x: Array | np.ndarray,
    kernel: Array | np.ndarray,
    group_sizes: GroupSizes,
    *,
    recipe: RecipeLike,
    rows: int | None = 128,
    **options: Any,
) -> Any:
    """`grouped_dense(x, kernel, group_sizes, recipe=recipe, **options)`, whose operands the "gradient" of `tap` counts.

    tap      from `new_tap`; None: nothing is counted, and this is grouped_dense
    rows     how many rows of each group to look at, a multiple of 128: evenly spread ones, and 1024 of their columns.
             None: all rows and columns. An amax is always that of all elements

    Results and gradients are those of `grouped_dense`. Stochastic rounding is counted with the bits of seed 0. Raises
    ValueError for a tap of another number of groups, for x with blocks of rows, with `sharding` and under `mesh_roles`:
    over a mesh, call it inside `jax.shard_map`.
    """
    recipe = as_recipe(recipe)
    if tap is None:
        return grouped_dense(x, kernel, group_sizes, recipe=recipe, **options)
    x, kernel, roles = jnp.asarray(x), jnp.asarray(kernel), roles_in_force(options.get("sharding"))
    if x.ndim != 2 or roles is not None:
        raise ValueError(
            f"x has shape {list(x.shape)} and sharding, given or of mesh_roles, is {roles}; a tap takes rows [M, K] of "
            "one device, inside jax.shard_map those of a shard"
        )
    result = grouped_dense(x, kernel, group_sizes, recipe=recipe, **options)
    _check_tap(tap, kernel.shape[0])
    used = HighPrecision() if recipe is None else recipe
    state: DelayedState | None = options.get("state")
    look = partial(_counted, used, check_rows(rows))
    sizes = as_group_sizes(group_sizes, x.shape[0], reports=bool(options.get("return_status")))
    _, (contracted, *_) = options.get("contracting_dims", ((-1,), (1,)))
    matrices = kernel.swapaxes(1, 2) if contracted in (1, -2) else kernel
    seen_x = look("x", x, sizes, None if state is None else state.x.scale)
    seen_kernel = look("w", matrices, None, None if state is None else state.kernel.scale)
    y, *more = result if isinstance(result, tuple) else (result,)
    grad_scale = None if state is None else state.grad.scale
    rule = _Rule(used, check_rows(rows), varying_axes(tap))
    y = _tapped(rule, y, tap, (seen_x, seen_kernel), sizes, grad_scale)
    return (y, *more) if more else y


def _check_tap(tap: object, groups: int) -> None:
    if not isinstance(tap, Tap):
        raise ValueError(f"tap is a {type(tap).__name__}; give octavo_jax.new_tap({groups}), or None to count nothing")
    wanted = len(FIELDS), groups
    for name in ("x", "kernel", "grad"):
        shape = getattr(tap, name).shape
        if shape != wanted:
            raise ValueError(
                f"tap.{name} has shape {list(shape)} and the kernel has {groups} groups, so that {list(wanted)} is "
                f"needed; make it with octavo_jax.new_tap({groups}), and of stacked taps give each layer or shard one"
            )


def _counted(recipe: Recipe, rows: int, operand: Operand, value: Array, sizes: Array | None, scale: Any) -> Array:
    spec = recipe.quantizer(operand)
    direction = "rowwise" if spec is None or spec.shares_codes else spec.directions[0]
    seed = seed_words(0) if spec is not None and spec.stochastic else None
    given = scale if spec is not None and spec.scaling == "delayed" else None
    result: Array = counted(value, sizes, seed, given, spec=spec, direction=direction, rows=rows)
    return result


class _Rule(NamedTuple):
    """What `_counted` takes of a call's options, and the manual mesh axes over which the call's tap differs."""

    recipe: Recipe
    rows: int
    axes: frozenset[str]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(rule: _Rule, y: Array, tap: Tap, seen: tuple[Array, Array], sizes: Array, scale: Array | None) -> Array:
    return y


def _forward(rule: _Rule, y: Array, tap: Tap, *saved: Any) -> tuple[Array, Any]:
    return y, saved


def _backward(rule: _Rule, saved: Any, dy: Array) -> tuple[Any, ...]:
    seen, sizes, scale = saved
    counts = *seen, _counted(rule.recipe, rule.rows, "dy", dy, sizes, scale)
    seen_x, seen_kernel, seen_grad = (_of_shards(one, rule.axes) for one in counts)
    return dy, Tap(seen_x, seen_kernel, seen_grad), None, None, None


def _of_shards(counts: Array, axes: frozenset[str]) -> Array:
    """The counts [8, G] of all shards that share a tap, which differs over `axes` alone."""
    shared = tuple(sorted(varying_axes(counts) - axes))
    if shared:
        place = FIELDS.index("amax")
        amax = lax.pmax(fp32.as_bits(counts[place]), shared)  # type: ignore[no-untyped-call]
        counts = lax.psum(counts, shared).at[place].set(fp32.as_float(amax))  # type: ignore[no-untyped-call]
    result: Array = varying_over(counts, axes)
    return result


_tapped.defvjp(_forward, _backward)


def observations(seen: Any, prefix: str = "octavo/", *, experts: bool = False) -> dict[str, float]:
    """Flat numbers for W&B or TensorBoard from taps that came back as gradients; waits for them.

    seen      a pytree of taps
    experts   also the numbers of each expert, under "<prefix><layer>/<operand>/expert<g>/<what>"

    Keys are "<prefix><layer>/<operand>/<what>", as octavo_torch's are. The layer is the tap's path in the pytree, for
    stacked taps "<path>.<number>", and the operand is x, w or dy. What is counted: amax and non_finite (a number of
    elements), and for an operand that is quantized also saturated and underflow (shares of the elements looked at) and
    sqnr_db. The SQNR is left out where it does not exist, without a signal or without noise.
    """
    taps, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(seen), is_leaf=lambda leaf: isinstance(leaf, Tap))
    numbers: dict[str, float] = {}
    for path, tap in taps:
        layer = jax.tree_util.keystr(path, simple=True, separator=".") or "model"
        for place in np.ndindex(tap.x.shape[:-2]):
            name = ".".join([layer, *map(str, place)])
            for operand, part in (("x", tap.x), ("w", tap.kernel), ("dy", tap.grad)):
                values = np.asarray(part[place], np.float64)
                start = f"{prefix}{name}/{operand}/"
                sums = np.where(np.array(FIELDS) == "amax", values.max(axis=1), values.sum(axis=1))
                numbers |= _numbers(start, sums)
                for expert in range(values.shape[1] if experts else 0):
                    numbers |= _numbers(f"{start}expert{expert}/", values[:, expert])
    return numbers


def _numbers(start: str, values: np.ndarray) -> dict[str, float]:
    return {start + name: value for name, value in numbers_of(values.tolist()).items()}
