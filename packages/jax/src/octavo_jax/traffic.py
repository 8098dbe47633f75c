"""What a compiled program moves between devices, and the results of its custom calls, read from its optimized HLO.

A jaxpr does not show all of it, because XLA adds collectives of its own where shardings do not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal[
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
]

_KINDS = "|".join(get_args(Kind))
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?\S+ = (?P<result>.+?) (?P<kind>{_KINDS})(?P<start>-start)?\((?P<rest>.*)$")
_CALL = re.compile(r"^\s*(?:ROOT )?%?\S+ = (?P<result>.+?) custom-call\(.*custom_call_target=\"(?P<target>[^\"]+)\"")
_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "f4e2m1fn": 4, "c64": 64, "c128": 128}


@dataclass(frozen=True)
class ArrayShape:
    """An array on one device: XLA's name of its dtype ("bf16", "u8", "f8e4m3fn"), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = _BITS.get(self.dtype) or int(digits.group(1) if digits else 32)
        return math.prod(self.shape) * bits // 8


@dataclass(frozen=True)
class Collective:
    """One collective operation, counted once even inside a loop.

    kind      XLA's name
    results   the arrays that one device holds afterwards; several where XLA combined operations
    named     JAX's path to the operation it came from, such as "jit(step)/shard_map/all_gather"; "" where XLA added it
    """

    kind: Kind
    results: tuple[ArrayShape, ...]
    named: str

    @property
    def bytes(self) -> int:
        """The size of the results on one device."""
        return sum(result.bytes for result in self.results)


@dataclass(frozen=True)
class CustomCall:
    """One call of a kernel: its target's name and the shapes of its results on one device."""

    target: str
    results: tuple[ArrayShape, ...]


def collectives(compiled: Any) -> tuple[Collective, ...]:
    """Every collective of a compiled program, which `jax.jit(f).lower(...).compile()` returns, in its order.

    XLA:CPU moves bf16 as f32 and float8 as f16. GPUs move arrays as they are, and so does XLA:CPU with integers.
    """
    return tuple(_collectives(compiled.as_text()))


def custom_calls(compiled: Any, prefix: str = "octavo") -> tuple[CustomCall, ...]:
    """Every custom call whose target begins with `prefix`."""
    matches = (_CALL.match(line) for line in compiled.as_text().splitlines())
    calls = (CustomCall(match["target"], _arrays(match["result"])) for match in matches if match)
    return tuple(call for call in calls if call.target.startswith(prefix))


def _arrays(text: str) -> tuple[ArrayShape, ...]:
    return tuple(
        ArrayShape(dtype, tuple(int(side) for side in sides.split(",") if side))
        for dtype, sides in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", text))
    )


def _collectives(text: str) -> Iterator[Collective]:
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        results = _arrays(match["result"])
        if match["start"] and match["kind"] != "all-reduce":
            # The results of an asynchronous start are its operands, then its own; some add words of state at the end.
            results = tuple(one for one in results if one.shape)
            results = results[len(results) // 2 :]
        named = re.search(r'op_name="([^"]*)"', match["rest"])
        kind: Any = match["kind"]
        yield Collective(kind, results, named[1] if named else "")
