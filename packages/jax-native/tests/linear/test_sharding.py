"""The kernels on shards: one device's bits, and calls that see a shard's arrays alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
import octavo_numerics
from octavo_jax import MeshAxes
from octavo_jax.traffic import collectives, custom_calls

M, K, N, G = 40, 256, 512, 2


class Case(NamedTuple):
    """A recipe, a mesh, blocks of tokens, roles, and how arrays lie: x, kernel, bias, sizes, dy."""

    recipe: str
    mesh: Mapping[str, int]
    blocks: tuple[int, ...]
    axes: MeshAxes
    specs: tuple[P, ...]


CASES = {
    "block, more blocks than shards": Case(
        "fp8-block",
        {"ep": 2, "fsdp": 2},
        (4, 2),
        MeshAxes(ep="ep", fsdp="fsdp"),
        (P("ep", "fsdp"), P("ep", "fsdp"), P("ep"), P(), P("ep", "fsdp")),
    ),
    "nvfp4, scales of whole matrices": Case(
        "nvfp4",
        {"fsdp": 2, "ep": 4},
        (4, 2),
        MeshAxes(ep="ep", fsdp="fsdp", fsdp_dim="N"),
        (P("ep", "fsdp"), P("ep", None, "fsdp"), P("ep"), P("ep", "fsdp"), P("ep", "fsdp")),
    ),
    "mxfp8, column-parallel": Case(
        "mxfp8",
        {"ep": 2, "fsdp": 2, "tp": 2},
        (2, 2),
        MeshAxes(ep="ep", fsdp="fsdp", tp="tp"),
        (P("ep", "fsdp"), P("ep", "fsdp", "tp"), P("ep", "tp"), P("ep"), P("ep", "fsdp", None, "tp")),
    ),
    "delayed, no experts": Case(
        "fp8-delayed",
        {"dp": 4, "fsdp": 2},
        (8,),
        MeshAxes(dp="dp", fsdp="fsdp", fsdp_dim="G"),
        (P(("dp", "fsdp")), P("fsdp"), P(), P(), P(("dp", "fsdp"))),
    ),
    "row, experts alone": Case(
        "fp8-row", {"ep": 8}, (8,), MeshAxes(ep="ep"), (P("ep"), P("ep"), P("ep"), P("ep"), P("ep"))
    ),
}


def _mesh(lengths: Mapping[str, int]) -> Mesh:
    """Of these axes, the longest one halved until there are devices enough."""
    axes = dict(lengths)
    while math.prod(axes.values()) > jax.device_count():
        axes[max(axes, key=axes.__getitem__)] //= 2
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes), devices=devices)


def _run(case: Case, sharding: MeshAxes | None, x: Any, kernel: Any, bias: Any, sizes: Any, dy: Any) -> Any:
    recipe = octavo.recipe(case.recipe)
    state: Any = octavo_jax.init_delayed(recipe, kernel.shape[0]) if recipe.stateful else None  # type: ignore[arg-type]

    def layer(x: Any, kernel: Any, bias: Any, state: Any) -> Any:
        made = octavo_jax.grouped_dense(
            x, kernel, sizes, recipe=recipe, bias=bias, seed=7, state=state, sharding=sharding, backend="jax-native"
        )
        return (made, None) if state is None else made

    (y, later), pull = jax.vjp(layer, x, kernel, bias, state)
    return y, later, pull((dy, later))


def _assert_same(case: Case, arrays: tuple[Any, ...], got: Any, wanted: Any) -> None:
    """Equal bits but for float32 sums in another order: dx over tp, and gradients over data blocks."""
    largest = [float(np.nanmax(np.abs(a.astype(np.float32)))) for a in arrays]
    bound = octavo_numerics.error_bound(octavo.recipe(case.recipe), N, gemm="dgrad")
    blocks = int(np.prod(case.blocks))
    of_data = 2.0**-24 * blocks * blocks * M * largest[4]
    sums = {"dx": 2 * bound.c * N * largest[4] * largest[1], "dw": of_data * largest[0], "db": of_data}
    (y, later, (dx, dw, db, state)), expected = got, jax.tree.leaves(wanted)
    named = {"y": y, "later": later, "dx": dx, "dw": dw, "db": db, "state": state}
    names = [name for name, tree in named.items() for _ in jax.tree.leaves(tree)]
    for name, a, b in zip(names, jax.tree.leaves(list(named.values())), expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        allowed = np.zeros_like(b)
        if (name in ("dw", "db") and case.axes.fsdp) or (name == "dx" and case.axes.tp):
            allowed += sums[name] + (bound.unit * np.abs(b) if name == "dx" else 0)
        assert np.all(np.abs(a - b) <= allowed), name


@pytest.mark.parametrize("name", CASES)
def test_shards_have_the_bits_of_one_device(name: str, rng: np.random.Generator) -> None:
    """y, gradients and amaxes; sums over data blocks and over tp add float32 in another order.

    Tails of blocks are NaN. Every quantizer's call has the rows of one block; no collective has rows of tokens, but
    partial sums over tp.
    """
    case, mesh = CASES[name], _mesh(CASES[name].mesh)
    experts = case.blocks[0] if case.axes.ep else 1
    sizes = rng.integers(0, M // G + 1, (*case.blocks, G)).astype(np.int32)

    def tokens(width: int) -> Any:
        rows = rng.standard_normal((*case.blocks, M, width), np.float32)
        rows[np.arange(M) >= sizes.sum(-1)[..., None]] = np.nan
        return rows.astype(jnp.bfloat16)

    kernel, bias = (rng.standard_normal((experts * G, *s), np.float32) for s in ((K, N), (N,)))
    arrays = tokens(K), kernel, bias, sizes, tokens(N)
    wanted = jax.jit(lambda *a: _run(case, None, *a))(*arrays)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, case.specs, strict=True)]
    compiled = jax.jit(lambda *a: _run(case, case.axes, *a)).lower(*placed).compile()
    got = compiled(*placed)
    _assert_same(case, arrays, got, wanted)
    rows = {r.shape[0] for c in custom_calls(compiled, "octavo_quantize") for r in c.results if r.shape[-1:] == (K,)}
    assert M in rows or case.recipe == "fp8-row"
    moved = [one for one in collectives(compiled) if any(M in result.shape for result in one.results)]
    assert all(one.kind == "all-reduce" and case.axes.tp is not None for one in moved)
    scattered = [one for one in collectives(compiled) if one.kind == "reduce-scatter"]
    assert len(scattered) == (mesh.shape.get("fsdp", 1) > 1)
