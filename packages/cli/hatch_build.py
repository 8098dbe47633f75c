"""Puts the plugin template into the wheel and the sdist: docs/examples/acme-octavo, the one that the tests run.

From the tree it is read where it stands; an sdist carries a copy in `template/`, from which its wheel is built.
An editable install reads it in the tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SKIPPED = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "build", "dist"}


class TemplateHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatch's custom build hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add each file of the template under the name it has in this kind of artifact."""
        if version == "editable":
            return
        root = Path(self.root)
        candidates = [root / "template", root.parent.parent / "docs" / "examples" / "acme-octavo"]
        source = next((folder for folder in candidates if (folder / "pyproject.toml").is_file()), None)
        if source is None:
            raise FileNotFoundError(f"the plugin template is in none of {', '.join(map(str, candidates))}")
        target = "octavo_cli/template" if self.target_name == "wheel" else "template"
        for file in sorted(source.rglob("*")):
            parts = file.relative_to(source).parts
            if file.is_file() and not any(part in SKIPPED or part.endswith(".egg-info") for part in parts):
                build_data["force_include"][str(file)] = "/".join([target, *parts])
