"""Whole steps lower for CUDA by jax-triton, for chips that are not here: programs have the calls that were started."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Facts = list[dict[str, Any]]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_triton") is None or importlib.util.find_spec("jax_plugins") is None,
    reason="jax-triton (for Python 3.12 and newer) or JAX's CUDA plugin is not installed",
)


def _lower(which: str) -> Facts:
    """In a process in which Triton compiles."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "lowered.py"), which]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def _hold(facts: Facts) -> None:
    for each in facts:
        # XLA's programs share what is equal, so that a table that ten ask for is lowered as often as they are jitted
        assert 0 < each["calls"] <= sum(each["kernels"].values()), each


def test_steps_are_lowered() -> None:
    """Products by descriptors and by pointers; quantizers with turned columns; either order of weights."""
    facts = _lower("quick")
    _hold(facts)
    kernels = {each["recipe"]: set(each["kernels"]) for each in facts}
    assert {"described_rows", "described_columns"} <= kernels["bf16"]
    assert {"described_rows", "undivided_columns", "quantize_blocks", "dequantize_plane"} <= kernels["fp8-block"]
    assert {"rows_times_matrices", "columns_times_columns", "quantize_blocks"} <= kernels["mxfp8"]


@pytest.mark.slow
def test_every_step_is_lowered_for_every_chip() -> None:
    """All recipes, all five chips, both orders of weights."""
    facts = _lower("all")
    assert len(facts) == 70
    _hold(facts)
