"""What `octavo bench ep` leaves: a row per recipe, devices and way; and what is gathered of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.results import goal_dicts
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times


@dataclass(frozen=True)
class EpRow:
    """Forward and backward of a MoE block of the experts (G, K, F, M).

    devices   that share the experts
    way       of the exchange; "" on one device
    payload   tokens and gradients travel to the experts as codes
    received  bytes that one device receives from others in a step: of buffers, where the way is ragged
    nvlink    those that it received by the GPUs' counters, what is no row included; None where none tells
    dropped   choices that found no row
    """

    section: ClassVar[str] = "rows"

    shape: Shape
    kind: str
    devices: int
    way: str
    payload: bool
    backends: tuple[str, ...]
    received: int
    nvlink: int | None
    dropped: int
    times: Times

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """Strong scaling: of this row, and as a goal of the faster way alone."""
        blocks = [row for row in rows if isinstance(row, EpRow) and (row.shape, row.kind) == (self.shape, self.kind)]
        alone = next((row for row in blocks if row.devices == 1), None)
        if alone is None or self.devices == 1:
            return {}
        reached = {"over one": alone.times.ms / self.times.ms}
        alike = [row for row in blocks if (row.devices, row.payload) == (self.devices, self.payload)]
        if self.times.ms <= min(row.times.ms for row in alike):
            reached["one device"] = reached["over one"]
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "devices": self.devices,
            "way": self.way,
            "payload": self.payload,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "backends": list(self.backends),
            "received_bytes": self.received,
            "nvlink_bytes": self.nvlink,
            "dropped": self.dropped,
            "us": self.times.as_dict(),
            "ms": round(self.times.ms, 4),
            "goals": goal_dicts(goals),
        }


@dataclass(frozen=True)
class Gathered:
    """The gathers of a kernel [G, K, 2F] that FSDP cuts, forward and backward.

    bytes    that one device holds after them, in the compiled program
    nvlink   that it received from others, by the GPUs' counters; None where none tells
    """

    section: ClassVar[str] = "gathered"
    backends: ClassVar[tuple[str, ...]] = ()

    shape: Shape
    kind: str
    devices: int
    bytes: int
    nvlink: int | None = None

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """Its bytes over those of the same kernel in bf16."""
        plain = next(
            (row for row in rows if isinstance(row, Gathered) and (row.shape, row.kind) == (self.shape, "bf16")), None
        )
        if plain is None:
            return {}
        reached = {"bf16's bytes": self.bytes / plain.bytes}
        if self.nvlink is not None and plain.nvlink:
            reached["bf16's bytes over NVLink"] = self.nvlink / plain.nvlink
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "devices": self.devices,
            "shape": list(self.shape.key),
            "gathered_bytes": self.bytes,
            "nvlink_bytes": self.nvlink,
            "goals": goal_dicts(goals),
        }
