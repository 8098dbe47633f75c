"""plan_cpu against a twin in numpy that shares no code with it, over 100 000 vectors of group sizes.

docs/faults: rows 6 (last group empty), 12 (sum below M), 61 and 62 (sizes out of range), 26 to 29 (overflow).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from cpu_calls import make_plan
from guarded import POISON, put

import octavo_native as native

I64 = npt.NDArray[np.int64]
HEIGHTS = (16, 32, 64, 128, 256)
BAD_SIZES = 1


def twin(sizes: npt.NDArray[np.signedinteger], rows: int) -> tuple[I64, npt.NDArray[np.bool_]]:
    """(plans [B, words], bad [B]) of size vectors [B, G], by the definition in plan.h: clamp, add up, cut at `rows`."""
    count, groups = sizes.shape
    ends = np.minimum(np.cumsum(np.clip(sizes, 0, rows).astype(np.int64), axis=1), rows)
    starts = np.concatenate([np.zeros((count, 1), dtype=np.int64), ends[:, :-1]], axis=1)
    kept = ends - starts
    bad = (kept != sizes).any(axis=1)

    def prefix(values: I64) -> I64:
        return np.concatenate([np.zeros((count, 1), dtype=np.int64), np.cumsum(values, axis=1)], axis=1)

    blocks = [prefix(-(-kept // height)) for height in HEIGHTS]
    order = np.argsort(-kept, axis=1, kind="stable")
    header = np.zeros((count, 16), dtype=np.int64)
    header[:, 0], header[:, 1], header[:, 2], header[:, 3] = ends[:, -1], bad * BAD_SIZES, groups, rows
    for index, block in enumerate(blocks):
        header[:, 4 + index] = block[:, -1]
    arrays = [header, prefix(kept), *blocks, order]
    padding = np.zeros((count, -sum(array.shape[1] for array in arrays) % 4), dtype=np.int64)
    return np.concatenate([*arrays, padding, panels(kept, starts, blocks, rows)], axis=1), bad


def panels(kept: I64, starts: I64, blocks: list[I64], rows: int) -> I64:
    """[B, 4 P] words of the panel table."""
    count, groups = kept.shape
    bound = (rows + 127 * groups) // 128
    first = blocks[HEIGHTS.index(128)]
    number = np.broadcast_to(np.arange(bound), (count, bound))
    used = number < first[:, -1:]
    # Vectors beside each other on one axis: `first` is sorted within each, so that one search finds every group.
    step = bound + 1
    lifted = (first[:, 1:] + np.arange(count)[:, None] * step).reshape(-1)
    wanted = (number + np.arange(count)[:, None] * step).reshape(-1)
    group = np.searchsorted(lifted, wanted, side="right").reshape(count, bound) - np.arange(count)[:, None] * groups
    group = np.where(used, group, 0)

    def of_group(values: I64) -> I64:
        return np.take_along_axis(values, group, axis=1)

    local = number - of_group(first)
    table = np.zeros((count, bound, 8), dtype=np.int32)
    table[..., 0] = np.where(used, group, -1)
    table[..., 1] = np.where(used, np.minimum(of_group(kept) - 128 * local, 128), 0)
    table[..., 4] = np.where(used, local, 0)
    table[..., 6] = np.where(used, of_group(blocks[0]) + 8 * local, 0)
    table[..., 7] = np.where(used, of_group(blocks[1]) + 4 * local, 0)
    words = table.view(np.int64)
    words[..., 1] = np.where(used, of_group(starts) + 128 * local, 0)
    return words.reshape(count, 4 * bound)


def made(sizes: npt.NDArray[np.signedinteger], rows: int) -> tuple[I64, npt.NDArray[np.int32]]:
    """(plans [B, words], status words [B]) from plan_cpu, into poisoned memory."""
    count, groups = sizes.shape
    words = native.plan_words(rows, groups)
    given = put(sizes)
    plans = put(np.full((count, words), int.from_bytes(bytes([POISON] * 8), "little", signed=True), dtype=np.int64))
    status = put(np.full(count, 4, dtype=np.int32))  # a flag of somebody else's, which stays
    for index in range(count):
        native.plan(
            cuda=False,
            sizes=given.address + index * groups * sizes.itemsize,
            sizes_are_64=sizes.itemsize == 8,
            groups=groups,
            rows=rows,
            plan=plans.address + index * words * 8,
            status=status.address + index * 4,
        )
    assert (given.array == sizes).all()
    return plans.array, status.array


def draw(rng: np.random.Generator, count: int, groups: int, rows: int, dtype: type) -> npt.NDArray[np.signedinteger]:
    """Vectors that fit, vectors that do not, and vectors with values at the ends of the dtype."""
    info = np.iinfo(dtype)
    edges = np.array([0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257], dtype=np.int64)
    sizes = rng.choice(edges, (count, groups))
    even = rng.integers(0, 2 * rows // groups + 2, (count, groups))
    sizes = np.where(rng.random((count, 1)) < 0.4, even, sizes)
    sizes[rng.random((count, groups)) < 0.2] = 0
    hostile = rng.choice(
        np.array([-1, -128, info.min, info.min + 1, info.max, info.max - 1, rows, rows + 1, info.max // 2]),
        (count, groups),
    )
    chosen = (rng.random((count, groups)) < 2 / groups) & (rng.random((count, 1)) < 0.3)
    return np.where(chosen, hostile, sizes).astype(dtype)


def compare(sizes: npt.NDArray[np.signedinteger], rows: int) -> float:
    """Every word equal; the part of the vectors that were bad."""
    want, bad = twin(sizes, rows)
    got, status = made(sizes, rows)
    wrong = np.flatnonzero((got != want).any(axis=1))
    if wrong.size:
        first = wrong[0]
        words = np.flatnonzero(got[first] != want[first])
        raise AssertionError(f"rows {rows} sizes {sizes[first].tolist()}: {len(wrong)} plans differ, in words {words}")
    assert (status == np.where(bad, 4 | BAD_SIZES, 4)).all()
    return float(bad.mean())


def test_a_hundred_thousand_size_vectors(rng: np.random.Generator) -> None:
    """1 to 40 groups, M from 0 to 6 000, int32 and int64, good and bad in good measure."""
    batches, each = 200, 500
    bad = []
    for batch in range(batches):
        groups = int(rng.integers(1, 41))
        rows = int(rng.choice([0, 1, 127, 128, 129, int(rng.integers(0, 6000)), 100 * groups]))
        bad.append(compare(draw(rng, each, groups, rows, np.int64 if batch % 2 else np.int32), rows))
    assert 0.2 < np.mean(bad) < 0.95  # both kinds were tested


@pytest.mark.parametrize(("groups", "rows"), [(1024, 70_000), (1100, 3), (65_536, 200_000), (65_536, 0)])
def test_many_groups(groups: int, rows: int, rng: np.random.Generator) -> None:
    """As many groups as a call may have."""
    compare(draw(rng, 3, groups, rows, np.int64), rows)


def test_a_tall_operand() -> None:
    """M = 2^23: long runs of panels in one group, and sums of sizes past int64."""
    rows, most = 1 << 23, int(np.iinfo(np.int64).max)
    compare(np.array([[rows, 0, 0], [rows - 129, 0, 129], [most, most, most], [5, most, 7]], dtype=np.int64), rows)


def test_sizes_that_fit_are_not_flagged() -> None:
    """A sum below M leaves the status word alone, and a null one is allowed."""
    plan, status = make_plan(np.array([3, 0, 4], dtype=np.int32), 9)
    assert status == 0
    assert plan.array[:4].tolist() == [7, 0, 3, 9]
    sizes = put(np.array([-1], dtype=np.int64))
    native.plan(cuda=False, sizes=sizes.address, sizes_are_64=True, groups=1, rows=9, plan=plan.address)
    assert plan.array[:4].tolist() == [0, BAD_SIZES, 1, 9]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"sizes": 0}, "sizes is null"),
        ({"plan": 0}, "plan is null"),
        ({"plan": 8}, "32 bytes"),
        ({"sizes": 4}, "sizes is not aligned"),
        ({"status": 2}, "status is not aligned"),
        ({"groups": 0}, "groups is less than 1"),
        ({"groups": 65_537}, "groups is past 65536"),
        ({"rows": -1}, "rows is negative"),
        ({"rows": (1 << 30) + 1}, "rows is past 2\\^30"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(change: dict[str, int], word: str) -> None:
    """Small numbers are misaligned pointers, which nothing follows."""
    sizes, plan = put(np.zeros(2, dtype=np.int64)), put(np.zeros(native.plan_words(5, 2), dtype=np.int64))
    good = {"sizes": sizes.address, "groups": 2, "rows": 5, "plan": plan.address}
    with pytest.raises(ValueError, match=word):
        native.plan(cuda=False, sizes_are_64=True, **(good | change))
    assert not plan.array.any()
