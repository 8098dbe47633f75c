"""How long one H200 computes a MoE layer: three coefficients per recipe, fitted to whole layers that were measured."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 128
"""Rows of a tile of the grouped GEMMs."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Milliseconds of a layer's forward and backward, from permuted tokens to combined ones.

    per_pflop   for 1e15 operations of its nine GEMMs: three of fc1, which is two matrices wide, and of fc2
    per_rows    for 1e9 elements of rows: rows (K + F)
    per_weights for 1e9 elements of weights: experts K F
    """

    per_pflop: float
    per_rows: float
    per_weights: float


RATES = {
    "bf16": Rates(1388.3, 2.208, 2.754),
    "fp8-delayed": Rates(735.7, 5.593, 5.520),
    "fp8-current": Rates(781.9, 5.537, 6.842),
    "fp8-row": Rates(760.2, 6.424, 7.579),
    "fp8-block": Rates(924.8, 3.862, 6.638),
    "mxfp8": Rates(1437.7, 7.080, 11.933),
    "nvfp4": Rates(1500.7, 14.864, 11.339),
}
"""Least squares of relative errors, none of them negative, over the six layers of
benchmarks/results/moe-h200-2026-11-27.json; they meet each of its rows within 7 %."""


def compute_us(rates: Rates, rows: float, experts: float, sides: tuple[int, int], *, ragged: bool = True) -> float:
    """Microseconds of a rank that computes so many rows.

    rows      choices that its experts serve
    experts   of the rank
    sides     K and F of weights [2F, K] and [K, F]
    ragged    an expert's last tile is half full on average; False: groups are whole tiles
    """
    k, f = sides
    computed = rows + (experts * TILE / 2 if ragged and rows else 0)
    work = rates.per_pflop * 18 * computed * k * f / 1e15
    moved = rates.per_rows * rows * (k + f) / 1e9
    return 1000 * (work + moved + rates.per_weights * experts * k * f / 1e9)
