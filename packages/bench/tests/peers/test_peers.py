"""The torch versions make the definition's bits, so that their time is that of the same work."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import octavo_numerics
from octavo_bench.harness.shapes import even, ragged
from octavo_bench.peers import compile as peers
from octavo_bench.quantize.case import CASES, Case
from octavo_bench.quantize.peer import peer_of

ROWS, COLS = 512, 256
SIZES = [256, 256]


def _input(seed: int, cols: int = COLS) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, cols, generator=draw) * torch.exp2(torch.arange(ROWS) % 40 - 20.0)[:, None]
    x[7, :128] = 0
    return x.to(torch.bfloat16)


def _definition(case: Case, x: torch.Tensor, **arguments: Any) -> octavo_numerics.QuantizedArray:
    values = x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return octavo_numerics.quantize(values, case.spec, SIZES, **arguments)


def _same(ours: torch.Tensor, definition: Any) -> None:
    expected = np.ascontiguousarray(definition).view(np.uint8).reshape(-1)
    assert np.array_equal(ours.contiguous().view(torch.uint8).numpy().reshape(-1), expected)


def test_block_row_and_both_are_the_definition(seed: int) -> None:
    """Codes and scales; columns as panels of 128 rows."""
    x = _input(seed)
    expected = _definition(Case("quantize", "block", "both"), x)
    codes, scales, columns, column_scales = peers.block_both(x)
    _same(codes, expected.rowwise)
    _same(scales.t(), expected.rowwise_scale)
    _same(columns.transpose(1, 2), expected.columnwise)
    _same(column_scales, expected.columnwise_scale[: ROWS // 128])  # type: ignore[index]
    assert torch.equal(peers.row_codes(peers.block_row(x)), codes.view(torch.uint8))


def test_mxfp8_row_is_the_definition(seed: int) -> None:
    """Round-up exponents, a zero block included."""
    x = _input(seed)
    expected = _definition(Case("quantize", "mxfp8", "row"), x)
    codes, scales = peers.mxfp8_row(x)
    _same(codes, expected.rowwise)
    _same(scales, expected.rowwise_scale)


def test_known_scales_are_the_definition(seed: int) -> None:
    """One factor a group, values that saturate among them."""
    x = _input(seed)
    scale = torch.tensor([0.75, 3.0])
    expected = _definition(Case("quantize", "delayed", "row"), x, scale=scale.numpy())
    _same(peers.tensor_row(x, scale), expected.rowwise)


def test_swiglu_is_rounded_once_and_then_quantized(seed: int) -> None:
    """silu(gate) * up, gate first."""
    x = _input(seed, 2 * COLS)
    gate, up = x[:, :COLS].float(), x[:, COLS:].float()
    activated = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
    expected = _definition(Case("quantize", "block", "row"), activated)
    _same(peers.swiglu_block_row(x)[0], expected.rowwise)


def test_five_rows_have_a_peer_and_only_in_even_aligned_groups(seed: int) -> None:
    """Where the torch version would do other work there is none."""
    with_peer = {case.label for case in CASES if peer_of(case, even(1024, 4), 256)}
    assert with_peer == {"delayed row", "block row", "block row+col", "swiglu + block row", "mxfp8 row"}
    row = Case("quantize", "block", "row")
    for grouping, cols in (
        (even(1025, 4), 256),
        (ragged(4096, 8, seed), 256),
        (even(1024, 4), 272),
        (even(64, 4), 256),
    ):
        assert peer_of(row, grouping, cols) is None


@pytest.mark.parametrize("amax", [448.0, 449.0, 2.0**-126, 1e-38, 3e38, 0.0])
def test_power_of_two_scales_at_the_edges(amax: float) -> None:
    """Subnormal quotients and overflow: the largest finite scale, and 1 for a zero block."""
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    x[0, 0] = amax
    expected = octavo_numerics.quantize(
        x.view(torch.int16).numpy().view(ml_dtypes.bfloat16), Case("quantize", "block", "row").spec, [128]
    )
    codes, scales = peers.block_row(x)
    _same(codes, expected.rowwise)
    _same(scales.t(), expected.rowwise_scale)
