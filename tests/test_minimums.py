"""The oldest dependencies that the packages declare are the ones that `nox -s minimums` last passed with."""

from __future__ import annotations

import importlib
import json
import tomllib
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from test_noxfile import constant
from workspace import ROOT, Package, packages

RECORD: dict[str, dict[str, str]] = json.loads((ROOT / "tests" / "golden" / "minimums.json").read_text())
ADAPTERS = constant("ADAPTERS")
OLDEST = packages()["octavo-core"].project["requires-python"].removeprefix(">=")


def floors(package: Package, *, adapters: bool = False) -> dict[str, Version]:
    """The oldest version of each dependency of a package, its extras and its tests; or those of adapters' extras."""
    extras = package.project.get("optional-dependencies", {})
    lines = [line for extra, each in extras.items() for line in each if (extra in ADAPTERS) == adapters]
    if not adapters:
        groups = tomllib.loads((package.directory / "pyproject.toml").read_text())["dependency-groups"]
        lines += [*package.project.get("dependencies", []), *groups["test"]]
    found = {}
    for requirement in map(Requirement, lines):
        if requirement.name not in packages() and _is_of_the_oldest_python(requirement):
            (specifier,) = requirement.specifier
            assert specifier.operator == ">=", f"{package.distribution}: {requirement}"
            found[requirement.name] = Version(specifier.version)
    return found


def _is_of_the_oldest_python(requirement: Requirement) -> bool:
    """Whether the session installs it: what is required of newer Pythons alone, it does not."""
    return requirement.marker is None or requirement.marker.evaluate({"python_version": OLDEST})


def test_a_dependency_has_one_floor() -> None:
    """The session tests all packages in one environment, so it would miss the lower one of two floors."""
    declared = set(chain.from_iterable(floors(package).items() for package in packages().values()))
    names = [name for name, _ in declared]
    assert {pair for pair in declared if names.count(pair[0]) > 1} == set()


@pytest.mark.parametrize("name", sorted(packages()))
def test_declared_floors_have_passed(name: str) -> None:
    """A floor that nobody has tried breaks the first user who has it: run `nox -s minimums` after a change of one."""
    passed = {dependency: Version(version) for dependency, version in RECORD[name].items()}
    python = Version(packages()[name].project["requires-python"].removeprefix(">="))
    assert passed == {"python": python, **floors(packages()[name])}


def test_floors_of_adapters_have_passed() -> None:
    """The libraries that adapters are for, which need newer versions of our other dependencies than we do."""
    declared = set(chain.from_iterable(floors(package, adapters=True).items() for package in packages().values()))
    passed = {name: Version(version) for name, version in RECORD["adapters"].items() if name != "python"}
    assert dict(declared) == passed


@pytest.mark.parametrize(
    "name",
    [
        "octavo-torch",
        "octavo-torch-native",
        "octavo-torch-cudagraph",
        "octavo-torch-triton",
        "octavo-jax",
        "octavo-jax-native",
        "octavo-jax-triton",
    ],
)
def test_a_card_needs_what_its_package_declares(name: str) -> None:
    """The registry refuses a backend by its card's `needs`: another floor there would let in what was never tried."""
    package = packages()[name]
    declared = {each.name: each.specifier for each in map(Requirement, package.project["dependencies"])}
    card = importlib.import_module(f"{package.import_name}.plugin").CARD
    needs = [each for each in map(Requirement, card.needs) if each.name != "python"]
    assert needs
    assert {each.name: declared[each.name] for each in needs} == {each.name: each.specifier for each in needs}
