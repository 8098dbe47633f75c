"""Which kernel a backend would run, and why: what `octavo why --kernels` prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One way in which a backend could compute a GEMM, and what its model expects of it.

    name          of the kernel or tile, for people
    tiles         output tiles that are computed, partly filled ones included
    waves         tiles that each processor of the device computes one after another
    filled        part of the computed outputs that the result has, 0 to 1
    microseconds  expected time
    chosen        True for the one that runs
    """

    name: str
    tiles: int
    waves: float
    filled: float
    microseconds: float
    chosen: bool
