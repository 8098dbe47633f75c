"""The tests' helper modules, importable by name: pytest's importlib mode puts no folder of tests on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))
