"""sanitize.py, which compute-sanitizer watches on a GPU: whether it calls everything that there is to call."""

from __future__ import annotations

import re
from pathlib import Path

import octavo_native as native

TESTS = Path(__file__).resolve().parents[1]


def imported(by: Path) -> set[Path]:
    """`by` and the modules of this folder's `sanitizing` and `support` that it imports, one through another."""
    names = re.findall(r"^from (?:sanitizing import (.*)|(?:sanitizing\.)?(\w+) import)", by.read_text(), re.M)
    files = {by}
    for name in {part.strip() for found in names for text in found for part in text.split(",")} - {""}:
        for folder in ("sanitizing", "support"):
            if (file := TESTS / folder / f"{name}.py").exists():
                files |= imported(file)
    return files


def test_every_function_with_a_kernel_is_called() -> None:
    """One that nobody calls there would be a kernel that no tool has watched, whatever its own tests say."""
    stubs = (Path(native.__file__).parent / "_native.pyi").read_text()
    functions = re.findall(r"^def (\w+)\(([^)]*)\)", stubs, re.M)
    launching = {name for name, arguments in functions if "cuda: bool" in arguments}
    assert {"plan", "record_amax", "choose_experts", "adamw_step"} <= launching
    sources = (file.read_text() for file in imported(TESTS / "sanitize.py"))
    called = re.findall(r"""(?:native\.|")(\w+)""", "\n".join(sources))  # as an attribute, or by a string
    assert launching <= set(called)
