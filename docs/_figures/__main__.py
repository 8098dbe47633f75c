"""Draw the figures of the docs anew: `python docs/_figures [FOLDER]`, without one those that are in the tree.
`tests/documents` compares them with these."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tests")]

from all_figures import drawn  # noqa: E402

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "_static"
for name, text in drawn():
    (folder / f"{name}.svg").write_text(text)
