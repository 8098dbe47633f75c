"""Casts in integer arithmetic: the bits of the definition, whatever Triton's own casts are on a chip."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from octavo_torch_triton.arrays.launch import start
from octavo_triton.kernels.formats import (
    bits_of,
    e2m1_bytes,
    from_code,
    from_stored,
    half_from_code,
    magnitudes,
    rounded_to_bfloat16,
    to_code,
    to_stored,
    widened,
)

CODES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
SIZE = 4096


@triton.jit
def _cast(x, codes, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(codes + at, to_code(tl.load(x + at), FORMAT).to(tl.uint8))


@triton.jit
def _values(codes, x, halves, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    code = tl.load(codes + at)
    tl.store(x + at, from_code(code.to(tl.int32), FORMAT))
    if FORMAT != "e2m1":
        tl.store(halves + at, half_from_code(code, FORMAT))


@triton.jit
def _stored(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, to_stored(tl.load(x + at), "bfloat16"))


@triton.jit
def _by_instruction(x, stored, bytes_of, rounded, values, sizes, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at)
    tl.store(bytes_of + at, e2m1_bytes(value))
    tl.store(rounded + at, rounded_to_bfloat16(value))
    bits = tl.load(stored + at)
    tl.store(values + 2 * at, bits_of(widened(bits, "bfloat16", "rows")))
    tl.store(values + 2 * at + 1, bits_of(widened(bits, "bfloat16", "columns")))
    tl.store(sizes + at, magnitudes(bits, "bfloat16"))


@triton.jit
def _by_definition(x, stored, bytes_of, rounded, values, sizes, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at)
    tl.store(bytes_of + at, to_code(value, "e2m1").to(tl.uint8))
    tl.store(rounded + at, to_stored(value, "bfloat16"))
    bits = bits_of(from_stored(tl.load(stored + at), "bfloat16"))
    tl.store(values + 2 * at, bits)
    tl.store(values + 2 * at + 1, bits)
    tl.store(sizes + at, bits & 0x7FFFFFFF)


def _numbers(rng: np.random.Generator, name: str) -> Any:
    """fp32 numbers: any bits at all, every midpoint of neighbouring codes and its neighbours, the ends."""
    count = 8 if name == "e2m1" else 128
    grid = np.unique(np.arange(count, dtype=np.uint8).view(CODES[name]).astype(np.float32))
    grid = grid[np.isfinite(grid)]
    middle = (grid[1:] + grid[:-1]) / 2
    near = np.concatenate([grid, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    ends = np.array([0.0, np.inf, np.nan, 1e-45, 3.4e38, LARGEST[name] * 1.001, LARGEST[name] * 8], np.float32)
    some = rng.integers(0, 1 << 32, 4 * SIZE, dtype=np.uint32).view(np.float32)
    close = (rng.standard_normal(4 * SIZE) * LARGEST[name] / 8).astype(np.float32)
    numbers = np.concatenate([near, -near, ends, -ends, some, close])
    return np.concatenate([numbers, np.zeros(-len(numbers) % SIZE, np.float32)])


@pytest.mark.parametrize("name", list(CODES))
def test_casts_are_the_definitions(name: str, rng: np.random.Generator, device: str) -> None:
    """Nearest even, subnormals, saturation, one NaN: ml_dtypes' cast of what is clipped to the format."""
    numbers = _numbers(rng, name)
    x = torch.from_numpy(numbers).to(device)
    codes = torch.empty(len(numbers), dtype=torch.uint8, device=device)
    start(_cast, (len(numbers) // SIZE,), x, (x, codes), FORMAT=name, SIZE=SIZE)
    clipped = np.nan_to_num(np.clip(numbers, -LARGEST[name], LARGEST[name]))
    expected = clipped.astype(CODES[name]).view(np.uint8)
    expected[np.isnan(numbers)] = 0x7 if name == "e2m1" else 0x7F
    np.testing.assert_array_equal(codes.cpu().numpy(), expected)


@pytest.mark.parametrize("name", list(CODES))
def test_every_code_has_its_value(name: str, device: str) -> None:
    """All codes, in fp32 and, where fp16 products are made of them, in fp16."""
    count = 16 if name == "e2m1" else 256
    numbers = np.arange(count, dtype=np.uint8)
    codes = torch.from_numpy(numbers).to(device)
    x = torch.empty(count, device=device)
    halves = torch.empty(count, dtype=torch.float16, device=device)
    start(_values, (1,), x, (codes, x, halves), FORMAT=name, SIZE=count)
    expected = numbers.view(CODES[name]).astype(np.float32)
    np.testing.assert_array_equal(x.cpu().numpy(), expected)
    assert (np.signbit(x.cpu().numpy()) == np.signbit(expected))[~np.isnan(expected)].all()
    if name != "e2m1":
        np.testing.assert_array_equal(halves.float().cpu().numpy(), expected)


def test_results_are_rounded_to_nearest(rng: np.random.Generator, device: str) -> None:
    """Any fp32 bits, stored as bfloat16: the bits of torch's cast; Triton's interpreter would cut them off."""
    x = torch.from_numpy(rng.integers(0, 1 << 32, 4 * SIZE, dtype=np.uint32).view(np.float32)).to(device)
    out = torch.empty(len(x), dtype=torch.bfloat16, device=device)
    start(_stored, (4,), x, (x, out.view(torch.int16)), SIZE=SIZE)
    expected = x.to(torch.bfloat16)
    numbers = ~x.isnan()
    assert torch.equal(out.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])
    assert out[~numbers].isnan().all()


def test_instructions_that_differ_from_the_interpreters_way_make_its_bits(
    rng: np.random.Generator, device: str
) -> None:
    """On a GPU these are written for its instructions, several values at a time, and only there can they be wrong.

    Of numbers: what is NaN is NaN in another way, and told apart from the others before a code is made.
    """
    numbers = _numbers(rng, "e2m1")
    numbers = np.where(np.isnan(numbers), np.float32(1.0), numbers)
    x = torch.from_numpy(numbers).to(device)
    stored = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, len(numbers), dtype=np.int16)).to(device)
    made: list[list[torch.Tensor]] = []
    for kernel in (_by_instruction, _by_definition):
        out = [torch.empty(len(x), dtype=dtype, device=device) for dtype in (torch.uint8, torch.int16)]
        out += [torch.empty(count * len(x), dtype=torch.int32, device=device) for count in (2, 1)]
        start(kernel, (len(x) // SIZE,), x, (x, stored, *out), SIZE=SIZE)
        made.append(out)
    for got, expected in zip(*made, strict=True):
        assert torch.equal(got, expected)
