"""The backend does what its card says: quantizer bits equal the definition, GEMMs stay within their bounds."""

from __future__ import annotations

import subprocess
import sys


def test_the_conformance_suite_passes() -> None:
    """Every capability that the card declares is tested; what it does not declare is skipped with the reason."""
    program = "from octavo_registry.cli import main; main()"
    command = [sys.executable, "-c", program, "conform", "acme-jax"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
