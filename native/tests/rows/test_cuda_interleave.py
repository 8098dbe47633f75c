"""interleave_halves on a GPU against torch's copies. Skipped where there is no device."""

from __future__ import annotations

import numpy as np
import pytest
from devices import needs_device

import octavo_native as native

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from move_calls import poisoned, stream  # noqa: E402  it imports torch
from problems import CUDA, POISON, address  # noqa: E402

pytestmark = needs_device

GUARD = 64


def exchanged(given: torch.Tensor, start: int, blocks: int, *, interleave: bool) -> torch.Tensor:
    """One call on bytes [rows, ..., block_bytes] that begin `start` bytes past an aligned address, as the result does;
    the bytes around the result are checked."""
    held = torch.empty(start + given.numel(), dtype=torch.uint8, device="cuda")
    held[start:] = given.reshape(-1)
    out = poisoned((start + given.numel() + GUARD,), torch.uint8, CUDA)
    native.interleave_halves(
        cuda=True, stream=stream(CUDA), from_=address(held) + start, into=address(out) + start, rows=given.shape[0],
        blocks=blocks, block_bytes=given.shape[3], interleave=interleave,
    )  # fmt: skip
    assert (out[:start] == POISON).all()
    assert (out[start + given.numel() :] == POISON).all()
    return out[start : start + given.numel()]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_halves_take_turns_and_back(size: int, rng: np.random.Generator) -> None:
    """Blocks of any number of elements, one among them and all of a half, odd rows, starts of any alignment: the bytes
    of torch's transposed copy, and none beside them."""
    draw = torch.Generator("cuda").manual_seed(int(rng.integers(1 << 40)))
    for block in (1, 2, 3, 8, 129):
        for rows, blocks in ((1, 1), (3, 7), (40, 64), (5, 301), (int(rng.integers(1, 60)), int(rng.integers(1, 900)))):
            shape = (rows, 2, blocks, block * size)
            halves = torch.randint(256, shape, generator=draw, dtype=torch.uint8, device="cuda")
            turns = halves.transpose(1, 2).contiguous()
            for start in (0, size, 8, 16):
                case = (shape, start)
                assert torch.equal(exchanged(halves, start, blocks, interleave=True), turns.reshape(-1)), case
                assert torch.equal(exchanged(turns, start, blocks, interleave=False), halves.reshape(-1)), case


def test_more_words_than_a_launch_numbers(rng: np.random.Generator) -> None:
    """Arrays of more than 2^31 words of one byte are moved in slices of rows."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("the device has less than 12 GiB free")
    draw = torch.Generator("cuda").manual_seed(int(rng.integers(1 << 40)))
    rows, blocks = (1 << 31) // 60_006 + 17, 10_001
    halves = torch.randint(256, (rows, 2, blocks, 3), generator=draw, dtype=torch.uint8, device="cuda")
    turns = poisoned((rows, blocks, 2, 3), torch.uint8, CUDA)
    native.interleave_halves(
        cuda=True, stream=stream(CUDA), from_=address(halves), into=address(turns), rows=rows, blocks=blocks,
        block_bytes=3, interleave=True,
    )  # fmt: skip
    assert torch.equal(turns.transpose(1, 2)[-40:], halves[-40:])
    assert torch.equal(turns.transpose(1, 2)[:40], halves[:40])
    assert torch.equal(turns.view(-1).view(torch.uint8).sum(), halves.sum())
