"""One call, five routes: the same bits, the same traffic, and `explain` says which it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
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
from octavo_jax.traffic import collectives

E, F, M, K, N, G = 2, 4, 6, 128, 32, 1
MESH = {"ep": E, "fsdp": F}
AXES = MeshAxes(ep="ep", fsdp="fsdp")
TOKENS, KERNEL, SIZES = P("ep", "fsdp"), P("ep", "fsdp"), P("ep", "fsdp")
BACKEND = "jax-reference"
SLOW = pytest.mark.slow


def _layer(x: Any, kernel: Any, sizes: Any, recipe: octavo.Recipe) -> Any:
    return octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, sharding=AXES, backend=BACKEND)


def _step(layer: Callable[..., Any], x: Any, kernel: Any, sizes: Any, dy: Any) -> tuple[Any, ...]:
    y, pull = jax.vjp(lambda x, kernel: layer(x, kernel, sizes), x, kernel)
    return (y, *pull(dy))


def _arrays(rng: np.random.Generator) -> list[Any]:
    """x, kernel, sizes and dy; every block has a tail of NaN."""
    x, dy = (rng.standard_normal((E, F, M, columns)).astype(np.float32) for columns in (K, N))
    x[..., -1, :] = dy[..., -1, :] = np.nan
    kernel = rng.standard_normal((E * G, K, N)).astype(np.float32)
    sizes = rng.integers(0, M, (E, F, G)).astype(np.int32)
    return [jnp.asarray(one) for one in (x, kernel, sizes, dy)]


def _reached(route: str, mesh_of: Any, layer: Callable[..., Any]) -> tuple[Any, AbstractContextManager[Any], Any]:
    """(mesh, the context to be in, the layer inside what it takes) by which the route is reached."""
    kind = AxisType.Explicit if route == "explicit" else AxisType.Auto
    mesh = mesh_of(kind, **MESH)
    context: AbstractContextManager[Any] = jax.set_mesh(mesh) if route == "explicit" else nullcontext()
    if route in ("auto", "explicit"):
        return mesh, context, layer
    manual = {"manual": {"ep", "fsdp"}, "partly manual": {"ep"}}[route]
    tokens, kernel = (P(*(name if name in manual else None for name in spec)) for spec in (TOKENS, KERNEL))
    specs = (tokens, kernel, tokens)
    return mesh, context, jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=tokens, axis_names=manual)


ROUTES = ("auto", "explicit", "manual", "partly manual")


def _check(recipe: octavo.Recipe, routes: tuple[str, ...], mesh_of: Any, placed: Any, arrays: list[Any]) -> list[Any]:
    """Bits of one device on each route; its collectives, by route."""
    alone = jax.jit(partial(_step, partial(octavo_jax.grouped_dense, recipe=recipe, backend=BACKEND)))
    x, kernel, sizes, dy = arrays
    experts = jnp.split(kernel, E)
    blocks = [[alone(x[e, f], experts[e], sizes[e, f], dy[e, f]) for f in range(F)] for e in range(E)]
    y, dx, each = (np.asarray([[block[i] for block in row] for row in blocks], np.float64) for i in range(3))
    dw = each.sum(axis=1).reshape(E * G, K, N)
    # fp32 sums of F shards, in an order of XLA's own
    atol = F * 2.0**-23 * np.abs(each).sum(axis=1).reshape(E * G, K, N)
    found = []
    for route in routes:
        mesh, context, layer = _reached(route, mesh_of, partial(_layer, recipe=recipe))
        with context:
            given = placed(mesh, arrays, (TOKENS, KERNEL, SIZES, TOKENS))
            compiled = jax.jit(partial(_step, layer)).lower(*given).compile()
            results = compiled(*given)
        np.testing.assert_array_equal(results[0], y)
        np.testing.assert_array_equal(results[1], dx)
        assert (np.abs(np.asarray(results[2], np.float64) - dw) <= atol).all()
        found.append(collectives(compiled))
    return found


def _traffic(found: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return sorted((one.kind, result.dtype, result.shape) for one in found for result in one.results)


@pytest.mark.parametrize(
    ("recipe", "routes"),
    [
        ("bf16", ROUTES),
        *(pytest.param(name, ROUTES, marks=SLOW) for name in ("mxfp8", "fp8-row", "fp8-current", "nvfp4")),
    ],
)
def test_routes_agree(
    recipe: str, routes: tuple[str, ...], mesh_of: Any, placed: Any, rng: np.random.Generator
) -> None:
    """y and dx are one device's bits, dw its sum; no token moves, the kernel's gradient is scattered once, and each
    route moves what the others do."""
    made = octavo.recipe(recipe)
    made = made if not made.stochastic else octavo.NVFP4(stochastic_gradients=False)
    found = _check(made, routes, mesh_of, placed, _arrays(rng))
    for one in found:
        assert _traffic(one) == _traffic(found[0])
        kinds = [collective.kind for collective in one]
        assert kinds.count("reduce-scatter") == 1
        assert set(kinds) <= {"reduce-scatter", "all-gather", "all-reduce"}
        assert all(result.shape[-2:] not in ((M, K), (M, N)) for each in one for result in each.results)
        assert all(each.bytes <= 4 * K * G for each in one if each.kind == "all-reduce")


def test_half_of_bf16_is_gathered(mesh_of: Any, placed: Any, rng: np.random.Generator) -> None:
    """Forward and backward, each one plane: a byte an element and a scale for 32 of them, where bf16 has two bytes."""
    (found,) = _check(octavo.recipe("mxfp8"), ("explicit",), mesh_of, placed, _arrays(rng))
    gathered = sum(one.bytes for one in found if one.kind == "all-gather")
    assert gathered == 2 * E * G // mesh_of(**MESH).shape["ep"] * K * N * 33 // 32
    assert {result.dtype for one in found if one.kind == "all-gather" for result in one.results} == {"u8"}


@pytest.mark.parametrize("route", ROUTES)
def test_explain_names_the_route(route: str, mesh_of: Any, placed: Any, rng: np.random.Generator) -> None:
    """And how arrays lie and what moves, from inside and outside of a shard_map."""
    told: list[octavo_jax.LayerReport] = []

    def asked(x: Any, kernel: Any, sizes: Any, recipe: octavo.Recipe) -> Any:
        told.append(octavo_jax.explain(x, kernel, sizes, recipe=recipe, sharding=AXES, backend=BACKEND))
        return x

    recipe = octavo.recipe("fp8-row")
    mesh, context, layer = _reached(route, mesh_of, partial(asked, recipe=recipe))
    with context:
        x, kernel, sizes, _ = placed(mesh, _arrays(rng), (TOKENS, KERNEL, SIZES, TOKENS))
        jax.jit(layer).lower(x, kernel, sizes)
    report = told[-1]
    assert report.route == route
    assert any("quantized" in move and "'fsdp'" in move for move in report.moves)
    assert "wgrad: dw is summed and scattered along K over 'fsdp'" in report.moves
    assert f"route: {route}" in str(report)
    wanted = {"manual": P(), "partly manual": P(None, "fsdp")}.get(route, P("ep", "fsdp"))
    assert tuple(report.lie["x"])[:2] == (*wanted, None, None)[:2]


def test_one_device_is_said_to_be_one() -> None:
    """Nothing lies anywhere, nothing moves."""
    report = octavo_jax.explain(jnp.ones((4, 32)), jnp.ones((1, 32, 16)), [4], recipe=None, backend=BACKEND)
    assert (report.route, dict(report.lie), report.moves) == ("single", {}, ())
    assert "nothing moves" in str(report)


CACHED = """
import jax, jax.numpy as jnp, octavo, octavo_jax
from jax import monitoring
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
events = {"cache_hits": 0, "cache_misses": 0}
def told(event, **_):
    name = event.rsplit("/", 1)[-1]
    if "compilation_cache" in event and name in events:
        events[name] += 1
monitoring.register_event_listener(told)
mesh = jax.make_mesh((2, jax.device_count() // 2), ("ep", "fsdp"), axis_types=(AxisType.%s,) * 2)
jax.set_mesh(mesh)
axes = octavo_jax.MeshAxes(ep="ep", fsdp="fsdp")
x = jax.device_put(jnp.ones((2, 4, 4, 32)), NamedSharding(mesh, P("ep", "fsdp")))
kernel = jax.device_put(jnp.ones((2, 32, 16)), NamedSharding(mesh, P("ep", "fsdp")))
sizes = jax.device_put(jnp.ones((2, 4, 1), jnp.int32), NamedSharding(mesh, P("ep", "fsdp")))
def loss(x, kernel):
    y = octavo_jax.grouped_dense(x, kernel, sizes, recipe=None, sharding=axes, backend="jax-reference")
    return (y * y).sum()
events.update(cache_hits=0, cache_misses=0)
dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernel)
print(events["cache_hits"], events["cache_misses"], float(dw.sum()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_a_second_process_finds_the_program(kind: str, tmp_path: Path) -> None:
    """The persistent compilation cache serves what is a shard_map: a custom_partitioning it never would."""
    settings = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    told = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", CACHED % kind]
        done = subprocess.run(
            command, env={**settings, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        told.append(done.stdout.split())
    (hits, misses, value), again = told
    assert (hits, int(misses) > 0) == ("0", True)
    assert again == [misses, "0", value]
