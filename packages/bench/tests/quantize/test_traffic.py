"""The byte model against counts by hand: bytes per element of bf16 input, and the padding of column panels."""

from __future__ import annotations

import pytest

from octavo_bench.harness.traffic import Traffic, panels
from octavo_bench.quantize.case import CASES, Case, traffic

EVEN = (4096,) * 8
COLS = 7168
ELEMENTS = 32768 * COLS

PER_ELEMENT = [
    (Case("quantize", "delayed", "row"), 3.0),
    (Case("quantize", "delayed", "both"), 4.0),
    (Case("quantize", "current", "row"), 5.0),
    (Case("quantize", "current", "both"), 6.0),
    (Case("quantize", "row", "row"), 3 + 4 / COLS),
    (Case("quantize", "row", "both"), 6 + 4 / COLS + 4 / 4096),
    (Case("quantize", "block", "row"), 3 + 4 / 128),
    (Case("quantize", "block", "both"), 4 + 8 / 128),
    (Case("quantize", "block", "both", native=False), 4 + 8 / 128),
    (Case("quantize", "mxfp8", "row"), 3 + 1 / 32),
    (Case("quantize", "mxfp8", "both"), 4 + 2 / 32),
    (Case("quantize", "nvfp4", "row"), 4 + 0.5 + 1 / 16),
    (Case("quantize", "nvfp4", "both"), 4 + 1 + 2 / 16),
    (Case("quantize", "nvfp4", "both", hadamard=True), 4 + 1 + 2 / 16),
    (Case("quantize", "block", "row", swiglu=True), 5 + 4 / 128),
    (Case("quantize", "mxfp8", "both", swiglu=True), 6 + 2 / 32),
    (Case("weights", "block", "both", operand="w", square=True), 4 + 8 / 128**2),
    (Case("dequantize", "block", "column"), 3 + 4 / 128),
    (Case("dequantize", "mxfp8", "column"), 3 + 1 / 32),
    (Case("dequantize", "nvfp4", "column"), 2.5 + 1 / 16),
]


@pytest.mark.parametrize(("case", "expected"), PER_ELEMENT, ids=[case.label for case, _ in PER_ELEMENT])
def test_bytes_an_element(case: Case, expected: float) -> None:
    """Groups that are whole panels; what a group adds (scales of a tensor, second levels) is below a thousandth."""
    found = traffic(case, EVEN, COLS).total / ELEMENTS
    per_group = 3 * 4 * len(EVEN) / ELEMENTS
    assert expected <= found <= expected + per_group


def test_the_design_table_to_two_digits() -> None:
    """docs and issue quote 3.00, 4.00, 5.00, 6.00, 3.03, 4.06, 4.56 and 5.13."""

    def quoted(recipe: str, outputs: str) -> str:
        case = next(c for c in CASES if c.label == f"{recipe} {outputs}")
        return f"{traffic(case, EVEN, COLS).total / ELEMENTS + 1e-9:.2f}"

    assert [quoted("delayed", "row"), quoted("delayed", "row+col")] == ["3.00", "4.00"]
    assert [quoted("current", "row"), quoted("current", "row+col")] == ["5.00", "6.00"]
    assert [quoted("per-row", "row"), quoted("per-row", "row+col")] == ["3.00", "6.00"]
    assert [quoted("block", "row"), quoted("block", "row+col")] == ["3.03", "4.06"]
    assert [quoted("mxfp8", "row"), quoted("mxfp8", "row+col")] == ["3.03", "4.06"]
    assert [quoted("nvfp4", "row"), quoted("nvfp4", "row+col")] == ["4.56", "5.13"]


def test_exact_bytes_of_one_small_problem() -> None:
    """Groups of 0, 1 and 130 rows, 272 columns: 131 rows, panels 0 + 1 + 2, three column blocks a row."""
    sizes, cols = (0, 1, 130), 272
    assert panels(sizes) == 3
    x = 131 * 272 * 2
    rows = 131 * 272 + 131 * 3 * 4
    columns = 3 * 272 * 128 + 3 * 272 * 4
    assert traffic(Case("quantize", "block", "both"), sizes, cols) == Traffic(x, rows + columns)
    columns = 3 * 272 * 128 + 3 * 272 * 4  # four E8M0 bytes a column and panel
    rows = 131 * 272 + 131 * 9
    assert traffic(Case("quantize", "mxfp8", "both"), sizes, cols) == Traffic(x, rows + columns)
    columns = 3 * 272 * 64 + 3 * 272 * 8 + 3 * 4
    rows = 131 * 136 + 131 * 17 + 3 * 4
    assert traffic(Case("quantize", "nvfp4", "both"), sizes, cols) == Traffic(2 * x, rows + columns)
    rows, columns = 131 * 272 + 131 * 4, 3 * 272 * 128 + 3 * 272 * 4
    assert traffic(Case("quantize", "row", "both"), sizes, cols) == Traffic(2 * x, rows + columns)
    rows, columns = 131 * 272 + 3 * 4, 3 * 272 * 128 + 3 * 4
    assert traffic(Case("quantize", "delayed", "both"), sizes, cols) == Traffic(x + 3 * 4, rows + columns)


def test_the_plain_layout_pads_nothing_but_hadamard_groups() -> None:
    """Blocks restart at each group: 130 rows have two of 128; Hadamard groups are padded to 16 rows."""
    sizes, cols = (0, 1, 130), 272
    rows = 131 * 272 + 131 * 3 * 4
    columns = 131 * 272 + (1 + 2) * 272 * 4
    plain = Case("quantize", "block", "both", native=False)
    assert traffic(plain, sizes, cols).written == rows + columns
    rows = 131 * 272 + 131 * 17 + 3 * 4
    columns = (16 + 144) * 272 + (1 + 9) * 272 + 3 * 4
    hadamard = Case("quantize", "nvfp4", "both", hadamard=True, native=False)
    assert traffic(hadamard, sizes, cols).written == rows + columns


def test_panel_padding_of_small_groups_counts() -> None:
    """512 rows a group off by one cost a whole panel more: the GEMM reads it, so it is no loss of the kernel."""
    case = Case("dequantize", "block", "column")
    even, odd = traffic(case, (512,) * 4, 256), traffic(case, (513,) * 4, 256)
    assert even.written == 16 * 256 * 128 * 2
    assert odd.written == 20 * 256 * 128 * 2
    assert odd.read == 20 * 256 * (128 + 4)


def test_wide_inputs_are_wide_on_the_way_in() -> None:
    """fp32 reads four bytes an element and writes the same codes."""
    case = Case("quantize", "block", "row")
    narrow, wide = traffic(case, EVEN, COLS), traffic(case, EVEN, COLS, 4)
    assert wide.read == 2 * narrow.read
    assert wide.written == narrow.written


def test_stacked_weights_are_groups_of_rows() -> None:
    """[8, 200, 272] in 128x128 blocks: two by three scales a matrix and direction, column panels padded to 256 rows."""
    case = Case("weights", "block", "both", operand="w", square=True)
    moved = traffic(case, (200,) * 8, 272)
    assert moved.read == 8 * 200 * 272 * 2
    assert moved.written == 8 * 200 * 272 + 8 * 256 * 272 + 2 * 8 * 2 * 3 * 4
