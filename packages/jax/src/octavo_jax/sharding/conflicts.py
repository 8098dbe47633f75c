"""Calls that a mesh does not fit, each refused by a ValueError that names both sides and the fix.

`check_shards`     shapes that the shards do not divide evenly
`check_whole`      arrays that are sharded, of functions that take whole ones
`check_has_roles`  calls that give no mesh axis a role while their arrays are sharded: XLA would gather the tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import jax
from jax import Array
from jax.sharding import AxisType

from octavo import Recipe
from octavo.quantizer import Operand
from octavo_jax.sharding.axes import ROLES, MeshAxes, Role
from octavo_jax.sharding.placement import Letter, Placement
from octavo_jax.sharding.specs import matrix_letters
from octavo_registry import Weight

_OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")


def check_shards(placement: Placement | None, recipe: Recipe | None, x: Array, kernel: Array, weight: Weight) -> None:
    """ValueError where blocks, groups or features of x [*B, M, K] and the kernel are not divided evenly by the mesh, or
    a shard cuts a block that shares a scale."""
    if placement is None or placement.mesh is None:
        return
    _check_blocks(placement, x)
    _check_groups(placement, kernel)
    size = dict(zip(matrix_letters(weight), kernel.shape[1:], strict=True))
    for letter, length in size.items():
        _check_side(placement, recipe, letter, length)


def _shards(placement: Placement, letter: Letter) -> tuple[int, str]:
    """The number of shards along a dimension, and the roles that make them, in words."""
    axes = placement.non_manual(placement.axes_of(letter))
    named = [f"{role}={getattr(placement.axes, role)!r}" for role in _roles(placement, axes)]
    return placement.shard_count(axes), " and ".join(named)


def _roles(placement: Placement, axes: tuple[str, ...]) -> list[Role]:
    return [role for role in ROLES if set(placement.axes.names(role)) & set(axes)]


def _check_blocks(placement: Placement, x: Array) -> None:
    shards, named = _shards(placement, "e")
    if shards > 1 and "e" not in placement.block_letters:
        raise ValueError(
            f"{named} shards experts over {shards} and x has shape {list(x.shape)} without an axis of expert blocks; "
            f"give x [E, M, K] or [E, F, M, K] and sizes [E, G] or [E, F, G] with E a multiple of {shards}"
        )
    what: dict[Literal["e", "f"], str] = {"e": "expert", "f": "data"}
    for letter, kind in what.items():
        shards, named = _shards(placement, letter)
        length = placement.block_count(letter)
        if letter in placement.block_letters and length % shards:
            raise ValueError(
                f"x has {length} {kind} blocks and {named} shards them over {shards}; give a multiple of {shards}"
            )


def _check_groups(placement: Placement, kernel: Array) -> None:
    experts, groups = placement.block_count("e"), kernel.shape[0]
    shards, named = _shards(placement, "g")
    if groups % experts or (groups // experts) % shards:
        needs = f"{experts} expert blocks" + (f", each cut by {named} into {shards}" if shards > 1 else "")
        raise ValueError(f"kernel has {groups} groups for {needs}; give a multiple of {experts * shards}")


def _check_side(placement: Placement, recipe: Recipe | None, letter: Letter, length: int) -> None:
    side = letter.upper()
    shards, named = _shards(placement, letter)
    if length % shards:
        raise ValueError(
            f"the kernel's {side} is {length} and {named} shards it over {shards}; pad it to a multiple of {shards}, "
            "or shard another dimension (fsdp_dim, tp_dim)"
        )
    block = _block(recipe)
    everywhere = placement.shard_count(placement.axes_of(letter))
    if everywhere > 1 and block is not None and (length // shards) % block:
        assert recipe is not None
        roles = " and ".join(
            f"{role}={getattr(placement.axes, role)!r}" for role in _roles(placement, placement.axes_of(letter))
        )
        other = "" if recipe.computed_as is recipe else f", computed as {recipe.computed_as.kind!r},"
        raise ValueError(
            f"{roles} leaves {length // shards} of the kernel's {side} to a shard and the recipe {recipe.kind!r}"
            f"{other} has one scale for {block}, so that a shard would cut a block: use fewer shards, or shard another "
            "dimension (fsdp_dim, tp_dim)"
        )


def _block(recipe: Recipe | None) -> int | None:
    """Elements along a dimension that share a scale; None where nothing is quantized in blocks."""
    specs = [] if recipe is None else [recipe.quantizer(operand) for operand in _OPERANDS]
    sizes = [spec.block_size for spec in specs if spec is not None and spec.block_size is not None]
    return max(sizes) if sizes else None


def check_whole(function: str, *, leading: int | None = None, **operands: Any) -> None:
    """ValueError where an Explicit mesh cuts an argument of `function`, which has no `sharding` to say what is meant.

    leading   how many first axes have to be whole; None: all of them
    """
    for name, shape, spec in _cut(operands, leading):
        raise ValueError(
            f"{name} {shape} is placed as {spec} on an Explicit mesh, and {function} takes what one device holds; call "
            f"it inside jax.shard_map on local arrays, or give {name} whole: jax.sharding.reshard({name}, P())"
        )


def _cut(operands: dict[str, Any], leading: int | None = None) -> Iterator[tuple[str, list[int], Any]]:
    """Name, shape and placement of each array that an Explicit mesh cuts on one of its `leading` axes."""
    for name, operand in operands.items():
        for leaf in jax.tree.leaves(operand):
            if isinstance(leaf, jax.Array):
                spec = getattr(jax.typeof(leaf).sharding, "spec", ())
                if any(entry is not None for entry in spec[:leading]):
                    yield name, list(leaf.shape), spec


def check_has_roles(function: str, sharding: MeshAxes | None, **operands: Any) -> None:
    """ValueError where no mesh axis has a role and an argument of `function` is cut by an Explicit mesh, or, without
    `sharding`, where the caller is manual over some axes of a mesh and leaves others to XLA, which would gather what a
    custom call reads.

    On one device, under an Auto mesh and where the caller is manual over every axis there is nothing to say.
    """
    if sharding is not None and sharding.every:
        return
    for name, shape, spec in _cut(operands):
        given = "is None" if sharding is None else "gives no mesh axis a role"
        raise ValueError(
            f"{name} {shape} is placed as {spec} on an Explicit mesh and sharding {given}; give {function} "
            "sharding=octavo_jax.MeshAxes(...), which says what part each mesh axis plays"
        )
    if sharding is not None:
        return
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = [name for name, kind in kinds.items() if kind == AxisType.Manual]
    left = [name for name, kind in kinds.items() if kind != AxisType.Manual and mesh.shape[name] > 1]
    if manual and left:
        raise ValueError(
            f"{function} is called manual over mesh axes {manual} while {left} are left to XLA, which would gather "
            "tokens over them, and sharding is None; give sharding=octavo_jax.MeshAxes(...) with the parts that these "
            f"play (MeshAxes() where they cut nothing), or be manual over {left}, too"
        )
