"""MLPs, normalized layers and layers of one matrix across a mesh, their quantizers fused with what comes before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
from octavo_jax import MeshAxes
from octavo_jax.traffic import collectives

B, S, K, C, N = 4, 7, 128, 128, 128
BACKEND = "jax-reference"
SLOW = pytest.mark.slow
FSDP_TP = MeshAxes(fsdp="fsdp", tp="tp")
FSDP = MeshAxes(fsdp="fsdp")


@dataclass(frozen=True)
class Case:
    """A layer of x [B, S, K]: its function, shapes of its parameters and how they lie, and its result's."""

    function: Callable[..., Any]
    axes: MeshAxes
    shapes: dict[str, tuple[int, ...]]
    lie: dict[str, P]
    result: tuple[tuple[int, ...], P]


def _mlp(x: Any, **how: Any) -> Any:
    """One group, with probabilities; x's first axis is the mesh's data blocks."""
    sizes = jnp.full((*x.shape[:-2], 1), S - 1, jnp.int32)
    return octavo_jax.grouped_mlp(x, group_sizes=sizes, **how)


CASES = {
    "dense": Case(
        octavo_jax.dense,
        FSDP_TP,
        {"kernel": (K, 2, C // 2), "bias": (2, C // 2)},
        {"kernel": P("fsdp", "tp"), "bias": P("tp")},
        ((2, C // 2), P("fsdp", None, "tp")),
    ),
    "row-parallel dense": Case(
        octavo_jax.dense,
        MeshAxes(fsdp="fsdp", tp="tp", tp_dim="K"),
        {"kernel": (K, N), "bias": (N,)},
        {"kernel": P("tp", "fsdp"), "bias": P()},
        ((N,), P("fsdp")),
    ),
    "layernorm_dense": Case(
        partial(octavo_jax.layernorm_dense, norm="layer"),
        FSDP_TP,
        {"kernel": (K, C), "gamma": (K,), "beta": (K,), "bias": (C,)},
        {"kernel": P("fsdp", "tp"), "gamma": P(), "beta": P(), "bias": P("tp")},
        ((C,), P("fsdp", None, "tp")),
    ),
    "layernorm_mlp": Case(
        partial(octavo_jax.layernorm_mlp, activation="gelu"),
        FSDP_TP,
        {"gamma": (K,), "wi": (K, C), "wo": (C, N), "bi": (C,), "bo": (N,)},
        {"gamma": P(), "wi": P("fsdp", "tp"), "wo": P("tp", "fsdp"), "bi": P("tp"), "bo": P()},
        ((N,), P("fsdp")),
    ),
    "grouped_mlp": Case(
        _mlp,
        FSDP,
        {"wi": (1, K, 2 * C), "wo": (1, C, N), "bi": (1, 2 * C), "bo": (1, N)},
        {"wi": P(None, "fsdp"), "wo": P(None, None, "fsdp"), "bi": P(), "bo": P()},
        ((N,), P("fsdp")),
    ),
}


def _step(function: Callable[..., Any], x: Any, parameters: Any, dy: Any) -> tuple[Any, ...]:
    y, pull = jax.vjp(lambda x, parameters: function(x, **parameters), x, parameters)
    return (y, *pull(dy))


@pytest.mark.parametrize(
    ("name", "recipe", "kind"),
    [
        ("layernorm_mlp", "bf16", "Explicit"),
        ("row-parallel dense", "fp8-current", "Auto"),
        *(pytest.param(name, "mxfp8", "Explicit", marks=SLOW) for name in CASES),
        *(pytest.param(name, "fp8-row", "Auto", marks=SLOW) for name in CASES),
        *(pytest.param(name, "nvfp4", "Auto", marks=SLOW) for name in ("layernorm_mlp", "grouped_mlp")),
    ],
)
def test_shards_against_one_device(
    name: str, recipe: str, kind: str, mesh_of: Any, placed: Any, rng: np.random.Generator
) -> None:
    """Results and gradients are those of each data block on one device, and the kernels' are summed over blocks; where
    tp cuts a sum it is added up in fp32. Tokens cross the mesh in tp's sums alone."""
    case, made = CASES[name], octavo.recipe(recipe)
    made = octavo.NVFP4(stochastic_gradients=False) if made.stochastic else made
    shape, lies = case.result
    tokens = P("fsdp", None, "tp") if case.axes.tp_dim == "K" else P("fsdp")
    parameters = {
        key: jnp.asarray(rng.standard_normal(sides) / np.sqrt(sides[-2] if len(sides) > 1 else 1), jnp.float32)
        for key, sides in case.shapes.items()
    }
    x, dy = (jnp.asarray(rng.standard_normal((B, S, *sides)), jnp.float32) for sides in ((K,), shape))
    function = partial(case.function, recipe=made, backend=BACKEND)
    mesh = mesh_of(AxisType[kind], fsdp=B, tp=2 if case.axes.tp else 1)
    data, tp = mesh.axis_sizes
    with jax.set_mesh(mesh):
        given = (
            *placed(mesh, [x], [tokens]),
            dict(zip(parameters, placed(mesh, parameters.values(), case.lie.values()), strict=True)),
            *placed(mesh, [dy], [lies]),
        )
        compiled = jax.jit(partial(_step, partial(function, sharding=case.axes))).lower(*given).compile()
        y, dx, gradients = compiled(*given)
    alone = jax.jit(partial(_step, function))
    blocks = [alone(x, parameters, dy) for x, dy in zip(jnp.split(x, data), jnp.split(dy, data), strict=True)]
    _assert_close(y, np.concatenate([block[0] for block in blocks]), tp)
    _assert_close(dx, np.concatenate([block[1] for block in blocks]), tp)
    for key, gradient in gradients.items():
        each = np.asarray([block[2][key] for block in blocks], np.float64)
        _assert_close(gradient, each.sum(axis=0), data * tp, np.abs(each).sum(axis=0).max())
    moved = [result for one in collectives(compiled) if one.kind != "all-reduce" for result in one.results]
    assert all(S not in result.shape for result in moved)


def _assert_close(actual: Any, wanted: Any, parts: int, largest: float | None = None) -> None:
    """Equal bits of one part; of several, what fp32 sums of them in another order may be off by."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    atol = 0 if parts == 1 else (largest or np.abs(wanted).max()) * K * 2.0**-23
    assert np.abs(actual - wanted).max() <= atol


def test_counts_under_remat_scan_and_sharding(mesh_of: Any) -> None:
    """Layers in a scan under `save_quantized` quantize as often on a mesh as on one device: nothing twice."""
    recipe, layers = octavo.recipe("fp8-current"), 3
    mesh, axes = mesh_of(ep=2, fsdp=4), MeshAxes(ep="ep", fsdp="fsdp")
    experts, data = mesh.axis_sizes
    x, sizes = jnp.ones((experts, data, S, K)), jnp.ones((experts, data, 1), jnp.int32)
    wi, wo = jnp.ones((layers, experts, K, 2 * C)), jnp.ones((layers, experts, C, K))

    def gradient(x: Any, wi: Any, wo: Any, sharding: MeshAxes | None, sizes: Any) -> Any:
        def layer(x: Any, kernels: Any) -> tuple[Any, None]:
            y = octavo_jax.grouped_mlp(
                x, *kernels, sizes, recipe=recipe, sharding=sharding, backend=BACKEND, activation="swiglu"
            )
            return jnp.tanh(y), None

        saved = jax.checkpoint(layer, policy=octavo_jax.policies.save_quantized())
        return jax.grad(lambda x, kernels: jax.lax.scan(saved, x, kernels)[0].sum(), argnums=(0, 1))(x, (wi, wo))

    with jax.set_mesh(mesh):
        found = octavo_jax.counting.count_runs(lambda *a: gradient(*a, axes, sizes), x, wi, wo)
    one = octavo_jax.counting.count_runs(lambda *a: gradient(*a, None, sizes[0, 0]), x[0, 0], wi[:, :1], wo[:, :1])
    assert found == one
    assert found.quantize == 6 * layers


BAD = {
    "an expert axis": ("dense", MeshAxes(ep="tp"), {}, "ep='tp' and its kernel is one matrix"),
    "groups over fsdp": ("dense", MeshAxes(fsdp="fsdp", fsdp_dim="G"), {}, "fsdp_dim='G'"),
    "an odd batch": ("dense", FSDP, {"x": (3, S, K)}, "cut its first axis into 4"),
    "a cut normalization": ("layernorm_dense", MeshAxes(tp="tp", tp_dim="K"), {}, "normalization is over K"),
    "a row-parallel MLP": ("layernorm_mlp", MeshAxes(tp="tp", tp_dim="K"), {}, "first layer is column-parallel"),
    "a cut gate": ("grouped_mlp", FSDP_TP, {}, "a gate and its partner"),
    "an axis the mesh lacks": ("grouped_mlp", MeshAxes(fsdp="model"), {}, "'model' and the mesh has 'fsdp', 'tp'"),
}


@pytest.mark.parametrize("what", BAD)
def test_conflicts(what: str) -> None:
    """Each is a sentence with both names and what to do."""
    name, axes, shapes, message = BAD[what]
    case = CASES[name]
    parameters = {key: jnp.ones(sides) for key, sides in case.shapes.items()}
    x = jnp.ones(shapes.get("x", (B, S, K)))
    mesh = AbstractMesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match=message):
        case.function(x, **parameters, recipe=octavo.recipe("fp8-row"), sharding=axes, backend=BACKEND)


def test_no_mesh() -> None:
    """A layer of one matrix must know how many shards its tokens have."""
    with pytest.raises(ValueError, match=r"no mesh is in scope.*jax\.set_mesh"):
        octavo_jax.dense(jnp.ones((B, K)), jnp.ones((K, N)), recipe=None, sharding=FSDP, backend=BACKEND)
