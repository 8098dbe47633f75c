"""Fixtures of this package's tests."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from octavo_bench.harness.goals import Goal, Goals, Place, read_goals
from octavo_bench.harness.perform import row_fields
from octavo_bench.harness.results import Row
from octavo_registry.cli import app

ROOT = Path(__file__).resolve().parents[3]
GOALS = ROOT / "benchmarks" / "goals" / "h200.toml"


class Run:
    """Outcome of one `octavo ARGUMENTS`, in this process: frameworks are imported once for all tests."""

    def __init__(self, *arguments: str) -> None:
        with mock.patch.object(sys, "argv", ["octavo", *arguments]):  # a result file records its command
            result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code = result.exit_code
        self.out = result.stdout
        self.err = result.stderr

    @property
    def json(self) -> Any:
        """What stdout holds."""
        return json.loads(self.out)


@pytest.fixture(scope="session")
def run() -> type[Run]:
    """run("bench", "gemm", ...): the outcome of the command with these arguments."""
    return Run


@pytest.fixture
def seed() -> int:
    """A new seed each run, shown by pytest where the test fails."""
    value = secrets.randbits(31)
    print(f"seed {value}")
    return value


@pytest.fixture(scope="session")
def goals_file() -> Path:
    """The goals of this repository."""
    return GOALS


@pytest.fixture(scope="session")
def h200() -> Goals:
    """What the goals file of this repository holds."""
    goals = read_goals(GOALS)
    assert goals is not None
    return goals


@pytest.fixture(scope="session")
def judged(h200: Goals) -> Callable[..., list[Goal]]:
    """judged("step", row, rows): the goals of a row among the rows of a run; on an H200, unless others are named."""

    def call(
        benchmark: str, row: Row, rows: Sequence[Row], *, device: str = "cuda", gpu: str = "NVIDIA H200"
    ) -> list[Goal]:
        return list(h200.judge(benchmark, row_fields(row), row.measures(rows), Place(device, gpu)))

    return call


def _described(goals: Sequence[Goal]) -> list[str]:
    return [f"{goal.name}: {'pass' if goal.passed else 'MISS'}" for goal in goals]


@pytest.fixture(scope="session")
def described() -> Callable[[Sequence[Goal]], list[str]]:
    """Goals as "name: pass" or "name: MISS"."""
    return _described


@pytest.fixture(scope="session")
def has_the_schema_of() -> Callable[[dict[str, Any], str], None]:
    """has_the_schema_of(content, "gemm-h200-2026-11-30.json"): a new file has every field of a published one."""

    def check(content: dict[str, Any], published: str) -> None:
        old = json.loads((ROOT / "benchmarks" / "results" / published).read_text())
        assert content["schema_version"] == old["schema_version"]
        # the one is added by hand, the other where a goals file has figures of these shapes
        missing = set(old) - set(content) - {"commit", "recorded"}
        assert not missing
        for section, rows in old.items():
            if isinstance(rows, list) and rows and isinstance(rows[0], dict) and content[section]:
                fields = set.intersection(*(set(row) for row in rows))  # some rows have more
                assert fields <= set(content[section][0]), section

    return check
