"""`--slow`: run the tests marked slow, too. Eight virtual CPU devices, for the tests that shard."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# JAX reads it once, when its first device is asked for.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

_HERE = Path(__file__).resolve().parent

# Helper modules of the sharding tests by name: pytest's importlib mode puts no folder of tests on the path.
sys.path.insert(0, str(_HERE / "tests" / "sharding"))


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
