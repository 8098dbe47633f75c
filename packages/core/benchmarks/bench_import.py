"""Time of `import octavo` in a fresh interpreter, less the interpreter's own start. Budget: 150 ms."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def _start(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_interpreter_alone(benchmark: Any) -> None:
    benchmark.pedantic(_start, args=("pass",), rounds=10, warmup_rounds=1)


def test_import_octavo(benchmark: Any) -> None:
    benchmark.pedantic(_start, args=("import octavo",), rounds=10, warmup_rounds=1)
