"""Quantizers of rows, of rows that an index names, of stacked matrices and of MXFP4, and what is made of codes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from problems import (
    COLS,
    DIRECTIONS,
    DTYPES,
    NATIVE_LAYOUT,
    POISON,
    SIZES,
    SPECS,
    Extras,
    Place,
    Plane,
    Shape,
    address,
    filled,
    new_plane,
    quantize,
    quantizer,
)
from sanitizing.comparison import Comparison
from torch import Tensor

import octavo_native as native
from octavo_native import layouts


def quantizers(check: Comparison) -> None:
    """Every spec, planes and layouts; sizes, columns and dtypes in turn. Dequantize and convert what was made."""
    turn = itertools.count()
    for spec, which, native_layout, dtype in itertools.product(SPECS, (1, 2, 3), (False, True), DTYPES):
        number = next(turn)
        shape = Shape(SIZES[number % len(SIZES)], COLS[number % len(COLS)])
        wanted = [direction for bit, direction in enumerate(DIRECTIONS) if which >> bit & 1]
        planes = {name: NATIVE_LAYOUT[name] if native_layout else layouts.PLAIN for name in wanted}
        extras = Extras(wanted=("amax", "dequantized") if which & 1 and number % 4 == 0 else ("amax",))
        _quantized(check, spec, shape, dtype, planes, extras, number)


def in_turns(check: Comparison) -> None:
    """Specs whose two passes are one launch from 32 MB on: rows in groups of a few panels, and matrices."""
    for number, spec in enumerate(SPECS):
        if spec["scaling"] not in ("current", "row") and not (spec["scaling"] == "nvfp4" and spec.get("square")):
            continue
        sizes = (1300, 0, 129) * 11 + (1000,)
        shape = Shape(sizes, 1040) if number % 2 else Shape((0,) * 66, 1040, matrix_rows=250)
        _quantized(check, spec, shape, "bfloat16", dict(NATIVE_LAYOUT), Extras(), 0)


def kept_rows(check: Comparison) -> None:
    """Rows of row scaling that are wide enough to stay in registers, with their last columns in part of a CTA."""
    of_rows = (spec for spec in SPECS if spec["scaling"] == "row")
    for spec, dtype, cols in itertools.product(of_rows, ("bfloat16", "float16"), (4104, 8192)):
        planes = {"rowwise": NATIVE_LAYOUT["rowwise"]}
        _quantized(check, spec, Shape(SIZES[0], cols), dtype, planes, Extras(), 0)


def indexed(check: Comparison) -> None:
    """Rows that are read where tokens stand, some of them nowhere, beside the same rows moved on the CPU."""
    for number, (spec, dtype, which) in enumerate(itertools.product(SPECS, DTYPES, (1, 2, 3))):
        shape = Shape(SIZES[number % 4], COLS[number % len(COLS)])
        each = 1 + number % 3
        count = -(-shape.rows // each) + number % 2
        tokens = torch.randn(count, shape.cols, generator=check.draw).to(DTYPES[dtype])
        order = torch.randint(count * each, (shape.rows,), generator=check.draw)
        order[::7] = torch.tensor([-1, count * each, 1 << 40, -(1 << 62)])[number % 4]
        inside = (order >= 0) & (order < count * each)
        moved = torch.where(inside[:, None], tokens[order.clamp(0, count * each - 1) // each], 0)
        planes = {
            name: (NATIVE_LAYOUT[name], layouts.PLAIN)[number // 3 % 2]
            for bit, name in enumerate(DIRECTIONS)
            if which >> bit & 1
        }
        gap, wanted = (0, 8, 3)[number % 3], ("amax",) if which & 1 else ("amax", "dbias")
        through = Extras(tensors={"index": order}, wanted=wanted, source={"each": each, "count": count})
        held = torch.full((count, shape.cols + gap), torch.nan, dtype=DTYPES[dtype])[:, : shape.cols]
        held.copy_(tokens)
        # a copy to the device would close the gaps
        array = torch.empty(count * held.stride(0), dtype=held.dtype, device=check.place.device)
        x = array.as_strided(held.shape, held.stride()).copy_(held)
        what = f"quantize {spec} {dtype} cols {shape.cols} of {count} tokens, {each} choices each"
        ours, extra = quantize(spec, shape, x, dtype, planes, check.place, through)
        alone = check.rows(shape, shape.cols, dtype, check.reference, moved)
        theirs, other = quantize(spec, shape, alone, dtype, planes, check.reference, Extras(wanted=wanted))
        check.planes(what, spec, shape, ours, theirs)
        check.same(f"{what} amax", extra["amax"].cpu().numpy(), other["amax"].numpy())
        if "dbias" in extra:
            check.summed(what, shape, moved.double(), extra["dbias"].cpu().view(torch.float32))


def unchanged(check: Comparison) -> None:
    """With the flag set no output is written."""
    for number, spec in enumerate(SPECS):
        shape = Shape(SIZES[0], COLS[number % len(COLS)])
        x = check.rows(shape, shape.cols, "bfloat16", check.place, check.values(shape, shape.cols, "bfloat16"))
        flag = Extras(tensors={"unchanged": torch.ones(1, dtype=torch.int32)}, wanted=("amax", "activated"))
        planes, extra = quantize(spec, shape, x, "bfloat16", NATIVE_LAYOUT, check.place, flag)
        made = [array for plane in planes for array in (plane.codes, plane.scales, plane.factor)]
        for array in (*made, *extra.values()):
            if array is not None:
                kept = array.cpu().numpy()
                check.same(f"unchanged {spec}", kept, np.full_like(kept, POISON))


def stacks(check: Comparison) -> None:
    """Stacked matrices, square blocks and not."""
    for number, (spec, native_layout) in enumerate(itertools.product(SPECS, (False, True))):
        if spec.get("hadamard"):
            continue
        shape = Shape((0, 0, 0), COLS[number % len(COLS)], matrix_rows=(129, 48, 17)[number % 3])
        planes = {name: NATIVE_LAYOUT[name] if native_layout else layouts.PLAIN for name in DIRECTIONS}
        _quantized(check, {**spec, "operand": "w"}, shape, tuple(DTYPES)[number % 3], planes, Extras(), number)


def interleaved(check: Comparison) -> None:
    """Matrices whose columns or rows take turns, of specs that CUDA serves; some with more tiles than fit at once."""
    served = [spec for spec in SPECS if spec["scaling"] in ("delayed", "current")]
    served += [{"scaling": "block", "format": name, "square": True} for name in ("e4m3", "e5m2")]
    axes = ("interleaved_cols", "interleaved_rows")
    for number, (spec, axis, block) in enumerate(itertools.product(served, axes, (1, 8, 24))):
        large = spec["scaling"] == "current" and block == 1
        shape = Shape((0,) * (40 if large else 3), 1056 if large else 288, matrix_rows=(432, 240, 144)[number % 3])
        which = 3 if large else number % 3 + 1
        planes = {name: NATIVE_LAYOUT[name] for bit, name in enumerate(DIRECTIONS) if which >> bit & 1}
        extras = Extras(wanted=() if spec["scaling"] == "block" else ("amax",), source={axis: block})
        _quantized(check, {**spec, "operand": "w"}, shape, "bfloat16", planes, extras, 0)


def packed(check: Comparison) -> None:
    """Matrices of MXFP4 quantized from their bytes, beside the CPU's codes of their values."""
    spec = {"scaling": "block", "format": "e4m3", "square": True}
    for number, (rows, cols) in enumerate(((129, 288), (1, 32), (128, 128), (300, 96), (16, 544))):
        for which, native_layout in itertools.product((1, 2, 3), (False, True)):
            shape = Shape((0, 0), cols, matrix_rows=rows)
            codes, scales = (
                torch.randint(low, high, (shape.rows, cols // per), generator=check.draw, dtype=torch.uint8)
                for low, high, per in ((0, 256, 2), (100, 150, 32))
            )
            scales[::77] = torch.tensor([0, 255, 254, 1, 127][number], dtype=torch.uint8)
            wanted = [direction for bit, direction in enumerate(DIRECTIONS) if which >> bit & 1]
            planes = {name: NATIVE_LAYOUT[name] if native_layout else layouts.PLAIN for name in wanted}
            used = {**spec, "power_of_two": number % 2 == 0}
            host = Place(False)
            values = filled((shape.rows, cols), 2, host)
            native.expand_mxfp4(
                cuda=False, codes=address(codes), scales=address(scales), blocks=scales.numel(),
                out=address(values), out_dtype=native.DTYPES["bfloat16"],
            )  # fmt: skip
            x = values.view(torch.bfloat16).view(shape.rows, cols)
            theirs, _ = quantize(used, shape, x, "bfloat16", planes, host, Extras())
            if check.place.cuda:
                through, held = Extras(tensors={"mxfp4_scales": scales}), codes.to(check.place.device)
                ours, _ = quantize(used, shape, held, "bfloat16", planes, check.place, through)
                check.planes(f"MXFP4 {rows} x {cols} {planes}", used, shape, ours, theirs)


def rounded(check: Comparison) -> None:
    """Weights that are rounded to MXFP4 first, in blocks along rows and down columns: rows of every magnitude, NaN and
    infinities, stacked and ragged."""
    spec = {"scaling": "block", "format": "e4m3", "square": True, "power_of_two": True}
    kinds = itertools.product(DIRECTIONS, ("bfloat16", "float32"), (False, True), (False, True), (1, 2, 3))
    for number, (axis, dtype, stacked, native_layout, which) in enumerate(kinds):
        cols = COLS[number % len(COLS)]
        shape = Shape((0, 0), cols, matrix_rows=(129, 40)[number % 2]) if stacked else Shape(SIZES[number % 7], cols)
        powers = torch.randint(-148, 128, (shape.rows, 1), generator=check.draw).float()
        values = torch.randn(shape.rows, cols, generator=check.draw) * torch.exp2(powers / 2).square()
        values[shape.rows // 2 :: 97, cols // 2] = (torch.nan, torch.inf, -0.0)[number % 3]
        wanted = [direction for bit, direction in enumerate(DIRECTIONS) if which >> bit & 1]
        planes = {name: NATIVE_LAYOUT[name] if native_layout else layouts.PLAIN for name in wanted}
        used = {**spec, "operand": "w", "mxfp4": native.DIRECTIONS[axis]}
        _quantized(check, used, shape, dtype, planes, Extras(), number, values.to(DTYPES[dtype]))


def _quantized(
    check: Comparison,
    spec: dict[str, Any],
    shape: Shape,
    dtype: str,
    planes: dict[str, str],
    extras: Extras,
    number: int,
    given: Tensor | None = None,
) -> None:
    values = check.values(shape, shape.cols, dtype) if given is None else given
    what = f"quantize {spec} {dtype} sizes {shape.sizes} cols {shape.cols} matrix rows {shape.matrix_rows}"

    def run(place: Place) -> tuple[list[Plane], dict[str, Tensor]]:
        x = check.rows(shape, shape.cols, dtype, place, values, gap=0 if shape.matrix_rows else (0, 8, 3)[number % 3])
        return quantize(spec, shape, x, dtype, planes, place, extras)

    made = check.both(what, run)
    if made is None:
        return
    (ours, extra), (theirs, other) = made
    check.planes(what, spec, shape, ours, theirs)
    for name in extra:
        end = 2 * shape.used * shape.cols if name == "dequantized" else None
        check.same(f"{what} {name}", extra[name].cpu().numpy()[:end], other[name].cpu().numpy()[:end])
    for one, reference in zip(ours, theirs, strict=True):
        _dequantized(check, what, spec, shape, one, reference, tuple(DTYPES)[number % 3])
        _converted(check, what, spec, shape, one, reference)


def _dequantized(
    check: Comparison, what: str, spec: dict[str, Any], shape: Shape, ours: Plane, theirs: Plane, dtype: str
) -> None:
    columnwise = ours.direction == "columnwise"
    to_panels = ours.layout == layouts.NATIVE_COLUMNS
    plain_rows = shape.rows
    if columnwise and spec.get("hadamard"):
        plain_rows = layouts.block_bound(shape.rows, len(shape.sizes), 16) * 16
    bound = layouts.panel_bound(shape.rows, len(shape.sizes), shape.matrix_rows)
    element = DTYPES[dtype].itemsize
    for into_panels in (False, True) if to_panels else (False,):
        count = bound * 128 * shape.cols if into_panels else plain_rows * shape.cols

        def run(place: Place, into: bool = into_panels, size: int = count) -> Tensor:
            plane = ours if place is check.place else theirs
            out = filled((size,), element, place)
            plan = shape.plan(place)
            quantizer(spec).dequantize(
                **place.common,
                **shape.arguments,
                direction=native.DIRECTIONS[plane.direction],
                codes=address(plane.codes),
                scales=address(plane.scales),
                global_=address(plane.factor),
                layout=int(plane.layout != layouts.PLAIN),
                cols=shape.cols,
                plan=address(plan),
                out=address(out),
                out_dtype=native.DTYPES[dtype],
                out_layout=int(into),
            )
            return out

        made = check.both(f"dequantize of {what}", run)
        if made is not None:
            panels = sum(-(-size // 128) for size in shape.real)
            end = element * panels * 128 * shape.cols if into_panels else None
            one, other = (value.cpu().numpy()[:end] for value in made)
            check.same(f"dequantize {ours.direction} {ours.layout} to {dtype} of {what}", one, other)


def _converted(check: Comparison, what: str, spec: dict[str, Any], shape: Shape, ours: Plane, theirs: Plane) -> None:
    to_native = ours.layout == layouts.PLAIN
    layout = NATIVE_LAYOUT[ours.direction] if to_native else layouts.PLAIN

    def run(place: Place) -> Plane:
        plane = ours if place is check.place else theirs
        into = new_plane(spec, shape, plane.direction, layout, place)
        plan = shape.plan(place)
        quantizer(spec).convert(
            **place.common,
            **shape.arguments,
            direction=native.DIRECTIONS[plane.direction],
            to=int(to_native),
            codes=address(plane.codes),
            scales=address(plane.scales),
            into_codes=address(into.codes),
            into_scales=address(into.scales),
            cols=shape.cols,
            plan=address(plan),
        )
        return Plane(into.direction, into.layout, into.codes, into.scales, None)

    made = check.both(f"convert of {what}", run)
    if made is not None:
        check.planes(f"convert of {what}", spec, shape, [made[0]], [made[1]])
