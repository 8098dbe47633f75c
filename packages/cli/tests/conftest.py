"""Fixtures of this package's tests."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest


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
