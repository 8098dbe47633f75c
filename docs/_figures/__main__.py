"""Draw the figures of the docs anew: `python docs/_figures`. `tests/documents` compares them with the tree."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tests")]

from all_figures import drawn  # noqa: E402

for name, text in drawn():
    (HERE.parent / "_static" / f"{name}.svg").write_text(text)
