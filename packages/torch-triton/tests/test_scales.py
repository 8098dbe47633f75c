"""Maxima and scales: short ways to the bits of the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from octavo_torch_triton.arrays.launch import start
from octavo_triton.kernels.formats import bits_of
from octavo_triton.kernels.maxima import largest_across, largest_all, largest_down
from octavo_triton.kernels.quantizers.tiles import rows_in_runs
from octavo_triton.kernels.scales import decode_of, fp32_encode, is_poisoned

SIZE = 4096
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


@triton.jit
def _powers_of_two(amax, encode, decode, epsilon, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    pattern = tl.load(amax + at)
    scale = fp32_encode(pattern, epsilon, FORMAT, True)
    tl.store(encode + at, bits_of(scale))
    tl.store(decode + at, bits_of(decode_of(scale, is_poisoned(pattern), True)))


@triton.jit
def _maxima(x, across, down, everything, DTYPE: tl.constexpr, RUN: tl.constexpr):
    row, column = rows_in_runs(RUN), tl.arange(0, 128)
    stored = tl.load(x + row[:, None] * 128 + column[None, :])
    at = row[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(across + at, largest_across(stored, DTYPE, 128, 128, 32))
    blocks = tl.arange(0, 4)[:, None] * 128 + column[None, :]
    tl.store(down + blocks, largest_down(stored, DTYPE, RUN, 128, 128, 32))
    tl.store(everything, largest_all(stored, DTYPE, 128, 128))


@pytest.mark.parametrize("epsilon", [0.0, 1e-12])
@pytest.mark.parametrize("name", list(LARGEST))
def test_powers_of_two_are_the_definitions(name: str, epsilon: float, rng: np.random.Generator, device: str) -> None:
    """Exponents are subtracted where the definition divides and cuts the significand off; 1 / 2^127 is subnormal."""
    exponents = np.arange(255, dtype=np.int32)[:, None] << 23
    edges = np.array([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], np.int32)
    some = rng.integers(0, 0x7F800000, 2 * SIZE, dtype=np.int32)
    patterns = np.concatenate([(exponents | edges).ravel(), some])
    patterns = np.concatenate([patterns, np.zeros(-len(patterns) % SIZE, np.int32)])
    floor = np.float32(epsilon)
    made = [torch.zeros(len(patterns), dtype=torch.int32, device=device) for _ in range(2)]
    amax = torch.from_numpy(patterns).to(device)
    start(
        _powers_of_two, (len(patterns) // SIZE,), amax, (amax, *made, int(floor.view(np.int32))), FORMAT=name, SIZE=SIZE
    )
    floored = np.maximum(patterns.view(np.float32), floor)
    with np.errstate(divide="ignore", over="ignore"):
        quotient = np.minimum(np.float32(LARGEST[name]) / floored, np.finfo(np.float32).max)
    power = (quotient.view(np.int32) & 0x7F800000).view(np.float32)
    encode = np.where(floored == 0, np.float32(1), power)
    np.testing.assert_array_equal(made[0].cpu().numpy(), encode.view(np.int32))
    np.testing.assert_array_equal(made[1].cpu().numpy(), (np.float32(1) / encode).view(np.int32))


@pytest.mark.parametrize("run", [4, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_maxima_are_of_what_is_theirs(dtype: torch.dtype, run: int, rng: np.random.Generator, device: str) -> None:
    """Of 32 columns, of 32 rows, of all: also subnormals; an infinity and a NaN show as what is not finite.

    On a GPU bfloat16 goes two to a register, and only there can that be wrong.
    """
    x = torch.from_numpy(rng.standard_normal((128, 128)).astype(np.float32)).to(dtype)
    x[:32] *= 2.0**-130
    place = rng.permutation(128 * 128)[:6]
    x.view(-1)[place] = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 3e38, -3e38]).to(dtype)
    tile = x.to(device)
    tile = tile.view(torch.int16) if dtype is torch.bfloat16 else tile
    made = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((128, 4), (4, 128), (1,))]
    start(_maxima, (1,), tile, (tile, *made), DTYPE=str(dtype).removeprefix("torch."), RUN=run, num_warps=4)
    sizes = x.float().view(torch.int32) & 0x7FFFFFFF
    wanted = (sizes.view(128, 4, 32).amax(2), sizes.view(4, 32, 128).amax(1), sizes.max().view(1))
    for got, expected in zip(made, wanted, strict=True):
        finite = expected < 0x7F800000
        assert torch.equal(got.cpu() < 0x7F800000, finite)
        assert torch.equal(got.cpu()[finite], expected[finite])
