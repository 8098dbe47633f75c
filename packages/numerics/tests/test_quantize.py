"""quantize, dequantize and valid: planes, shapes, groups, tails, stacked matrices."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo import PRESETS, QuantizerSpec
from octavo.quantizer import Operand
from octavo_numerics import PLANES, QuantizedArray, dequantize, plane_sizes, quantize, valid
from octavo_numerics.vectors import cases

SPECS: dict[str, QuantizerSpec] = {
    f"{name}-{operand}": spec
    for name, recipe in PRESETS.items()
    for operand in ("x", "w", "dy")
    if (spec := recipe.quantizer(operand)) is not None
}


def scale_for(spec: QuantizerSpec, groups: int) -> np.ndarray | None:
    return np.full(groups, 3, dtype=np.float32) if spec.scaling == "delayed" else None


def run(x: np.ndarray, spec: QuantizerSpec, sizes: Any = None, **more: Any) -> QuantizedArray:
    groups = x.shape[0] if x.ndim == 3 else 1 if sizes is None else len(sizes)
    return quantize(x, spec, sizes, seed=5, scale=scale_for(spec, groups), **more)


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].shape == right[name].shape and left[name].tobytes() == right[name].tobytes() for name in left
    )


@pytest.mark.parametrize("key", SPECS)
def test_planes_have_the_shapes_of_their_spec(key: str, rng: np.random.Generator) -> None:
    """Ragged and stacked: payload and scale shapes, dtypes, and which planes exist."""
    spec = SPECS[key]
    ragged = run(rng.standard_normal((70, 40)).astype(np.float32), spec, [20, 0, 33])
    tensors = [ragged]
    if not spec.hadamard:
        tensors.append(run(rng.standard_normal((3, 20, 40)).astype(np.float32), spec))
    for q in tensors:
        for direction in ("rowwise", "columnwise"):
            payload, scale = getattr(q, direction), getattr(q, f"{direction}_scale")
            assert (payload is not None) == (direction in spec.directions)
            if payload is None:
                continue
            assert payload.shape == q.spec.payload_shape(direction)
            assert scale.shape == q.spec.scale_shape(direction)
            assert payload.dtype.itemsize == 1
            kinds = {"fp32": np.float32, "e8m0": np.uint8, "e4m3": ml_dtypes.float8_e4m3fn}
            assert scale.dtype == kinds[spec.scale_format]
            second = getattr(q, f"{direction}_global")
            assert (second is not None) == (spec.scaling == "nvfp4")
        if spec.shares_codes and spec.orientation == "both":
            assert q.rowwise is q.columnwise
            assert q.rowwise_scale is q.columnwise_scale
    assert ragged.group_sizes is not None
    assert ragged.group_sizes.tolist() == [20, 0, 33]


@pytest.mark.parametrize("case", [case for case in cases() if case.stacked], ids=lambda case: case.key)
def test_stacked_matrices_are_groups_of_their_own(case: Any, rng: np.random.Generator) -> None:
    """Each matrix quantized alone, and the same rows as ragged groups, give the same bits."""
    spec = case.spec.model_copy(update={"orientation": "both"})
    w = rng.standard_normal((3, 37, 50)).astype(np.float32)
    stacked = valid(run(w, spec))
    ragged = valid(run(w.reshape(111, 50), spec, [37, 37, 37]))
    assert {name: array.tobytes() for name, array in stacked.items()} == {
        name: array.tobytes() for name, array in ragged.items()
    }
    alone = valid(run(w[1:2], spec, group_offset=1))
    assert all(stacked[name][1].tobytes() == alone[name][0].tobytes() for name in stacked)


@pytest.mark.parametrize("key", SPECS)
def test_the_tail_is_not_read_and_dequantizes_to_zero(key: str, rng: np.random.Generator) -> None:
    """NaN rows past the sum change nothing and come back as +0 (contract.md, promise 2; faults.md 8, 12, 14)."""
    spec = SPECS[key]
    x = rng.standard_normal((60, 40)).astype(np.float32)
    exact = run(x[:53], spec, [20, 0, 33])
    x[53:] = np.nan
    tailed = run(x, spec, [20, 0, 33])
    assert same(valid(exact), valid(tailed))
    for direction in spec.directions:
        values = dequantize(tailed, direction)
        rows = int(plane_sizes(tailed, direction).sum())
        assert values.shape == tailed.spec.payload_shape(direction)
        assert not values[rows:].view(np.uint32).any()
        assert np.isfinite(values).all()


@pytest.mark.parametrize("key", SPECS)
@pytest.mark.parametrize("sizes", [[0], [0, 0, 0], [0, 5, 0], [5, 0, 0]])
def test_empty_groups_are_harmless_anywhere(key: str, sizes: list[int], rng: np.random.Generator) -> None:
    """First, last, only, all: an empty group has scale 1 where it has one, and shifts nobody's (faults.md 3, 6)."""
    spec = SPECS[key]
    x = rng.standard_normal((9, 20)).astype(np.float32)
    q = run(x, spec, sizes)
    filled = [group for group, size in enumerate(sizes) if size]
    for direction in spec.directions:
        assert np.isfinite(dequantize(q, direction)).all()
    if filled:
        alone = valid(run(x[:5], spec, group_offset=filled[0]))
        for name, array in alone.items():
            held = valid(q)[name]
            per_group = held.shape[0] == len(sizes) and array.shape[0] == 1
            assert (
                held[filled[0] :][: len(array)].tobytes() == array.tobytes()
                if per_group
                else same({name: held}, {name: array})
            )
    if spec.scaling == "current":
        scales = q.rowwise_scale if q.rowwise_scale is not None else q.columnwise_scale
        assert scales is not None
        assert all(scales[group] == 1 for group, size in enumerate(sizes) if not size)


@pytest.mark.parametrize("key", SPECS)
@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0), (2, 0, 4), (2, 4, 0)])
def test_empty_tensors_work(key: str, shape: tuple[int, ...]) -> None:
    """No rows, no columns, neither: arrays without elements, not an error."""
    spec = SPECS[key]
    if len(shape) == 3 and spec.hadamard:
        return
    q = run(np.zeros(shape, dtype=np.float32), spec)
    for direction in spec.directions:
        assert dequantize(q, direction).shape == q.spec.payload_shape(direction)
    assert set(valid(q)) <= set(PLANES)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_inputs_convert_to_fp32_exactly(dtype: Any, rng: np.random.Generator) -> None:
    """Any of the three dtypes gives the bits of its fp32 value; strided and read-only ones, too (faults.md 44, 45)."""
    x = (rng.standard_normal((40, 66)) * 8).astype(dtype)
    x.setflags(write=False)
    for view in (x, x[::2, ::3], x.T, np.broadcast_to(x[:1], x.shape)):
        spec = SPECS["mxfp8-x"]
        assert same(valid(quantize(view, spec)), valid(quantize(np.array(view, dtype=np.float32), spec)))


@pytest.mark.parametrize("operand", ["x", "dy"])
def test_hadamard_columns_restart_at_each_group(operand: Operand, rng: np.random.Generator) -> None:
    """Groups are padded to 16 rows, group g starting at 16 * sum of ceil(size / 16) before it."""
    spec = SPECS[f"nvfp4-{operand}"]
    x = rng.standard_normal((50, 24)).astype(np.float32)
    q = run(x, spec, [17, 0, 5, 20])
    assert plane_sizes(q, "columnwise").tolist() == [32, 0, 16, 32]
    assert plane_sizes(q, "rowwise").tolist() == [17, 0, 5, 20]
    values = dequantize(q, "columnwise")
    third = dequantize(run(x[17:22], spec, group_offset=2), "columnwise")
    assert values[32:48].tobytes() == third.tobytes()


def test_delayed_scaling_saturates_finite_values_and_marks_each_non_finite_one() -> None:
    """Scales come from history: 1e30 saturates, Inf and NaN code as NaN, their neighbours are untouched."""
    x = np.array([[1, -1e30, np.inf, -np.inf, np.nan, 3e38]], dtype=np.float32)
    scale = np.array([1e3], dtype=np.float32)
    q = quantize(x, SPECS["fp8-delayed-x"], scale=scale)
    assert q.rowwise is not None
    assert q.rowwise.view(np.uint8).tolist() == [[0x7E, 0xFE, 0x7F, 0x7F, 0x7F, 0x7E]]
    assert q.rowwise_scale is not None
    assert q.rowwise_scale.tolist() == [np.float32(1) / scale[0]]


def test_every_dequantized_nan_has_one_pattern() -> None:
    """0x7FC00000, whatever NaN or infinity went in."""
    x = np.array([[0xFFC12345, 0x7F800001, 0xFF800000, 0x3F800000]], dtype=np.uint32).view(np.float32)
    for key, spec in SPECS.items():
        for direction in spec.directions:
            values = dequantize(run(x, spec), direction)
            assert set(values[np.isnan(values)].view(np.uint32).tolist()) == {0x7FC00000}, key


@pytest.mark.parametrize("power_of_two", [True, False])
def test_outputs_are_new_arrays(power_of_two: bool, rng: np.random.Generator) -> None:
    """The input is not written to and not aliased."""
    x = rng.standard_normal((8, 8)).astype(np.float32)
    before = x.copy()
    spec = QuantizerSpec(format="e4m3", scaling="current", power_of_two=power_of_two)
    q = quantize(x, spec)
    assert np.array_equal(x, before)
    assert q.rowwise is not None
    assert not np.shares_memory(q.rowwise, x)


@pytest.mark.parametrize("scaling", ["current", "nvfp4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_makes_its_group_nan(scaling: str, bad: float, rng: np.random.Generator) -> None:
    """It wins the amax that the whole group is scaled by, wherever it stands; the others keep their bits."""
    spec = QuantizerSpec(scaling=scaling, format="e2m1" if scaling == "nvfp4" else "e4m3", orientation="both")  # type: ignore[arg-type]
    x, sizes = rng.standard_normal((48, 32)).astype(np.float32), [16, 0, 20, 12]
    clean = quantize(x, spec, sizes)
    for row in (16, int(rng.integers(17, 35)), 35):
        broken = x.copy()
        broken[row, rng.integers(32)] = bad
        q = quantize(broken, spec, sizes)
        for direction in ("rowwise", "columnwise"):
            values, before = dequantize(q, direction), dequantize(clean, direction)
            assert np.isnan(values[16:36]).all()
            assert values[:16].tobytes() == before[:16].tobytes()
            assert values[36:].tobytes() == before[36:].tobytes()
