"""What `octavo bench quantize` leaves: one `Row` a case, and the JSON form of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_bench.harness.results import Facts, Failure, failure_dicts, rounded
from octavo_bench.harness.timing import Times

EQUAL = "equal"
"""`Row.match` where every bit is the definition's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case on one shape and grouping.

    shape           [rows, columns] of what is quantized, or [G, N, K]
    bytes_*         what has to move (octavo_bench.harness.traffic); per_element counts elements of `shape`
    times           of one call, on one thread where the device is the CPU
    predicted_us    bytes at the device's copy rate of this run; None on the CPU
    ratio           predicted / measured: the share of the copy rate that was reached
    goal, passed    least ratio, and whether it was reached; on the CPU GB of input a second a core
    all_cores_us    the same call on every core (CPU)
    host            of one call through the plugin's bound plan; on a GPU the launch, its allocations included
    peer            the recipe in plain torch under torch.compile; peer_codes_equal: share of row codes equal to ours
    match           "equal", what differs from the definition, or why it was not compared
    notes           why something is missing
    """

    case: str
    shape: tuple[int, ...]
    grouping: str
    bytes_read: int
    bytes_written: int
    times: Times
    threads: int = 1
    input_copies: int = 1
    copy_tb_per_s: float | None = None
    goal: float | None = None
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
        """Elements of `shape`."""
        count = 1
        for side in self.shape:
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
    def passed(self) -> bool | None:
        """Whether the goal was reached; None where there is none."""
        if self.goal is None:
            return None
        return (self.input_gb_per_s if self.ratio is None else self.ratio) >= self.goal

    @property
    def peer_ratio(self) -> float | None:
        """The peer's time over ours."""
        return None if self.peer is None else self.peer.median / self.times.median

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "case": self.case,
            "shape": list(self.shape),
            "grouping": self.grouping,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "bytes_per_element": round(self.bytes_total / self.elements, 4),
            "us": rounded(self.times),
            "threads": self.threads,
            "input_copies": self.input_copies,
            "tb_per_s": round(self.tb_per_s, 4),
            "input_gb_per_s": round(self.input_gb_per_s, 3),
            "copy_tb_per_s": _round(self.copy_tb_per_s),
            "predicted_us": _round(self.predicted_us),
            "ratio": _round(self.ratio),
            "goal": self.goal,
            "passed": self.passed,
            "all_cores_us": _round(self.all_cores_us),
            "host_us": rounded(self.host),
            "peer_us": rounded(self.peer),
            "peer_ratio": _round(self.peer_ratio),
            "peer_codes_equal": _round(self.peer_codes_equal, 6),
            "match": self.match,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class Results(Facts):
    """A whole run. `groupings` holds every vector of sizes by name, so that the bytes can be counted again."""

    copy_tb_per_s: dict[str, float]
    groupings: dict[str, list[int]]
    rows: Sequence[Row]
    failures: Sequence[Failure]

    @property
    def differing(self) -> list[Row]:
        """Rows whose bits are not the definition's."""
        return [row for row in self.rows if row.match.startswith("differs")]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return self.document(
            judged=[row.passed for row in self.rows if row.passed is not None],
            match={"equal": sum(row.match == EQUAL for row in self.rows), "differs": len(self.differing)},
            copy_tb_per_s={name: round(rate, 4) for name, rate in self.copy_tb_per_s.items()},
            groupings=self.groupings,
            failures=failure_dicts(self.failures),
            rows=[row.as_dict() for row in self.rows],
        )


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
