"""Quantized outputs equal the executable definition bit for bit (promise 5).

`quantize` runs one jitted function a spec, with traced sizes, seed, scale and group offset: one compilation serves
every input class and size vector. `test_grouped_dense.py` has it inside a caller's jit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import octavo_jax
import octavo_numerics
from octavo import QuantizerSpec

M, G, K = 200, 5, 72
STACKED = (3, 40, 72)

SPECS = {
    "delayed": QuantizerSpec(format="e4m3", scaling="delayed"),
    "delayed-e5m2": QuantizerSpec(format="e5m2", scaling="delayed"),
    "current": QuantizerSpec(format="e4m3", scaling="current"),
    "current-e5m2-pow2-eps": QuantizerSpec(format="e5m2", scaling="current", power_of_two=True, amax_epsilon=0.3),
    "row": QuantizerSpec(format="e4m3", scaling="row", power_of_two=True),
    "row-fp32": QuantizerSpec(format="e4m3", scaling="row"),
    "block": QuantizerSpec(format="e4m3", scaling="block", power_of_two=True),
    "block-e5m2-fp32": QuantizerSpec(format="e5m2", scaling="block"),
    "block-square": QuantizerSpec(format="e4m3", scaling="block", square=True, power_of_two=True),
    "mxfp8": QuantizerSpec(format="e4m3", scaling="mxfp8"),
    "mxfp8-e5m2-square": QuantizerSpec(format="e5m2", scaling="mxfp8", square=True),
    "nvfp4": QuantizerSpec(format="e2m1", scaling="nvfp4"),
    "nvfp4-square": QuantizerSpec(format="e2m1", scaling="nvfp4", square=True),
    "nvfp4-stochastic": QuantizerSpec(format="e2m1", scaling="nvfp4", rounding="stochastic", role="dy"),
    "nvfp4-hadamard-stochastic": QuantizerSpec(
        format="e2m1", scaling="nvfp4", rounding="stochastic", hadamard=True, role="dy"
    ),
}

Compare = Callable[[Any, Any], None]


@pytest.fixture
def compare(as_definition: Callable[..., Any]) -> Compare:
    """Fails at the first byte by which a GroupedTensor differs from the definition's."""

    def check(expected: Any, q: octavo_jax.GroupedTensor) -> None:
        wanted, got = octavo_numerics.valid(expected), octavo_numerics.valid(as_definition(q))
        assert wanted.keys() == got.keys()
        for name, plane in wanted.items():
            assert plane.dtype == got[name].dtype, name
            a, b = (np.ascontiguousarray(p).view(np.uint8) for p in (plane, got[name]))
            assert np.array_equal(a, b), f"{name} differs first at byte {np.argwhere(a != b)[0]}"
        for direction in ("rowwise", "columnwise"):
            a = octavo_numerics.dequantize(expected, direction).view(np.uint32)
            b = np.asarray(octavo_jax.dequantize(q, direction)).view(np.uint32)
            assert np.array_equal(a, b), f"dequantized {direction} differs first at {np.argwhere(a != b)[0]}"

    return check


def _scale(rng: np.random.Generator, spec: QuantizerSpec, groups: int) -> np.ndarray | None:
    """Encode scales of any exponent, subnormal ones too."""
    if spec.scaling != "delayed":
        return None
    return rng.integers(1, 0x7F800000, groups).astype(np.uint32).view(np.float32)


# The conformance suite has the other specs on this backend, on the same classes of inputs (test_quantizer.py); what it
# dequantizes is rowwise and not square.
DEFAULT = ("current-e5m2-pow2-eps", "row", "block-e5m2-fp32", "mxfp8", "nvfp4-hadamard-stochastic", "nvfp4-square")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in SPECS if name not in DEFAULT]


@pytest.mark.parametrize("name", [*DEFAULT, *OTHERS])
def test_ragged_rows(
    name: str, rng: np.random.Generator, inputs: Any, compare: Compare, sizes_of: Callable[..., np.ndarray]
) -> None:
    """Every input class, device sizes around the block sizes, none at all; NaN tail (faults.md 5, 6, 8, 13, 14, 64)."""
    spec = SPECS[name]
    for kind, make in inputs.items():
        x, sizes, seed = make(rng, (M, K)), sizes_of(rng, G, M), int(rng.integers(1 << 31))
        if kind == "zero":
            sizes[:] = 0
        x[sizes.sum() :] = np.nan
        scale = _scale(rng, spec, G)
        offset = int(rng.integers(100))
        expected = octavo_numerics.quantize(x, spec, sizes, seed=seed, scale=scale, group_offset=offset)
        q = octavo_jax.quantize(
            x, spec, jnp.asarray(sizes), seed=jnp.int32(seed), scale=scale, group_offset=jnp.int32(offset)
        )
        try:
            compare(expected, q)
        except AssertionError as error:
            raise AssertionError(f"input class {kind}, sizes {sizes.tolist()}: {error}") from None


@pytest.mark.parametrize(
    "name",
    [
        "delayed",
        "nvfp4-square",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("current", "row", "block-square", "mxfp8")),
    ],
)
def test_stacked_matrices(
    name: str, rng: np.random.Generator, inputs: Any, compare: Compare, narrowed: Callable[..., np.ndarray]
) -> None:
    """[G, N, K] in bf16, more than two blocks each way and none whole (faults.md 59)."""
    spec = SPECS[name]
    for kind, make in inputs.items():
        x = narrowed(make(rng, STACKED), "bfloat16")
        seed, scale = int(rng.integers(1 << 31)), _scale(rng, spec, STACKED[0])
        expected = octavo_numerics.quantize(x, spec, seed=seed, scale=scale)
        q = octavo_jax.quantize(x, spec, seed=seed, scale=scale)
        try:
            compare(expected, q)
        except AssertionError as error:
            raise AssertionError(f"input class {kind}: {error}") from None


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", ["current", "row", "nvfp4-square"])
def test_one_plane(name: str, orientation: str, rng: np.random.Generator, as_definition: Any) -> None:
    """A quantizer of one direction makes that plane alone, eager as well, host sizes, fp16, one group."""
    spec = QuantizerSpec(**{**dict(SPECS[name]), "orientation": orientation})
    x = rng.standard_normal((40, 24)).astype(np.float16)
    q = octavo_jax.quantize(x, spec, [33])
    wanted, got = (octavo_numerics.valid(p) for p in (octavo_numerics.quantize(x, spec, [33]), as_definition(q)))
    assert wanted.keys() == got.keys()
    assert all(wanted[name].tobytes() == got[name].tobytes() for name in wanted)


@pytest.mark.parametrize("seed", [0, 7, -1, (1 << 63) + 5, (1 << 64) + 3])
def test_host_seeds_are_taken_modulo_2_64(seed: int, rng: np.random.Generator, as_definition: Any) -> None:
    """A host seed of any size gives the definition's bits; another seed gives others (faults.md 40)."""
    spec = SPECS["nvfp4-hadamard-stochastic"]
    x, sizes = rng.standard_normal((M, K)).astype(np.float32), [100, 0, 50, 50, 0]
    q = octavo_jax.quantize(x, spec, sizes, seed=seed)
    expected = octavo_numerics.valid(octavo_numerics.quantize(x, spec, sizes, seed=seed % (1 << 64)))
    got = octavo_numerics.valid(as_definition(q))
    assert all(expected[name].tobytes() == got[name].tobytes() for name in expected)
    other = octavo_numerics.valid(as_definition(octavo_jax.quantize(x, spec, sizes, seed=seed + 1)))
    assert other["rowwise"].tobytes() != got["rowwise"].tobytes()


def test_shared_codes_are_one_array(rng: np.random.Generator) -> None:
    """Per-tensor and square column data are the transpose of the same codes, so no second array is kept."""
    q = octavo_jax.quantize(rng.standard_normal((16, 8)).astype(np.float32), SPECS["current"])
    assert q.rowwise is q.columnwise
    assert q.rowwise_scale is q.columnwise_scale


@pytest.mark.parametrize("name", ["row", "nvfp4"])
def test_no_rows(name: str) -> None:
    """M = 0 is a tensor like others."""
    q = octavo_jax.quantize(np.zeros((0, 16), np.float32), SPECS[name], [0, 0])
    assert octavo_jax.dequantize(q).shape == (0, 16)
