"""wgrad of FP8 codes on Hopper, by a kernel whose warps have no roles: jax-triton could not start those with roles."""

from __future__ import annotations

from typing import Any

from jax import Array

from octavo_jax_triton.gemm.operands import Planes
from octavo_jax_triton.launch.arguments import Output, Target, divisible_by_16, row_descriptor
from octavo_jax_triton.launch.launch_kernel import launch_kernel
from octavo_triton.kernels.hopper.undivided_columns import undivided_columns
from octavo_triton.layouts import TILE, tiles
from octavo_triton.products.spec import GemmSpec
from octavo_triton.products.tiles import BESIDE

_OF_CODES, _OF_SCALES = 128, 0
"""Bytes of a swizzle: what tensor cores read, and what threads read."""


def columns_on_hopper(
    spec: GemmSpec, left: Planes, right: Planes, table: Array, out: Output, target: Target
) -> Array | None:
    """wgrad; None, and nothing started, where another kernel has to."""
    if spec.chip != "sm_90" or spec.product != "fp8":
        return None
    groups, height, width = out.shape
    (a, a_scale, _), (b, b_scale, _) = left, right
    of_a, of_b = (row_descriptor(codes, (TILE, TILE), _OF_CODES) for codes in (a, b))
    scales: list[Any] = [a_scale, b_scale]
    if spec.scaling == "block":
        scales = [row_descriptor(scale, (1, TILE), _OF_SCALES) for scale in (a_scale, b_scale) if scale is not None]
    if of_a is None or of_b is None or any(scale is None for scale in scales):
        return None
    down, across = tiles(height), tiles(width)
    arguments = (
        of_a, scales[0], of_b, scales[1], table, out,
        height, width, groups, down, across, height * width, width, 1,
    )  # fmt: skip
    how = {"SCALING": spec.scaling, "BESIDE": BESIDE, "EVEN": divisible_by_16(height, width)}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return launch_kernel(undivided_columns, (groups * down * across,), arguments, target, **how, **options)[out.name]
