"""What options may say, checked before anything heavy is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from octavo_bench.errors import InputError
from octavo_registry.cli.files import check_writable
from octavo_registry.discovery.install import how_to_install


def names_of(option: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names of `a,b`, each once, or all that are allowed for ""; `InputError` for others."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in allowed:
            raise InputError(f"{option} names {name!r}; known names are {', '.join(allowed)}")
        if names.count(name) > 1:
            raise InputError(f"{option} names {name!r} twice; give each once")
    return tuple(names) or tuple(allowed)


def check_counts(**counts: int | None) -> None:
    """`InputError` for a count below 1, named as the option is; None is an option that was not given."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it is at least 1")


def check_installed(command: str, modules: Sequence[str], distribution: str) -> None:
    """`InputError` that says how `distribution` is installed, which brings the modules, where one is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(name.replace("_", "-") for name in missing)
        raise InputError(f"bench {command} needs {names}, not installed here; {how_to_install(distribution)}")


def check_output(path: Path | None) -> None:
    """`BadInput` before the work where the file could not be written after it."""
    if path is not None:
        check_writable("--output", path)
