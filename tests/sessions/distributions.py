"""The distributions of this repository: where each one is, and what it requires."""

from __future__ import annotations

import re
from typing import Any

from nox.project import dependency_groups, load_toml
from workspace import ROOT

DIRECTORIES = {
    "octavo-core": "packages/core",
    "octavo-numerics": "packages/numerics",
    "octavo-registry": "registry",
    "octavo-torch": "packages/torch",
    "octavo-jax": "packages/jax",
    "octavo-native": "native",
    "octavo-torch-native": "packages/torch-native",
    "octavo-torch-cudagraph": "packages/torch-cudagraph",
    "octavo-triton": "packages/triton",
    "octavo-torch-triton": "packages/torch-triton",
    "octavo-jax-native": "packages/jax-native",
    "octavo-jax-triton": "packages/jax-triton",
    "octavo-conformance": "packages/conformance",
    "octavo-bench": "packages/bench",
    "octavo": "packages/cli",
}
NATIVE = "octavo-native"


def project(distribution: str) -> dict[str, Any]:
    """The table [project] of its pyproject.toml."""
    return dict(load_toml(ROOT / DIRECTORIES[distribution] / "pyproject.toml")["project"])


def ours(requirements: list[str]) -> list[str]:
    """The names of those requirements that are distributions of this repository."""
    names = (re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements)
    return [name for name in names if name in DIRECTORIES]


def closure(distributions: list[str]) -> list[str]:
    """These distributions and all others of this repository that they need, so that pip seeks none on an index."""
    found: dict[str, None] = {}
    queue = list(distributions)
    while queue:
        name = queue.pop()
        if name not in found:
            found[name] = None
            queue += ours(project(name).get("dependencies", []))
    return list(found)


def needed_by_tests(distribution: str) -> tuple[str, ...]:
    """The requirements of its dependency group "test"."""
    pyproject = load_toml(ROOT / DIRECTORIES[distribution] / "pyproject.toml")
    return tuple(dependency_groups(pyproject, "test"))


def outside(distributions: list[str]) -> list[str]:
    """The requirements of these distributions that are not of this repository."""
    required = [requirement for name in distributions for requirement in project(name).get("dependencies", [])]
    return [requirement for requirement in required if not ours([requirement])]
