"""Grouped GEMMs on a device, or on the CPU the same way: arrays allocated once, calls that wait for nothing. Not tests.

`Prepared` is a problem of gemm_problems, whose operands the definition has quantized. `Chain` quantizes on the device,
for what needs a quantizer before the GEMM, or more elements than the definition is made for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cpu_calls import DTYPE, quantizer
from gemm_problems import DIRECTION, Array, Case, Problem
from problems import NATIVE_LAYOUT, Place, Shape, address, new_plane
from quantize_call import run_quantizer
from torch import Tensor

import octavo_native as native
from octavo_native import layouts

GUARD = 256
UNWRITTEN = 0xFF
"""Bytes of what no call has written: NaN in every floating-point type of results, codes and scales but E2M1."""


def stream_of(place: Place) -> int:
    """The stream that torch works on, 0 on the CPU."""
    return int(torch.cuda.current_stream().cuda_stream) if place.cuda else 0


def device_bytes(values: Array, place: Place) -> Tensor:
    """An exactly allocated copy."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat.copy()).to(place.device)


def unwritten(count: int, place: Place) -> Tensor:
    """Bytes that a call writes."""
    return torch.full((count,), UNWRITTEN, dtype=torch.uint8, device=place.device)


class Guarded:
    """Bytes between guards, all of them UNWRITTEN until a call writes."""

    def __init__(self, count: int, place: Place) -> None:
        self.count = count
        self.memory = unwritten(count + 2 * GUARD, place)

    @property
    def address(self) -> int:
        """Of the first byte inside, 0 where there is none."""
        return self.memory.data_ptr() + GUARD if self.count else 0

    @property
    def inside(self) -> Tensor:
        """The bytes between the guards."""
        return self.memory[GUARD : GUARD + self.count]

    def check(self) -> None:
        """Fails where a guard was written."""
        for name, guard in (("before", self.memory[:GUARD]), ("after", self.memory[GUARD + self.count :])):
            assert bool((guard == UNWRITTEN).all()), f"bytes {name} the array were written"


class Out:
    """The result's memory: rows `gap` elements further apart than they are long, matrices `group_gap` more."""

    def __init__(self, case: Case, shape: tuple[int, ...], place: Place, gap: int = 0, group_gap: int = 0) -> None:
        self.shape, self.dtype = shape, DTYPE[case.out_dtype]
        self.stride = shape[-1] + gap
        stacked = len(shape) == 3
        self.group_stride = shape[1] * self.stride + group_gap if stacked else 0
        self.count = shape[0] * (self.group_stride if stacked else self.stride)
        self.held = Guarded(self.count * self.dtype.itemsize, place)
        self.start = self.held.inside.clone()

    def parts(self, flat: Array) -> tuple[Array, list[Array]]:
        """Views of `flat`, the memory's elements: the result, and what lies between its rows and matrices."""
        if len(self.shape) == 2:
            rows = flat.reshape(self.shape[0], self.stride)
            return rows[:, : self.shape[1]], [rows[:, self.shape[1] :]]
        matrices = flat.reshape(self.shape[0], self.group_stride)
        rows = matrices[:, : self.shape[1] * self.stride].reshape(*self.shape[:2], self.stride)
        return rows[:, :, : self.shape[2]], [rows[:, :, self.shape[2] :], matrices[:, self.shape[1] * self.stride :]]

    def begin_with(self, values: Array) -> None:
        """What every call finds in the memory."""
        flat = np.full(self.count * self.dtype.itemsize, UNWRITTEN, dtype=np.uint8).view(self.dtype)
        self.parts(flat)[0][:] = values
        self.start = torch.from_numpy(flat.view(np.uint8)).to(self.held.memory.device)

    def refill(self) -> None:
        """As it was before the first call, in order with the stream's work."""
        self.held.inside.copy_(self.start)

    def result(self) -> Array:
        """The result on the host; what lies between its rows must be as it was."""
        self.held.check()
        values, gaps = self.parts(self.held.inside.cpu().numpy().view(self.dtype))
        for gap in gaps:
            assert (np.ascontiguousarray(gap).view(np.uint8) == UNWRITTEN).all(), "memory between rows was written"
        return np.ascontiguousarray(values)


class Prepared:
    """A problem with all its arrays on `place`."""

    def __init__(self, problem: Problem, place: Place, *, gap: int = 0, group_gap: int = 0, threads: int = 1) -> None:
        self.problem, self.place = problem, place
        case, groups = problem.case, len(problem.sizes)
        self.gemm = case.native
        self.sizes = torch.tensor(problem.sizes, dtype=torch.int64, device=place.device)
        self.plan = Guarded(8 * native.plan_words(problem.rows, groups), place)
        native.plan(
            cuda=place.cuda,
            sizes=self.sizes.data_ptr(),
            sizes_are_64=True,
            groups=groups,
            rows=problem.rows,
            plan=self.plan.address,
            stream=stream_of(place),
        )
        self.out = Out(case, problem.out_shape, place, gap, group_gap)
        if problem.accumulator is not None:
            self.out.begin_with(problem.accumulator)
        self.arrays: dict[str, Tensor] = {}
        for name, side in (("left", problem.left), ("right", problem.right)):
            for part, values in side.arrays.items():
                self.arrays[name if part == "data" else f"{name}_{part}"] = device_bytes(values, place)
        self.arguments: dict[str, Any] = {
            **problem.sides,
            "cuda": place.cuda,
            "threads": threads,
            "plan": self.plan.address,
            "out": self.out.held.address,
            "out_row_stride": self.out.stride,
            "out_group_stride": self.out.group_stride,
            "left_stride": problem.left.stride,
            "right_stride": problem.right.stride,
        }
        if problem.bias is not None:
            self.arrays["bias"] = device_bytes(problem.bias, place)
            self.arguments["bias_dtype"] = native.DTYPES[problem.bias.dtype.name]
        if problem.bias_scales is not None:
            self.arrays["bias_scales"] = device_bytes(problem.bias_scales, place)
        self.arguments |= {name: address(array) for name, array in self.arrays.items()}
        self.workspaces: dict[int, Guarded] = {}

    def workspace(self, tile: int) -> Guarded:
        """Of exactly the size that is asked for."""
        if tile not in self.workspaces:
            size = self.gemm.workspace_bytes(cuda=self.place.cuda, **self.problem.sides, tile=tile)
            self.workspaces[tile] = Guarded(size, self.place)
        return self.workspaces[tile]

    def run(self, tile: int = -1, ctas: int = 0) -> None:
        """One call on torch's stream, output and workspace refilled first; waits for nothing."""
        workspace = self.workspace(tile)
        self.out.refill()
        workspace.inside.fill_(UNWRITTEN)
        self.gemm.run(
            **self.arguments,
            tile=tile,
            ctas=ctas,
            workspace=workspace.address,
            workspace_bytes=workspace.count,
            stream=stream_of(self.place),
        )

    def result(self, tile: int = -1, ctas: int = 0) -> Array:
        """`run`, and the result on the host; guards are checked."""
        self.run(tile, ctas)
        self.workspace(tile).check()
        return self.out.result()

    def differs(self, bits: Tensor) -> Tensor:
        """bool [] on the device: whether the memory of the result is other than `bits`."""
        return (self.out.held.inside != bits).any()


class ChainOperand:
    """One side of a Chain: its values, and the plane that the GEMM reads where the case is quantized."""

    def __init__(self, case: Case, side: str, values: Tensor, place: Place, plan: Tensor, groups: int) -> None:
        self.case, self.side, self.values, self.place = case, side, values, place
        self.direction = DIRECTION[case.gemm][side == "right"]
        self.quantizer: Any = None
        if case.scaling is not None:
            self._prepare(0 if values.dim() == 3 else address(plan), groups)

    def _prepare(self, plan: int, groups: int) -> None:
        side: Any = self.side
        spec = self.case.quantizer(side)
        self.quantizer = quantizer(spec)
        stacked = self.values.dim() == 3
        self.shape = Shape((0,) * groups, self.values.shape[-1], self.values.shape[1] if stacked else 0)
        self.shape.rows = self.values.shape[:-1].numel()
        named = {
            "format": spec.format,
            "scaling": spec.scaling,
            "square": spec.square_in(self.direction),
            "hadamard": spec.hadamard,
        }
        self.plane = new_plane(named, self.shape, self.direction, NATIVE_LAYOUT[self.direction], self.place)
        self.encode = torch.full((groups,), 16.0, device=self.place.device)
        sides = {"cuda": self.place.cuda, "dtype": native.DTYPES[self.case.dtype], "cols": self.shape.cols}
        sides |= self.shape.arguments
        planes = {name: self.direction == name for name in ("rowwise", "columnwise")}
        self.workspace = unwritten(self.quantizer.workspace_bytes(**sides, **planes), self.place)
        prefix = self.direction[:3]
        self.arguments = sides | {
            "x": address(self.values),
            "row_stride": self.shape.cols,
            "plan": plan,
            f"{prefix}_codes": address(self.plane.codes),
            f"{prefix}_scales": address(self.plane.scales),
            f"{prefix}_global": address(self.plane.factor),
            f"{prefix}_layout": native.LAYOUTS["native"],
            "encode_scales": address(self.encode) if spec.scaling == "delayed" else 0,
            "workspace": address(self.workspace),
            "workspace_bytes": self.workspace.numel(),
        }

    @property
    def arrays(self) -> dict[str, int]:
        """Addresses, as the GEMM takes them."""
        if self.quantizer is None:
            return {self.side: address(self.values)}
        parts = {"": self.plane.codes, "_scales": self.plane.scales, "_global": self.plane.factor}
        return {f"{self.side}{name}": address(part) for name, part in parts.items()}

    def quantize(self) -> None:
        """Into a plane that was not written before, on torch's stream."""
        if self.quantizer is None:
            return
        for part in (self.plane.codes, self.plane.scales, self.plane.factor, self.workspace):
            if part is not None:
                part.fill_(UNWRITTEN)
        run_quantizer(self.quantizer, **self.arguments, stream=stream_of(self.place))

    def exact(self, dtype: str = "float32") -> Tensor:
        """What is multiplied: [rows, cols], Hadamard data with each group padded to 16 rows; NaN where no group is."""
        if self.quantizer is None:
            return self.values.reshape(-1, self.values.shape[-1])
        groups, hadamard = len(self.shape.sizes), self.case.hadamard and self.direction == "columnwise"
        rows = layouts.block_bound(self.shape.rows, groups, 16) * 16 if hadamard else self.shape.rows
        out = torch.full((rows, self.shape.cols), torch.nan, dtype=getattr(torch, dtype), device=self.place.device)
        self.quantizer.dequantize(
            cuda=self.place.cuda,
            direction=native.DIRECTIONS[self.direction],
            codes=address(self.plane.codes),
            scales=address(self.plane.scales),
            global_=address(self.plane.factor),
            layout=native.LAYOUTS["native"],
            cols=self.shape.cols,
            **self.shape.arguments,
            plan=self.arguments["plan"],
            out=address(out),
            out_dtype=native.DTYPES[dtype],
            stream=stream_of(self.place),
        )
        return out


class Chain:
    """Plan, quantize both operands, multiply: nothing waits or allocates after the first call.

    left, right  values [M, C] or [G, N, C] on `place`, which may be written between calls
    sizes        int64 [G] there, which may be written between calls
    """

    def __init__(self, case: Case, left: Tensor, right: Tensor, sizes: Tensor, place: Place) -> None:
        self.case, self.place, self.sizes = case, place, sizes
        groups, rows = sizes.numel(), left.shape[0]
        n, k = (left.shape[1], right.shape[-1]) if case.gemm != "fprop" else (right.shape[1], right.shape[2])
        self.sides = {"rows": rows, "n": n, "k": k, "groups": groups}
        self.plan = torch.empty(native.plan_words(rows, groups), dtype=torch.int64, device=place.device)
        self.operands = [
            ChainOperand(case, name, values, place, self.plan, groups)
            for name, values in (("left", left), ("right", right))
        ]
        self.gemm = case.native
        shape = {"fprop": (rows, n), "dgrad": (rows, k), "wgrad": (groups, n, k)}[case.gemm]
        self.out = torch.empty(shape, dtype=getattr(torch, case.out_dtype), device=place.device)
        self.workspace = unwritten(self.gemm.workspace_bytes(cuda=place.cuda, **self.sides), place)

    def make_plan(self) -> None:
        """Of the sizes as they are when the device comes to it."""
        native.plan(
            cuda=self.place.cuda,
            sizes=self.sizes.data_ptr(),
            sizes_are_64=True,
            groups=self.sides["groups"],
            rows=self.sides["rows"],
            plan=self.plan.data_ptr(),
            stream=stream_of(self.place),
        )

    def multiply(self) -> None:
        """Into an output of NaN."""
        self.out.fill_(torch.nan)
        arrays = self.operands[0].arrays | self.operands[1].arrays
        self.gemm.run(
            **self.sides,
            **arrays,
            cuda=self.place.cuda,
            plan=self.plan.data_ptr(),
            out=self.out.data_ptr(),
            workspace=address(self.workspace),
            workspace_bytes=self.workspace.numel(),
            stream=stream_of(self.place),
        )

    def run(self) -> None:
        """All of it."""
        self.make_plan()
        for operand in self.operands:
            operand.quantize()
        self.multiply()

    @property
    def bits(self) -> Tensor:
        """The result's bytes."""
        return self.out.view(torch.uint8)
