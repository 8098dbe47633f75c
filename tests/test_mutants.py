"""The list of planted bugs speaks of today's sources, and its results of today's bugs: `nox -s mutants` runs them."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from source_tree import nodes
from test_noxfile import constant
from workspace import ROOT, tracked

sys.path.insert(0, str(ROOT / "tests" / "mutants"))
from planted import Mutant, mutants, results

MUTANTS = mutants()
AREAS = {
    *("autograd", "checkpoints", "cli", "delayed_scaling", "dispatch", "experts", "layouts", "moe", "names", "native"),
    *("permutation", "plugins", "quantizers", "sharding"),
}
LEAST = 120
LEAST_KILLED = 0.97


@cache
def _tests_of(file: Path) -> set[str]:
    functions = (node for node in nodes(file) if isinstance(node, ast.FunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_can_be_planted_in_todays_sources(name: str) -> None:
    """Its text stands in its file once, what it leaves is valid, and the tests that have to notice are there."""
    mutant = MUTANTS[name]
    planted = mutant.planted((ROOT / mutant.file).read_text())
    if mutant.file.endswith(".py"):
        ast.parse(planted)
    assert mutant.promise.endswith(".")
    assert mutant.directory in constant("DIRECTORIES").values()
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert not function or function.partition("[")[0] in _tests_of(ROOT / file), f"{test} is not there"


def test_every_area_has_bugs() -> None:
    """Quantizers, layouts, dispatch, autograd, delayed scaling, sharding, names, permutation, checkpoints, commands,
    C++, and what was built on them."""
    assert {mutant.area for mutant in MUTANTS.values()} == AREAS
    assert len(MUTANTS) >= LEAST
    assert min(Counter(mutant.area for mutant in MUTANTS.values()).values()) >= 10


def test_results_are_of_todays_bugs() -> None:
    """Every bug has run as it stands in the list, nearly all were noticed, and the others say why nobody can."""
    recorded = results()
    assert recorded.keys() == MUTANTS.keys(), "run `nox -s mutants`"
    changed = [name for name, mutant in MUTANTS.items() if recorded[name]["digest"] != mutant.digest]
    assert not changed, f"changed since they ran; run `nox -s mutants -- --only {' '.join(changed)}`"
    survived = {name for name, entry in recorded.items() if entry["outcome"] != "killed"}
    assert survived == {name for name, mutant in MUTANTS.items() if mutant.survives}
    assert 1 - len(survived) / len(MUTANTS) >= LEAST_KILLED


def test_a_bug_that_does_not_apply_is_refused() -> None:
    """A text that is not there, or there twice, would plant nothing, or more than one bug."""
    bug = Mutant("id", "area", "a.py", "x = 1", "x = 2", "A promise.", ("packages/core/tests/test_specs.py",))
    assert bug.planted("x = 1\n") == "x = 2\n"
    for text in ("", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match="it has to be there once"):
            bug.planted(text)


def test_a_bug_asks_tests_of_one_package() -> None:
    """A session has the environment of one package."""
    tests = ("packages/core/tests/test_specs.py", "registry/tests/test_cli_process.py")
    with pytest.raises(ValueError, match="tests of one package are needed"):
        assert Mutant("id", "area", "a.py", "x", "y", "A promise.", tests).directory


def test_copies_are_of_the_projects_files_alone() -> None:
    """The runner, the list and the results belong to the repository."""
    names = {file.relative_to(ROOT).as_posix() for file in tracked("tests/mutants/**")}
    assert {"tests/mutants/run.py", "tests/mutants/planted.py", "tests/mutants/README.md"} <= names
