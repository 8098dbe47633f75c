"""Puts the plugin templates into the wheel and the sdist: those of docs/examples that the tests run.

From the tree they are read where they stand; an sdist carries copies in `templates/`, from which its wheel is built.
An editable install reads them in the tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TEMPLATES = ("acme-octavo", "acme-octavo-jax")
SKIPPED = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "build", "dist"}


class TemplateHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatch's custom build hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add each file of the templates under the name it has in this kind of artifact."""
        if version == "editable":
            return
        root = Path(self.root)
        for name in TEMPLATES:
            candidates = [root / "templates" / name, root.parent.parent / "docs" / "examples" / name]
            source = next((folder for folder in candidates if (folder / "pyproject.toml").is_file()), None)
            if source is None:
                raise FileNotFoundError(f"the plugin template is in none of {', '.join(map(str, candidates))}")
            target = f"octavo_cli/templates/{name}" if self.target_name == "wheel" else f"templates/{name}"
            for file in sorted(source.rglob("*")):
                parts = file.relative_to(source).parts
                if file.is_file() and not any(part in SKIPPED or part.endswith(".egg-info") for part in parts):
                    build_data["force_include"][str(file)] = "/".join([target, *parts])
