"""The suite that any backend runs, on the CPU and, where there is one, on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_conformance_suite_passes(tmp_path: Path) -> None:
    """What the card declares is tested, nothing works undeclared."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    suite = ["--pyargs", "octavo_conformance.suite", "--octavo-backend", "jax-native"]
    settings = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}  # for what it shards
    result = subprocess.run([*command, *suite], env=settings, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "undeclared capability" not in result.stdout
