"""A pytest plugin: `--selected FILE` names the tests of each backend, and nothing else is collected.

With dozens of backends, making every test and asking it for each word of a long -k takes longer than those that run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

Selection = tuple[list[str], list[str]]
"""Names of tests, and words of which their cases have one."""

SELECTED = pytest.StashKey[dict[str, list[Selection]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--selected", type=Path, help="JSON: by backend, a list of [names of tests, words of cases]")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SELECTED] = json.loads(config.getoption("selected").read_text())


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> list[Any] | None:
    """Nothing of a test that no backend is asked for."""
    selections = (selection for each in collector.config.stash[SELECTED].values() for selection in each)
    return [] if name.startswith("test_") and not any(name in tests for tests, _ in selections) else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Before the suite gives a test its cases: of those, the ones that are asked for."""
    selected, test, every = metafunc.config.stash[SELECTED], metafunc.function.__name__, metafunc.parametrize

    def is_asked_for(case: Any, name: str) -> bool:
        selections = selected[case.target.name]
        return any(test in tests and any(word in f"{test}[{name}" for word in words) for tests, words in selections)

    def some(argument: str, cases: list[Any], *, ids: list[str], indirect: bool) -> None:
        kept = {name: case for case, name in zip(cases, ids, strict=True) if is_asked_for(case, name)}
        every(argument, list(kept.values()), ids=list(kept), indirect=indirect)

    metafunc.parametrize = some  # type: ignore[method-assign, assignment]
