"""Roots and quotients out of approximations, as the kernels make them, against IEEE's; compiled for this machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from compiled import lines_of, needs_compiler

HERE = Path(__file__).resolve().parent

DOUBTFUL = {"root 3ffc114a", "root 406e9372", "divisor 3fffffff"}
"""What would be wrong with the least exact approximation that PTX allows. nvcc's own root and quotient are the same
operations, so no GPU makes that one; test_adamw.py has a GPU go through all roots, and divide by that divisor."""


@needs_compiler
def test_roots_quotients_and_updates_are_exact(tmp_path: Path, rng: np.random.Generator) -> None:
    """Kernels step without IEEE's divisions and roots, and a step has the definition's bits all the same."""
    seed = str(int(rng.integers(1 << 31)))
    assert set(lines_of(HERE / "exact.cpp", tmp_path, seed)) <= DOUBTFUL
