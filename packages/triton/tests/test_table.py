"""The table of ragged rows, whatever integers a framework has, and whichever way it hands arrays over."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from octavo_triton.kernels.formats import as_bits, multiple_of_16
from octavo_triton.kernels.panels import index_rows
from octavo_triton.layouts import index_programs, panels_of, table_words

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    return np.random.default_rng(seed)


def _table(sizes: torch.Tensor, rows: int, dtype: torch.dtype) -> np.ndarray:
    groups = len(sizes)
    programs, padded, chunk = index_programs(rows, groups)
    table = torch.full((table_words(rows, groups),), -1, dtype=dtype, device=DEVICE)
    index_rows[(programs,)](
        sizes.to(DEVICE), table, None, None, rows, groups, panels_of(rows, groups),
        GROUPS=padded, CHUNK=chunk, FLAG=False,
    )  # fmt: skip
    made: np.ndarray = table.cpu().numpy().astype(np.int64)
    return made


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_table_is_the_definitions(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Starts, the first block of each group for blocks of 128, 32 and 16, and the group and first row of each panel:
    one loop in numpy, for groups of any size and rows past their sum."""
    groups = int(rng.integers(1, 40))
    sizes = rng.integers(0, 300, groups) * (rng.random(groups) > 0.3)
    rows = int(sizes.sum()) + int(rng.integers(0, 400))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    expected = [starts]
    for block in (128, 32, 16):
        counts = -(-sizes // block)
        expected.append(np.cumsum(counts) - counts)
    owners: list[int] = []
    firsts: list[int] = []
    for group, size in enumerate(sizes):
        for first in range(0, int(size), 128):
            owners.append(group)
            firsts.append(int(starts[group]) + first)
    panels = panels_of(rows, groups)
    assert len(owners) <= panels - 1  # one is left for rows past the sum, or there are none
    rest = np.minimum(starts[-1] + 128 * np.arange(panels - len(owners)), rows)
    expected += [np.array([*owners, *[groups] * len(rest)]), np.array([*firsts, *rest])]
    np.testing.assert_array_equal(_table(torch.from_numpy(sizes), rows, dtype), np.concatenate(expected))


def test_every_row_past_the_sum_has_a_panel(rng: np.random.Generator) -> None:
    """Panels of no group are what writes zeros there."""
    for rows in (1, 127, 128, 129, int(rng.integers(130, 3000))):
        table = _table(torch.zeros(3, dtype=torch.int64), rows, torch.int32)
        first = table[-panels_of(rows, 3) :]
        covered = {row for start in first for row in range(start, min(start + 128, rows))}
        assert covered == set(range(rows))


def test_sizes_that_are_none_are_cut() -> None:
    """Negative ones are empty groups, and nothing reaches past the rows."""
    starts = _table(torch.tensor([5, -3, 1 << 40, 7]), 100, torch.int64)[:5]
    np.testing.assert_array_equal(starts, [0, 5, 5, 100, 100])


@triton.jit
def _copied(source, target, length, SIZE: tl.constexpr):
    source = as_bits(source)
    target = as_bits(target)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at, mask=at < multiple_of_16(length)), mask=at < multiple_of_16(length))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
def test_arrays_are_read_as_bits(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Any bit pattern, NaN's payloads and subnormals too, arrives as it is; 16 divides the length."""
    size = torch.empty(0, dtype=dtype).element_size()
    stored = {torch.bfloat16: torch.int16}.get(dtype, dtype) if DEVICE == "cpu" else dtype
    given = torch.from_numpy(rng.integers(0, 256, 64 * size, dtype=np.uint8)).to(DEVICE)
    made = torch.zeros_like(given)
    _copied[(1,)](given.view(stored), made.view(stored), 64, SIZE=64)
    assert torch.equal(made, given)
