"""explain: how a layer would run, on which route it reaches the shards of a mesh, and what moves between devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from octavo_jax.array_moves.moves import Move
from octavo_jax.arrays.axes import ContractingDims, grouped_weight
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.arrays.sizes import GroupSizes, as_group_sizes, in_one_array
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.layer import Layer, LayerOptions, layer_for
from octavo_jax.dispatch.room import Room
from octavo_jax.linear.argument_placements import UNKNOWN, ArgumentPlacements
from octavo_jax.linear.arguments import as_array, check_operands, check_sizes_fit
from octavo_jax.linear.expert_rows import ExpertRows
from octavo_jax.sharding import specs
from octavo_jax.sharding.axes import MeshAxes, called_function, roles_in_force
from octavo_jax.sharding.conflicts import check_has_roles, check_shards
from octavo_jax.sharding.placement import Placement, Route
from octavo_jax.sharding.placement_of_call import placement_of
from octavo_registry import LayerPlan


@dataclass(frozen=True)
class LayerReport:
    """How one layer runs. Printable.

    route       how the layer reaches its shards. "single": there is one device. "auto", "explicit" or "partly manual":
                by a `jax.shard_map` of its own over axes of that kind. "auto, mesh unknown": it is partitioned when XLA
                compiles. "manual": inside the caller's shard_map
    lie         the PartitionSpec by which the layer needs each array to lie, over axes that the caller is not manual
                over; {} for "single"
    placed      how each argument is placed, in words; of arrays that are traced on an Auto mesh, that it is not known
    misplaced   the arguments that have to move before the layer can run, with their bytes
    moves       a sentence for each thing that the layer itself moves between devices
    plan        the registry's plan; every `Plan` in `plan.plans` has the verdict on each backend in `decisions`
    """

    route: Route
    lie: Mapping[str, PartitionSpec]
    placed: Mapping[str, str]
    misplaced: tuple[Move, ...]
    moves: tuple[str, ...]
    plan: LayerPlan

    def __str__(self) -> str:
        lines = [f"route: {self.route}"]
        lines += [f"  {name} needs {spec}{self._found(name)}" for name, spec in self.lie.items()]
        lines += [f"  {name} is {placed}" for name, placed in self.placed.items() if name not in self.lie]
        lines += [f"  before the layer: {move}" for move in self.misplaced]
        lines += [f"  {move}" for move in self.moves]
        if not self.misplaced and not self.moves:
            unknown = [name for name, placed in self.placed.items() if placed == UNKNOWN]
            lines.append("  nothing moves between devices" + (f", as far as is known of {unknown}" if unknown else ""))
        return "\n".join([*lines, str(self.plan)])

    def _found(self, name: str) -> str:
        return f", is {self.placed[name]}" if name in self.placed else ""


def explain(
    x: Array | np.ndarray,
    kernel: Array | np.ndarray,
    group_sizes: GroupSizes,
    *,
    recipe: RecipeLike,
    contracting_dims: ContractingDims = ((-1,), (1,)),
    preferred_element_type: DTypeLike | None = None,
    sharding: MeshAxes | None = None,
    backend: BackendNames = None,
    room: Room | None = None,
) -> LayerReport:
    """What `octavo_jax.grouped_dense` would run for these arguments, forward and backward; nothing is computed.

    It works wherever that call would, on arrays that are traced or not, under `jax.set_mesh` and inside
    `jax.shard_map`, and raises the same errors. The placement of arrays with values is known, so for them it also
    counts the bytes that would have to move.
    """
    recipe, sharding = as_recipe(recipe), roles_in_force(sharding)
    x, kernel = as_array("x", x), as_array("kernel", kernel)
    weight = grouped_weight(contracting_dims, x.ndim)
    check_has_roles("grouped_dense", sharding, x=x, kernel=kernel)
    group_sizes = in_one_array(group_sizes)
    expert_rows = ExpertRows.of(sharding, x, group_sizes)
    x, group_sizes = expert_rows.in_blocks("x", x, "i"), expert_rows.sizes(group_sizes)
    placement = placement_of(sharding, group_sizes, x, kernel)
    groups, _, _ = check_operands(x, kernel, weight, None, placement)
    blocks = () if placement is None else placement.blocks
    rows = x.shape[-2] if x.ndim == len(blocks) + 2 else math.prod(x.shape[:-1])
    check_sizes_fit(as_group_sizes(group_sizes, rows, blocks), groups, placement)
    check_shards(placement, recipe, x, kernel, weight)
    options = LayerOptions.of(recipe, preferred_element_type, backend=backend, room=room)
    layer = layer_for(options, x, kernel, weight=weight, placement=placement)
    places = ArgumentPlacements.of(
        called_function("grouped_dense", sharding), placement, weight, x, kernel, group_sizes
    )
    if placement is None or placement.route == "single":
        return LayerReport("single", MappingProxyType({}), places.placed, places.misplaced, (), layer.plan)
    lie: dict[str, Any] = {
        "x": specs.rows(placement, "i"),
        "kernel": specs.kernel(placement, weight),
        "bias": specs.groups(placement, columns="o"),
        "group_sizes": specs.sizes(placement),
        "y": specs.rows(placement, "o"),
    }
    moves = tuple(_moves(placement, layer))
    return LayerReport(placement.route, MappingProxyType(lie), places.placed, places.misplaced, moves, layer.plan)


def _moves(placement: Placement, layer: Layer) -> Iterator[str]:
    axes, manual = placement.axes, placement.manual_axes
    if placement.mesh_unknown:
        yield f"as {axes} says, over the mesh that XLA finds"
        return
    if placement.gathered_axes:
        over, side = _named(placement.gathered_axes), placement.gathered_letter.upper()
        parts = "quantized, and codes and scales of the one plane that a GEMM reads are gathered"
        for gemm in ("fprop", "dgrad"):
            what = parts if layer.plan.recipe.quantizes(gemm) else "gathered as they are"
            yield f"{gemm}: the kernel's shards along {side} are {what} over {over}"
        if set(placement.gathered_axes) <= set(placement.data_axes):
            yield f"wgrad: dw is summed and scattered along {side} over {over}"
    summed = tuple(name for name in placement.data_axes if name not in placement.gathered_axes)
    for name, by in (("this package", placement.non_manual(summed)), ("JAX", tuple(a for a in summed if a in manual))):
        if by:
            yield f"wgrad: dw and the bias's gradient are summed over {_named(by)} by {name}"
    for letter, result in (("i", "fprop: y is"), ("o", "dgrad: dx is")):
        over_tp = placement.cutting_axes(letter)  # type: ignore[arg-type]
        if over_tp:
            yield f"{result} summed over {_named(over_tp)}"
    spanning = [part for part in layer.plan.plans if part.request.quantizer is not None]
    cut = placement.cutting_axes("k") + tuple(
        name for name in placement.cutting_axes("n") if name not in placement.cutting_axes("k")
    )
    if cut and any(part.request.kind in ("current", "row", "nvfp4", "delayed") for part in spanning):
        yield f"amaxes of scales that span shards are maxima over {_named(cut)}"


def _named(names: tuple[str, ...]) -> str:
    return " and ".join(repr(name) for name in names)
