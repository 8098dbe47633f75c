"""A block for what a pass reads and writes: no two arrays that are in use at the same time share a byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo_torch.recording.lifetimes import ALIGNMENT, Lifetime, block_of

LAUNCHES = 12

lifetimes = st.lists(
    st.tuples(
        st.integers(1, 1 << 40),
        st.one_of(st.integers(1, 5000), st.integers(ALIGNMENT - 1, ALIGNMENT + 1)),
        st.integers(0, LAUNCHES - 1),
        st.integers(0, LAUNCHES - 1),
    ),
    max_size=30,
).map(
    lambda drawn: [
        Lifetime(number, start, size, min(ends), max(ends)) for number, (start, size, *ends) in enumerate(drawn)
    ]
)


@given(lifetimes)
def test_arrays_in_use_do_not_overlap(arrays: list[Lifetime]) -> None:
    """Each array is in the block once, at the remainder that it had, and shares bytes only with arrays that no launch
    uses while it is in use."""
    block = block_of(arrays)
    places = dict(block.offsets)
    assert len(places) == len(arrays) == len(block.offsets)
    for array in arrays:
        offset = places[array.number]
        assert 0 <= offset <= block.size - array.size
        assert offset % ALIGNMENT == array.start % ALIGNMENT
        for other in arrays:
            if other.number != array.number:
                apart = offset + array.size <= places[other.number] or places[other.number] + other.size <= offset
                assert apart or other.last < array.first or array.last < other.first


def test_memory_is_used_again() -> None:
    """Three arrays in a row, of which two are in use at a time, take the room of two; none take no room."""
    arrays = [Lifetime(number, 0, 4 * ALIGNMENT, number, number + 1) for number in range(3)]
    assert block_of(arrays).size == 8 * ALIGNMENT
    assert block_of([]).size == 0
