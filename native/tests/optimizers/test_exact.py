"""Roots and quotients out of approximations, as the kernels make them, against IEEE's; compiled for this machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("g++") or shutil.which("c++")

DOUBTFUL = {"root 3ffc114a", "root 406e9372", "divisor 3fffffff"}
"""What would be wrong with the least exact approximation that PTX allows. nvcc's own root and quotient are the same
operations, so no GPU makes that one; test_adamw.py has a GPU go through all roots, and divide by that divisor."""


def _fused() -> list[str]:
    """Options for one instruction, where this machine has it: std::fma is a slow function otherwise."""
    known = Path("/proc/cpuinfo")
    return ["-mfma"] if platform.machine() == "x86_64" and known.exists() and " fma " in known.read_text() else []


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_roots_quotients_and_updates_are_exact(tmp_path: Path, rng: np.random.Generator) -> None:
    """Kernels step without IEEE's divisions and roots, and a step has the definition's bits all the same."""
    assert COMPILER is not None
    program = tmp_path / "exact"
    include = HERE.parents[1] / "include"
    options = ("-std=c++20", "-O2", "-ffp-contract=off", *_fused(), f"-I{include}")
    subprocess.run([COMPILER, *options, str(HERE / "exact.cpp"), "-o", str(program)], check=True)
    seed = str(int(rng.integers(1 << 31)))
    found = subprocess.run([str(program), seed], check=True, capture_output=True, text=True).stdout
    assert set(found.splitlines()) <= DOUBTFUL
