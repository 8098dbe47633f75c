"""The pytest11 entry point: options, and nothing more until a backend is named.

Every pytest run on a machine with this package loads this module, so it imports pytest alone.
"""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from octavo_conformance import SEED_KEY

SUITE = "octavo_conformance.suite"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suite; all of them do nothing without `--octavo-backend`."""
    group = parser.getgroup("octavo", "Octavo conformance suite")
    group.addoption(
        "--octavo-backend", action="append", default=[], metavar="NAME", help="backend to put through the suite"
    )
    group.addoption(
        "--octavo-report", action="append", default=[], metavar="FILE", help="write a report: .json, or .xml for JUnit"
    )
    group.addoption("--octavo-gaps", default=None, metavar="FILE", help="TOML list of known gaps, each with a reason")
    group.addoption("--octavo-seed", type=int, default=None, metavar="N", help="seed of every input; random by default")
    group.addoption("--octavo-skips", action="store_true", help="list why tests were skipped")
    group.addoption("--octavo-full", action="store_true", help="every combination, not the quick selection")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the session object when a backend was asked for; bad names and files raise `pytest.UsageError`."""
    config.addinivalue_line("markers", "octavo_needs(op, over, **conditions): the capability that a test needs")
    if not config.getoption("octavo_backend"):
        if any(str(argument).replace("/", ".").rstrip(".").endswith(SUITE) for argument in config.args):
            raise pytest.UsageError(f"{SUITE} needs --octavo-backend NAME; `octavo doctor` lists the names")
        return
    from octavo_conformance.session import Session

    config.pluginmanager.register(Session(config, _seed(config)), "octavo-conformance-session")


def _seed(config: pytest.Config) -> int:
    """One seed for the controller and all its xdist workers; a bad one raises `pytest.UsageError`."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is not None and SEED_KEY in worker:
        return int(worker[SEED_KEY])
    asked: int | None = config.getoption("octavo_seed")
    if asked is not None and asked < 0:
        raise pytest.UsageError(f"--octavo-seed {asked}: a seed is 0 or more")
    return secrets.randbits(32) if asked is None else asked
