"""CUDA's plans of group sizes, however bad, are those of the CPU, word for word. Skipped where there is no device."""

from __future__ import annotations

import numpy as np
import pytest
from devices import needs_device

import octavo_native as native
from octavo_native import layouts

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from problems import CPU, CUDA, EDGE_SIZES, POISON, Place  # noqa: E402  it imports torch

pytestmark = needs_device

GROUPS = (1, 2, 5, 8, 64, 128, 1000, 1024, 1100)
VECTORS = 100_000
BATCH = 1000


def size_vectors(rng: np.random.Generator, count: int, groups: int, rows: int, wide: bool) -> np.ndarray:
    """Group sizes of every kind: fair, skewed, around block edges, negative, past the rows, the integers' ends."""
    dtype = np.int64 if wide else np.int32
    ends = np.iinfo(dtype)
    share = rows // groups
    sizes = rng.integers(0, 2 * share + 2, (count, groups))
    kind = rng.integers(0, 6, (count, 1))
    sizes = np.where(kind == 1, rng.choice(EDGE_SIZES, (count, groups)), sizes)
    sizes = np.where((kind == 2) & (rng.random((count, groups)) < 0.7), 0, sizes)
    sizes = np.where(kind == 3, share, sizes)
    bad = np.array([ends.min, ends.min + 1, -1, rows, rows + 1, ends.max - 1, ends.max], dtype=np.int64)
    sizes = np.where((kind == 4) & (rng.random((count, groups)) < 2 / groups), rng.choice(bad, (count, groups)), sizes)
    anything = rng.integers(ends.min, ends.max, (count, groups), dtype=np.int64, endpoint=True)
    return np.where(kind == 5, anything, sizes).astype(dtype)


def plans(place: Place, sizes: np.ndarray, rows: list[int], words: int) -> tuple[np.ndarray, np.ndarray]:
    """One plan a row of `sizes`, each in `words` poisoned words, and the status words; one wait for all of them."""
    count, groups = sizes.shape
    held = torch.from_numpy(sizes).to(place.device)
    out = torch.full((count, words), POISON, dtype=torch.int64, device=place.device)
    status = torch.full((count,), 4, dtype=torch.int32, device=place.device)
    stream = torch.cuda.current_stream().cuda_stream if place.cuda else 0
    for i in range(count):
        native.plan(
            cuda=place.cuda,
            stream=stream,
            sizes=held.data_ptr() + i * groups * sizes.itemsize,
            sizes_are_64=sizes.itemsize == 8,
            groups=groups,
            rows=rows[i],
            plan=out.data_ptr() + 8 * i * words,
            status=status.data_ptr() + 4 * i,
        )
    return out.cpu().numpy(), status.cpu().numpy()


def test_plans_of_fuzzed_sizes_are_those_of_the_cpu(rng: np.random.Generator) -> None:
    """faults.md 16, 61 and "device-side group offsets": no size, however bad, leads a plan astray; bad ones are told.

    100 000 vectors; whole plans are compared, and the words after them stay untouched.
    """
    for batch in range(VECTORS // BATCH):
        groups, wide = GROUPS[batch % len(GROUPS)], bool(rng.integers(2))
        most = int(rng.choice([0, 100, 2000, 20_000, 100_000]))
        rows = [int(n) for n in rng.integers(0, most, BATCH, endpoint=True)]
        sizes = size_vectors(rng, BATCH, groups, most, wide)
        words = layouts.round_up(native.plan_words(most, groups), 4) + 4
        ours, status = plans(CUDA, sizes, rows, words)
        theirs, their_status = plans(CPU, sizes, rows, words)
        different = np.flatnonzero((ours != theirs).any(axis=1) | (status != their_status))
        if different.size:
            first = int(different[0])
            word = int(np.flatnonzero(ours[first] != theirs[first])[0]) if (ours[first] != theirs[first]).any() else -1
            pytest.fail(f"plan of {sizes[first].tolist()} in {rows[first]} rows differs from word {word} on")


@pytest.mark.parametrize("groups", [2048, 5000, 65_536])
def test_plans_of_many_groups_are_those_of_the_cpu(rng: np.random.Generator, groups: int) -> None:
    """Past 1 024 groups the kernel works in chunks with carried sums; equal sizes keep the order of their numbers."""
    rows = 1 << 21
    sizes = np.concatenate([size_vectors(rng, 6, groups, rows, True), np.full((1, groups), 7, dtype=np.int64)])
    words = layouts.round_up(native.plan_words(rows, groups), 4) + 4
    ours, status = plans(CUDA, sizes, [rows] * len(sizes), words)
    theirs, their_status = plans(CPU, sizes, [rows] * len(sizes), words)
    assert (ours == theirs).all()
    assert (status == their_status).all()
