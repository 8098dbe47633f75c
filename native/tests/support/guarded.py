"""Arrays that are poisoned and lie between guards, so that stray writes and missing ones show. Not tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]

POISON = 0xA5
GUARD = 256


def aligned(count: int, dtype: npt.DTypeLike, to: int = 256) -> Array:
    """A zeroed array whose address is a multiple of `to`."""
    size = np.dtype(dtype).itemsize
    raw = np.zeros(count * size + to, np.uint8)
    start = -raw.ctypes.data % to
    return raw[start : start + count * size].view(dtype)


class Guarded:
    """Poisoned bytes of an array, aligned to 256, with guards on both sides."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        memory = np.full(self.size + 2 * GUARD + 256, POISON, dtype=np.uint8)
        start = GUARD + (-(memory.ctypes.data + GUARD)) % 256
        self._memory, self._start = memory, start

    @property
    def address(self) -> int:
        """0 for an array without elements, as frameworks give it."""
        return self._memory.ctypes.data + self._start if self.size else 0

    @property
    def bytes(self) -> U8:
        """The array's bytes, guards checked."""
        end = self._start + self.size
        assert (self._memory[: self._start] == POISON).all(), "bytes before the array were written"
        assert (self._memory[end:] == POISON).all(), "bytes after the array were written"
        return self._memory[self._start : end]

    @property
    def array(self) -> Array:
        """The array itself."""
        return self.bytes.view(self.dtype).reshape(self.shape)

    @property
    def untouched(self) -> bool:
        """True where every byte is still poison."""
        return bool((self.bytes == POISON).all())


def put(values: Array) -> Guarded:
    """A guarded copy of `values`."""
    out = Guarded(values.shape, values.dtype)
    out.bytes[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return out
