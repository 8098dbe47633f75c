"""The end of processes that have answered everything."""

from __future__ import annotations

import time
from typing import Any

ENDS_WITHIN = 60.0
"""Seconds from the last answer until a process has to have ended; one that hangs would hold its GPU."""


def end(processes: Any, notes: list[str], within: float = ENDS_WITHIN) -> None:
    """Waits until all of torch.multiprocessing's `processes` have ended; kills those that do not, and notes it.

    Raises what a process has raised.
    """
    deadline = time.monotonic() + within
    while not processes.join(timeout=min(within, 1.0)):
        if time.monotonic() > deadline:
            alive = [process for process in processes.processes if process.is_alive()]
            for process in alive:
                process.kill()
                process.join()
            notes.append(f"{len(alive)} processes had not ended {within:g} s after the last row and were killed")
            return
