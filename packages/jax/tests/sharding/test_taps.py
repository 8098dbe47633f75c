"""Taps of `observed` inside jax.shard_map: of shards that share one, and of shards that have their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import octavo_jax
from octavo.health import FIELDS

M, K, N, G = 24, 32, 16, 3
SIZES = np.array([[10, 0, 8], [3, 6, 14]], np.int32)
ADDED = [place for place, name in enumerate(FIELDS) if name != "amax"]
AMAX = FIELDS.index("amax")


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_count_what_they_hold(check_vma: bool, mesh_of: Any, rng: np.random.Generator) -> None:
    """A tap that in_specs cut has what each shard counted, under check_vma=False, too. One that shards share has the
    sums of that and the largest amaxes, NaN winning, and of the kernel that they share its counts once. With JAX's
    default check_vma=True neither could be: JAX's sentence was about the types of a custom_vjp's rule."""
    mesh = mesh_of(data=2)
    shards = mesh.size
    x, dy = (rng.standard_normal((shards, M, n)).astype(np.float32) for n in (K, N))
    x[0, 2, 1] = np.nan
    kernel = rng.standard_normal((G, K, N)).astype(np.float32)

    def loss(tap: Any, x: Any, dy: Any, sizes: Any, kernel: Any) -> Any:
        y = octavo_jax.observed(tap, x[0], kernel, sizes[0], recipe="fp8-current", rows=None)
        return jnp.sum(y * dy[0])

    def outside(spec: P, part: Any) -> Any:
        """The loss of all shards, whose taps are placed as `spec` and of which each takes a `part`."""

        def shard(tap: Any, *arrays: Any) -> Any:
            return jax.lax.psum(loss(part(tap), *arrays), "data")

        specs = spec, P("data"), P("data"), P("data"), P()
        return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)

    tap, rest = octavo_jax.new_tap(G), (x, dy, SIZES[:shards], kernel)
    taps = jax.tree.map(lambda counts: jnp.stack([counts] * shards), tap)
    own = jax.jit(jax.grad(outside(P("data"), lambda tap: jax.tree.map(lambda counts: counts[0], tap))))(taps, *rest)
    for shard in range(shards):
        ends = SIZES[shard].cumsum()
        for g, (end, size) in enumerate(zip(ends, SIZES[shard], strict=True)):
            for seen, rows in ((own.x, x), (own.grad, dy)):
                assert seen[shard, 0, g] == size * rows.shape[2]
                amax = np.abs(rows[shard, end - size : end]).max(initial=0)
                np.testing.assert_array_equal(seen[shard, AMAX, g], amax)
    numbers = octavo_jax.observations({"fc1": own})
    assert numbers["octavo/fc1.0/dy/amax"] == np.abs(dy[0, : SIZES[0].sum()]).max()
    assert len({key.split("/")[1] for key in numbers}) == shards
    if not check_vma:
        return
    shared = jax.jit(jax.grad(outside(P(), lambda tap: tap)))(tap, *rest)
    for name in ("x", "grad"):
        of_all, of_each = np.asarray(getattr(shared, name)), np.asarray(getattr(own, name))
        np.testing.assert_array_equal(of_all[ADDED], of_each.sum(0)[ADDED], name)
        np.testing.assert_array_equal(of_all[AMAX], of_each.max(0)[AMAX], name)
    np.testing.assert_array_equal(shared.kernel, own.kernel[0])


def test_a_gradient_taken_inside_has_its_own_shard_s_counts(mesh_of: Any, rng: np.random.Generator) -> None:
    """observing.md: with check_vma=False, where nothing tells that a tap is shared, stacked by out_specs; with
    check_vma=True a shared tap has the counts of all."""
    mesh = mesh_of(data=2)
    shards = mesh.size
    x = rng.standard_normal((shards * M, K)).astype(np.float32)
    kernel = rng.standard_normal((G, K, N)).astype(np.float32)

    def seen(tap: Any, x: Any, kernel: Any) -> Any:
        def loss(tap: Any) -> Any:
            return octavo_jax.observed(tap, x, kernel, SIZES[0], recipe="fp8-current", rows=None).sum()

        return jax.tree.map(lambda counts: counts[None], jax.grad(loss)(tap))

    amaxes = np.abs(x.reshape(shards, M, K)[:, : SIZES[0].sum()]).max((1, 2))
    for check_vma, wanted in (False, amaxes), (True, np.full(shards, amaxes.max())):
        inside = jax.shard_map(
            seen, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P("data"), check_vma=check_vma
        )
        counted = jax.jit(inside)(octavo_jax.new_tap(G), x, kernel)
        np.testing.assert_array_equal(counted.x[:, AMAX].max(1), wanted)
        numbers = octavo_jax.observations({"fc1": counted})
        assert [numbers[f"octavo/fc1.{shard}/x/amax"] for shard in range(shards)] == wanted.tolist()


def test_a_tap_that_does_not_fit_is_refused() -> None:
    """With its shape and what makes the right one; JAX spoke of a custom_vjp's rule."""
    x, kernel, sizes = jnp.ones((8, 32)), jnp.ones((2, 32, 8)), [4, 4]
    stacked = jax.tree.map(lambda counts: counts[None], octavo_jax.new_tap(2))
    for tap, shape in ((octavo_jax.new_tap(3), r"\[8, 3\]"), (stacked, r"\[1, 8, 2\]")):
        with pytest.raises(ValueError, match=rf"tap.x has shape {shape} and the kernel has 2 groups.*new_tap\(2\)"):
            octavo_jax.observed(tap, x, kernel, sizes, recipe=None)
    with pytest.raises(ValueError, match=r"tap is a dict; give octavo_jax\.new_tap\(2\), or None"):
        octavo_jax.observed({}, x, kernel, sizes, recipe=None)  # type: ignore[arg-type]
