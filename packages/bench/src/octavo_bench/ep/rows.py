"""The rows that `octavo bench ep` measures: blocks of experts over devices, and gathers of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.results import goal_dicts, layer_dict
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times


@dataclass(frozen=True)
class EpRow:
    """Forward and backward of a MoE block of the experts (G, K, F, M).

    devices   how many share the experts
    way       how the exchange returns rows, or the name of a peer library; "" on one device
    route     what carries the exchange in torch, "collective" or "peer"; "" on one device and in JAX
    payload   whether tokens and gradients travel to the experts as codes
    received  bytes that one device receives from the others in a step; of whole buffers where the way is ragged; None
              for peer libraries
    nvlink    the bytes that it received by the GPUs' counters, those that are not rows included; None without counters
    dropped   choices for which the buffers had no row
    alone     times of the same layer on one device, measured in turns with this one; None where it was not
    """

    section: ClassVar[str] = "rows"

    shape: Shape
    kind: str
    devices: int
    way: str
    payload: bool
    backends: tuple[str, ...]
    received: int | None
    nvlink: int | None
    dropped: int
    times: Times
    route: str = ""
    alone: Times | None = None

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """Scaling: of this row, and as a goal of the faster way alone."""
        blocks = [row for row in rows if isinstance(row, EpRow) and (row.shape, row.kind) == (self.shape, self.kind)]
        alone = self.alone or next((row.times for row in blocks if row.devices == 1), None)
        if alone is None or self.devices == 1:
            return {}
        reached = {"over one": alone.ms / self.times.ms}
        alike = [row for row in blocks if row.backends and (row.devices, row.payload) == (self.devices, self.payload)]
        if self.backends and self.times.ms <= min(row.times.ms for row in alike):
            reached["one device"] = reached["over one"]
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return layer_dict(
            self,
            goals,
            devices=self.devices,
            way=self.way,
            route=self.route,
            payload=self.payload,
            received_bytes=self.received,
            nvlink_bytes=self.nvlink,
            dropped=self.dropped,
            alone_us=None if self.alone is None else self.alone.as_dict(),
        )


@dataclass(frozen=True)
class Gathered:
    """The gathers of a kernel [G, K, 2F] that FSDP shards, forward and backward.

    bytes    what one device holds after them, by the compiled program
    nvlink   bytes that it received from others, by the GPUs' counters; None without counters
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
