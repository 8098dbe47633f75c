"""Shardy's rules: which dimensions of a stage's operands and results are one factor, and which it must not shard.

There is one rule for each stage: a quantizer, fprop, dgrad, wgrad, or the sums of a bias. None is written by hand: it
follows from the letters that `octavo_jax.sharding.specs` gives the stage's arrays (`gemms.wgrad_gemm` has those of
wgrad), so that a rule and the PartitionSpecs of the same stage cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from octavo_jax.sharding.placement import Letter, Placement

Names = tuple[Letter, ...]
"""Of one dimension: more than one where it is their product."""


class Rule(NamedTuple):
    """Shardy's rule as text, the factors that it must not shard, and sizes that do not follow from one dimension."""

    text: str
    need_replication: tuple[str, ...]
    sizes: dict[str, int]


def shardy_rule(
    placement: Placement, ins: list[list[Names]], outs: list[list[Names]], shapes: list[tuple[int, ...]]
) -> Rule:
    """Shardy's rule for arrays with these letters and shapes.

    A letter is one factor. A dimension that is longer than its letters' factors, as a payload's is that has a scale for
    each block, is their product with one more factor, which must not be sharded.
    """
    rest = _numbered()
    sizes = _sizes(placement, [*ins, *outs], shapes)
    alone: set[str] = set()
    fixed: dict[str, int] = {}

    def factors(names: Names, length: int) -> str:
        parts: list[str] = [name for name in names if placement.axes_of(name)]
        product = math.prod(sizes[name] for name in parts)
        if length % product:
            parts, product = [], 1
        if length != product or not parts:
            extra = next(rest)
            fixed[extra] = length // product
            parts.append(extra)
        if len(parts) == 1:
            alone.add(parts[0])
        return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"

    words = [" ".join(map(factors, dims, shape)) for dims, shape in zip([*ins, *outs], shapes, strict=True)]
    text = f"{', '.join(words[: len(ins)])} -> {', '.join(words[len(ins) :])}"
    used = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split())
    every = {**sizes, **fixed}
    return Rule(text, tuple(fixed), {name: every[name] for name in sorted(used & set(every)) if name not in alone})


def _numbered() -> Iterator[str]:
    number = 0
    while True:
        yield f"r{number}"
        number += 1


def _sizes(placement: Placement, dims: list[list[Names]], shapes: list[tuple[int, ...]]) -> dict[str, int]:
    """The size of each letter's factor: the shortest dimension, without the expert blocks in it."""
    sizes: dict[str, int] = {"e": placement.block_count("e"), "f": placement.block_count("f")}
    for names_of, shape in zip(dims, shapes, strict=True):
        for names, length in zip(names_of, shape, strict=True):
            for name in names:
                if name not in ("e", "f"):
                    here = length // (sizes["e"] if "e" in names else 1)
                    sizes[name] = min(sizes.get(name, here), here)
    return sizes
