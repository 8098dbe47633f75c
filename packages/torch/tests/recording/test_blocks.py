"""Blocks of memory for what a pass reads and writes: no two arrays that are in use at the same time share a byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo_torch.recording.blocks import ALIGNMENT, SMALL, Block, Lifetime, blocks_for

LAUNCHES = 12

lifetimes = st.lists(
    st.tuples(
        st.integers(1, 1 << 40),
        st.one_of(st.integers(1, 5000), st.integers(SMALL - 2, SMALL + 2), st.integers(1, 5 * SMALL)),
        st.integers(0, LAUNCHES - 1),
        st.integers(0, LAUNCHES - 1),
    ),
    max_size=30,
).map(
    lambda drawn: [
        Lifetime(number, start, size, min(ends), max(ends)) for number, (start, size, *ends) in enumerate(drawn)
    ]
)
ends = st.lists(st.integers(0, LAUNCHES), max_size=5).map(lambda stops: [*sorted(stops), LAUNCHES])


@given(lifetimes, ends)
def test_arrays_in_use_do_not_overlap(arrays: list[Lifetime], ends: list[int]) -> None:
    """Each array is in one block that is there whenever a launch uses it, at the remainder that it had, and shares
    bytes only with arrays that no launch uses while it is in use."""
    blocks = blocks_for(arrays, ends)
    places = {number: (block, offset) for block in blocks for number, offset in block.offsets}
    assert len(places) == len(arrays) == sum(len(block.offsets) for block in blocks)
    for array in arrays:
        block, offset = places[array.number]
        assert 0 <= offset <= block.size - array.size
        assert offset % ALIGNMENT == array.start % ALIGNMENT
        begin = 0 if block.first_part == 0 else ends[block.first_part - 1]
        assert begin <= array.first <= array.last < ends[block.last_part]
        for other in arrays:
            if other.number == array.number or places[other.number][0] is not block:
                continue
            apart = offset + array.size <= places[other.number][1] or places[other.number][1] + other.size <= offset
            assert apart or other.last < array.first or array.last < other.first


@given(lifetimes, ends)
def test_large_arrays_are_held_no_longer_than_they_are_used(arrays: list[Lifetime], ends: list[int]) -> None:
    """A block of large arrays is there for the parts that use every one of them; small ones share one for all."""
    by_number = {array.number: array for array in arrays}

    def inside(block: Block) -> list[Lifetime]:
        return [by_number[number] for number, _ in block.offsets]

    of_small = [block for block in blocks_for(arrays, ends) if inside(block)[0].size < SMALL]
    assert len(of_small) <= 1
    for block in blocks_for(arrays, ends):
        if block in of_small:
            assert all(array.size < SMALL for array in inside(block))
            continue
        for array in inside(block):
            assert (0 if block.first_part == 0 else ends[block.first_part - 1]) <= array.first < ends[block.first_part]
            assert array.last < ends[block.last_part]
            assert block.last_part == 0 or array.last >= ends[block.last_part - 1]


def test_memory_is_used_again() -> None:
    """Three arrays in a row, of which two are in use at a time, take the room of two."""
    arrays = [Lifetime(number, 0, 4 * SMALL, number, number + 1) for number in range(3)]
    (block,) = blocks_for(arrays, [4])
    assert block.size == 8 * SMALL
