"""Every kernel once on small problems, each array allocated exactly, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck  python native/tests/sanitize.py
    compute-sanitizer --tool racecheck python native/tests/sanitize.py
    compute-sanitizer --tool initcheck python native/tests/sanitize.py --tail unwritten
    compute-sanitizer --tool synccheck python native/tests/sanitize.py

Results are compared with the CPU kernels bit for bit, in the regions that the layouts define. Outputs are filled
before each call; workspaces are not, since their content at entry is undefined. `--tail unwritten` leaves the rows
past the sum without a value, so that initcheck sees whoever reads them; otherwise they are NaN. `--device cpu`
compares three threads with one instead, where there is no GPU. `--only gemms --share 0/4` runs every fourth GEMM from
the first on, for a tool that is too slow for all of them in one run.

What is run is every scaling and format, row, column and both planes, both layouts, three dtypes, ragged and stacked
operands, MXFP4 and rounding to it, every prologue, dequantize, convert, swizzle, pack and plan, moved rows, routers,
AdamW's steps, and every tile of every GEMM, on values whose sums are exact in any order; shapes, sizes and dtypes take
turns rather than being multiplied out, so that a tool is done in seconds. Sizes hold empty groups, tails, and values
that are negative, past the rows or near the ends of int64.
"""

from __future__ import annotations

import os

# without it torch hands out parts of larger blocks, and an overrun hits memory that is allocated
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import argparse
import itertools
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))  # as native/conftest.py does for pytest
from adamw_calls import BF16, Run, define, draw, planes, same, step
from gemm_launches import KINDS, Launch
from move_calls import CASES, draw_index, draw_rows, poisoned, route, stream
from problems import (
    ACTIVATIONS,
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
    valid,
)
from router_bounds import gradient_is_bound, weights_are_bound
from router_calls import rule_of
from torch import Tensor

import octavo_native as native
import octavo_numerics as numerics
from octavo.router import RouterRule, Score
from octavo_native import layouts

SHOWN = 30
"""Faults that are printed."""

PARTS = (
    *("plans", "quantizers", "indexed", "unchanged", "stacks", "packed", "rounded", "prologues", "reshuffles"),
    *("moves", "routers", "optimizers", "gemms"),
)
"""Methods of `Check`."""


class Check:
    """Counts comparisons and keeps what differs."""

    def __init__(self, place: Place, reference: Place, tail: str, share: slice = slice(None)) -> None:
        self.place, self.reference, self.tail, self.share = place, reference, tail, share
        self.equal = 0
        self.faults: list[str] = []
        self.refusals: Counter[str] = Counter()
        self.draw = torch.Generator().manual_seed(20)

    def rows(self, shape: Shape, cols: int, dtype: str, place: Place, values: Tensor, gap: int = 0) -> Tensor:
        """`values` in the used rows of an array on `place`, the tail as `--tail` says; `gap` elements between rows."""
        x = torch.empty(shape.rows, cols + gap, dtype=DTYPES[dtype], device=place.device)[:, :cols]
        x[: shape.used] = values[: shape.used].to(place.device)
        if self.tail == "nan" or not place.cuda:
            x[shape.used :] = torch.nan
        return x

    def values(self, shape: Shape, cols: int, dtype: str) -> Tensor:
        """Normal values of several magnitudes, with zeros and a block of zeros."""
        values = (
            torch.randn(shape.rows, cols, generator=self.draw) * torch.exp2(torch.arange(shape.rows) % 9 - 4.0)[:, None]
        )
        values[shape.rows // 2, : cols // 2] = 0
        return values.to(DTYPES[dtype])

    def same(self, what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Bit for bit, or a fault with the first difference."""
        different = np.flatnonzero(np.ascontiguousarray(ours).reshape(-1) != np.ascontiguousarray(theirs).reshape(-1))
        if not different.size:
            self.equal += 1
            return
        first = int(different[0])
        one, other = (int(np.ascontiguousarray(part).reshape(-1)[first]) for part in (ours, theirs))
        self.faults.append(
            f"{what}: {different.size} of {ours.size} bytes differ, the first is byte {first}: "
            f"{one:#x}, and {other:#x} on one CPU thread"
        )

    def both(self, what: str, run: Any) -> tuple[Any, Any] | None:
        """`run(place)` on both; None where they refuse the arguments. One that refuses alone is a fault."""
        results, errors = [], []
        for place in (self.reference, self.place):
            try:
                results.append(run(place))
            except ValueError as error:
                errors.append(str(error))
        if len(errors) == 1:
            self.faults.append(f"{what}: one device refuses what the other runs: {errors[0]}")
            return None
        if errors:
            self.refusals[errors[0]] += 1
            return None
        return results[1], results[0]

    def planes(self, what: str, spec: dict[str, Any], shape: Shape, ours: list[Plane], theirs: list[Plane]) -> None:
        """Every plane's defined bytes."""
        for one, other in zip(ours, theirs, strict=True):
            names = ("codes", "scales", "factors")
            for name, a, b in zip(names, valid(spec, shape, one), valid(spec, shape, other), strict=False):
                self.same(f"{what} {one.direction} {one.layout} {name}", a, b)

    def plans(self) -> None:
        """Good and bad sizes, both widths, one group and many."""
        many = tuple(7 * i % 13 for i in range(1024))
        for sizes in (*SIZES, many):
            shape = Shape(sizes, 16)
            for wide in (True, False):
                made = [shape.plan(place, wide) for place in (self.place, self.reference)]
                ours, theirs = (value.cpu().numpy().view(np.uint8) for value in made)
                self.same(f"plan of {len(sizes)} groups {sizes[:8]}", ours, theirs)

    def quantizers(self) -> None:
        """Every spec, planes and layouts; sizes, columns and dtypes in turn. Dequantize and convert what was made."""
        turn = itertools.count()
        for spec, which, native_layout, dtype in itertools.product(SPECS, (1, 2, 3), (False, True), DTYPES):
            number = next(turn)
            shape = Shape(SIZES[number % len(SIZES)], COLS[number % len(COLS)])
            wanted = [direction for bit, direction in enumerate(DIRECTIONS) if which >> bit & 1]
            planes = {name: NATIVE_LAYOUT[name] if native_layout else layouts.PLAIN for name in wanted}
            extras = Extras(wanted=("amax", "dequantized") if which & 1 and number % 4 == 0 else ("amax",))
            self._quantized(spec, shape, dtype, planes, extras, number)

    def indexed(self) -> None:
        """Rows that are read where tokens stand, some of them nowhere, beside the same rows moved on the CPU."""
        for number, (spec, dtype, which) in enumerate(itertools.product(SPECS, DTYPES, (1, 2, 3))):
            shape = Shape(SIZES[number % 4], COLS[number % len(COLS)])
            each = 1 + number % 3
            count = -(-shape.rows // each) + number % 2
            tokens = torch.randn(count, shape.cols, generator=self.draw).to(DTYPES[dtype])
            order = torch.randint(count * each, (shape.rows,), generator=self.draw)
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
            array = torch.empty(count * held.stride(0), dtype=held.dtype, device=self.place.device)
            x = array.as_strided(held.shape, held.stride()).copy_(held)
            what = f"quantize {spec} {dtype} cols {shape.cols} of {count} tokens, {each} choices each"
            ours, extra = quantize(spec, shape, x, dtype, planes, self.place, through)
            alone = self.rows(shape, shape.cols, dtype, self.reference, moved)
            theirs, other = quantize(spec, shape, alone, dtype, planes, self.reference, Extras(wanted=wanted))
            self.planes(what, spec, shape, ours, theirs)
            self.same(f"{what} amax", extra["amax"].cpu().numpy(), other["amax"].numpy())
            if "dbias" in extra:
                self._summed(what, shape, moved.double(), extra["dbias"].cpu().view(torch.float32))

    def unchanged(self) -> None:
        """With the flag set no output is written."""
        for number, spec in enumerate(SPECS):
            shape = Shape(SIZES[0], COLS[number % len(COLS)])
            x = self.rows(shape, shape.cols, "bfloat16", self.place, self.values(shape, shape.cols, "bfloat16"))
            flag = Extras(tensors={"unchanged": torch.ones(1, dtype=torch.int32)}, wanted=("amax", "activated"))
            planes, extra = quantize(spec, shape, x, "bfloat16", NATIVE_LAYOUT, self.place, flag)
            made = [array for plane in planes for array in (plane.codes, plane.scales, plane.factor)]
            for array in (*made, *extra.values()):
                if array is not None:
                    kept = array.cpu().numpy()
                    self.same(f"unchanged {spec}", kept, np.full_like(kept, POISON))

    def stacks(self) -> None:
        """Stacked matrices, square blocks and not."""
        for number, (spec, native_layout) in enumerate(itertools.product(SPECS, (False, True))):
            if spec.get("hadamard"):
                continue
            shape = Shape((0, 0, 0), COLS[number % len(COLS)], matrix_rows=(129, 48, 17)[number % 3])
            planes = {name: NATIVE_LAYOUT[name] if native_layout else layouts.PLAIN for name in DIRECTIONS}
            self._quantized({**spec, "operand": "w"}, shape, tuple(DTYPES)[number % 3], planes, Extras(), number)

    def packed(self) -> None:
        """Matrices of MXFP4 quantized from their bytes, beside the CPU's codes of their values."""
        spec = {"scaling": "block", "format": "e4m3", "square": True}
        for number, (rows, cols) in enumerate(((129, 288), (1, 32), (128, 128), (300, 96), (16, 544))):
            for which, native_layout in itertools.product((1, 2, 3), (False, True)):
                shape = Shape((0, 0), cols, matrix_rows=rows)
                codes, scales = (
                    torch.randint(low, high, (shape.rows, cols // per), generator=self.draw, dtype=torch.uint8)
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
                if self.place.cuda:
                    through, held = Extras(tensors={"mxfp4_scales": scales}), codes.to(self.place.device)
                    ours, _ = quantize(used, shape, held, "bfloat16", planes, self.place, through)
                    self.planes(f"MXFP4 {rows} x {cols} {planes}", used, shape, ours, theirs)

    def rounded(self) -> None:
        """Weights that are rounded to MXFP4 first: rows of every magnitude, NaN and infinities, stacked and ragged."""
        spec = {"scaling": "block", "format": "e4m3", "square": True, "power_of_two": True, "mxfp4": True}
        kinds = itertools.product(("bfloat16", "float32"), (False, True), (False, True), (1, 2, 3))
        for number, (dtype, stacked, native_layout, which) in enumerate(kinds):
            cols = COLS[number % len(COLS)]
            shape = (
                Shape((0, 0), cols, matrix_rows=(129, 40)[number % 2]) if stacked else Shape(SIZES[number % 7], cols)
            )
            powers = torch.randint(-148, 128, (shape.rows, 1), generator=self.draw).float()
            values = torch.randn(shape.rows, cols, generator=self.draw) * torch.exp2(powers / 2).square()
            values[shape.rows // 2 :: 97, cols // 2] = (torch.nan, torch.inf, -0.0)[number % 3]
            wanted = [direction for bit, direction in enumerate(DIRECTIONS) if which >> bit & 1]
            planes = {name: NATIVE_LAYOUT[name] if native_layout else layouts.PLAIN for name in wanted}
            self._quantized({**spec, "operand": "w"}, shape, dtype, planes, Extras(), number, values.to(DTYPES[dtype]))

    def _quantized(
        self,
        spec: dict[str, Any],
        shape: Shape,
        dtype: str,
        planes: dict[str, str],
        extras: Extras,
        number: int,
        given: Tensor | None = None,
    ) -> None:
        values = self.values(shape, shape.cols, dtype) if given is None else given
        what = f"quantize {spec} {dtype} sizes {shape.sizes} cols {shape.cols} matrix rows {shape.matrix_rows}"

        def run(place: Place) -> tuple[list[Plane], dict[str, Tensor]]:
            x = self.rows(
                shape, shape.cols, dtype, place, values, gap=0 if shape.matrix_rows else (0, 8, 3)[number % 3]
            )
            return quantize(spec, shape, x, dtype, planes, place, extras)

        made = self.both(what, run)
        if made is None:
            return
        (ours, extra), (theirs, other) = made
        self.planes(what, spec, shape, ours, theirs)
        for name in extra:
            end = 2 * shape.used * shape.cols if name == "dequantized" else None
            self.same(f"{what} {name}", extra[name].cpu().numpy()[:end], other[name].cpu().numpy()[:end])
        for one, reference in zip(ours, theirs, strict=True):
            self._dequantized(what, spec, shape, one, reference, tuple(DTYPES)[number % 3])
            self._converted(what, spec, shape, one, reference)

    def _dequantized(
        self, what: str, spec: dict[str, Any], shape: Shape, ours: Plane, theirs: Plane, dtype: str
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
                plane = ours if place is self.place else theirs
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

            made = self.both(f"dequantize of {what}", run)
            if made is not None:
                panels = sum(-(-size // 128) for size in shape.real)
                end = element * panels * 128 * shape.cols if into_panels else None
                one, other = (value.cpu().numpy()[:end] for value in made)
                self.same(f"dequantize {ours.direction} {ours.layout} to {dtype} of {what}", one, other)

    def _converted(self, what: str, spec: dict[str, Any], shape: Shape, ours: Plane, theirs: Plane) -> None:
        to_native = ours.layout == layouts.PLAIN
        layout = NATIVE_LAYOUT[ours.direction] if to_native else layouts.PLAIN

        def run(place: Place) -> Plane:
            plane = ours if place is self.place else theirs
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

        made = self.both(f"convert of {what}", run)
        if made is not None:
            self.planes(f"convert of {what}", spec, shape, [made[0]], [made[1]])

    def prologues(self) -> None:
        """Activations, their derivatives and norms. Codes are compared with those of the rounded values quantized
        alone on the CPU: it is the quantizer that is exact."""
        kinds = [("activation", name) for name in ACTIVATIONS]
        kinds += [("activation_grad", name) for name in ACTIVATIONS]
        kinds += [("norm", name) for name in native.NORMS]
        specs = [SPECS[0], SPECS[2], SPECS[4], SPECS[6], SPECS[9], SPECS[12], SPECS[14]]
        for number, (kind, name) in enumerate(kinds * 2):
            self._fused(specs[number % len(specs)], kind, name, tuple(DTYPES)[number % 3], number)
        # SwiGLU, plain and clamped, has kernels of its own, of aligned bf16 rows
        names = ("swiglu", "clamped_swiglu")
        for number, (kind, spec, name) in enumerate(itertools.product(("activation", "activation_grad"), specs, names)):
            self._fused(spec, kind, name, "bfloat16", 2 * number)

    def _fused(self, spec: dict[str, Any], kind: str, name: str, dtype: str, number: int) -> None:
        gated = name in native.GATED
        inner = (64, 38)[number % 2]
        out_cols = 2 * inner if kind == "activation_grad" and gated else inner
        in_cols = 2 * inner if gated and kind != "norm" else inner
        shape = Shape(SIZES[number % 4], out_cols)
        values = self.values(shape, in_cols, dtype)
        prologue = {"prologue": native.PROLOGUES[kind]}
        prologue |= {"norm": native.NORMS[name]} if kind == "norm" else {"activation": native.ACTIVATIONS[name]}
        tensors: dict[str, Tensor] = {}
        wanted = ["amax", "activated"]
        if kind == "norm":
            tensors["gamma"] = torch.randn(in_cols, generator=self.draw).to(DTYPES[dtype])
            wanted += ["rstd"]
            if name == "layer":
                tensors["beta"] = torch.randn(in_cols, generator=self.draw).to(DTYPES[dtype])
                wanted += ["mean"]
        elif number % 2:
            tensors["probs"] = torch.rand(shape.rows, generator=self.draw)
        if kind == "activation_grad":
            tensors["dy"] = self.values(shape, inner, dtype)
            wanted += ["dbias"]
        planes = {direction: NATIVE_LAYOUT[direction] for direction in DIRECTIONS}
        what = f"{kind} {name} + {spec} {dtype}"

        def run(place: Place) -> Any:
            x = self.rows(shape, in_cols, dtype, place, values)
            held = Extras(prologue, dict(tensors), tuple(wanted), 1e-5)
            if "dy" in tensors:
                held.tensors["dy"] = self.rows(shape, inner, dtype, place, tensors["dy"])
            return quantize(spec, shape, x, dtype, planes, place, held)

        made = self.both(what, run)
        if made is None:
            return
        ours, extra = made[0]
        activated = extra["activated"].cpu().view(DTYPES[dtype]).view(shape.rows, out_cols)
        alone = self.rows(shape, out_cols, dtype, self.reference, activated)
        theirs, other = quantize(spec, shape, alone, dtype, planes, self.reference, Extras(wanted=("amax",)))
        self.planes(what, spec, shape, ours, theirs)
        self.same(f"{what} amax", extra["amax"].cpu().numpy(), other["amax"].numpy())
        for name_of in ("mean", "rstd"):
            if name_of in extra and not extra[name_of].cpu().view(torch.float32)[: shape.used].isfinite().all():
                self.faults.append(f"{what}: {name_of} has values that are not finite")
        if "dbias" in extra:
            self._summed(what, shape, activated.double(), extra["dbias"].cpu().view(torch.float32))

    def _summed(self, what: str, shape: Shape, values: Tensor, dbias: Tensor) -> None:
        """fp32 sums of n terms in any order are within n * 2^-24 of the sum of magnitudes."""
        start = 0
        for group, size in enumerate(shape.real):
            rows = values[start : start + size]
            wrong = (dbias.view(len(shape.sizes), -1)[group].double() - rows.sum(0)).abs()
            if (wrong > size * 2.0**-24 * rows.abs().sum(0)).any():
                self.faults.append(f"{what}: dbias of group {group} is off by {wrong.max().item()}")
            start += size
        self.equal += 1

    def reshuffles(self) -> None:
        """Swizzled scales and packed E2M1, there and back; MXFP4 to values."""
        for outer, blocks in ((1, 1), (128, 4), (130, 9), (257, 3)):
            tiles = layouts.round_up(outer, 128) * layouts.round_up(blocks, 4)
            sides = {"outer": outer, "blocks": blocks}
            self._there_and_back(native.swizzle_scales, "to_swizzled", sides, outer * blocks, tiles, most=256)
        for rows, cols in ((1, 1), (3, 37), (130, 64)):
            halves = rows * layouts.ceil_div(cols, 2)
            self._there_and_back(native.pack_e2m1, "pack", {"rows": rows, "cols": cols}, rows * cols, halves, most=16)
        for blocks, dtype in itertools.product((1, 7, 1000), DTYPES):
            self._expanded(blocks, dtype)

    def _expanded(self, blocks: int, dtype: str) -> None:
        lengths = 16 * blocks, blocks
        codes, scales = (torch.randint(256, (n,), generator=self.draw, dtype=torch.uint8) for n in lengths)

        def run(place: Place) -> Tensor:
            held, out = [array.to(place.device) for array in (codes, scales)], filled((32 * blocks,), 4, place)
            native.expand_mxfp4(
                cuda=place.cuda, codes=address(held[0]), scales=address(held[1]), blocks=blocks, out=address(out),
                out_dtype=native.DTYPES[dtype],
            )  # fmt: skip
            return out.cpu()

        made = self.both(f"expand_mxfp4 {blocks} {dtype}", run)
        if made is not None:
            self.same(f"expand_mxfp4 {blocks} {dtype}", made[0].numpy(), made[1].numpy())

    def moves(self) -> None:
        """Routing, and rows that move with it, weighted and not, close together and apart."""
        for number, (case, dtype) in enumerate(itertools.product(CASES, DTYPES)):
            self._moved(case, dtype, gap=(0, 8, 3)[number % 3], weighted=number % 2 == 0)

    def _moved(self, case: tuple[int, int, int, int], dtype: str, gap: int, weighted: bool) -> None:
        tokens, each, cols, groups = case
        index, weights = draw_index(self.draw, tokens, each, groups), torch.rand(tokens, each, generator=self.draw)
        seed = int(torch.randint(1 << 40, (), generator=self.draw))

        def run(place: Place) -> list[Tensor]:
            held, draw = route(place, index, groups), torch.Generator().manual_seed(seed)
            x = draw_rows(draw, tokens, cols, dtype, gap, place)
            rows = draw_rows(draw, tokens * each, cols, dtype, gap, place)
            rows[held.used :] = torch.nan
            factors = weights.to(place.device) if weighted else None
            moved = [held.move("permute_rows", x, factors), held.move("combine_rows", rows, factors)]
            products = held.dot(rows, x), held.dot(rows.abs(), x.abs())
            return [value.cpu() for value in (*held.tensors, *moved, *products)]

        made = self.both(f"moves {case} {dtype}", run)
        if made is None:
            return
        names = ("sizes", "order", "position", "routed", "rows", "y")
        for name, ours, theirs in zip(names, made[0], made[1], strict=False):
            self.same(f"{name} of {case} {dtype}", ours.view(torch.uint8).numpy(), theirs.view(torch.uint8).numpy())
        # fp32 sums of `cols` products are within (cols + 2) 2^-24 of the sum of magnitudes; the CPU's are rounded once
        wrong = (made[0][-2].double() - made[1][-2].double()).abs()
        if (wrong > (cols + 4) * 2.0**-24 * made[1][-1].double()).any():
            self.faults.append(f"products of {case} {dtype} are off by {wrong.max().item()}")

    def routers(self) -> None:
        """Choices by every score, by groups, and taken as given; the gradient of the logits."""
        kinds = itertools.product((1, 40, 60, 128, 256, 512, 1024), get_args(Score))
        for number, (experts, score) in enumerate(kinds):
            self._routed(33, experts, min(8, experts), score, tuple(DTYPES)[number % 3], number)

    def _routed(self, tokens: int, experts: int, k: int, score: Score, dtype: str, number: int) -> None:
        grouped = experts % 4 == 0 and number % 2 == 1
        logits = torch.randn(tokens, experts, generator=self.draw).to(DTYPES[dtype])
        dweights, bias = torch.randn(tokens, k, generator=self.draw), torch.zeros(experts)
        replay = torch.randint(-1, experts + 1, (tokens, k), generator=self.draw)
        groups = {"groups": 4, "kept_groups": 2} if grouped else {}
        rule = RouterRule(k, score, renormalize=number % 4 < 2, **groups)

        def run(place: Place) -> list[Tensor]:
            held = [tensor.to(place.device) for tensor in (logits, dweights, bias, replay)]
            given = native.Logits(
                data=address(held[0]), dtype=native.DTYPES[dtype], tokens=tokens, experts=experts, stride=experts
            )
            common = {**place.common, "stream": stream(place), "rule": rule_of(rule), "logits": given}
            choices, counts = (poisoned(side, torch.int64, place) for side in ((tokens, k), (experts,)))
            weights, dlogits = (
                poisoned(side, like, place)
                for side, like in (((tokens, k), torch.float32), (logits.shape, logits.dtype))
            )
            native.choose_experts(
                **common, bias=address(held[2]) if grouped else 0, replay=address(held[3]) if number % 5 == 0 else 0,
                choices=address(choices), weights=address(weights), counts=address(counts),
            )  # fmt: skip
            native.choose_gradient(
                **common, choices=address(choices), dweights=address(held[1]), dlogits=address(dlogits)
            )
            return [tensor.cpu() for tensor in (choices, counts, weights, dlogits)]

        what = f"router of {experts} {score} {dtype}"
        made = self.both(what, run)
        if made is None:
            return
        if not grouped:  # sums of scores may tie by an identity that rounding breaks
            for name, ours, theirs in zip(("choices", "counts"), made[0], made[1], strict=False):
                self.same(f"{name} of {what}", ours.view(torch.uint8).numpy(), theirs.view(torch.uint8).numpy())
        values = logits.float().numpy().astype(dtype)
        for choices, _, weights, dlogits in made:
            choice = numerics.choose_experts(values, rule, None, choices.numpy())
            gradient = dlogits.float().numpy().astype(dtype)
            if not weights_are_bound(weights.numpy(), values, choice, rule):
                self.faults.append(f"{what}: weights are past octavo_numerics.choice_weights_bound")
            if not gradient_is_bound(gradient, values, choices.numpy(), dweights.numpy(), rule):
                self.faults.append(f"{what}: gradients are past octavo_numerics.choose_gradient_bound")

    def optimizers(self) -> None:
        """AdamW's step, which has no kernel on CPUs: against octavo_numerics."""
        if not self.place.cuda:
            return
        rng = np.random.default_rng(20)
        kinds = itertools.product(((3, 130, 132), (2, 7, 131)), (np.float32, BF16), (32, 8), (np.float32, BF16))
        for number, (shape, master, bits, grad) in enumerate(kinds):
            arrays, run = draw(rng, shape, master, grad, bits), Run(on_device=number % 2 == 1)
            held = planes(shape, NATIVE_LAYOUT["columnwise"]) if shape[2] % 4 == 0 else None
            made, wanted = step(*arrays, run, None if held is None else held.arguments), define(*arrays, run)
            wrong = [*same(made, wanted), *([] if held is None else held.differs(wanted.master))]
            self.equal += not wrong
            self.faults += [f"{name} of AdamW {shape} {master} {bits}" for name in wrong]
            values = replace(run, values=BF16)
            self.faults += [f"{name} of AdamW {shape}" for name in same(step(*arrays, values), define(*arrays, values))]

    def gemms(self) -> None:
        """Every kind of GEMM on every tile; sizes, sides, biases and accumulators in turn."""
        for number, kind in tuple(enumerate(KINDS))[self.share]:
            launch = Launch(kind, number, self.draw)
            for tile in (-1, *range(launch.tiles)):

                def run(place: Place, launch: Launch = launch, tile: int = tile) -> Tensor:
                    return launch.run(place, tile, unwritten=self.tail == "unwritten" and place.cuda)

                made = self.both(f"{launch} tile {tile}", run)
                if made is not None:
                    self.same(f"{launch} tile {tile}", *(value.cpu().numpy() for value in made))

    def _there_and_back(self, call: Any, flag: str, sides: dict[str, int], count: int, other: int, most: int) -> None:
        values = torch.randint(0, most, (count,), generator=self.draw, dtype=torch.uint8)
        what = f"{call.__name__} {sides}"

        def run(place: Place) -> tuple[Tensor, Tensor]:
            there, back, source = filled((other,), 1, place), filled((count,), 1, place), values.to(place.device)
            call(cuda=place.cuda, from_=address(source), into=address(there), **sides, **{flag: True})
            call(cuda=place.cuda, from_=address(there), into=address(back), **sides, **{flag: False})
            return there.cpu(), back.cpu()

        made = self.both(what, run)
        if made is None:
            return
        (there, back), (reference, _) = made
        self.same(what, there.numpy(), reference.numpy())
        self.same(f"{what} and back", back.numpy(), values.numpy())


def _share(text: str) -> slice:
    """Every N-th from the I-th on, of "I/N"."""
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share; give I/N with I below N, such as 0/4")
    return slice(int(first), None, int(step))


def main() -> int:
    """Run everything; 1 where something differs."""
    parser = argparse.ArgumentParser(description="Every native kernel once, compared with the CPU's.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tail", choices=("nan", "unwritten"), default="nan")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part to run, instead of all; repeatable")
    parser.add_argument("--share", type=_share, default=slice(None), metavar="I/N", help="every N-th GEMM from I on")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not (torch.cuda.is_available() and native.HAS_CUDA):
        print("sanitize: no CUDA device, or octavo-native was built without CUDA; use --device cpu", file=sys.stderr)
        return 2
    place = Place(True) if chosen.device == "cuda" else Place(False, threads=3)
    check = Check(place, Place(False), chosen.tail, chosen.share)
    for part in chosen.only or PARTS:
        getattr(check, part)()
        print(f"{part}: {check.equal} arrays equal, {len(check.faults)} faults so far", flush=True)
    for fault in check.faults[:SHOWN]:
        print(f"FAULT {fault}")
    for reason, count in check.refusals.items():
        print(f"refused by both, {count} times: {reason}")
    print(f"{check.equal} arrays equal to the CPU's, {len(check.faults)} faults")
    return 1 if check.faults else 0


if __name__ == "__main__":
    sys.exit(main())
