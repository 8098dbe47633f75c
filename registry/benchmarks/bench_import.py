"""Start-up times in fresh interpreters. Budget: 400 ms for `octavo --help`; the first row is Python's own start."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

STARTS = {
    "interpreter": ["-c", "pass"],
    "import_octavo_registry": ["-c", "import octavo_registry"],
    "octavo_help": ["-c", "from octavo_registry.cli import main; main()", "--help"],
    "octavo_recipes_show": ["-c", "from octavo_registry.cli import main; main()", "recipes", "show", "mxfp8"],
}


def _start(arguments: list[str]) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", STARTS)
def test_start(benchmark: Any, name: str) -> None:
    benchmark.pedantic(_start, args=(STARTS[name],), rounds=10, warmup_rounds=1)
