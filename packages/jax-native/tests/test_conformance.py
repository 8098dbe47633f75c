"""The suite that any backend runs, on the CPU and, where there is one, on the GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_conformance_suite_passes(tmp_path: Path) -> None:
    """What the card declares is tested, nothing works undeclared."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    suite = ["--pyargs", "octavo_conformance.suite", "--octavo-backend", "jax-native"]
    result = subprocess.run([*command, *suite], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "undeclared capability" not in result.stdout
