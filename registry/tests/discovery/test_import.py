"""What importing the package does not do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HOSTILE = "import pathlib\npathlib.Path({canary!r}).touch()\n"


def python(code: str, *path: Path) -> str:
    """Output of a fresh interpreter that has `path` before everything else."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    environment.pop("OCTAVO_BACKEND", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, timeout=60
    )
    return done.stdout


def test_importing_loads_no_plugin(install: Any, tmp_path: Path) -> None:
    """faults.md, "plugin loading": a hostile distribution that is merely installed is not imported with the library.

    The same distribution is imported at the first use, which shows that the first half could have failed.
    """
    canary = tmp_path / "canary"
    points = {
        "octavo.backends": {"hostile": "oct_hostile"},
        "octavo.frameworks": {"hostile": "oct_hostile:BRIDGE"},
        "octavo.commands": {"hostile": "oct_hostile:app"},
    }
    install("test-hostile", {"oct_hostile": HOSTILE.format(canary=str(canary))}, points)
    site = tmp_path / "site"
    names = "octavo_registry.state_token(); octavo_registry.framework_names()"
    python(f"import octavo, octavo_registry, octavo_registry.cli; {names}", site)
    assert not canary.exists()
    only = "lambda: [e for e in published('octavo.backends') if e.distribution == 'test-hostile']"
    code = "from octavo_registry import Registry; from octavo_registry.discovery.entry_points import published"
    python(f"{code}; Registry({only}).plugins()", site)
    assert canary.exists()


def test_importing_brings_no_framework() -> None:
    """The registry is what a plugin's card needs: no framework, numpy or terminal library comes with it."""
    heavy = "{'torch', 'jax', 'numpy', 'typer', 'rich', 'octavo_numerics', 'octavo_torch', 'octavo_jax'}"
    assert python(f"import sys, octavo_registry; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"
