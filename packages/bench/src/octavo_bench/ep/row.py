"""What `octavo bench ep` leaves: a row a recipe, devices and way; what is gathered of kernels; its JSON form."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.results import Facts, Failure, failure_dicts, rounded
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

SCALING_DEVICES = 4
SCALING = {False: 2.8, True: 3.2}
"""Speed of that many devices over one: tokens as they are, and as codes."""
GATHERED_OF_BF16 = 0.52
"""Bytes of a kernel that FSDP gathers quantized, of bf16's: a half, and the scales."""


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
    goals: tuple[Goal, ...] = ()

    @property
    def ms(self) -> float:
        """Milliseconds."""
        return self.times.median / 1e3

    def as_dict(self) -> dict[str, Any]:
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
            "us": rounded(self.times),
            "ms": round(self.ms, 4),
            "goals": [goal.as_dict() for goal in self.goals],
        }


@dataclass(frozen=True)
class Gathered:
    """The gathers of a kernel [G, K, 2F] that FSDP cuts, forward and backward.

    bytes    that one device holds after them, in the compiled program
    nvlink   that it received from others, by the GPUs' counters; None where none tells
    """

    shape: Shape
    kind: str
    devices: int
    bytes: int
    nvlink: int | None = None
    goals: tuple[Goal, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "devices": self.devices,
            "shape": list(self.shape.key),
            "gathered_bytes": self.bytes,
            "nvlink_bytes": self.nvlink,
            "goals": [goal.as_dict() for goal in self.goals],
        }


def speedup(row: EpRow, rows: Sequence[EpRow]) -> float | None:
    """One device's time over this row's; None where that was not measured."""
    one = next((one for one in rows if (one.shape, one.kind, one.devices) == (row.shape, row.kind, 1)), None)
    return None if one is None else one.ms / row.ms


def ep_goals(row: EpRow, rows: Sequence[EpRow]) -> tuple[Goal, ...]:
    """Strong scaling, judged of the faster way."""
    alike = [one for one in rows if (one.shape, one.kind, one.devices, one.payload) == _key(row)]
    factor = speedup(row, rows)
    if row.devices != SCALING_DEVICES or factor is None or row.ms > min(one.ms for one in alike):
        return ()
    needed = SCALING[row.payload]
    return (Goal(f"{needed} of one device", needed, factor),)


def _key(row: EpRow) -> tuple[Shape, str, int, bool]:
    return row.shape, row.kind, row.devices, row.payload


def gathered_goals(row: Gathered, rows: Sequence[Gathered]) -> tuple[Goal, ...]:
    """8-bit kernels against bf16's: what is gathered, and what NVLink carries for it."""
    plain = gathered_plain(row, rows)
    if plain is None or row.kind in ("bf16", "nvfp4"):
        return ()
    goals = [Goal("half of bf16's bytes", GATHERED_OF_BF16, row.bytes / plain.bytes, most=True)]
    if row.nvlink is not None and plain.nvlink:
        goals.append(Goal("half over NVLink", GATHERED_OF_BF16, row.nvlink / plain.nvlink, most=True))
    return tuple(goals)


def gathered_plain(row: Gathered, rows: Sequence[Gathered]) -> Gathered | None:
    """The same kernel gathered in bf16; None where that was not run."""
    return next((one for one in rows if (one.shape, one.kind) == (row.shape, "bf16")), None)


@dataclass(frozen=True, kw_only=True)
class EpResults(Facts):
    """A whole run. k choices a token; `slack` rows of a device over an even share."""

    k: int
    slack: float
    rows: Sequence[EpRow]
    gathered: Sequence[Gathered]
    notes: Sequence[str]
    failures: Sequence[Failure]

    @property
    def judged(self) -> list[bool]:
        """Whether each goal is met."""
        of_blocks = [goal for row in self.rows for goal in row.goals]
        of_kernels = [goal for row in self.gathered for goal in row.goals]
        return [goal.passed for goal in (*of_blocks, *of_kernels)]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return self.document(
            judged=self.judged,
            match={},
            framework="jax",
            choices=self.k,
            slack=self.slack,
            xla_flags=os.environ.get("XLA_FLAGS", ""),
            failures=failure_dicts(self.failures),
            rows=[row.as_dict() for row in self.rows],
            gathered=[row.as_dict() for row in self.gathered],
            notes=list(self.notes),
        )
