"""Runs of the suite in a process of its own, on the plugins of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PLUGINS = Path(__file__).parent / "plugins"
SETTINGS = Path(__file__).parents[1] / "src" / "octavo_conformance" / "suite" / "pytest.ini"


@dataclass(frozen=True)
class Run:
    """What a run of the suite left behind."""

    code: int
    output: str
    report: dict[str, Any]

    def ids(self, outcome: str, backend: str | None = None) -> set[str]:
        """Ids of the rows with an outcome, without their cases."""
        rows = [row for row in self.report["rows"] if row["outcome"] == outcome]
        return {row["id"].partition("[")[0] for row in rows if backend in (None, row["backend"])}


def environment() -> dict[str, str]:
    """This process's, with the plugins of this folder on the path."""
    path = [str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


Suite = Callable[..., Run]


@pytest.fixture(scope="session")
def plugins_environment() -> dict[str, str]:
    """Environment of a process that finds the plugins of this folder installed."""
    return environment()


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """`suite(*arguments)`: pytest on the suite, with a JSON report."""

    def run(*arguments: str) -> Run:
        file = tmp_path_factory.mktemp("run") / "report.json"
        command = [sys.executable, "-m", "pytest", "-c", str(SETTINGS), "-q", "--pyargs", "octavo_conformance.suite"]
        done = subprocess.run(
            [*command, "--octavo-report", str(file), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
        )
        report = json.loads(file.read_text()) if file.exists() else {}
        return Run(done.returncode, done.stdout + done.stderr, report)

    return run
