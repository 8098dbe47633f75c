"""A grouped GEMM on the CPU, whose inputs and what lies around the result are checked to be as they were. Not tests."""

from __future__ import annotations

import numpy as np
from cpu_calls import DTYPE, make_plan
from gemm_problems import Problem
from guarded import POISON, Guarded, put

import octavo_native as native


def run(problem: Problem, *, threads: int = 1, out_row_stride: int = 0, out_group_stride: int = 0) -> np.ndarray:
    """The result [out_shape]; what lies around it and every input is checked to be as it was."""
    case = problem.case
    plan, _ = make_plan(np.array(problem.sizes, dtype=np.int64), problem.rows)
    inputs = {"plan": plan}
    for name, side in (("left", problem.left), ("right", problem.right)):
        inputs |= {f"{name}_{array}".removesuffix("_data"): put(values) for array, values in side.arrays.items()}
    for name in ("bias", "bias_scales"):
        if getattr(problem, name) is not None:
            inputs[name] = put(getattr(problem, name))
    *lead, rows, cols = problem.out_shape
    matrices = int(np.prod(lead, dtype=np.int64))
    row_stride = out_row_stride or cols
    group_stride = out_group_stride or rows * row_stride
    out = Guarded((matrices * group_stride,), DTYPE[case.out_dtype])
    width = out.dtype.itemsize
    strides = (group_stride * width, row_stride * width, width)

    def part(array: np.ndarray) -> np.ndarray:
        # every row has its gap behind it, the last one too
        return np.lib.stride_tricks.as_strided(array, (matrices, rows, cols), strides)

    if problem.accumulator is not None:
        part(out.array)[:] = problem.accumulator
    before = {name: array.bytes.copy() for name, array in inputs.items()}
    gemm = case.native
    needed = gemm.workspace_bytes(cuda=False, **problem.sides)
    workspace = Guarded((needed,), np.uint8)
    gemm.run(
        cuda=False,
        **problem.sides,
        **{name: array.address for name, array in inputs.items()},
        out=out.address,
        left_stride=problem.left.stride,
        right_stride=problem.right.stride,
        out_row_stride=out_row_stride,
        out_group_stride=out_group_stride,
        bias_dtype=0 if problem.bias is None else native.DTYPES[problem.bias.dtype.name],
        workspace=workspace.address,
        workspace_bytes=needed,
        threads=threads,
    )
    assert workspace.bytes is not None
    for name, array in inputs.items():
        assert (array.bytes == before[name]).all(), f"{name} was written"
    result = part(out.array).copy().reshape(problem.out_shape)
    if out.size:
        part(out.array)[:] = np.frombuffer(bytes([POISON] * width), dtype=out.dtype)[0]
        assert out.untouched, "memory between the rows of the result was written"
    return result
