"""Fixtures of this package's tests."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from octavo_registry.cli import app


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
    """run("train", "--quick", ...): the outcome of the command with these arguments."""
    return Run


@pytest.fixture
def seed() -> int:
    """A new seed each run, shown by pytest where the test fails."""
    value = secrets.randbits(31)
    print(f"seed {value}")
    return value


@pytest.fixture
def text_file(tmp_path: Path, seed: int) -> Path:
    """English-like text that is long enough to train on."""
    words = [b"grouped", b"tensor", b"scale", b"of", b"the", b"expert", b"a", b"rounds", b"to", b"nearest"]
    path = tmp_path / "text.txt"
    path.write_bytes(b" ".join(words[(i * i * 7 + i * seed + (i // 13)) % len(words)] for i in range(20_000)))
    return path
