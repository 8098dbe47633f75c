"""The properties of docs/numerics, over shapes drawn around every block and tile edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from octavo import QuantizerSpec
from octavo.quantizer import Direction
from octavo_numerics import QuantizedArray, dequantize, hadamard, plane_sizes, quantize, tensor_stats, valid
from octavo_numerics.vectors import cases

EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129)
SPECS = list({case.key.rsplit(".", 1)[0]: case.spec for case in cases() if case.operand is None}.values())

# no limit of time: a machine that others share may pause any example
COMMON = settings(deadline=None, max_examples=60, print_blob=True, suppress_health_check=[HealthCheck.too_slow])

sizes_of_groups = st.lists(st.sampled_from(EDGES), min_size=1, max_size=4)
columns = st.sampled_from((1, 15, 16, 17, 33, 128, 129))
seeds = st.integers(0, 2**32 - 1)


def specs(keep: Callable[[QuantizerSpec], bool] = lambda spec: True) -> st.SearchStrategy[QuantizerSpec]:
    return st.sampled_from([spec for spec in SPECS if keep(spec)])


@dataclass(frozen=True)
class Tensor:
    """A bell-shaped ragged tensor with a tail of 3 rows."""

    sizes: tuple[int, ...]
    x: np.ndarray

    @property
    def rows(self) -> int:
        return sum(self.sizes)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    sizes, cols, seed = draw(sizes_of_groups), draw(columns), draw(seeds)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sum(sizes) + 3, cols)) * np.exp2(rng.integers(-6, 6, (sum(sizes) + 3, 1)))
    return Tensor(tuple(sizes), x.astype(np.float32))


def run(x: np.ndarray, spec: QuantizerSpec, sizes: tuple[int, ...] | None, group_offset: int = 0) -> QuantizedArray:
    groups = len(sizes) if sizes is not None else len(x) if x.ndim == 3 else 1
    scale = np.exp2(np.arange(groups) + group_offset).astype(np.float32) if spec.scaling == "delayed" else None
    return quantize(x, spec, sizes, seed=11, group_offset=group_offset, scale=scale)


def same(left: QuantizedArray, right: QuantizedArray) -> bool:
    one, other = valid(left), valid(right)
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def group_rows(q: QuantizedArray, direction: Direction, group: int) -> slice:
    ends = np.cumsum(plane_sizes(q, direction))
    return slice(int(ends[group] - plane_sizes(q, direction)[group]), int(ends[group]))


@COMMON
@given(tensors(), specs())
def test_negation_negates(tensor: Tensor, spec: QuantizerSpec) -> None:
    """q(-x) = -q(x): the same scales, the same magnitudes, the other sign (zeros of a Hadamard sum aside)."""
    left, right = run(tensor.x, spec, tensor.sizes), run(-tensor.x, spec, tensor.sizes)
    for direction in spec.directions:
        one, other = valid(left), valid(right)
        sign = np.uint8(8 if spec.format == "e2m1" else 128)
        codes, negated = one[direction].view(np.uint8), other[direction].view(np.uint8)
        if spec.hadamard and direction == "columnwise":
            assert np.array_equal(dequantize(left, direction), -dequantize(right, direction))
        else:
            assert np.array_equal(codes ^ sign, negated)
        assert one[f"{direction}_scale"].tobytes() == other[f"{direction}_scale"].tobytes()


@COMMON
@given(tensors(), specs(lambda spec: spec.scaling != "delayed" and not spec.amax_epsilon))
def test_a_power_of_two_goes_through(tensor: Tensor, spec: QuantizerSpec) -> None:
    """q(4x) = 4 q(x): the same codes."""
    left, right = run(tensor.x, spec, tensor.sizes), run(4 * tensor.x, spec, tensor.sizes)
    for direction in spec.directions:
        assert valid(left)[direction].tobytes() == valid(right)[direction].tobytes()
        assert np.array_equal(4 * dequantize(left, direction), dequantize(right, direction))


@COMMON
@given(tensors(), specs())
def test_groups_are_local(tensor: Tensor, spec: QuantizerSpec) -> None:
    """A group's values and codes are those of a call with that group alone and its group_offset."""
    together = run(tensor.x, spec, tensor.sizes)
    ends = np.cumsum(tensor.sizes)
    for group, size in enumerate(tensor.sizes):
        alone = run(tensor.x[ends[group] - size : ends[group]], spec, (size,), group_offset=group)
        for direction in spec.directions:
            rows = group_rows(together, direction, group)
            assert valid(together)[direction][rows].tobytes() == valid(alone)[direction].tobytes()
            values = dequantize(alone, direction)[: plane_sizes(alone, direction)[0]]
            assert dequantize(together, direction)[rows].tobytes() == values.tobytes()


@COMMON
@given(tensors(), specs(), st.integers(1, 40))
def test_the_tail_may_be_anything(tensor: Tensor, spec: QuantizerSpec, more: int) -> None:
    """Padding invariance: longer tails of NaN, infinities or zeros give the same bits (faults.md 8, 14)."""
    expected = run(tensor.x[: tensor.rows], spec, tensor.sizes)
    for filler in (np.nan, np.inf, 0):
        tail = np.full((more, tensor.x.shape[1]), filler, dtype=np.float32)
        assert same(run(np.concatenate([tensor.x[: tensor.rows], tail]), spec, tensor.sizes), expected)


@COMMON
@given(tensors(), specs(lambda spec: not spec.hadamard), st.integers(1, 20))
def test_zero_rows_added_to_a_group_change_no_code(tensor: Tensor, spec: QuantizerSpec, more: int) -> None:
    """Kernels may pad groups inside their layouts (faults.md 64)."""
    cols = tensor.x.shape[1]
    pieces, start = [], 0
    for size in tensor.sizes:
        pieces += [tensor.x[start : start + size], np.zeros((more, cols), dtype=np.float32)]
        start += size
    padded = run(np.concatenate(pieces), spec, tuple(size + more for size in tensor.sizes))
    plain = run(tensor.x, spec, tensor.sizes)
    for direction in spec.directions:
        for group, size in enumerate(tensor.sizes):
            rows, wider = group_rows(plain, direction, group), group_rows(padded, direction, group)
            codes = valid(padded)[direction][wider][:size]
            assert codes.tobytes() == valid(plain)[direction][rows].tobytes()


@COMMON
@given(tensors(), specs(), seeds, st.sampled_from([np.nan, np.inf, -np.inf]))
def test_non_finite_in_nan_out_and_only_in_its_group(
    tensor: Tensor, spec: QuantizerSpec, seed: int, bad: float
) -> None:
    """Overflow is never hidden; other groups keep their bits."""
    assume(tensor.rows)
    rng = np.random.default_rng(seed)
    row, col = rng.integers(tensor.rows), rng.integers(tensor.x.shape[1])
    x = tensor.x.copy()
    x[row, col] = bad
    clean, dirty = run(tensor.x, spec, tensor.sizes), run(x, spec, tensor.sizes)
    group = int(np.searchsorted(np.cumsum(tensor.sizes), row, side="right"))
    for direction in spec.directions:
        values, before = dequantize(dirty, direction), dequantize(clean, direction)
        rows = group_rows(dirty, direction, group)
        inside = row - int(np.cumsum(tensor.sizes)[group] - tensor.sizes[group])
        assert np.isnan(values[rows][inside, col])
        if spec.scaling == "nvfp4":
            assert np.isnan(values[rows]).all()
        others = np.ones(len(values), dtype=bool)
        others[rows] = False
        assert values[others].tobytes() == before[others].tobytes()
        if spec.scaling == "delayed":
            assert np.isnan(values).sum() == 1


@COMMON
@given(
    st.integers(1, 3),
    st.sampled_from(EDGES),
    columns,
    seeds,
    specs(lambda spec: spec.shares_codes and spec.rounding == "nearest"),
)
def test_two_dimensional_recipes_commute_with_transpose(
    n: int, rows: int, cols: int, seed: int, spec: QuantizerSpec
) -> None:
    """Square blocks and per-tensor scales of w.T are those of w, transposed; MXFP4's blocks turn with the matrix."""
    w = np.random.default_rng(seed).standard_normal((n, rows, cols)).astype(np.float32)
    ways = {None: None, "rowwise": "columnwise", "columnwise": "rowwise"}
    turned = QuantizerSpec(**{**dict(spec), "mxfp4": ways[spec.mxfp4]})
    one, other = run(w, spec, None), run(np.swapaxes(w, 1, 2), turned, None)
    assert np.array_equal(np.swapaxes(dequantize(one), 1, 2), dequantize(other))
    left, right = valid(one), valid(other)
    assert np.array_equal(np.swapaxes(left["rowwise"].view(np.uint8), 1, 2), right["rowwise"].view(np.uint8))
    if spec.square:
        scale = left["rowwise_scale"]
        assert np.ascontiguousarray(np.swapaxes(scale, 1, 2)).tobytes() == right["rowwise_scale"].tobytes()


@COMMON
@given(tensors(), specs(lambda spec: spec.scaling == "mxfp8"), seeds)
@example(Tensor((1,), np.full((1, 1), np.uint32(0x04600001).view(np.float32))), SPECS[0], 0)
def test_mx_never_saturates(tensor: Tensor, spec: QuantizerSpec, seed: int) -> None:
    """Not on any pattern up to 1.75 * 2^127; amax 0x04600001 exceeds 448 by one rounding and is not cut.

    Past that the nearest code may stand for 2^128, which fp32 does not hold.
    """
    if spec.scaling != "mxfp8":
        spec = QuantizerSpec(format="e4m3", scaling="mxfp8")
    bits = np.random.default_rng(seed).integers(0, 0x7F600000, tensor.x.shape, dtype=np.uint32)
    patterns = bits.view(np.float32) if tensor.x.size > 1 else tensor.x
    for direction in spec.directions:
        stats = tensor_stats(patterns, spec, tensor.sizes, direction=direction)
        assert not stats.saturated.any()
        assert not stats.non_finite.any()


@COMMON
@given(tensors(), specs(lambda spec: spec.scaling == "mxfp8" or spec.power_of_two))
def test_quantizing_again_keeps_values(tensor: Tensor, spec: QuantizerSpec) -> None:
    """dequantize then quantize keeps every value for power-of-two scales and MX (not the codes)."""
    for direction in spec.directions:
        one = spec.model_copy(update={"orientation": direction})
        values = dequantize(run(tensor.x, one, tensor.sizes), direction)
        assert np.array_equal(dequantize(run(values, one, tensor.sizes), direction), values)


@COMMON
@given(st.integers(1, 4), columns, seeds)
def test_the_hadamard_transform_keeps_norms(runs: int, cols: int, seed: int) -> None:
    """Orthogonal up to the one rounding of its output to bfloat16, half a unit of 2^-8."""
    x = np.random.default_rng(seed).integers(-8, 9, (16 * runs, cols)).astype(np.float32)
    before, after = (np.linalg.norm(values.astype(np.float64), axis=0) for values in (x, hadamard(x)))
    assert (np.abs(after - before) <= 2.0**-8 * before).all()


@COMMON
@given(tensors(), specs(lambda spec: spec.orientation == "both"))
def test_one_direction_alone_gives_the_same_plane(tensor: Tensor, spec: QuantizerSpec) -> None:
    """Asking for both directions changes neither."""
    both = valid(run(tensor.x, spec, tensor.sizes))
    for direction in ("rowwise", "columnwise"):
        alone = valid(run(tensor.x, spec.model_copy(update={"orientation": direction}), tensor.sizes))
        assert all(alone[name].tobytes() == both[name].tobytes() for name in alone)


@COMMON
@given(tensors(), specs())
def test_the_same_call_gives_the_same_bits(tensor: Tensor, spec: QuantizerSpec) -> None:
    """Deterministic (contract.md, promise 11; faults.md 22, 32)."""
    assert same(run(tensor.x, spec, tensor.sizes), run(tensor.x.copy(), spec, tensor.sizes))
