"""What every benchmark's file says: of its run, of what failed, of times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from octavo_bench.harness.machine import machine, versions
from octavo_bench.harness.timing import Times

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that could not be run, and the error's text."""

    case: str
    shape: tuple[int, ...]
    grouping: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What every result file says of its run: a row has `repeats` timed calls at most."""

    command: str
    device: str
    dtype: str
    seed: int
    repeats: int
    machine: dict[str, Any]
    seconds: float
    versions: dict[str, str | None]

    def document(self, *, judged: Sequence[bool], match: dict[str, int], **parts: Any) -> dict[str, Any]:
        """The content of a result file: what all of them have, then `parts`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "date": datetime.now(UTC).date().isoformat(),
            "machine": self.machine,
            "versions": self.versions,
            "device": self.device,
            "dtype": self.dtype,
            "seed": self.seed,
            "repeats": self.repeats,
            "goals": {"reached": sum(judged), "of": len(judged)},
            "match": match,
            **parts,
            "seconds": round(self.seconds, 1),
        }


class Asked(Protocol):
    """What the choices of every benchmark have."""

    @property
    def device(self) -> str:
        """cuda or cpu."""

    @property
    def seed(self) -> int:
        """Of everything that is drawn."""

    @property
    def repeats(self) -> int:
        """Timed calls of a row."""


def facts_of(
    asked: Asked, command: str, start: float, framework: str = "torch", dtype: str = "bfloat16"
) -> dict[str, Any]:
    """The fields of `Facts`, for the results of a run that began at `start`, of time.perf_counter."""
    facts = Facts(
        command=command,
        device=asked.device,
        dtype=dtype,
        seed=asked.seed,
        repeats=asked.repeats,
        machine=machine(asked.device, framework),
        seconds=time.perf_counter() - start,
        versions=versions(),
    )
    return vars(facts)


def failure_dicts(failures: Sequence[Failure]) -> list[dict[str, Any]]:
    """Failures as plain values for JSON."""
    return [{**asdict(failure), "shape": list(failure.shape)} for failure in failures]


def told(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def rounded(times: Times | None) -> dict[str, float] | None:
    """Times as plain values for JSON, in microseconds."""
    return None if times is None else {name: round(value, 3) for name, value in asdict(times).items()}
