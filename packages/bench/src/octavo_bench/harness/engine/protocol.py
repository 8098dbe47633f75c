"""Engine: what a framework has to give so that one benchmark serves torch and JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from octavo.formats import DType
from octavo_bench.harness.engine.values import F32
from octavo_bench.harness.timing import Call, Times

BUDGET_MS = 80.0
"""Device time that one row's timed calls may take: slow peers get fewer repeats."""


class Engine(Protocol):
    """Arrays and clocks of one framework on one device.

    framework, device, arch   as in octavo_registry.Request
    where                     where group sizes live, likewise
    cache_bytes               of the device's last cache; 0: buffers are not rotated
    """

    framework: str
    device: str
    arch: tuple[int, int] | None
    where: Literal["host", "device"]
    cache_bytes: int

    def normal(self, shape: tuple[int, ...], seed: int) -> Any:
        """bf16 normal values; rows, and blocks of 128 columns of matrices, differ in size by up to 4."""

    def array(self, values: Sequence[float] | Sequence[int], dtype: str) -> Any:
        """A one-dimensional array of these values."""

    def full(self, shape: tuple[int, ...], dtype: DType, value: float) -> Any:
        """A new array of one value."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a user would run it again and again."""

    def sizes_for(self, backend: str, sizes: Any, rows: int) -> Any:
        """`sizes` in the form that a layer of this backend keeps for its calls."""

    def take(self, array: Any, index: npt.NDArray[np.int64], axis: int) -> Any:
        """Rows or columns of an array."""

    def host(self, array: Any) -> F32:
        """The values on the host."""

    def times(self, calls: Sequence[Call], repeats: int) -> Times:
        """Time of one call; `calls` are the same work on different buffers, taken in turn."""

    def times_in_turns(self, ways: Sequence[Sequence[Call]], repeats: int) -> list[Times]:
        """`times` of several ways to do the same work, in turns (`timing.turn_order`): all meet the same clocks."""

    def batch(self, calls: Sequence[Call], count: int) -> float:
        """Microseconds per call of `count` of them in turn, from the host's first to the device's last."""

    def copy_rate(self) -> float | None:
        """TB/s of a device copy, bytes read and written counted; None where it says nothing."""

    def release(self) -> None:
        """Give memory that is not used back to the device."""
