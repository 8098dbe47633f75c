"""Where the packages of this repository are, and which files belong to it."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def tracked(*patterns: str, root: Path = ROOT) -> list[Path]:
    """Files that git tracks under `root`, sorted; all of them, or those that match one of the glob `patterns`.

    A clone holds much that is not the project's: virtual environments of any name, builds, results. Only git knows
    which files are. As in `Path.glob`, `*` stays within one folder and `**/` crosses folders. Files that are deleted
    and not yet committed are left out.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--", *(f":(glob){pattern}" for pattern in patterns)]
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return sorted(path for name in output.split("\0") if name and (path := root / name).exists())


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
    """Every package of the workspace by distribution name, as its pyproject.toml gives it."""
    by_name = {}
    for file in tracked("packages/*/pyproject.toml", "*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        by_name[project["name"]] = Package(project["name"], file.parent, project)
    return by_name
