"""Auto meshes that are known when XLA partitions the program, and no sooner: `custom_partitioning`.

These are meshes of `jax.jit(..., in_shardings=...)` lowered from shapes, and of the old `with mesh:`. The program holds
a function of whole arrays. When XLA's partitioner asks for that of shards, it gets the local function with its
collectives, on exactly the specs of `octavo_jax.sharding.specs`, whatever sharding it had guessed. Shardy guesses by
the rule; GSPMD, where JAX still has it, by `infer_sharding_from_operands`.

JAX's custom_partitioning has limits: no vmap, no export, and no hit in the persistent compilation cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from octavo_jax.array_moves.shares import entries_of
from octavo_jax.sharding.placement import Letter, Placement, partitioned
from octavo_jax.sharding.placement_of_call import check_axes
from octavo_jax.sharding.shardy_rules import Names, shardy_rule


def run_partitioned_later(
    placement: Placement,
    local: Callable[..., Any],
    operands: tuple[Any, ...],
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Any:
    """`octavo_jax.sharding.run_on_shards` where the mesh is not known; specs hold letters.

    ValueError for tensor parallelism under GSPMD, which was seen to gather tokens' codes between two calls.
    """
    if placement.axes.tp and not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise ValueError(
            f"sharding has tp={placement.axes.tp!r}, no mesh is in scope and JAX partitions by GSPMD, which would "
            "gather tokens over tp; call it under jax.set_mesh(mesh), or with jax_use_shardy_partitioner on"
        )
    arrays, tree = jax.tree.flatten(operands)
    results = jax.eval_shape(local, *operands)
    out_tree = jax.tree.structure(results)
    ins, outs = _flat(placement, in_specs, operands), _flat(placement, out_specs, results)

    def shardings(mesh: Any, dims: Sequence[list[Names]]) -> list[NamedSharding]:
        return [NamedSharding(mesh, _spec(placement, one)) for one in dims]

    def flat(*arrays: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(local(*jax.tree.unflatten(tree, arrays))))

    def partition(mesh: Any, _: Any, __: Any) -> Any:
        _check_mesh(placement, mesh)

        def of_shards(*arrays: Any) -> tuple[Any, ...]:
            with partitioned(mesh):
                return flat(*arrays)

        return mesh, of_shards, tuple(shardings(mesh, outs)), tuple(shardings(mesh, ins))

    def infer(mesh: Any, _: Any, __: Any) -> Any:
        _check_mesh(placement, mesh)
        return tuple(shardings(mesh, outs))

    shapes = [one.shape for one in (*arrays, *jax.tree.leaves(results))]
    rule = shardy_rule(placement, ins, outs, shapes)
    function: Any = custom_partitioning(flat)  # type: ignore[no-untyped-call]
    function.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=rule.text,
        need_replication_factors=rule.need_replication,
        **rule.sizes,
    )
    return jax.tree.unflatten(out_tree, function(*arrays))


def _check_mesh(placement: Placement, mesh: Any) -> None:
    if mesh.empty:
        raise ValueError(
            f"sharding is {placement.axes!r} and the program is partitioned over devices without a named mesh; shard "
            "its arguments with jax.sharding.NamedSharding, or call it under jax.set_mesh"
        )
    check_axes(placement.axes, mesh.axis_names)


def _flat(placement: Placement, specs: Any, operands: Any) -> list[list[Names]]:
    """The letters of each array's dimensions; `specs` is a prefix of `operands`, entries without letters ().

    A side of the kernel that fsdp does not cut goes by the tokens' letter: a GEMM's result has it from the kernel.
    """
    flat: list[list[Names]] = []
    pairs: tuple[tuple[Letter, Letter], ...] = (("k", "i"), ("n", "o"))
    same = {k: i for k, i in pairs if placement.axes_of(k) == placement.axes_of(i)}

    def add(spec: PartitionSpec, arrays: Any) -> None:
        for array in jax.tree.leaves(arrays):
            letters: Any = entries_of(spec, array.ndim)
            flat.append([tuple(same.get(letter, letter) for letter in names) for names in letters])

    jax.tree.map(add, specs, operands, is_leaf=lambda node: isinstance(node, PartitionSpec))
    return flat


def _spec(placement: Placement, dims: list[Names]) -> PartitionSpec:
    """The axes of an array's dimensions."""
    entries = (sum((placement.axes_of(letter) for letter in names), ()) for names in dims)
    spec: PartitionSpec = PartitionSpec(*(names or None for names in entries))  # type: ignore[no-untyped-call]
    return spec
