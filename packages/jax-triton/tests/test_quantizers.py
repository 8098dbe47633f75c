"""Quantizers: the turned layout, what XLA sums up of a kernel's parts, seeds and offsets that are traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_table import target_of

import octavo_numerics
from octavo import QuantizerSpec
from octavo_jax_triton.arrays.planes import checked_plane
from octavo_jax_triton.launch.arguments import Target
from octavo_jax_triton.quantizers.dequantizer import converted
from octavo_jax_triton.quantizers.quantizer import bind_quantize

ROWS, COLUMNS = 300, 80
SPECS = {
    "delayed": QuantizerSpec(scaling="delayed", format="e4m3"),
    "current": QuantizerSpec(scaling="current", format="e5m2"),
    "row": QuantizerSpec(scaling="row", format="e4m3"),
    "block": QuantizerSpec(scaling="block", format="e4m3", power_of_two=True),
    "square": QuantizerSpec(scaling="block", format="e4m3", square=True),
}


def _drawn(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.array([0, 141, 3, 128], np.int32)
    x = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    x[sizes.sum() :] = np.nan
    return x, sizes


def _quantize(spec: QuantizerSpec, columnwise: str, target: Target, x: Any, sizes: Any, **more: Any) -> Any:
    scale = jnp.ones(len(sizes)) if spec.scaling == "delayed" else None
    return bind_quantize(spec, columnwise, target)(jnp.asarray(x), jnp.asarray(sizes), scale=scale, **more)


@pytest.mark.parametrize("name", ["delayed", "current", "row"])
@pytest.mark.parametrize("shape", [(0, 48), (2, 48, 0)], ids=str)
def test_an_operand_without_elements_has_scales(name: str, shape: tuple[int, ...], device: str) -> None:
    """No program has a tile, and the scales, which a product may read, are written all the same."""
    sizes = None if len(shape) == 3 else np.array([0, shape[0]], np.int32)
    scale = np.array([0.5, 2.0], np.float32) if name == "delayed" else None
    expected = octavo_numerics.quantize(np.zeros(shape, np.float32), SPECS[name], sizes, scale=scale)
    of_groups, given = (None if array is None else jnp.asarray(array) for array in (sizes, scale))
    quantize = bind_quantize(SPECS[name], "turned", target_of(device))
    q = quantize(jnp.zeros(shape), of_groups, scale=given)
    for plane in ("rowwise_scale", "columnwise_scale"):
        np.testing.assert_array_equal(np.asarray(getattr(q, plane)), getattr(expected, plane), plane)


@pytest.mark.parametrize("name", list(SPECS))
def test_turned_codes_are_the_plain_ones(name: str, rng: np.random.Generator, device: str) -> None:
    """Quantized into panels or turned afterwards and back: the same bits, and zeros where a panel has no row."""
    (x, sizes), target, spec = _drawn(rng), target_of(device), SPECS[name]
    plain = _quantize(spec, "plain", target, x, sizes)
    turned = _quantize(spec, "turned", target, x, sizes)
    assert turned.spec.columnwise_layout == "turned"
    codes = np.asarray(turned.columnwise).view(np.uint8)
    turned_later = np.asarray(converted(plain, "turned", target).columnwise).view(np.uint8)
    real, start = int(sizes.sum()), 0
    back = np.asarray(converted(turned, "plain", target).columnwise).view(np.uint8)
    np.testing.assert_array_equal(back[:real], np.asarray(plain.columnwise).view(np.uint8)[:real])
    panels = 0
    for size in sizes:
        for first in range(0, size, 128):
            height = min(128, size - first)
            np.testing.assert_array_equal(codes[panels, :, :height].T, back[start + first :][:height])
            assert not codes[panels, :, height:].any()
            panels += 1
        start += size
    assert panels == 4
    # what lies behind is of no group, and a GPU leaves there whatever was in memory
    np.testing.assert_array_equal(codes[:panels], turned_later[:panels])


def test_amax_of_a_group_is_its_rows_alone(rng: np.random.Generator, device: str) -> None:
    """Maxima are found in parts, of which those of no group hold whatever was in memory: groups of every size keep the
    definition's scales, an empty one has that of zeros, and rows past the sum count nowhere."""
    x, sizes = _drawn(rng)
    for spec in (SPECS["current"], SPECS["row"]):
        mine = _quantize(spec, "plain", target_of(device), x, sizes)
        theirs = octavo_numerics.quantize(x, spec, sizes)
        for name in ("columnwise_scale", "rowwise_scale"):
            actual, expected = np.asarray(getattr(mine, name)), getattr(theirs, name)
            if actual.shape == (ROWS,):
                actual, expected = actual[: sizes.sum()], expected[: sizes.sum()]
            np.testing.assert_array_equal(actual, expected)


def test_a_traced_offset_draws_the_groups_own_bits(rng: np.random.Generator, device: str) -> None:
    """Experts of a rank begin at a number that is known on the device alone; the seed may be traced, too."""
    spec = QuantizerSpec(scaling="nvfp4", format="e2m1", rounding="stochastic", role="dy")
    (x, sizes), seed, offset = _drawn(rng), int(rng.integers(0, 1 << 31)), int(rng.integers(1, 1 << 31))
    run = bind_quantize(spec, "plain", target_of(device))
    traced = jax.jit(lambda seed, offset: run(jnp.asarray(x), jnp.asarray(sizes), seed=seed, group_offset=offset))
    mine = traced(jnp.int32(seed), jnp.int32(offset))
    theirs = octavo_numerics.quantize(x, spec, sizes, seed=seed, group_offset=offset)
    real = int(sizes.sum())
    np.testing.assert_array_equal(np.asarray(mine.rowwise)[:real], theirs.rowwise[:real])


def test_a_plane_of_another_shape_is_refused(rng: np.random.Generator, device: str) -> None:
    """Kernels trust the shapes that a spec gives, so that a plane of another operand would be read past its end."""
    x, sizes = _drawn(rng)
    q = _quantize(SPECS["block"], "plain", target_of(device), x, sizes)
    wrong = jax.tree.map(lambda leaf: leaf[:-1] if leaf.ndim > 1 else leaf, q)
    with pytest.raises(ValueError, match=r"x\.rowwise has shape .*must have shape \[300, 80\]"):
        checked_plane(wrong, "rowwise", "x.")
