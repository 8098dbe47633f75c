"""tensor_stats: what is counted, on tensors whose losses are known."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import QuantizerSpec
from octavo_numerics import dequantize, quantize, tensor_stats, valid
from octavo_numerics.vectors import cases

CURRENT = QuantizerSpec(format="e4m3", scaling="current", power_of_two=True)
DELAYED = QuantizerSpec(format="e4m3", scaling="delayed")


def f32(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def test_saturation_underflow_and_amax_are_counted_by_group() -> None:
    """With an encode scale of 1: 500 is cut, 460 is rounded to 448, 2^-11 vanishes, 0 does not count."""
    x = f32([500, 460, 1, 0], [2.0**-11, 2.0**-9, 0, 1], [np.nan, np.inf, 7, -600])
    stats = tensor_stats(x, DELAYED, [2, 0, 1], scale=np.ones(3, dtype=np.float32))
    assert stats.elements.tolist() == [8, 0, 4]
    assert stats.amax[:2].tolist() == [500, 0]
    assert np.isnan(stats.amax[2])
    assert stats.saturated.tolist() == [1, 0, 1]
    assert stats.underflow.tolist() == [1, 0, 0]
    assert stats.non_finite.tolist() == [0, 0, 2]


def test_exact_tensors_lose_nothing() -> None:
    """Values of the format give an infinite SQNR; a zero tensor has no signal."""
    assert tensor_stats(f32([1, 2, 448]), CURRENT).sqnr_db.tolist() == [np.inf]
    assert np.isnan(tensor_stats(f32([0, 0]), CURRENT).sqnr_db[0])


@pytest.mark.parametrize(
    "case", [case for case in cases() if not case.stacked and case.operand is None], ids=lambda case: case.key
)
def test_signal_and_noise_are_those_of_the_quantized_tensor(case: object, rng: np.random.Generator) -> None:
    """The statistics describe what `quantize` with the same arguments returns, in every recipe, of groups so far apart
    that a scale of the other one would be seen."""
    spec: QuantizerSpec = case.spec  # type: ignore[attr-defined]
    x = rng.standard_normal((50, 40)).astype(np.float32)
    x[30:] *= 64
    scale = np.array([90, 90 / 64], dtype=np.float32) if spec.scaling == "delayed" else None
    stats = tensor_stats(x, spec, [30, 17], seed=3, scale=scale)
    values = dequantize(quantize(x, spec, [30, 17], seed=3, scale=scale))
    noise = [((values[a:b].astype(np.float64) - x[a:b]) ** 2).sum() for a, b in ((0, 30), (30, 47))]
    # float64 sums of at most 1880 squares, all positive: another order moves them by less than 1880 * 2^-53 = 2.1e-13
    np.testing.assert_allclose(stats.noise, noise, rtol=1e-12)
    total = stats.total()
    assert total.elements.tolist() == [47 * 40]
    np.testing.assert_allclose(total.noise, [sum(noise)], rtol=1e-12)
    low = 15 if spec.format == "e2m1" or spec.mxfp4 else 20
    assert low < float(total.sqnr_db[0]) < 45


def test_hadamard_columns_are_judged_in_their_domain(rng: np.random.Generator) -> None:
    """Padded rows count as elements; SQNR is that of E2M1, not of a transform mistaken for noise."""
    spec = QuantizerSpec(format="e2m1", scaling="nvfp4", hadamard=True)
    x = rng.standard_normal((40, 64)).astype(np.float32)
    stats = tensor_stats(x, spec, [20, 20], direction="columnwise")
    assert stats.elements.tolist() == [32 * 64] * 2
    assert (stats.sqnr_db > 15).all()
    assert (tensor_stats(x, spec, [20, 20]).elements == 20 * 64).all()


def test_a_poisoned_unit_is_reported_as_non_finite() -> None:
    """One Inf takes its MX block with it and nothing else."""
    x = np.ones((2, 64), dtype=np.float32)
    x[0, 3] = np.inf
    stats = tensor_stats(x, QuantizerSpec(format="e4m3", scaling="mxfp8", orientation="rowwise"))
    assert stats.non_finite.tolist() == [32]
    assert stats.sqnr_db.tolist() == [np.inf]


def test_the_first_element_that_is_not_finite_is_named_by_group(rng: np.random.Generator) -> None:
    """Row-major within the group; a NaN in the second group is not the first group's, and the total counts on."""
    x = rng.standard_normal((12, 40)).astype(np.float32)
    x[7, 3], x[9, 1], x[2, 39] = np.nan, np.inf, -np.inf
    stats = tensor_stats(x, CURRENT, [2, 6, 0, 4])
    assert stats.first_non_finite.tolist() == [-1, 39, -1, 1 * 40 + 1]
    assert stats.total().first_non_finite.tolist() == [2 * 40 + 39]
    assert tensor_stats(x[:2], CURRENT).total().first_non_finite.tolist() == [-1]


@pytest.mark.parametrize(
    "case", [case for case in cases() if not case.stacked and case.operand is None], ids=lambda case: case.key
)
def test_scale_exponents_are_those_of_the_stored_scales(case: object, rng: np.random.Generator) -> None:
    """Every positive finite scale that `quantize` stores is counted once, at its own power of two, in its group."""
    spec: QuantizerSpec = case.spec  # type: ignore[attr-defined]
    x = (rng.standard_normal((50, 40)) * 2.0 ** rng.integers(-9, 9, (50, 1))).astype(np.float32)
    x[3:20, :32] = 0
    scale = np.array([90, 0.5], dtype=np.float32) if spec.scaling == "delayed" else None
    stats = tensor_stats(x, spec, [30, 17], seed=3, scale=scale)
    planes = valid(quantize(x, spec, [30, 17], seed=3, scale=scale))
    direction = spec.directions[0]
    stored = planes[f"{direction}_scale"]
    if spec.scale_format == "e8m0":
        expected = stored.astype(np.int64).ravel() - 127
    elif spec.scale_format == "fp32":
        expected = np.floor(np.log2(stored.astype(np.float64))).astype(np.int64).ravel()
    else:
        assert sum(stats.exponents().values()) == int((stored.astype(np.float32) > 0).sum())
        return
    exponents, counts = np.unique(expected, return_counts=True)
    assert stats.exponents() == dict(zip(exponents.tolist(), counts.tolist(), strict=True))
    assert stats.scale_exponents.sum() == expected.size
