"""The `octavo` command, in process, of a registry that holds two backends and nothing that is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo_registry import Registry
from octavo_registry.cli import app, commands, notes, selftest
from octavo_registry.discovery import bridges, entry_points


class Run:
    """Outcome of one invocation."""

    def __init__(self, *arguments: str) -> None:
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


@pytest.fixture
def run() -> type[Run]:
    """run("why", "fprop", ...): the outcome of the command with these arguments."""
    return Run


@pytest.fixture(autouse=True)
def _only_of_this_test(monkeypatch: pytest.MonkeyPatch, fakes: Any, use: Callable[[Registry], None]) -> None:
    """Nothing that is installed beside the tests is seen; the registry holds one backend."""
    found = entry_points.published

    def published(group: str) -> Any:
        return tuple(entry for entry in found(group) if entry.distribution.startswith("test-"))

    monkeypatch.setattr(bridges, "published", published)
    monkeypatch.setattr(bridges, "_records", {})
    monkeypatch.setattr(commands, "published", published)
    monkeypatch.setattr(notes, "published", published)
    monkeypatch.setattr(selftest, "definition", lambda: None)
    use(fakes.registry(fakes.plugin("a", priority=5), fakes.plugin("b", rows=[fakes.row(device="cuda")])))
