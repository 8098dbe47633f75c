"""The stub of the compiled module, src/octavo_native/_native.pyi, as nanobind's stubgen writes it.

    python native/tools/stubs.py            write it, from the octavo_native that is installed
    python native/tools/stubs.py --check    exit with 1 where the committed one says something else

Parameters, defaults and docstrings are the module's own. What C++ cannot say, the types of what is inside constants and
results that are dicts and tuples, is added from the tables below.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

STUB = Path(__file__).resolve().parent.parent / "src" / "octavo_native" / "_native.pyi"

HEADER = """\
from collections.abc import Mapping
from collections.abc import Sequence as _Sequence
from typing import Final, TypedDict

class BuildInfo(TypedDict):
    cuda: bool
    nvcc: str | None
    archs: tuple[str, ...]
    compiler: str
    avx2: bool

class TileExpectation(TypedDict):
    name: str
    tile: int
    tiles: int
    waves: float
    filled: float
    microseconds: float
"""

CONSTANTS = {
    "dict": "Final[Mapping[str, int]]",
    "frozenset": "Final[frozenset[str]]",
    "int": "Final[int]",
    "bool": "Final[bool]",
}
"""The type of a module constant, by that in the generated stub."""

RESULTS = {
    "build_info": ("dict", "BuildInfo"),
    "tiles": ("tuple", "tuple[str, ...]"),
    "tile": ("dict", "TileExpectation"),
    "ffi_targets": ("dict", "dict[str, dict[str, object]]"),
    "ffi_plane_shapes": ("tuple", "tuple[tuple[int, ...], tuple[int, ...]]"),
}
"""The result of a function: its type in the generated stub, and in ours."""


def generated() -> str:
    """The stub of the installed module. ValueError where a table above names what stubgen did not write."""
    module = import_module("octavo_native._native")
    generator = import_module("nanobind.stubgen").StubGen(module, quiet=True)
    generator.put(module)
    text: str = generator.get()
    text = re.sub(r"\A(?:from .*\n|\n)*", "", text)
    text = re.sub(
        r"^([A-Z_]+): (\w+) = .*$", lambda match: f"{match[1]}: {CONSTANTS[match[2]]}", text, flags=re.MULTILINE
    )
    for name, (found, meant) in RESULTS.items():
        text, count = re.subn(rf"(def {name}\(.*\)) -> {found}:", rf"\1 -> {meant}:", text)
        if count != 1:
            raise ValueError(f"stubgen wrote `def {name}(...) -> {found}` {count} times; correct RESULTS")
    return HEADER + "\n" + text


def meaning(stub: str) -> str:
    """A stub without its layout: equal for stubs that differ in line breaks and indentation alone."""
    tree = ast.parse(stub)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = inspect.cleandoc(node.value)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):  # a docstring is body enough, with and without `...`
            node.body = [item for item in node.body if ast.unparse(item) != "..."] or node.body
    return ast.dump(tree, indent=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 fine, 1 another stub is committed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the stub instead of writing it")
    options = parser.parse_args(arguments)
    stub = generated()
    if not options.check:
        STUB.write_text(stub)
        if formatter := shutil.which("ruff"):
            subprocess.run([formatter, "format", "--quiet", str(STUB)], check=True)
    elif meaning(STUB.read_text()) != meaning(stub):
        print(f"{STUB} is not that of the installed module; run this without --check and commit it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
