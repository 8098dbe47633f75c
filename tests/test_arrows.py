"""Packages depend downwards only: from what their pyproject files declare and from what their code imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import nodes
from workspace import Package, packages, tracked

# What each package may need of ours (architecture.md, "The tree"); a new package adds its row.
MAY_NEED: dict[str, set[str]] = {
    "octavo-core": set(),
    "octavo-numerics": {"octavo-core"},
    "octavo-registry": {"octavo-core"},
    "octavo-torch": {"octavo-core", "octavo-registry"},
    "octavo-jax": {"octavo-core", "octavo-registry"},
    "octavo-native": set(),
    "octavo-torch-native": {"octavo-core", "octavo-registry", "octavo-torch", "octavo-native"},
    "octavo-torch-cudagraph": {
        *("octavo-core", "octavo-registry", "octavo-torch", "octavo-native", "octavo-torch-native"),
    },
    "octavo-triton": {"octavo-core"},
    "octavo-torch-triton": {"octavo-core", "octavo-registry", "octavo-torch", "octavo-triton"},
    "octavo-jax-native": {"octavo-core", "octavo-registry", "octavo-jax", "octavo-native"},
    "octavo-jax-triton": {"octavo-core", "octavo-registry", "octavo-jax", "octavo-triton"},
    "octavo-conformance": {"octavo-core", "octavo-numerics", "octavo-registry"},
    "octavo-bench": {
        *("octavo-core", "octavo-numerics", "octavo-registry"),
        *("octavo-torch", "octavo-jax", "octavo-native", "octavo-torch-native"),
    },
    "octavo": {
        *("octavo-core", "octavo-numerics", "octavo-registry", "octavo-conformance", "octavo-bench"),
        *("octavo-torch", "octavo-jax", "octavo-native"),
        *("octavo-torch-native", "octavo-torch-cudagraph", "octavo-torch-triton", "octavo-jax-native"),
        *("octavo-jax-triton", "octavo-triton"),
    },
}
CORE_MAY_NOT_IMPORT = {"torch", "jax", "numpy", "pluggy"}

every_package = pytest.mark.parametrize("name", sorted(packages()))


def _declared(package: Package) -> set[str]:
    extras = package.project.get("optional-dependencies", {}).values()
    requirements = [*package.project.get("dependencies", []), *(line for extra in extras for line in extra)]
    names = {re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0] for line in requirements}
    return names & set(packages()) - {package.distribution}


def _imported(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def _imports(package: Package) -> dict[str, Path]:
    return {name: file for file in tracked("**/*.py", root=package.source) for name in _imported(file)}


def test_every_package_has_its_row() -> None:
    """A package that nobody placed in the order could point anywhere."""
    assert set(packages()) == set(MAY_NEED)


@every_package
def test_declared_dependencies_point_down(name: str) -> None:
    """Promise of the tree: a third party installs a front end without our kernels, a card without a framework."""
    assert _declared(packages()[name]) <= MAY_NEED[name]


@every_package
def test_imports_are_declared_and_point_down(name: str) -> None:
    """An import that is not declared works in the workspace and breaks for whoever installs the package alone."""
    package = packages()[name]
    by_import = {other.import_name: other.distribution for other in packages().values()}
    for imported, file in _imports(package).items():
        distribution = by_import.get(imported)
        if distribution in (None, name):
            continue
        assert distribution in _declared(package), f"{file} imports {imported}, which {name} does not declare"


def test_core_imports_no_framework_and_no_plugin_machinery() -> None:
    """Schemas are read where neither numpy nor a framework is installed."""
    assert not CORE_MAY_NOT_IMPORT & set(_imports(packages()["octavo-core"]))


@every_package
def test_cards_import_no_framework(name: str) -> None:
    """Discovery reads every card of every plugin, so a card may cost nothing."""
    card = packages()[name].source / "plugin.py"
    heavy = {"torch", "jax", "flax", "numpy", "ml_dtypes"}
    assert not card.exists() or not heavy & set(_imported(card))
