"""explain: how a layer would run, on which route it reaches the shards of a mesh, and what moves between devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from octavo import Recipe
from octavo_jax.arrays.axes import ContractingDims, grouped_weight
from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.layer import Layer, LayerOptions, layer_for
from octavo_jax.linear.arguments import as_array, check_operands
from octavo_jax.sharding import specs
from octavo_jax.sharding.axes import MeshAxes
from octavo_jax.sharding.conflicts import check_shards, check_unnamed
from octavo_jax.sharding.placement import Placement, Route
from octavo_jax.sharding.placement_of_call import placement_of
from octavo_registry import LayerPlan


@dataclass(frozen=True)
class LayerReport:
    """How one layer runs. Printable.

    route   "single"; "auto", "explicit" or "partly manual": the layer's own `jax.shard_map` over axes of that kind;
            "auto, mesh unknown": partitioned when XLA compiles; "manual": the caller's shard_map
    lie     the PartitionSpec of each array over axes that the caller is not manual over; {} for "single"
    moves   a sentence for each thing that moves between devices
    plan    the registry's; every `Plan` of `plan.plans` has each backend's verdict in `decisions`
    """

    route: Route
    lie: Mapping[str, PartitionSpec]
    moves: tuple[str, ...]
    plan: LayerPlan

    def __str__(self) -> str:
        lines = [f"route: {self.route}", *(f"  {name} is placed as {spec}" for name, spec in self.lie.items())]
        lines += [f"  {move}" for move in self.moves or ("nothing moves between devices",)]
        return "\n".join([*lines, str(self.plan)])


def explain(
    x: Array | np.ndarray,
    kernel: Array | np.ndarray,
    group_sizes: GroupSizes,
    *,
    recipe: Recipe | None,
    contracting_dims: ContractingDims = ((-1,), (1,)),
    preferred_element_type: DTypeLike | None = None,
    sharding: MeshAxes | None = None,
    backend: BackendNames = None,
) -> LayerReport:
    """What `octavo_jax.grouped_dense` of these arguments would run, forward and backward; nothing is computed.

    Works where that call would: on arrays, traced or not, under `jax.set_mesh`, inside `jax.shard_map`. Raises its
    errors.
    """
    x, kernel = as_array(x), as_array(kernel)
    weight = grouped_weight(contracting_dims, x.ndim)
    if sharding is None:
        check_unnamed("grouped_dense", x=x, kernel=kernel)
    placement = placement_of(sharding, group_sizes, x, kernel)
    check_operands(x, kernel, weight, None, placement)
    check_shards(placement, recipe, x, kernel, weight)
    options = LayerOptions.of(recipe, preferred_element_type, backend=backend)
    layer = layer_for(options, x, kernel, weight=weight, placement=placement)
    if placement is None or placement.route == "single":
        return LayerReport("single", MappingProxyType({}), (), layer.plan)
    lie: dict[str, Any] = {
        "x": specs.rows(placement, "i"),
        "kernel": specs.kernel(placement, weight),
        "bias": specs.groups(placement, columns="o"),
        "group_sizes": specs.sizes(placement),
        "y": specs.rows(placement, "o"),
    }
    return LayerReport(placement.route, MappingProxyType(lie), tuple(_moves(placement, layer)), layer.plan)


def _moves(placement: Placement, layer: Layer) -> Iterator[str]:
    axes, manual = placement.axes, placement.manual
    if placement.deferred:
        yield f"as {axes} says, over the mesh that XLA finds"
        return
    if placement.gathered:
        over, side = _named(placement.gathered), placement.gathered_letter.upper()
        parts = "quantized, and codes and scales of the one plane that a GEMM reads are gathered"
        for gemm in ("fprop", "dgrad"):
            what = parts if layer.plan.recipe.quantizes(gemm) else "gathered as they are"
            yield f"{gemm}: the kernel's shards along {side} are {what} over {over}"
        if set(placement.gathered) <= set(placement.data):
            yield f"wgrad: dw is summed and scattered along {side} over {over}"
    summed = tuple(name for name in placement.data if name not in placement.gathered)
    for name, by in (("this package", placement.auto(summed)), ("JAX", tuple(a for a in summed if a in manual))):
        if by:
            yield f"wgrad: dw and the bias's gradient are summed over {_named(by)} by {name}"
    for letter, result in (("i", "fprop: y is"), ("o", "dgrad: dx is")):
        over_tp = placement.several(letter)  # type: ignore[arg-type]
        if over_tp:
            yield f"{result} summed over {_named(over_tp)}"
    spanning = [part for part in layer.plan.plans if part.request.quantizer is not None]
    cut = placement.several("k") + tuple(name for name in placement.several("n") if name not in placement.several("k"))
    if cut and any(part.request.kind in ("current", "row", "nvfp4", "delayed") for part in spanning):
        yield f"amaxes of scales that span shards are maxima over {_named(cut)}"


def _named(names: tuple[str, ...]) -> str:
    return " and ".join(repr(name) for name in names)
