"""RecordedPass: a pass as its launches, and the arrays that they read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_registry.contract.recording import Recorder
from octavo_torch.recording.lifetimes import ALIGNMENT, SMALL, Lifetime, block_of
from octavo_torch.recording.tape import Tape

Uses = dict[int, tuple[int, int]]
"""By the numbers of arrays, the first and the last launch that reads or writes it."""


class _Result(NamedTuple):
    """An array that the pass allocates and returns.

    number     of the array
    position   among the results
    stride     of one that lies transposed; None: it is contiguous
    """

    number: int
    position: int
    shape: torch.Size
    stride: tuple[int, ...] | None
    dtype: torch.dtype


class _Part(NamedTuple):
    """Launches from `first` to before `end`.

    results   are allocated before them, and so is scratch: arrays that nobody gets
    freed     numbers of such arrays that are freed after them
    stops     the names of the stops that come then
    """

    first: int
    end: int
    results: list[_Result]
    scratch: list[Lifetime]
    freed: list[int]
    stops: list[str]


class RecordedPass:
    """A pass that a Tape has written down.

    A large array is allocated before the first launch that uses it, and freed after the last one; small ones that
    nobody gets share a block.
    """

    def __init__(self, tape: Tape, given: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> None:
        """`given` and `results` are those of the pass that was written down. ValueError where `tape` refuses it, or a
        result is neither given nor an array that a launch has written."""
        if tape.refusal is not None:
            raise ValueError(tape.refusal)
        self._recorder: Recorder[Tensor] = tape.recorder
        launches = tape.recorder.arrays()
        uses = _uses(launches)
        first_allocated = sum(tensor is not None for tensor in given)
        self._allocation_count = len(tape.allocations)
        self._result_count = len(results)
        self._of_given, made = _sources(tape, given, results, first_allocated)
        if not all(result.number in uses for result in made):
            raise ValueError("no launch writes a result")
        returned = {result.number for result in made}
        scratch = [
            Lifetime(number, *memory, *uses[number])
            for number, memory in enumerate(tape.allocations, first_allocated)
            if number in uses and number not in returned
        ]
        self._block = block_of(array for array in scratch if array.size < SMALL)
        first_uses = {
            result: uses[result.number][0] if tape.allocations[result.number - first_allocated].size >= SMALL else 0
            for result in made
        }
        self._parts = _parts(len(launches), tape.stops, first_uses, [each for each in scratch if each.size >= SMALL])

    def run(
        self, given: Sequence[Tensor | None], like: Tensor, at_stop: Callable[[str], None] | None = None
    ) -> list[Tensor | None]:
        """The results of the pass on `given`: tensors like those that it was written down for, and where they had None,
        None.

        like      a tensor on the device
        at_stop   is called with the name of each stop
        """
        device, allocate, launch = like.device, torch.empty, self._recorder.run
        addresses = [tensor.data_ptr() for tensor in given if tensor is not None]
        addresses += [0] * self._allocation_count
        results: list[Tensor | None] = [None] * self._result_count
        for position, source in self._of_given:
            results[position] = given[source]
        memory: dict[int, Tensor] = {}
        small = _bytes(self._block.size, device)
        start = _aligned(small)
        for number, offset in self._block.offsets:
            addresses[number] = start + offset
        for first, end, made, scratch, freed, stops in self._parts:
            for number, position, shape, stride, dtype in made:
                if stride is None:
                    result = allocate(shape, dtype=dtype, device=device)
                else:
                    result = torch.empty_strided(shape, stride, dtype=dtype, device=device)
                results[position] = result
                addresses[number] = result.data_ptr()
            for array in scratch:
                # nothing but `memory` may hold them
                memory[array.number] = _bytes(array.size, device)
                addresses[array.number] = _aligned(memory[array.number]) + array.remainder
            launch(addresses, like, first, end)
            for number in freed:
                del memory[number]
            for stop in stops:
                if at_stop is not None:
                    at_stop(stop)
        return results


def _bytes(size: int, device: torch.device) -> Tensor:
    """Memory in which so many bytes begin at a multiple of ALIGNMENT, or at any remainder by it."""
    return torch.empty(size + 2 * ALIGNMENT, dtype=torch.uint8, device=device)


def _aligned(memory: Tensor) -> int:
    return -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT


def _uses(launches: Sequence[Sequence[int]]) -> Uses:
    uses: Uses = {}
    for launch, arrays in enumerate(launches):
        for number in arrays:
            uses[number] = uses.get(number, (launch, launch))[0], launch
    return uses


def _sources(
    tape: Tape, given: Sequence[Tensor | None], results: Sequence[Tensor | None], first_allocated: int
) -> tuple[list[tuple[int, int]], list[_Result]]:
    """The positions of results that are given tensors, each with theirs; and the results that the pass has made."""
    # of two allocations at one address the later one is still there
    numbers = {memory.start: number for number, memory in enumerate(tape.allocations, first_allocated)}
    places = {id(tensor): place for place, tensor in enumerate(given)}
    of_given: list[tuple[int, int]] = []
    made: list[_Result] = []
    for position, tensor in enumerate(results):
        if tensor is None:
            continue
        if id(tensor) in places:
            of_given.append((position, places[id(tensor)]))
            continue
        number = numbers.pop(tensor.data_ptr(), None)
        stride = None if tensor.is_contiguous() else tensor.stride()
        dense = stride is None or tensor.mT.is_contiguous()
        if number is None or not dense or tensor.nbytes != tape.allocations[number - first_allocated].size:
            raise ValueError("a result is not an array of its own")
        made.append(_Result(number, position, tensor.shape, stride, tensor.dtype))
    return of_given, made


def _parts(
    launches: int, stops: Sequence[tuple[str, int]], results: Mapping[_Result, int], large: Sequence[Lifetime]
) -> list[_Part]:
    """The parts of a pass: one ends where a large array begins or ends, and where there is a stop.

    results   each with the number of the launch before which it is allocated
    """
    # before the first launch there is nothing to do for a stop that the end of its part cannot do
    places = [(name, max(1, place)) for name, place in stops]
    ends = {launches, *results.values(), *(array.first for array in large), *(array.last + 1 for array in large)}
    ends |= {place for _, place in places}
    return [
        _Part(
            first,
            end,
            [result for result, before in results.items() if before == first],
            [array for array in large if array.first == first],
            [array.number for array in large if array.last + 1 == end],
            [name for name, place in places if place == end],
        )
        for first, end in pairwise(sorted({0, *ends}))
    ]
