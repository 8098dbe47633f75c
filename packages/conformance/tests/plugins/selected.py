"""A pytest plugin: `--selected FILE` names the tests of each backend, and nothing else is collected.

With dozens of backends, making every test and asking it for each word of a long -k takes longer than those that run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

Selection = tuple[list[str], list[str], bool]
"""Names of tests, words of which their cases have one, and whether one case is enough, the first word's first."""

SELECTED = pytest.StashKey[dict[str, list[Selection]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--selected", type=Path, help="JSON: by backend, a list of [names of tests, words of cases, one]")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SELECTED] = json.loads(config.getoption("selected").read_text())


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> list[Any] | None:
    """Nothing of a test that no backend is asked for."""
    selections = (selection for each in collector.config.stash[SELECTED].values() for selection in each)
    return [] if name.startswith("test_") and not any(name in tests for tests, _, _ in selections) else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Before the suite gives a test its cases: of those, the ones that are asked for."""
    selected, test, every = metafunc.config.stash[SELECTED], metafunc.function.__name__, metafunc.parametrize

    def some(argument: str, cases: list[Any], *, ids: list[str], indirect: bool) -> None:
        asked_for: set[int] = set()
        for backend, selections in selected.items():
            of_test = [(words, one) for tests, words, one in selections if test in tests]
            places = [place for place, case in enumerate(cases) if of_test and case.target.name == backend]
            for words, one in of_test:
                fit = [place for word in words for place in places if word in f"{test}[{ids[place]}"]
                asked_for.update(fit[:1] if one else fit)
        kept = sorted(asked_for)
        every(argument, [cases[place] for place in kept], ids=[ids[place] for place in kept], indirect=indirect)

    metafunc.parametrize = some  # type: ignore[method-assign, assignment]
