"""Launches of the numpy backend's fprop, written down by the addresses of arrays and made again at others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from octavo_numerics import QuantizedArray

READ = ("rowwise", "rowwise_scale", "rowwise_global")

Told = Callable[[int, int, bool], None]


class Listeners:
    """The recorder that is told of launches, and who is told of memory as soon as it is allocated; None: nobody."""

    recorder: Recorder | None = None
    memory: Told | None = None


def launch(run: Callable[..., Any], x: Any, w: Any, sizes: Any, **rest: Any) -> Any:
    """`run` of these operands, whose result is an array of its own while a recorder listens."""
    result = run(x, w, sizes, **rest)
    if Listeners.recorder is None or Listeners.memory is None:
        return result
    y = np.empty_like(result)
    Listeners.memory(*memory_of(y), True)
    y[...] = result
    Listeners.recorder.add(run, x, w, [*_planes(x), *_planes(w), sizes, y])
    return y


def memory_of(array: Any) -> tuple[int, int]:
    """The address of an array, and its bytes."""
    return array.ctypes.data, array.nbytes


class Recorder:
    """See `octavo_registry.contract.Recorder`. One fault reads w where it lay, the other refuses no array."""

    def __init__(self, fault: str | None, like: Any) -> None:
        self.refusal: str | None = None
        self._fault = fault
        self._named: list[tuple[int, int]] = []
        self._launches: list[tuple[Callable[..., Any], Any, Any, list[Any], list[int]]] = []

    def __enter__(self) -> Recorder:
        Listeners.recorder = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        Listeners.recorder = None

    def name(self, start: int, size: int, replaces: bool, /) -> None:
        """The number is the place in the list."""
        self._named.append((start, size))

    def add(self, run: Callable[..., Any], x: Any, w: Any, arrays: list[Any]) -> None:
        """Writes down a launch, or why it cannot be."""
        missing = [array for array in arrays if memory_of(array) not in self._named]
        if missing and self._fault != "unnumbered":
            self.refusal = "an array of a launch has no number"
        numbers = [
            -1 if memory_of(array) not in self._named else self._named.index(memory_of(array)) for array in arrays
        ]
        self._launches.append((run, x, w, arrays, numbers))

    def arrays(self) -> list[list[int]]:
        """Numbers by launch."""
        return [[number for number in numbers if number >= 0] for *_, numbers in self._launches]

    def run(self, addresses: list[int], like: Any, first: int, end: int, /) -> None:
        """Makes the launches."""
        for run, x, w, arrays, numbers in self._launches[first:end]:
            moved = [
                array if number < 0 else _at(addresses[number], array)
                for array, number in zip(arrays, numbers, strict=True)
            ]
            of_x = len(_planes(x))
            *planes, sizes, y = moved
            of_w = _planes(w) if self._fault == "stale-weights" else planes[of_x:]
            y[...] = run(_with(x, planes[:of_x], sizes), _with(w, of_w, None), sizes)


def _at(address: int, like: Any) -> Any:
    return np.ndarray(like.shape, like.dtype, (ctypes.c_char * like.nbytes).from_address(address))


def _planes(operand: Any) -> list[Any]:
    """What fprop reads of an operand."""
    if not isinstance(operand, QuantizedArray):
        return [operand]
    return [getattr(operand, name) for name in READ if getattr(operand, name) is not None]


def _with(operand: Any, planes: Sequence[Any], sizes: Any) -> Any:
    """The operand with these planes in the place of its own."""
    if not isinstance(operand, QuantizedArray):
        return planes[0]
    names = [name for name in READ if getattr(operand, name) is not None]
    return replace(operand, group_sizes=sizes, **dict(zip(names, planes, strict=True)))
