"""Every fp32 pattern through each cast of the definition: its slow test, whose code rational arithmetic found."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Any

from record import ROOT

FILE = "packages/numerics/tests/test_casts.py"
TEST = "test_all_of_fp32_is_cast_to_the_nearest_even_code"


def measure(count: int | None) -> dict[str, Any]:
    """Formats whose 2^32 casts are all right. `count` is not used: there are as many patterns as there are."""
    command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--slow", f"{FILE}::{TEST}")
    start = time.monotonic()
    run = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    outcomes = dict(re.findall(rf"::{TEST}\[(\w+)\] (PASSED|FAILED)", run.stdout))
    wrong = [name for name, outcome in outcomes.items() if outcome != "PASSED"]
    return {
        "test": f"{FILE}::{TEST}",
        "patterns": 1 << 32,
        "formats": list(outcomes),
        "wrong": wrong,
        "seconds": round(time.monotonic() - start),
        "faults": len(wrong) + int(run.returncode != 0 or not outcomes),
    }
