"""`--slow`: run the tests marked slow, too. Every package's tests have the option, tested alone or together."""

from __future__ import annotations

import gc

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", default=False, help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


def pytest_collection_finish() -> None:
    """What was imported stays to the end, so the garbage collector need not look through it: with torch or JAX that
    is a quarter of a second each time, and was a tenth of the JAX tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
