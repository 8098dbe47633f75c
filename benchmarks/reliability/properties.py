"""The definition's properties, and how many examples hypothesis tried each on."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from record import ROOT

FILE = "packages/numerics/tests/test_properties.py"


def measure(count: int | None) -> dict[str, Any]:
    """Passing examples by property, as hypothesis counts them. `count` is not used: the tests have their own."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-show-statistics", FILE)
    run = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    examples: dict[str, int] = {}
    name = ""
    for line in run.stdout.splitlines():
        if found := re.match(rf"{re.escape(FILE)}::(\w+)", line):
            name = found[1]
        elif found := re.search(r"(\d+) passing examples", line):
            examples[name] = examples.get(name, 0) + int(found[1])
    return {
        "file": FILE,
        "properties": len(examples),
        "examples": sum(examples.values()),
        "by_property": examples,
        "faults": int(run.returncode != 0),
    }
