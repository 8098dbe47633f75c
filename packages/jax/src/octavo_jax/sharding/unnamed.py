"""Calls without `sharding=` where arrays are sharded all the same: refused, for XLA would gather tokens."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType


def check_unnamed(function: str, **operands: Any) -> None:
    """ValueError where an argument of `function` is cut by an Explicit mesh, or where the caller is manual over some
    axes of a mesh and leaves others to XLA, which would gather what a custom call reads.

    On one device, under an Auto mesh and where the caller is manual over every axis there is nothing to say.
    """
    for name, operand in operands.items():
        for leaf in jax.tree.leaves(operand):
            if not isinstance(leaf, jax.Array):
                continue
            spec = getattr(jax.typeof(leaf).sharding, "spec", ())
            if any(entry is not None for entry in spec):
                raise ValueError(
                    f"{name} {list(leaf.shape)} lies as {spec} on an Explicit mesh and sharding is None; give "
                    f"{function} sharding=octavo_jax.MeshAxes(...), which says what part each mesh axis plays"
                )
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
