"""`--slow`: run the tests marked slow, too."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    # Every package declares the option, so that each can be tested alone; together the first one wins.
    try:
        parser.addoption("--slow", action="store_true", default=False, help="run the tests marked slow, too")
    except ValueError:
        return


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: more than a few seconds; run with `--slow`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow", default=False):
        return
    for item in items:
        if _HERE in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
