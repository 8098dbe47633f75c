"""Small GEMMs for `sanitize.py`: operands whose products and sums every kernel holds exactly, in any order. Not tests.

Values are -1, 0 and 1 with scales of powers of two, so that codes are powers of two and a sum of a few hundred products
fits the 14 bits in which Hopper adds FP8 products. NVFP4 has 2688 = 6 * 448 for 1: codes of 6, scales of 448, factors
of 1. One row in sixteen is not zero where a Hadamard transform spreads it, 10752 = 4 * 2688 each, over all sixteen.
"""

from __future__ import annotations

from typing import Any

import torch
from problems import (
    DTYPES,
    NATIVE_LAYOUT,
    SIZES,
    WIDTH,
    Place,
    Plane,
    Shape,
    address,
    filled,
    new_plane,
    quantizer,
)
from quantize_call import run_quantizer
from torch import Tensor

import octavo_native as native
from octavo_native import gemms

FOUR = {"left_format": "e2m1", "right_format": "e2m1"}
CHOICES = 3
"""Of a token, where an operand is rows of tokens."""
SIDES = ((144, 272), (16, 80), (80, 16), (272, 144), (48, 528))
"""(N, K)."""
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
DIRECTIONS = {
    "fprop": ("rowwise", "rowwise"),
    "dgrad": ("rowwise", "columnwise"),
    "wgrad": ("columnwise", "columnwise"),
}


def interleaved() -> list[dict[str, Any]]:
    """wgrad whose rows or columns take turns: every way in which scales and operands are read."""
    ways: list[dict[str, Any]] = [{"scaling": name} for name in ("delayed", "current", "row", "block", "mxfp8")]
    ways += [{"scaling": "nvfp4", **FOUR}, {"scaling": "nvfp4", **FOUR, "hadamard": True}]
    ways += [{"scaling": "block", side: True} for side in ("left_square", "right_square")]
    sides = ("left_interleave", "right_interleave")
    made = [{"gemm": "wgrad", **way, side: block} for way in ways for side, block in zip(sides, (1, 8), strict=True)]
    # x alone has square blocks, and its columns are no halves
    return [
        kind
        for kind in made
        if not any(kind.get(f"{side}_square", False) and f"{side}_interleave" in kind for side in ("left", "right"))
    ]


def kinds() -> list[dict[str, Any]]:
    """Arguments of `gemm_named`: every scaling and format, square weights, Hadamard data, dtypes, results, options.

    With `tokens`, the operand of that name stands where a router's tokens do; `sides` in the place of those in turn.
    """
    made: list[dict[str, Any]] = []
    for gemm in native.GEMMS:
        made += [
            {"gemm": gemm, "dtype": dtype, "out_dtype": out} for dtype in ("bfloat16", "float16") for out in DTYPES
        ]
        formats = ("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")
        for scaling in ("delayed", "current", "row", "block", "mxfp8"):
            for left, right in formats:
                made.append({"gemm": gemm, "scaling": scaling, "left_format": left, "right_format": right})
        made += [{"gemm": gemm, "scaling": name, "fast_accumulation": True} for name in ("delayed", "current", "row")]
        made.append({"gemm": gemm, "scaling": "nvfp4", **FOUR})
        if gemm == "wgrad":
            made.append({"gemm": gemm, "scaling": "nvfp4", **FOUR, "hadamard": True})
            made += [{"gemm": gemm, "scaling": "block", side: True} for side in ("left_square", "right_square")]
            made += interleaved()
        else:
            made.append({"gemm": gemm, "scaling": "nvfp4", **FOUR, "right_square": True})
            made.append({"gemm": gemm, "scaling": "block", "right_square": True})
    for gemm, side in (("fprop", "left"), ("dgrad", "left"), ("wgrad", "left"), ("wgrad", "right")):
        # of each, sums that are stored and sums that are added
        made += [{"gemm": gemm, "tokens": side, "out_dtype": out} for out in ("bfloat16", "float32") for _ in range(2)]
    for gemm in ("fprop", "dgrad"):
        codes = {"gemm": gemm, "tokens": "left", "scaling": "block", "right_square": True}
        # scales are loaded one by one, or four at once where their number is a multiple of four
        made += [codes, {**codes, "sides": (512, 512)}]
    for number, kind in enumerate(made):
        kind.setdefault("out_dtype", tuple(DTYPES)[number % 3])
        kind["accumulate"] = kind["gemm"] == "wgrad" and number % 2 == 1
    return made


KINDS = kinds()


class Launch:
    """One problem: `run` multiplies at a place, where operands are made and quantized the first time."""

    def __init__(self, kind: dict[str, Any], number: int, draw: torch.Generator) -> None:
        self.kind, self.number, self.draw = kind, number, draw
        self.gemm = gemms.gemm_named(**{name: value for name, value in kind.items() if name not in ("tokens", "sides")})
        self.n, self.k = kind.get("sides", SIDES[number % len(SIDES)])
        self.ragged = Shape(SIZES[number % len(SIZES)], 0)
        groups = len(self.ragged.sizes)
        self.sides = {"rows": self.ragged.rows, "n": self.n, "k": self.k, "groups": groups}
        self.shapes = {name: Shape(self.ragged.sizes, cols) for name, cols in (("x", self.k), ("dy", self.n))}
        self.shapes["w"] = Shape((0,) * groups, self.k, matrix_rows=self.n)
        self.values = {name: self._values(name) for name in OPERANDS[kind["gemm"]]}
        self.tokens = torch.randperm(self.ragged.rows, generator=draw)
        self.nowhere = torch.rand(self.ragged.rows, generator=draw) < 0.1
        if "tokens" in kind:
            self.values[OPERANDS[kind["gemm"]][kind["tokens"] == "right"]][self.nowhere] = 0
        self.bias = torch.randint(-9, 10, (groups, self.n), generator=draw).float()
        self.factors = torch.randint(-2, 3, (self.ragged.rows,), generator=draw).float()
        self.operands: dict[tuple[bool, int], dict[str, Tensor | None]] = {}
        self.accumulator = torch.randint(-9, 10, (groups, self.n, self.k), generator=draw).float()

    def __str__(self) -> str:
        return f"gemm {self.kind} sizes {self.ragged.sizes} N {self.n} K {self.k}"

    @property
    def tiles(self) -> int:
        """How many there are."""
        return len(self.gemm.tiles())

    def _values(self, name: str) -> Tensor:
        shape = self.shapes[name]
        values = torch.randint(-1, 2, (shape.rows, shape.cols), generator=self.draw).float()
        if self.kind.get("hadamard"):
            keep = torch.cat([torch.arange(size) % 16 == 3 for size in shape.real])
            values[: shape.used][~keep] = 0
            return values * 10752
        return values * (2688 if self.kind.get("scaling") == "nvfp4" else 1)

    def _rows(self, name: str, place: Place, unwritten: bool) -> Tensor:
        """The operand in memory: the tail NaN, or without a value."""
        shape = self.shapes[name]
        dtype = DTYPES[self.kind.get("dtype", "bfloat16")]
        x = torch.empty(shape.rows, shape.cols, dtype=dtype, device=place.device)
        x[: shape.used] = self.values[name][: shape.used].to(place.device, dtype)
        if not unwritten:
            x[shape.used :] = torch.nan
        return x

    def _quantized(self, side: int, x: Tensor, place: Place, unwritten: bool) -> Plane:
        """The plane that the GEMM reads; what the layout leaves open is poison, or without a value."""
        name = OPERANDS[self.kind["gemm"]][side]
        shape, direction = self.shapes[name], DIRECTIONS[self.kind["gemm"]][side]
        scaling = self.kind["scaling"]
        squares = self.kind.get(("left_square", "right_square")[side], False)
        spec = {
            "scaling": scaling,
            "format": self.kind.get(("left_format", "right_format")[side], "e4m3"),
            "operand": "x" if squares and name != "w" else name,
            "square": squares and name == "w",
            "square_columns": squares and name != "w",
            "hadamard": self.kind.get("hadamard", False),
            "power_of_two": WIDTH[scaling] == 4 and scaling != "delayed",
        }
        plane = new_plane(spec, shape, direction, NATIVE_LAYOUT[direction], place)
        if unwritten:
            plane.codes, plane.scales = torch.empty_like(plane.codes), torch.empty_like(plane.scales)
        made_by, prefix = quantizer(spec), direction[:3]
        sides = {"dtype": native.DTYPES[self.kind.get("dtype", "bfloat16")], "cols": shape.cols, **shape.arguments}
        planes = {one: one == direction for one in ("rowwise", "columnwise")}
        size = made_by.workspace_bytes(cuda=place.cuda, **sides, **planes)
        workspace = torch.empty(size, dtype=torch.uint8, device=place.device)
        encode = torch.exp2(torch.arange(len(shape.sizes)) % 5 - 2.0).to(place.device)
        run_quantizer(
            made_by,
            **place.common,
            **sides,
            **{
                f"{prefix}_codes": address(plane.codes),
                f"{prefix}_scales": address(plane.scales),
                f"{prefix}_global": address(plane.factor),
                f"{prefix}_layout": native.LAYOUTS["native"],
            },
            x=address(x),
            row_stride=shape.cols,
            plan=address(shape.plan(place)),
            encode_scales=address(encode) if scaling == "delayed" else 0,
            workspace=address(workspace),
            workspace_bytes=size,
        )
        if place.cuda:
            torch.cuda.synchronize()
        return plane

    def _operand(self, side: int, place: Place, unwritten: bool) -> dict[str, Tensor | None]:
        """Arrays by the names of `Gemm.run`."""
        name = ("left", "right")[side]
        x = self._rows(OPERANDS[self.kind["gemm"]][side], place, unwritten)
        of_tokens = self.kind.get("tokens") == name and place.cuda
        if self.kind.get("scaling") is None:
            return self._tokens(name, x, unwritten) if of_tokens else {name: x}
        plane = self._quantized(side, x, place, unwritten)
        if of_tokens:
            return self._codes_of_tokens(name, plane, unwritten)
        return {name: plane.codes, f"{name}_scales": plane.scales, f"{name}_global": plane.factor}

    def _tokens(self, name: str, x: Tensor, unwritten: bool) -> dict[str, Tensor | None]:
        """The rows x in another order, NaN or without a value where a row is to be zeros, and their index."""
        tokens = torch.empty_like(x)
        if not unwritten:
            tokens.fill_(torch.nan)
        read, place, index = self._index(x.device, unwritten)
        tokens[place[read]] = x[read]
        return {name: tokens, f"{name}_index": index}

    def _codes_of_tokens(self, name: str, plane: Plane, unwritten: bool) -> dict[str, Tensor | None]:
        """The same of the codes of rows and their scales, all of which are NaN where no row reads them."""
        rows, cols = self.ragged.rows, self.shapes[OPERANDS[self.kind["gemm"]][0]].cols
        by_block = plane.scales.view(torch.float32).view(-(-cols // 128), -1)
        codes, scales = torch.empty_like(plane.codes), by_block.new_empty(rows, len(by_block))
        if not unwritten:
            codes.fill_(0xFF)
            scales.fill_(torch.nan)
        read, place, index = self._index(codes.device, unwritten)
        codes.view(rows, cols)[place[read]] = plane.codes.view(rows, cols)[read]
        scales[place[read]] = by_block[:, :rows][:, read].T
        return {name: codes, f"{name}_scales": scales, f"{name}_index": index}

    def _index(self, device: torch.device, unwritten: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Which rows are read of a token, the token of each row, and the choice of each as kernels read it."""
        rows, used, nowhere = self.ragged.rows, self.ragged.used, self.nowhere.to(device)
        place = self.tokens.to(device)
        read = (torch.arange(rows, device=device) < used) & ~nowhere
        strange = torch.tensor([-1, CHOICES * rows, 1 << 40, -(1 << 62)], device=device)
        order = torch.where(nowhere, strange[place % 4], place * CHOICES + place % CHOICES)
        held = torch.empty_like(order)
        held[:used] = order[:used]
        return read, place, held if unwritten else order

    def run(self, place: Place, tile: int, unwritten: bool = False) -> Tensor:
        """Bytes of the result."""
        kind, groups = self.kind["gemm"], len(self.ragged.sizes)
        key = place.cuda, place.threads
        if key not in self.operands:
            self.operands[key] = self._operand(0, place, unwritten) | self._operand(1, place, unwritten)
        arrays = dict(self.operands[key])
        bias_dtype = tuple(DTYPES)[self.number % 3]
        if kind == "fprop" and self.number % 2:
            arrays["bias"] = self.bias.to(place.device, DTYPES[bias_dtype])
            if self.number % 4 == 1:
                arrays["bias_scales"] = self.factors.to(place.device)
        out_dtype = DTYPES[self.kind["out_dtype"]]
        if self.kind["accumulate"]:
            out = self.accumulator.to(place.device, out_dtype, copy=True).reshape(-1).view(torch.uint8)
        else:
            cols = self.n if kind == "fprop" else self.k
            out = filled((groups * self.n if kind == "wgrad" else self.ragged.rows, cols), out_dtype.itemsize, place)
        size = self.gemm.workspace_bytes(cuda=place.cuda, **self.sides, tile=tile if place.cuda else -1)
        workspace = torch.empty(size, dtype=torch.uint8, device=place.device)
        self.gemm.run(
            **place.common,
            **self.sides,
            **{name: address(array) for name, array in arrays.items()},
            plan=address(self.ragged.plan(place)),
            out=address(out),
            bias_dtype=native.DTYPES[bias_dtype],
            tile=tile if place.cuda else -1,
            each=CHOICES,
            count=self.ragged.rows,
            workspace=address(workspace),
            workspace_bytes=size,
        )
        if place.cuda:
            torch.cuda.synchronize()
        return out
