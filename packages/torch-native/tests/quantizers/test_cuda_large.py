"""The CUDA quantizers on operands of more than 2^31 elements."""

from __future__ import annotations

import native_calls as native
import numpy as np
import pytest
import torch
from cuda_device import MARKS
from cuda_quantizers import LAYOUTS, raw

from octavo_conformance.cards.variants import RAGGED, STACKED

pytestmark = [*MARKS, pytest.mark.usefixtures("no_flag_is_left")]

GB = 1 << 30


@pytest.mark.parametrize("name", ["current.e4m3", "row.e4m3.pow2", "block.e4m3.pow2", "mxfp8.e4m3", "nvfp4.hadamard"])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_more_than_two_to_the_31_elements(name: str, layouts: tuple[str, str], rng: np.random.Generator) -> None:
    """The last groups of an operand of more than 2^31 elements are those of a call of their own (faults 26 to 29)."""
    columns = 7168
    total = (1 << 31) // columns + 1000
    if torch.cuda.get_device_properties(0).total_memory < 40 * GB:
        pytest.skip("needs 40 GB of device memory")
    spec = RAGGED[name]
    last = 700
    x = torch.empty(total, columns, dtype=torch.bfloat16, device="cuda")
    for start in range(0, total, 1 << 16):
        x[start : start + (1 << 16)].normal_()
    sizes = torch.tensor([5, total - last - 105, 0, last, 100 - 37], device="cuda")
    big = native.quantize(x, spec, sizes, layouts=layouts, amax=True).codes
    start = int(sizes[:3].sum())
    small = native.quantize(x[start:], spec, sizes[3:], layouts=layouts, group_offset=3).codes
    used = int(sizes[3:].sum())
    for direction in ("rowwise", "columnwise"):
        values = native.dequantize(big, direction, dtype=torch.bfloat16)
        expected = native.dequantize(small, direction, dtype=torch.bfloat16)
        if spec.hadamard and direction == "columnwise":
            first = int(((sizes[:3] + 15) // 16 * 16).sum())
            count = int(((sizes[3:] + 15) // 16 * 16).sum())
        else:
            first, count = start, used
        assert torch.equal(raw(values[first : first + count]), raw(expected[:count])), direction
        del values, expected
    del big, small, x
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["current.e4m3", "block.e4m3.square", "mxfp8.e4m3", "nvfp4.square"])
def test_matrices_of_more_than_two_to_the_31_elements(name: str, rng: np.random.Generator) -> None:
    """The same for weights: the last matrix alone has the same codes (faults 26 to 29)."""
    groups, n, k = 80, 4096, 6656
    assert groups * n * k > 1 << 31
    w = torch.empty(groups, n, k, dtype=torch.bfloat16, device="cuda")
    for matrix in w:
        matrix.normal_()
    spec = STACKED[name]
    big = native.quantize(w, spec, layouts=("rows", "panels")).codes
    small = native.quantize(w[-1:], spec, layouts=("rows", "panels"), group_offset=groups - 1).codes
    for direction in ("rowwise", "columnwise"):
        values = native.dequantize(big, direction, dtype=torch.bfloat16)[-1:]
        assert torch.equal(raw(values), raw(native.dequantize(small, direction, dtype=torch.bfloat16)))
        del values
    del big, small, w
    torch.cuda.empty_cache()
