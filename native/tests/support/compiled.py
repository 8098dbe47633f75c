"""Programs of the tests that are compiled for this machine: what a header of include/octavo computes on the host."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("g++") or shutil.which("c++")
INCLUDE = Path(__file__).resolve().parents[2] / "include"

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def _fused() -> list[str]:
    """Options for one instruction, where this machine has it: std::fma is a slow function otherwise."""
    known = Path("/proc/cpuinfo")
    return ["-mfma"] if platform.machine() == "x86_64" and known.exists() and " fma " in known.read_text() else []


def lines_of(source: Path, folder: Path, *arguments: str) -> list[str]:
    """What the program prints, which is built in `folder`."""
    assert COMPILER is not None
    program = folder / source.stem
    options = ("-std=c++20", "-O2", "-ffp-contract=off", *_fused(), f"-I{INCLUDE}")
    subprocess.run([COMPILER, *options, str(source), "-o", str(program)], check=True)
    return subprocess.run([str(program), *arguments], check=True, capture_output=True, text=True).stdout.splitlines()
