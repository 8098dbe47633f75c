"""Whether a call keeps memory: of CPython's, and of the C library's, where tensors and C++ have theirs."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any, ClassVar


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: what malloc holds, of all arenas."""

    _fields_: ClassVar = [
        (field, ctypes.c_size_t)
        for field in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int:
    """Bytes that malloc has given out: tensors, what C++ keeps, Python objects of more than 512 bytes. 0 where the C
    library cannot say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = MallInfo
    return int(mallinfo().uordblks)


def kept_by(call: Callable[[], Any], times: int) -> tuple[int, int]:
    """Python's small blocks of memory, and bytes of malloc's, that there are more after `times` calls."""
    blocks, heap = sys.getallocatedblocks(), heap_bytes()
    for _ in range(times):
        call()
    gc.collect()
    return sys.getallocatedblocks() - blocks, heap_bytes() - heap


def keeps_nothing(call: Callable[[], Any], times: int = 100, windows: int = 10) -> bool:
    """In one of ten windows of `times` calls: CPython's lists of free objects fill over the first few, and a leak is in
    every window. Not asked of tracemalloc, which counts each object that takes the place of one older than itself."""
    for _ in range(20):
        call()
    gc.collect()
    for _ in range(windows):
        blocks, heap = kept_by(call, times)
        # a block kept by each call would be `times` blocks, and the smallest piece of malloc's is 32 bytes; half of
        # that, for others may be given back
        if blocks < times // 2 and heap < times * 16:
            return True
    return False
