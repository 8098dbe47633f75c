"""The pieces of the MoE block's exchange: payloads, gather and sum, slices of the ragged one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from moe_cases import BACKEND, E

import octavo
import octavo_numerics
from octavo.payload import payload_spec
from octavo_jax import moe
from octavo_jax.moe.exchange import TokenExchange, all_gather_tokens, reduce_scatter_sums
from octavo_jax.moe.ragged_exchange import exchange_slices

MESH = {"ep": 4}
ROWS, WIDTH = 6, 160
RECIPES = {"none": None, "mxfp8": octavo.MXFP8(), "block": octavo.BlockScaling(), "row": octavo.RowScaling()}


def _landed(x: np.ndarray, recipe: octavo.Recipe | None, operand: Any) -> np.ndarray:
    """What arrives of x: bf16 of the definition's dequantized values."""
    if recipe is None:
        return x
    q = octavo_numerics.quantize(x, payload_spec(recipe, operand), [len(x)])
    return np.asarray(octavo_numerics.dequantize(q, "rowwise")).astype(jnp.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
def test_tokens_go_everywhere_and_sums_come_home(name: str, mesh_of: Any, rng: np.random.Generator) -> None:
    """Tokens and gradients on their way to experts are the definition's codes, dequantized, bit for bit; sums on their
    way back are taken in float32 in the devices' order and rounded once, and have no payload."""
    recipe, mesh = RECIPES[name], mesh_of(**MESH)
    D = mesh.size
    x, parts = (rng.standard_normal((D * n, WIDTH)).astype(jnp.bfloat16) for n in (ROWS, D * ROWS))
    token_exchange = TokenExchange.of(("ep",), recipe, BACKEND)

    def both(x: Any, parts: Any) -> Any:
        everyone, pull = jax.vjp(partial(all_gather_tokens, token_exchange=token_exchange), x)
        sums, push = jax.vjp(partial(reduce_scatter_sums, token_exchange=token_exchange), parts)
        return everyone, pull(parts)[0], sums, push(x)[0]

    spec = P("ep")
    run = jax.shard_map(both, mesh=mesh, in_specs=(spec, spec), out_specs=(spec,) * 4)
    everyone, summed, sums, spread = (np.asarray(one) for one in jax.jit(run)(x, parts))
    by_device = parts.reshape(D, D, ROWS, WIDTH).astype(np.float32)
    total = by_device.sum(axis=0, dtype=np.float32).reshape(-1, WIDTH).astype(jnp.bfloat16)
    assert np.array_equal(everyone, np.tile(_landed(x, recipe, "x"), (D, 1)))
    assert np.array_equal(spread, np.tile(_landed(x, recipe, "dy"), (D, 1)))
    for one in (summed, sums):
        np.testing.assert_array_equal(one, total)


@pytest.mark.parametrize("rows", [10_000, 30])
def test_slices_tile_both_sides(rows: int, mesh_of: Any, rng: np.random.Generator) -> None:
    """Every row is sent to one place and every place is written once, in order of experts, then sources, without gaps;
    what finds no room is counted. A limit is the receiver's and all devices agree on it (faults.md 54, 55)."""
    mesh = mesh_of(**MESH)
    D = mesh.size
    sizes = rng.integers(0, 12, (D, E)).astype(np.int32)
    sizes[1] = 0  # a device without tokens
    sizes[:, 3] = 0
    run = jax.shard_map(
        lambda s: jax.tree.map(lambda a: a[None], exchange_slices(s[0], ("ep",), rows)),
        mesh=mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    made = jax.tree.map(np.asarray, jax.jit(run)(sizes))
    local = E // D
    lost = 0
    for device in range(D):
        landed: list[tuple[int, int]] = []
        for expert in range(device * local, (device + 1) * local):
            for source in range(D):
                start, size = made.out_landing[source, expert], made.out_size[source, expert]
                slot = source * local + expert % local
                assert (made.in_start[device, slot], made.in_size[device, slot]) == (start, size)
                assert made.in_landing[device, slot] == made.out_start[source, expert] == sizes[source, :expert].sum()
                landed += [(int(start) + row, expert) for row in range(size)]
        wanted = sizes[:, device * local : (device + 1) * local].sum()
        assert [row for row, _ in landed] == list(range(min(wanted, rows)))
        assert made.group_sizes[device].tolist() == [
            sum(expert == device * local + g for _, expert in landed) for g in range(local)
        ]
        lost += max(0, wanted - rows)
    assert made.dropped.sum() == lost


def test_what_an_exchange_refuses() -> None:
    """Scales that span rows cannot be decoded elsewhere; each sentence says what to give."""
    with pytest.raises(ValueError, match="payload is 'current', whose x has no scales of single rows; give RowScaling"):
        moe.Exchange(payload=octavo.CurrentScaling())
    with pytest.raises(ValueError, match="payload is 'nvfp4'"):
        moe.Exchange(payload=octavo.NVFP4())
    with pytest.raises(ValueError, match="payload is 'mxfp8', whose dy has no scales"):
        moe.Exchange(payload=octavo.MXFP8(dgrad="high_precision", wgrad="high_precision"))
    with pytest.raises(ValueError, match="way is 'dense'; it is 'gather', 'ragged' or None"):
        moe.Exchange(way="dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows is 0; give one or more"):
        moe.Exchange(rows=0)
