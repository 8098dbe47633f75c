"""Bound: what every operation's answer has. Each operation's file adds the parts that its operation may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic

from typing_extensions import TypeVar  # of typing from Python 3.13 on

from octavo_registry.contract.arrays import Prepare

Run_co = TypeVar("Run_co", covariant=True, default=Any)

NO_LAYOUTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Bound(Generic[Run_co]):
    """A backend's answer to a request: the function to call on the hot path, and what it expects.

    run      the function, as the protocol of the operation has it; arrays are the framework's
    layouts  of GEMMs: the layout in which each quantized operand ("x", "w", "dy") must arrive; absent: plain
    note     one clause for people, such as "emulated: bf16 products of dequantized operands"
    prepare  of operations on rows: prepares group sizes for `run`, which takes them as they are, too; None: it does not

    JAX finds its programs by the functions in them, so those of an answer for JAX, each part's, have a hash.
    """

    run: Run_co
    layouts: Mapping[str, str] = field(default_factory=lambda: NO_LAYOUTS, kw_only=True)
    note: str = field(default="", kw_only=True)
    prepare: Prepare[Any] | None = field(default=None, kw_only=True)
