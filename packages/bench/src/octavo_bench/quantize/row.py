"""What `octavo bench quantize` leaves: one row per case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.results import rounded
from octavo_bench.harness.timing import Times

EQUAL, DIFFERS = "equal", "differs"
"""How `QuantizeRow.match` begins where every bit is the definition's, and where one is not."""


@dataclass(frozen=True, slots=True)
class QuantizeRow:
    """One case on one shape and grouping.

    sides           [rows, columns] of what is quantized, or [G, N, K]
    bytes_*         what has to move (octavo_bench.harness.traffic); per_element counts elements of `sides`
    times           of one call, on one thread where the device is the CPU
    predicted_us    bytes at the device's copy rate of this run; None on the CPU
    ratio           predicted / measured: the share of the copy rate that was reached
    all_cores_us    the same call on every core (CPU)
    host            of one call through the plugin's bound plan; on a GPU the launch, its allocations included
    peer            of the recipe in plain torch under torch.compile; peer_codes_equal: the share of its row codes that
                    equal ours
    match           "equal", what differs from the definition, or why it was not compared
    notes           why something is missing
    """

    section: ClassVar[str] = "rows"

    case: str
    sides: tuple[int, ...]
    grouping: str
    bytes_read: int
    bytes_written: int
    times: Times
    threads: int = 1
    input_copies: int = 1
    copy_tb_per_s: float | None = None
    all_cores_us: float | None = None
    host: Times | None = None
    peer: Times | None = None
    peer_codes_equal: float | None = None
    input_bytes: int = 0
    match: str = "-"
    notes: tuple[str, ...] = ()

    @property
    def bytes_total(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def elements(self) -> int:
        """Elements of `sides`."""
        count = 1
        for side in self.sides:
            count *= side
        return count

    @property
    def tb_per_s(self) -> float:
        """Bytes read and written over the measured time."""
        return self.bytes_total / self.times.median / 1e6

    @property
    def predicted_us(self) -> float | None:
        """The time at the copy rate; the plan kernel is bound by latency and gets none."""
        if self.copy_tb_per_s is None or self.case == "plan":
            return None
        return self.bytes_total / self.copy_tb_per_s / 1e6

    @property
    def ratio(self) -> float | None:
        """Predicted over measured time."""
        return None if self.predicted_us is None else self.predicted_us / self.times.median

    @property
    def input_gb_per_s(self) -> float:
        """Bytes of the input, counted once, over the measured time."""
        return self.input_bytes / self.times.median / 1e3

    @property
    def shape(self) -> None:
        """What is quantized is no layer."""
        return None

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """The share of the copy rate, on a CPU the input's rate."""
        if self.ratio is None:
            return {"GB/s of input per core": self.input_gb_per_s}
        return {"the copy rate": self.ratio}

    @property
    def peer_ratio(self) -> float | None:
        """The peer's time over ours."""
        return None if self.peer is None else self.peer.median / self.times.median

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "case": self.case,
            "shape": list(self.sides),
            "grouping": self.grouping,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "bytes_per_element": round(self.bytes_total / self.elements, 4),
            "us": self.times.as_dict(),
            "threads": self.threads,
            "input_copies": self.input_copies,
            "tb_per_s": round(self.tb_per_s, 4),
            "input_gb_per_s": round(self.input_gb_per_s, 3),
            "copy_tb_per_s": rounded(self.copy_tb_per_s),
            "predicted_us": rounded(self.predicted_us),
            "ratio": rounded(self.ratio),
            "goal": goals[0].needed if goals else None,
            "passed": goals[0].passed if goals else None,
            "all_cores_us": rounded(self.all_cores_us),
            "host_us": _times(self.host),
            "peer_us": _times(self.peer),
            "peer_ratio": rounded(self.peer_ratio),
            "peer_codes_equal": rounded(self.peer_codes_equal, 6),
            "match": self.match,
            "notes": list(self.notes),
        }


def _times(times: Times | None) -> dict[str, float] | None:
    return None if times is None else times.as_dict()
