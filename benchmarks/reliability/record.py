"""What every record says of its making."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "jax", "numpy", "ml_dtypes", "hypothesis")


def git(*arguments: str) -> str:
    """What git says of this repository."""
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def stamped(command: str, found: dict[str, Any]) -> dict[str, Any]:
    """`found` with the command that repeats it, date, commit, machine and versions."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": git("rev-parse", "--short=10", "HEAD"),
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": versions,
        **found,
    }
