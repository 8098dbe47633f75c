"""Normalizations of arrays that an Explicit mesh cuts, along the normalized axis, too: computed, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
from octavo_jax import MeshAxes

M, K, N = 16, 64, 32
PLACES: dict[str, tuple[Any, Any]] = {
    "features": (P(None, "a"), P()),
    "scales": (P(), P("a")),
    "rows and scales": (P("a"), P("a")),
}


@pytest.mark.parametrize("name", PLACES)
def test_normalize_where_scales_are_cut_otherwise(
    name: str, mesh_of: Any, placed: Any, rng: np.random.Generator
) -> None:
    """y and the gradient of x have the bits that they have where scales are cut as x is, and those of scales are the
    same sums; y lies as x does, each gradient as its argument. JAX refused the types of a custom_vjp's rule, or of a
    product."""
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), K, K)]
    (dy,) = rng.standard_normal((1, M, K)).astype(np.float32)
    of_x, of_scales = PLACES[name]

    def step(x: Any, gamma: Any, beta: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda *a: octavo_jax.normalize(*a, norm="layer"), x, gamma, beta)
        return y, *pull(dy)

    mesh = mesh_of(AxisType.Explicit, a=2)
    alike = P(*of_x[1:])
    made = []
    with jax.set_mesh(mesh):
        for spec in (alike, of_scales):
            given = placed(mesh, [*arrays, dy], [of_x, spec, spec, of_x])
            made.append(jax.jit(step)(*given))
    wanted, explicit = made
    for one, other in zip(wanted[:2], explicit[:2], strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    rows = np.asarray(arrays[0], np.float64)
    terms = np.abs(dy * (rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)), np.abs(dy)
    for one, other, added in zip(wanted[2:], explicit[2:], terms, strict=True):
        # sums of M terms in two orders, each with a rounding at every one of them
        assert (np.abs(np.asarray(one) - np.asarray(other)) <= 2 * M * 2.0**-24 * added.sum(0)).all()
    types = [jax.typeof(one).sharding for one in (given[0], *given[:3])]
    assert [jax.typeof(one).sharding for one in explicit] == types


def _layer(x: Any, kernel: Any, gamma: Any, sharding: MeshAxes | None) -> Any:
    return octavo_jax.layernorm_dense(x, kernel, gamma, recipe=None, sharding=sharding)


def _mlp(x: Any, kernel: Any, gamma: Any, sharding: MeshAxes | None) -> Any:
    return octavo_jax.layernorm_mlp(x, gamma, kernel, jnp.ones((N // 2, K)), recipe=None, sharding=sharding)


def _quantizer(x: Any, _: Any, gamma: Any, __: MeshAxes | None) -> Any:
    return octavo_jax.norm_quantize(x, gamma, octavo.MXFP8().quantizer("x"))  # type: ignore[arg-type]


WHOLE, ROLES = "takes what one device holds; .*give gamma whole", MeshAxes(dp="a")
MOVED = r"gamma \[64\] is placed as P\('a'\) and sharding needs P\(None\).*reshard\(gamma, P\(None\)\)"
NO_ROLE = r"sharding gives no mesh axis a role; give \w+ sharding=octavo_jax\.MeshAxes"
REFUSED: list[tuple[Callable[..., Any], Any, Any, MeshAxes | None, str]] = [
    (_layer, P(), P("a"), None, WHOLE),
    (_mlp, P(), P("a"), None, WHOLE),
    (_quantizer, P(), P("a"), None, WHOLE),
    (_layer, P("a"), P("a"), ROLES, MOVED),
    (_mlp, P("a"), P("a"), ROLES, MOVED),
    (_layer, P(None, "a"), P(), None, r"x \[16, 64\] is placed as P\(None, 'a'\).* and sharding is None"),
    (_layer, P(None, "a"), P(), MeshAxes(), NO_ROLE),
    (_mlp, P("a"), P(), MeshAxes(), NO_ROLE),
    (_layer, P(None, "a"), P(), ROLES, r"x \[16, 64\] is placed as P\(None, 'a'\) and sharding needs P\('a', None\)"),
    (_layer, P(None, "a"), P(), MeshAxes(tp="a", tp_dim="K"), "the normalization is over K, which that would cut"),
]


def test_a_layer_whose_normalized_axis_is_cut_is_refused(mesh_of: Any, placed: Any) -> None:
    """With the argument, where it lies and what to do: JAX spoke of a broadcast, a shard_map or a reshape inside, and
    MeshAxes(), which gives no axis a role, let XLA gather what the mesh cuts."""
    mesh = mesh_of(AxisType.Explicit, a=2)
    arrays = jnp.ones((M, K)), jnp.ones((K, N)), jnp.ones(K)
    for function, of_x, of_gamma, sharding, sentence in REFUSED:
        x, kernel, gamma = placed(mesh, arrays, [of_x, P(), of_gamma])
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=sentence):
            jax.eval_shape(lambda *a, f=function, s=sharding: f(*a, s), x, kernel, gamma)


OF_MLP: dict[str, tuple[int, ...]] = {"wi": (K, N), "wo": (N // 2, K), "bi": (N,), "bo": (K,)}


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_whatever_an_mlp_is_given_cut_is_refused(
    recipe: str | None, mesh_of: Any, placed: Any, rng: np.random.Generator
) -> None:
    """layernorm_mlp's second kernel and the biases as its first kernel, and by their own names: the forward pass served
    them, and only a gradient met JAX's sentences on `jnp.repeat` or a dynamic_update_slice inside."""
    mesh = mesh_of(AxisType.Explicit, a=2)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in OF_MLP.items()}
    for name, shape in OF_MLP.items():
        for axis in range(len(shape)):
            spec: Any = P(*[None] * axis, "a")  # type: ignore[no-untyped-call]
            x, gamma, *rest = placed(
                mesh,
                [jnp.ones((M, K)), jnp.ones(K), *arrays.values()],
                [P(), P(), *(spec if name == one else P() for one in arrays)],
            )
            given = dict(zip(arrays, rest, strict=True))
            with jax.set_mesh(mesh), pytest.raises(ValueError, match=rf"^{name} .*is placed as .*give layernorm_mlp"):
                jax.eval_shape(lambda g=given, x=x, gamma=gamma: octavo_jax.layernorm_mlp(x, gamma, **g, recipe=recipe))
    biases = {"bi": (2, N), "bo": (2, K), "probs": (M,), "bo_scales": (M,)}
    for name in biases:
        of_all = [jnp.ones((M, K)), jnp.ones((2, K, N)), jnp.ones((2, N // 2, K)), *map(jnp.ones, biases.values())]
        x, wi, wo, *rest = placed(mesh, of_all, [P(), P(), P(), *(P("a") if name == one else P() for one in biases)])
        given = dict(zip(biases, rest, strict=True))
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=rf"^{name} .*is placed as .*give grouped_mlp"):
            jax.eval_shape(
                lambda g=given, x=x, wi=wi, wo=wo: octavo_jax.grouped_mlp(x, wi, wo, [8, 8], **g, recipe=recipe)
            )


def test_layers_that_no_role_is_given_say_so(mesh_of: Any, placed: Any) -> None:
    """grouped_dense, grouped_mlp and moe_mlp as the layers above, and a bias of experts that a mesh cuts."""
    mesh, sizes = mesh_of(AxisType.Explicit, a=2), jnp.array([8, 8])
    arrays = jnp.ones((M, K)), jnp.ones((2, K, N)), jnp.ones((2, N // 2, K)), jnp.ones((K, 2)), jnp.ones((2, N))
    cut, wi, wo, router, bi = placed(mesh, arrays, [P("a"), P(), P(), P(), P("a")])
    how: dict[str, Any] = {"recipe": None, "sharding": MeshAxes()}
    calls: list[Callable[[], Any]] = [
        lambda: octavo_jax.grouped_dense(cut, wi, sizes, **how),
        lambda: octavo_jax.grouped_mlp(cut, wi, wo, sizes, **how),
        lambda: octavo_jax.moe_mlp(cut, router, wi, wo, k=1, **how),
        lambda: octavo_jax.moe_mlp(jnp.ones((M, K)), router, wi, wo, k=1, bi=bi, **how),
    ]
    for call in calls:
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=NO_ROLE):
            jax.eval_shape(call)
