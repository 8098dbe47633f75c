"""Roles and shapes that do not go together: each a ValueError with both names and what to do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import octavo
import octavo_jax
from octavo_jax import MeshAxes

BAD_AXES: dict[str, tuple[dict[str, Any], str]] = {
    "two roles": ({"fsdp": "x", "ep": "x"}, "mesh axis 'x' is given as fsdp and ep"),
    "twice": ({"fsdp": ("x", "x")}, "'x' is given as fsdp twice"),
    "two roles, one a tuple": ({"dp": ("a", "x"), "tp": "x"}, "'x' is given as dp and tp"),
    "the groups of ep": ({"fsdp": "f", "ep": "e", "fsdp_dim": "G"}, "fsdp='f' shards .* group dimension.* ep='e' owns"),
    "one dimension": ({"fsdp": "f", "tp": "t", "fsdp_dim": "N"}, "fsdp='f' and tp='t' both shard the kernel's N"),
    "no name": ({"ep": 3}, "ep is 3; give the name"),
    "no tuple of names": ({"ep": ("a", None)}, "ep is .* give the name"),
    "tp_dim": ({"tp_dim": "G"}, "tp_dim is 'G'"),
    "fsdp_dim": ({"fsdp_dim": "M"}, "fsdp_dim is 'M'"),
}


@pytest.mark.parametrize("case", BAD_AXES)
def test_roles(case: str) -> None:
    """They are refused where they are written down."""
    roles, message = BAD_AXES[case]
    with pytest.raises(ValueError, match=message):
        MeshAxes(**roles)


MESH = AbstractMesh((2, 4), ("ep", "fsdp"), axis_types=(AxisType.Auto,) * 2)
EP_FSDP = MeshAxes(ep="ep", fsdp="fsdp")
BAD_SHAPES: dict[str, tuple[str, MeshAxes, dict[str, Any], str]] = {
    "an unknown axis": (
        "mxfp8",
        MeshAxes(ep="expert"),
        {},
        "ep='expert' names .* 'expert' and the mesh has 'ep', 'fsdp'",
    ),
    "rows of experts": (
        "mxfp8",
        EP_FSDP,
        {"blocks": (), "groups": 3},
        r"ep='ep' shards experts over 2 and x has shape \[8, 128\] for 3 group sizes",
    ),
    "expert blocks": ("mxfp8", EP_FSDP, {"blocks": (3, 4)}, "x has 3 expert blocks and ep='ep' shards them over 2"),
    "data blocks": ("mxfp8", EP_FSDP, {"blocks": (2, 6)}, "x has 6 data blocks and fsdp='fsdp' shards them over 4"),
    "a block of scales": (
        "mxfp8",
        EP_FSDP,
        {"k": 64},
        "fsdp='fsdp' leaves 16 of the kernel's K .*'mxfp8'.*one scale for 32",
    ),
    "folded blocks": (
        "mxfp8-folded",
        EP_FSDP,
        {"k": 256},
        "the recipe 'mxfp8', computed as 'block', has one scale for 128",
    ),
    "blocks of rounded weights": (
        "mxfp4",
        EP_FSDP,
        {"k": 256},
        "the recipe 'mxfp4_weights', computed as 'block', has one scale for 128",
    ),
    "a square block": ("fp8-block", EP_FSDP, {"k": 256}, "leaves 64 of the kernel's K .* one scale for 128"),
    "features": ("fp8-current", EP_FSDP, {"k": 130}, "kernel's K is 130 and fsdp='fsdp' shards it over 4; pad it"),
    "groups": ("mxfp8", MeshAxes(fsdp="fsdp", fsdp_dim="G"), {"blocks": (4,), "groups": 6}, "kernel has 6 groups .* 4"),
    "sizes of experts": ("mxfp8", EP_FSDP, {"groups": 5}, "2 entries for each of 2 expert blocks and kernel 5"),
    "other blocks": (
        "mxfp8",
        EP_FSDP,
        {"sizes": (4, 2, 2)},
        r"group_sizes has shape \[4, 2, 2\] and x \[2, 4, 8, 128\]",
    ),
    "too many axes": ("mxfp8", EP_FSDP, {"blocks": (2, 2, 2)}, "at most two"),
}


@pytest.mark.parametrize("case", BAD_SHAPES)
def test_shapes(case: str) -> None:
    """They are refused before anything is traced, on the mesh in scope."""
    recipe, axes, given, message = BAD_SHAPES[case]
    blocks, k = given.get("blocks", (2, 4)), given.get("k", 128)
    experts = blocks[0] if axes.ep and blocks else 1
    groups = given.get("groups", 2 * experts)
    sizes = given.get("sizes", (*blocks, groups if not axes.ep or not blocks else 2))
    with jax.sharding.use_abstract_mesh(MESH), pytest.raises(ValueError, match=message):
        octavo_jax.grouped_dense(
            jnp.zeros((*blocks, 8, k)),
            jnp.zeros((groups, k, 128)),
            jnp.zeros(sizes, jnp.int32),
            recipe=octavo.recipe(recipe),
            sharding=axes,
        )


def test_host_sizes_of_blocks_are_checked() -> None:
    """Each block has its own sum and its own rows."""
    x, kernel = jnp.zeros((2, 8, 32)), jnp.zeros((2, 32, 32))
    with pytest.raises(ValueError, match="sum to 9 and the tensor has 8 rows"):
        octavo_jax.grouped_dense(x, kernel, [[4, 4], [8, 1]], recipe=None)
