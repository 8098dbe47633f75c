"""Arrays of Explicit meshes, whose types say how they lie, and calls that name no roles."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from octavo_jax.sharding.conflicts import check_has_roles
from octavo_jax.sharding.explicit_placement import placed as placed_as
from octavo_jax.traffic import collectives

SHAPE = (2, 4, 8)
WANTED = P("ep", "fsdp")


@pytest.fixture
def mesh(mesh_of: Any) -> Any:
    return mesh_of(AxisType.Explicit, ep=2, fsdp=4)


def _placed(x: Any, **how: Any) -> Any:
    return placed_as(jax.sharding.get_abstract_mesh(), "kernel", x, WANTED, **how)


def test_what_is_whole_is_cut_without_traffic(mesh: Any, placed: Any) -> None:
    """Each device keeps its part, and the gradient has the argument's type again."""
    with jax.set_mesh(mesh):
        (x,) = placed(mesh, [jnp.ones(SHAPE)], [P("ep")])
        assert jax.typeof(_placed(x)).sharding.spec == P("ep", "fsdp", None)
        assert collectives(jax.jit(_placed).lower(x).compile()) == ()
        gradient = jax.jit(jax.grad(lambda x: _placed(x).sum()))(x)
        assert jax.typeof(gradient) == jax.typeof(x)
        assert _placed(gradient := _placed(x)) is gradient


@pytest.mark.parametrize("spec", [P("fsdp"), P("ep", None, "fsdp"), P(("ep", "fsdp"))])
def test_what_is_cut_otherwise_is_refused(spec: P, mesh: Any, placed: Any) -> None:
    """Both ways to lie and the fix are in the sentence: nothing moves in silence."""
    shape = (8, 4, 8)
    with jax.set_mesh(mesh):
        (x,) = placed(mesh, [jnp.ones(shape)], [spec])
        with pytest.raises(
            ValueError, match=r"kernel \[8, 4, 8\] is placed as P\(.*'fsdp'.*jax\.sharding\.reshard\(kernel"
        ):
            _placed(x)


def test_whole_tokens_are_refused(mesh: Any, placed: Any) -> None:
    """Cutting them is free, but their gradient would be gathered; what lies on no mesh yet is placed."""
    with jax.set_mesh(mesh):
        (x,) = placed(mesh, [jnp.ones(SHAPE)], [P("ep")])
        with pytest.raises(ValueError, match=re.escape("cut over nothing, not over ('fsdp',)")):
            _placed(x, tokens=True)
    alone = jnp.ones(SHAPE)
    with jax.set_mesh(mesh):
        assert jax.typeof(_placed(alone, tokens=True)).sharding.spec == P("ep", "fsdp", None)


def test_no_roles(mesh: Any, mesh_of: Any, placed: Any) -> None:
    """Without `sharding=`, an Explicit mesh's shards and a partly manual caller are refused; one device, an Auto mesh
    and a wholly manual caller are not."""

    def check(x: Any) -> Any:
        check_has_roles("grouped_dense", None, x=x)
        return x

    (x,) = placed(mesh, [jnp.ones(SHAPE)], [P("ep")])
    for call in (check, jax.jit(check)):
        with pytest.raises(ValueError, match=r"x \[2, 4, 8\] is placed as P\('ep'.*sharding=octavo_jax\.MeshAxes"):
            call(x)
    check(jnp.ones(SHAPE))
    auto = mesh_of(ep=2, fsdp=4)
    (x,) = placed(auto, [jnp.ones(SHAPE)], [P("ep")])
    jax.jit(check)(x)
    jax.jit(jax.shard_map(check, mesh=auto, in_specs=P("ep"), out_specs=P("ep")))(x)
    partly = jax.shard_map(check, mesh=auto, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"})
    with pytest.raises(ValueError, match=r"manual over mesh axes \['ep'\] while \['fsdp'\] are left to XLA"):
        jax.jit(partly)(x)
