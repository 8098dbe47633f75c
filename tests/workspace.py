"""Where the packages of this repository are."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Package:
    """One distribution of the workspace."""

    distribution: str
    directory: Path
    project: dict[str, Any]

    @property
    def source(self) -> Path:
        (source,) = [path for path in (self.directory / "src").iterdir() if (path / "__init__.py").exists()]
        return source

    @property
    def import_name(self) -> str:
        return self.source.name


@cache
def packages() -> dict[str, Package]:
    """Every package of the workspace by distribution name, found by its pyproject.toml."""
    found = {}
    for file in sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("*/pyproject.toml")]):
        project = tomllib.loads(file.read_text())["project"]
        found[project["name"]] = Package(project["name"], file.parent, project)
    return found
