"""Rows of tokens to rows of groups, their sums back, and their products; octavo_registry.contract.moves defines them.

  position  int64 [T, k], the row of each choice
  routed    uint8 [T, k], 0 where a choice is routed nowhere
  weights   fp32 [T, k], or None

Tokens are gathered from, never added to, so that no sum depends on an order of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_triton.kernels.device import device_function
from octavo_triton.kernels.formats import from_stored, to_stored


@device_function
def place_of(position, routed, token, choice, tokens, choices):
    """(index of the choice, its row, whether it is routed) of one choice of each token."""
    at = token * choices + choice
    real = token < tokens
    return at, tl.load(position + at, mask=real, other=0), tl.load(routed + at, mask=real, other=0) != 0


@triton.jit
def permute_rows(
    x, position, routed, weights, rows, tokens, choices, columns, x_stride,
    DTYPE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens and COLUMNS columns of them, which are read once, to the row of each choice."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < columns)[None, :]
    value = tl.load(x + token[:, None] * x_stride + column[None, :], mask=inside, other=0)
    for choice in tl.range(0, choices, loop_unroll_factor=4):
        at, row, live = place_of(position, routed, token, choice, tokens, choices)
        moved = value
        if weights is not None:
            weight = tl.load(weights + at, mask=live, other=0)
            moved = to_stored(from_stored(value, DTYPE) * weight[:, None], DTYPE)
        # rows of choices that are routed nowhere are zero, whatever the token and its weight are
        tl.store(rows + row[:, None] * columns + column[None, :], tl.where(live[:, None], moved, 0), mask=inside)


@triton.jit
def combine_rows(
    rows, position, routed, weights, y, tokens, choices, columns, row_stride,
    DTYPE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens and COLUMNS columns of them: fp32 sums in the order of choices, rounded once."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < columns)[None, :]
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for choice in tl.range(0, choices, loop_unroll_factor=4):
        at, row, live = place_of(position, routed, token, choice, tokens, choices)
        part = tl.load(rows + row[:, None] * row_stride + column[None, :], mask=inside & live[:, None], other=0)
        value = from_stored(part, DTYPE)
        if weights is not None:
            value = value * tl.load(weights + at, mask=live, other=0)[:, None]
        total += value
    tl.store(y + token[:, None] * columns + column[None, :], to_stored(total, DTYPE), mask=inside)


@triton.jit
def dot_rows(
    rows, dy, position, routed, products, tokens, choices, columns, row_stride, dy_stride,
    DTYPE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One choice of TOKENS tokens: COLUMNS fp32 sums of every COLUMNS-th product, added pairwise at the end."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    at, row, live = place_of(position, routed, token, tl.program_id(1), tokens, choices)
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for first in tl.range(0, columns, COLUMNS, loop_unroll_factor=2):
        column = first + tl.arange(0, COLUMNS)
        # zeros on both sides: an infinite dy times a row that nobody reads would be NaN
        inside = live[:, None] & (column < columns)[None, :]
        row_value = tl.load(rows + row[:, None] * row_stride + column[None, :], mask=inside, other=0)
        token_value = tl.load(dy + token[:, None] * dy_stride + column[None, :], mask=inside, other=0)
        total += from_stored(row_value, DTYPE) * from_stored(token_value, DTYPE)
    tl.store(products + at, tl.sum(total, 1), mask=token < tokens)
