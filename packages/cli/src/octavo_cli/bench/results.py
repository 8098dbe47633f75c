"""What a benchmark leaves: one `Row` a case, the machine it ran on, and the JSON form of both."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from octavo_cli.bench.timing import Times

SCHEMA_VERSION = 1

EQUAL = "equal"
"""`Row.match` where every bit is the definition's."""

_DISTRIBUTIONS = (
    *("octavo", "octavo-core", "octavo-registry", "octavo-numerics", "octavo-torch"),
    *("octavo-native", "octavo-torch-native", "octavo-jax", "octavo-jax-native"),
    *("torch", "triton", "jax", "jaxlib", "numpy"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One case on one shape and grouping.

    shape           [rows, columns] of what is quantized, or [G, N, K]
    bytes_*         what has to move (octavo_cli.bench.bytes); per_element counts elements of `shape`
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


def failure_dicts(failures: Sequence[Failure]) -> list[dict[str, Any]]:
    """Failures as plain values for JSON."""
    return [{**asdict(failure), "shape": list(failure.shape)} for failure in failures]


def told(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def versions() -> dict[str, str | None]:
    """Versions of what took part; None for what is not installed."""
    found: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine(device: str, framework: str = "torch") -> dict[str, Any]:
    """The processor, or the GPU with its driver, and how the native library was built; None: it is not installed."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": cores(),
        "native_build": _native_build(),
    }
    if device == "cuda" and framework == "jax":
        import jax

        first = jax.devices("gpu")[0]
        facts |= {"gpu": first.device_kind, "driver": _driver()}
    elif device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "compute_capability": [properties.major, properties.minor],
            "sm_count": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "driver": _driver(),
            "torch_cuda": torch.version.cuda,
        }
    return facts


def _native_build() -> dict[str, Any] | None:
    if importlib.util.find_spec("octavo_native") is None:
        return None
    import octavo_native

    return {name: _plain(value) for name, value in octavo_native.build_info().items()}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.split()[0] if told.split() else None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def rounded(times: Times | None) -> dict[str, float] | None:
    return None if times is None else {name: round(value, 3) for name, value in asdict(times).items()}
