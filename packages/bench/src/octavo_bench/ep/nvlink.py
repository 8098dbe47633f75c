"""What NVLink carries, by the GPUs' own counters."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import Any

STEPS = 10
"""Steps between two looks at the counters."""


def received_in_a_step(run: Callable[[int], Any], devices: int) -> int | None:
    """Bytes that one of `devices` receives over NVLink in a step; None where no counter tells.

    The counters are the whole host's: nothing else may use its GPUs meanwhile.

    run   runs that many steps, and waits for them
    """
    before = _received()
    if before is None:
        return None
    run(STEPS)
    after = _received()
    return None if after is None else (after - before) // (STEPS * devices)


def _received() -> int | None:
    """Bytes that all GPUs of the host have received since their counters began."""
    command = ["nvidia-smi", "nvlink", "--getthroughput", "d"]
    try:
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    counts = re.findall(r"Data Rx: (\d+) KiB", report)
    return 1024 * sum(map(int, counts)) if counts else None
