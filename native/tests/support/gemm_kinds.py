"""The ways in which kernels of grouped GEMMs differ, one case of each, and random operands on a device. Not tests."""

from __future__ import annotations

import pytest
import torch
from device_gemms import Chain, Prepared
from gemm_problems import GEMMS, Case, GemmName
from problems import CUDA, Place

RAGGED = (0, 1, 17, 130, 0, 96, 300)
"""Groups without rows, of less than a tile, of more than one, and not a multiple of anything."""


def kinds(gemm: GemmName) -> list[Case]:
    """Each way in which the kernels of a GEMM differ, once."""
    square = gemm != "wgrad"
    four = {"scaling": "nvfp4", "left_format": "e2m1", "right_format": "e2m1"}
    columns = (
        []
        if square
        else [
            Case(gemm=gemm, scaling="block", left_square=True),
            Case(gemm=gemm, scaling="block", right_square=True),
            Case(gemm=gemm, scaling="block", right_square=True, power_of_two=True, out_dtype="float32"),
        ]
    )
    return [
        *columns,
        Case(gemm=gemm),
        Case(gemm=gemm, dtype="float16", out_dtype="float16"),
        Case(gemm=gemm, scaling="delayed", left_format="e5m2"),
        Case(gemm=gemm, scaling="current", out_dtype="float32"),
        Case(gemm=gemm, scaling="current", fast_accumulation=True),
        Case(gemm=gemm, scaling="row", right_format="e5m2"),
        Case(gemm=gemm, scaling="block", power_of_two=True),
        Case(gemm=gemm, scaling="block", right_square=square, out_dtype="float32"),
        Case(gemm=gemm, scaling="mxfp8"),
        Case(gemm=gemm, **four, right_square=square, hadamard=not square),
    ]


KINDS = [case for gemm in GEMMS for case in kinds(gemm)]
WEIGHTS = kinds("wgrad")

every_kind = pytest.mark.parametrize("case", KINDS, ids=str)


def accumulation(case: Case) -> str:
    """How the kernels sum, for error_bound."""
    return "hopper_bf16" if case.scaling in (None, "mxfp8", "nvfp4") else "hopper_fp8"


def tiles(prepared: Prepared) -> range:
    """Numbers of the tiles, the model's choice first."""
    return range(-1, len(prepared.gemm.tiles()))


def random_chain(case: Case, sizes: list[int], rows: int, n: int, k: int, place: Place = CUDA) -> Chain:
    """Random operands on the device; the rows past the sum of `sizes` are NaN."""
    groups, device = len(sizes), place.device
    shapes = {"x": (rows, k), "dy": (rows, n), "w": (groups, n, k)}
    left, right = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[case.gemm]
    values = {
        name: torch.randn(shapes[name], dtype=getattr(torch, case.dtype), device=device) for name in (left, right)
    }
    for name in {left, right} - {"w"}:
        values[name][sum(sizes) :] = torch.nan
    held = torch.tensor(sizes, dtype=torch.int64, device=device)
    return Chain(case, values[left], values[right], held, place)
