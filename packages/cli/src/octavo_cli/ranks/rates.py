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
    "bf16": Rates(1320.9, 3.346, 2.340),
    "fp8-delayed": Rates(701.8, 6.117, 5.401),
    "fp8-current": Rates(757.0, 6.343, 6.192),
    "fp8-row": Rates(760.5, 6.965, 6.716),
    "fp8-block": Rates(879.8, 4.979, 5.281),
    "mxfp8": Rates(1395.1, 9.108, 10.339),
    "nvfp4": Rates(1494.5, 15.469, 10.120),
}
"""Least squares of relative errors, none of them negative, over the six layers of
benchmarks/results/moe-h200-2026-11-28.json; they meet each of its rows within 7 %."""


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
