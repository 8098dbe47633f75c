"""layouts.py against octavo.GroupedTensorSpec (plain) and against the bounds that panels must keep (native)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo
import octavo_native
from octavo import GroupedTensorSpec, QuantizerSpec
from octavo_native import layouts

SPECS = [
    QuantizerSpec(format="e4m3", scaling="delayed"),
    QuantizerSpec(format="e5m2", scaling="current"),
    QuantizerSpec(format="e4m3", scaling="row"),
    QuantizerSpec(format="e4m3", scaling="block"),
    QuantizerSpec(format="e4m3", scaling="block", square=True),
    QuantizerSpec(format="e4m3", scaling="block", square_columns=True),
    QuantizerSpec(format="e5m2", scaling="mxfp8"),
    QuantizerSpec(format="e4m3", scaling="mxfp8", square=True),
    QuantizerSpec(format="e2m1", scaling="nvfp4"),
    QuantizerSpec(format="e2m1", scaling="nvfp4", square=True),
    QuantizerSpec(format="e2m1", scaling="nvfp4", hadamard=True),
]
SCALE_BYTES = {"fp32": 4, "e8m0": 1, "e4m3": 1}

specs = st.sampled_from(SPECS)
directions = st.sampled_from(["rowwise", "columnwise"])
sizes = st.integers(0, 3000)
groups = st.integers(1, 70)
group_sizes = st.lists(st.integers(0, 400), min_size=1, max_size=12)


def fields(spec: QuantizerSpec, direction: octavo.quantizer.Direction) -> dict[str, object]:
    square = spec.square_in(direction)
    return {"format": spec.format, "scaling": spec.scaling, "square": square, "hadamard": spec.hadamard}


@given(spec=specs, direction=directions, rows=sizes, cols=sizes, groups=groups)
def test_plain_ragged_shapes_are_the_specs(
    spec: QuantizerSpec, direction: octavo.quantizer.Direction, rows: int, cols: int, groups: int
) -> None:
    tensor = GroupedTensorSpec(shape=(rows, cols), groups=groups, quantizer=spec)
    where = {"layout": layouts.PLAIN, "direction": direction, "rows": rows, "cols": cols, "groups": groups}
    assert layouts.codes_shape(**fields(spec, direction), **where) == tensor.payload_shape(direction)
    assert layouts.scales_shape(**fields(spec, direction), **where) == tensor.scale_shape(direction)


@given(spec=specs, direction=directions, matrix_rows=st.integers(1, 500), cols=sizes, groups=groups)
def test_plain_stacked_shapes_are_the_specs(
    spec: QuantizerSpec, direction: octavo.quantizer.Direction, matrix_rows: int, cols: int, groups: int
) -> None:
    if spec.hadamard:  # stacked matrices take it off
        spec = spec.model_copy(update={"hadamard": False})
    tensor = GroupedTensorSpec(shape=(groups, matrix_rows, cols), groups=groups, quantizer=spec, ragged_axis=None)
    where = {
        "layout": layouts.PLAIN,
        "direction": direction,
        "rows": groups * matrix_rows,
        "cols": cols,
        "groups": groups,
        "matrix_rows": matrix_rows,
    }
    assert layouts.codes_shape(**fields(spec, direction), **where) == tensor.payload_shape(direction)
    assert layouts.scales_shape(**fields(spec, direction), **where) == tensor.scale_shape(direction)


def ffi_shapes(
    spec: QuantizerSpec, direction: octavo.quantizer.Direction, layout: str, **sides: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return octavo_native.ffi_plane_shapes(
        format=octavo_native.FORMATS[spec.format],
        scaling=octavo_native.SCALINGS[spec.scaling],
        direction=octavo_native.DIRECTIONS[direction],
        layout=octavo_native.LAYOUTS["plain" if layout == layouts.PLAIN else "native"],
        square=spec.square_in(direction),
        hadamard=spec.hadamard,
        **sides,
    )


@given(
    spec=specs,
    direction=directions,
    native=st.booleans(),
    rows=sizes,
    cols=sizes,
    groups=groups,
    matrix_rows=st.sampled_from([0, 0, 1, 16, 100, 129, 500]),
)
def test_the_handlers_for_xla_require_the_same_shapes(
    spec: QuantizerSpec,
    direction: octavo.quantizer.Direction,
    native: bool,
    rows: int,
    cols: int,
    groups: int,
    matrix_rows: int,
) -> None:
    """JAX allocates by layouts.py, and the handlers refuse by shapes.h: where the two differ no call would run."""
    if matrix_rows:
        spec, rows = spec.model_copy(update={"hadamard": False}), groups * matrix_rows
    layout = layouts.LAYOUTS_OF_DIRECTION[direction][native]
    sides = {"rows": rows, "cols": cols, "groups": groups, "matrix_rows": matrix_rows}
    codes = layouts.codes_shape(**fields(spec, direction), layout=layout, direction=direction, **sides)
    scales = layouts.scales_shape(**fields(spec, direction), layout=layout, direction=direction, **sides)
    assert ffi_shapes(spec, direction, layout, **sides) == (codes, scales)


@given(group_sizes=group_sizes, tail=st.integers(0, 200), size=st.sampled_from([1, 16, 32, 64, 128, 256]))
def test_no_sizes_need_more_blocks_than_the_bound(group_sizes: list[int], tail: int, size: int) -> None:
    """A static bound: sizes on a device are not known where arrays are made."""
    needed = sum(math.ceil(rows / size) for rows in group_sizes)
    assert needed <= layouts.block_bound(sum(group_sizes) + tail, len(group_sizes), size)


@given(rows=st.integers(0, 2**30), groups=st.integers(1, 65536))
def test_plan_words_are_the_librarys(rows: int, groups: int) -> None:
    """layouts.plan_words is what JAX's shape rules call; the kernel lays the plan out by plan.h."""
    assert layouts.plan_words(rows, groups) == octavo_native.plan_words(rows, groups)


@given(spec=specs, rows=sizes, cols=sizes, groups=groups)
def test_native_planes_hold_what_plain_ones_do(spec: QuantizerSpec, rows: int, cols: int, groups: int) -> None:
    """No element and no scale of the plain layout is without a place; codes of four bits take half of a byte."""
    for direction, native in (("rowwise", layouts.NATIVE_ROWS), ("columnwise", layouts.NATIVE_COLUMNS)):
        at = {"direction": direction, "rows": rows, "cols": cols, "groups": groups}
        codes = math.prod(layouts.codes_shape(**fields(spec, direction), layout=native, **at))
        per_byte = 2 if spec.format == "e2m1" else 1
        assert codes * per_byte >= rows * cols
        plain = math.prod(layouts.scales_shape(**fields(spec, direction), layout=layouts.PLAIN, **at))
        scales = layouts.scales_shape(**fields(spec, direction), layout=native, **at)
        if not spec.hadamard:  # plain Hadamard data count their padding rows, panels hold theirs anyway
            assert (
                math.prod(scales) >= plain if direction == "rowwise" else math.prod(scales) >= min(plain, rows * cols)
            )


def test_native_shapes_by_example() -> None:
    """layouts.h: M = 300 rows, C = 130 columns, G = 3 groups, so P = floor((300 + 3 * 127) / 128) = 5."""
    at = {"rows": 300, "cols": 130, "groups": 3}
    rows = {**at, "direction": "rowwise", "layout": "rows"}
    panels = {**at, "direction": "columnwise", "layout": "panels"}
    mx, nv = {"format": "e4m3", "scaling": "mxfp8"}, {"format": "e2m1", "scaling": "nvfp4"}
    block = {"format": "e4m3", "scaling": "block"}
    assert layouts.codes_shape(**mx, **rows) == (300, 130)
    assert layouts.codes_shape(**nv, **rows) == (300, 65)
    assert layouts.codes_shape(**mx, **panels) == (5, 130, 128)
    assert layouts.codes_shape(**nv, **panels) == (5, 130, 64)
    assert layouts.scales_shape(**block, **rows) == (2, 300)
    assert layouts.scales_shape(**block, **{**rows, "rows": 301}) == (2, 304)  # whole 16-byte loads of fp32 scales
    assert layouts.scales_shape(**{**block, "square": True}, **rows) == (5, 2)
    assert layouts.scales_shape(**mx, **rows) == (300, 5)
    assert layouts.scales_shape(**block, **panels) == (5, 132)
    assert layouts.scales_shape(**mx, **panels) == (5, 130, 4)
    assert layouts.scales_shape(**nv, **panels) == (5, 130, 8)
    assert layouts.scales_shape(format="e4m3", scaling="row", **panels) == (3, 130)
    assert layouts.scales_shape(format="e4m3", scaling="current", **panels) == (3,)
    stacked = {"rows": 3 * 100, "matrix_rows": 100, "cols": 130, "groups": 3}
    assert layouts.codes_shape(**nv, **stacked, direction="rowwise", layout="rows") == (3, 100, 65)
    assert layouts.codes_shape(**mx, **stacked, direction="columnwise", layout="panels") == (3, 130, 128)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"layout": "panels"}, "layout is 'panels'; rowwise data have one of plain, rows"),
        ({"direction": "columnwise", "layout": "rows"}, "columnwise data have one of plain, panels"),
        ({"direction": "diagonal"}, "it is one of rowwise, columnwise"),
        ({"scaling": "tensor"}, "scaling is 'tensor'; it is one of delayed"),
        ({"matrix_rows": 7}, "4 matrices of 7 rows have 28"),
    ],
)
def test_what_is_no_layout_is_refused(wrong: dict[str, object], reason: str) -> None:
    fine: dict[str, object] = {"format": "e4m3", "scaling": "row", "layout": "rows", "direction": "rowwise"}
    arguments = {**fine, "rows": 30, "cols": 8, "groups": 4, **wrong}
    for shape in (layouts.codes_shape, layouts.scales_shape):
        with pytest.raises(ValueError, match=reason):
            shape(**arguments)  # type: ignore[arg-type]
