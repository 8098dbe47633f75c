"""Flax modules over a mesh: logical axes of linen, partitioning metadata of nnx, the sharding that layers are told."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from moe_cases import BACKEND, assert_sums_agree

import octavo_jax
from octavo_jax import linen as octavo_linen
from octavo_jax import nnx as octavo_nnx

T, WIDTH, HIDDEN, EXPERTS, CHOICES = 16, 32, 16, 4, 2
ROLES = octavo_jax.MeshAxes(fsdp="fsdp", ep="ep")
RULES = (("experts", "ep"), ("embed", "fsdp"), ("mlp", None))
AXES = {"wi_axes": ("experts", "embed", "mlp"), "wo_axes": ("experts", "mlp", "embed")}
KERNELS = {"wi": P("ep", "fsdp"), "wo": P("ep", None, "fsdp")}


def test_linen_parameters_lie_where_rules_put_logical_axes(mesh_of: Any, rng: np.random.Generator) -> None:
    """`nn.get_partition_spec` and the rules give every parameter its place at init; the block then trains as on one
    device, each expert on its own, its kernels cut by FSDP on another dimension."""
    x = jnp.asarray(rng.standard_normal((T, WIDTH)), jnp.float32)
    make: Any = partial(
        octavo_linen.MoE, num_experts=EXPERTS, k=CHOICES, hidden=HIDDEN, recipe=None, backend=BACKEND, **AXES
    )
    module, single = make(sharding=ROLES), make()
    mesh, key = mesh_of(fsdp=2, ep=4), jax.random.key(0)
    abstract = jax.eval_shape(single.init, key, x)
    places = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, RULES)
    assert {name: places["params"][name].spec for name in KERNELS} == {
        name: P(*spec, *(None,) * (3 - len(spec))) for name, spec in KERNELS.items()
    }
    variables = nn.unbox(jax.jit(single.init, out_shardings=places)(key, x))

    def loss(variables: Any, module: Any) -> Any:
        y, stats = module.apply(variables, x)
        return jnp.sum(y**2) + stats.balance_loss

    wanted = jax.jit(jax.grad(partial(loss, module=single)))(jax.device_get(variables))
    with jax.set_mesh(mesh):
        made = jax.jit(jax.grad(partial(loss, module=module)), out_shardings=places)(variables)
    jax.tree.map(assert_sums_agree, made, wanted)


def test_nnx_parameters_are_made_where_they_lie(mesh_of: Any, rng: np.random.Generator) -> None:
    """Under a mesh each parameter is made in the place that its axes name, and tells it (`nnx.get_partition_spec`); a
    layer over an Explicit mesh, whose types say where everything lies, has its gradient in the parameter's place."""
    blocks = rng.standard_normal((2, T, WIDTH)).astype(np.float32)
    sizes = np.array([[3, 0, 5, 8], [16, 0, 0, 0]], np.int32)
    mesh, place = mesh_of(AxisType.Explicit, fsdp=2), P(None, "fsdp", None)
    with jax.set_mesh(mesh):
        layer = octavo_nnx.GroupedLinear(
            EXPERTS,
            WIDTH,
            HIDDEN,
            kernel_axes=tuple(place),
            sharding=octavo_jax.MeshAxes(fsdp="fsdp"),
            backend=BACKEND,
            rngs=nnx.Rngs(0),
        )
        graph, state = nnx.split(layer)
        assert nnx.get_partition_spec(state)["kernel"].get_value() == place
        assert layer.kernel[...].sharding.spec == place

        @jax.jit
        @jax.grad
        def gradient(state: Any, x: Any, sizes: Any) -> Any:
            return jnp.sum(nnx.merge(graph, state)(x, sizes) ** 2)

        x, here = (jax.device_put(one, NamedSharding(mesh, P("fsdp"))) for one in (blocks, sizes))
        made = gradient(state, x, here)["kernel"].get_value()
        assert made.sharding.spec == place
    kernel = jax.device_get(layer.kernel[...])
    wanted = jax.grad(
        lambda kernel: jnp.sum(
            octavo_jax.grouped_dense(blocks, kernel, jnp.asarray(sizes), recipe=None, backend=BACKEND) ** 2
        )
    )(kernel)
    assert_sums_agree(made, wanted)


@pytest.mark.parametrize("name", ["GroupedLinear", "GroupedMLP", "MoE"])
def test_an_nnx_module_keeps_its_state_on_an_explicit_mesh(name: str, mesh_of: Any) -> None:
    """It is made whole and the layer cuts it along ep: what came back cut could not be kept, and every gradient of such
    a module was an error of JAX's about types that broadcast."""
    roles = octavo_jax.MeshAxes(ep="ep")
    sizes = [EXPERTS, WIDTH, HIDDEN]
    options: dict[str, Any] = {"recipe": "fp8-delayed", "sharding": roles, "backend": BACKEND, "rngs": nnx.Rngs(0)}
    with jax.set_mesh(mesh_of(AxisType.Explicit, ep=2)):
        module = getattr(octavo_nnx, name)(*sizes, **options, **({"k": 2} if name == "MoE" else {}))
        graph, state = nnx.split(module)

        def gradient(state: Any) -> Any:
            module = nnx.merge(graph, state)
            shapes = jnp.zeros((2, T, WIDTH)), jnp.zeros((2, EXPERTS // 2), jnp.int32)
            tokens = jax.sharding.reshard(shapes, P("ep"))

            def loss(module: Any) -> Any:
                first, second = ((module(*tokens) if name != "MoE" else module(tokens[0])[0]) for _ in range(2))
                return jnp.sum(first + second)

            wrt = nnx.DiffState(0, octavo_nnx.ScalingState)
            return nnx.grad(loss, argnums=wrt)(module), nnx.state(module, octavo_nnx.ScalingState)

        after, kept = jax.eval_shape(gradient, state)
        fresh = nnx.state(module, octavo_nnx.ScalingState)
        for made in (after, kept):
            assert jax.tree.leaves(jax.tree.map(jax.typeof, made)) == jax.tree.leaves(jax.tree.map(jax.typeof, fresh))
