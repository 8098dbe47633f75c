"""Where tests of this package find the stand-ins of libraries that need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tests" / "peers"))
