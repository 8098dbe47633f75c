"""The suite collects nothing until a backend is named."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True for the suite's files in a run that is about something else."""
    if collection_path.suffix == ".py" and not config.getoption("octavo_backend"):
        return True
    return None
