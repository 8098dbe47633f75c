"""The JAX examples of the documentation, as a reader runs them: a mesh of eight devices, and two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from sessions.xla import xla_settings
from workspace import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def _run(name: str) -> str:
    """What the example prints; LLVM optimizes nothing of its programs, as of other documents'."""
    environment = {**os.environ, **xla_settings("in a hurry")}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_eight_devices() -> None:
    """A layer and a MoE block over ep and fsdp give one device's loss; the example compares them itself."""
    assert "P('ep', 'fsdp', None)" in _run("sharding_8_devices.py")


def test_two_processes() -> None:
    """`jax.distributed` with gloo: both processes compute the same losses, which fall (faults.md 54)."""
    told = re.findall(r"process (\d) of 2, 4 devices: loss ([\d. ]+)", _run("two_processes.py"))
    assert sorted(process for process, _ in told) == ["0", "1"]
    first, second = ([float(value) for value in losses.split()] for _, losses in told)
    assert first == second
    assert first == sorted(first, reverse=True)
    assert first[-1] < 0.8 * first[0]
