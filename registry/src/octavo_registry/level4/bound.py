"""Level 4's Bound: one class for all operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo_registry.contract.bound import NO_LAYOUTS


@dataclass(frozen=True, slots=True)
class Bound:
    """What a backend of API level 4 answers to any request. From level 5 on, the classes of `contract` do.

    run              the function of the operation; a quantizer's may have methods `from_plain` and `to_plain`
    layouts          of GEMMs: the layout in which each quantized operand must arrive; absent: plain
    workspace_bytes  not looked at
    note             one clause for people
    prepare          as `contract.bound.Bound` has it
    run_with_amax    `BoundQuantize.with_amax`
    whole_layer      not called: a layer of level 4's plans is composed of them, with the same bits
    update_scales    `BoundQuantize.update_scales`
    """

    run: Callable[..., Any]
    layouts: Mapping[str, str] = field(default_factory=lambda: NO_LAYOUTS)
    workspace_bytes: int = 0
    note: str = ""
    prepare: Callable[..., Any] | None = None
    run_with_amax: Callable[..., Any] | None = None
    whole_layer: Callable[..., Any] | None = None
    update_scales: Callable[..., Any] | None = None
