"""The match of peers: how far sampled outputs are from float64 products of the bf16 operands, by norm.

Peers quantize in their own ways, or not at all, so there is no bound of theirs to hold them to as our own GEMMs are.
But a peer that leaves products out, or multiplies another group's weights, is fast for nothing: it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from octavo.recipe_base import Gemm
from octavo_bench.gemm.match import Place, sample_at, sampled_groups
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.problem import SIDES, Data
from octavo_bench.peers.of_gemms import Candidate

FARTHEST = 2.0**-4
"""Of a product of E4M3 codes, whose operands' roundings differ by 2.6 % of their norm each, in root mean square."""


def peer_match(engine: Engine, data: Data, sizes: Sequence[int], seed: int, candidate: Candidate, result: Any) -> str:
    """`within 3.7 %` for a result of the first set of operands; ValueError where it is farther than `FARTHEST`."""
    gemm = cast(Gemm, candidate.gemm)
    (left, _), (right, _) = SIDES[gemm]
    arrays = result, data.sets[0][left], data.sets[0][right]
    draw = np.random.default_rng(seed)
    error = size = 0.0
    for group in sampled_groups(sizes):
        start = sum(sizes[:group])
        place = Place(gemm, group, sizes, (start, start + sizes[group]))
        sample = sample_at(engine, data.shape, place, arrays, draw)
        exact = sample.a.astype(np.float64) @ sample.b.T.astype(np.float64)
        error, size = error + float(np.sum((sample.actual - exact) ** 2)), size + float(np.sum(exact**2))
    far = float(np.sqrt(error / size)) if size else 0.0
    if not far <= FARTHEST:
        raise ValueError(f"its result differs from the product by {far:.1%} of its norm, so its time does not count")
    return f"within {far:.1%}"
