"""The Hadamard transform: the matrix it is, the order of its operations, what it does at the edges."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_numerics import hadamard, round_bfloat16
from octavo_numerics.hadamard import SIGNS


def test_it_is_orthogonal() -> None:
    """H H^T = I, exactly: on 4 I every step is exact."""
    matrix = hadamard(4 * np.eye(16, dtype=np.float32)).astype(np.float64) / 4
    assert np.array_equal(matrix @ matrix.T, np.eye(16))
    assert np.array_equal(np.abs(matrix), np.full((16, 16), 0.25))


def test_it_is_sylvester_s_matrix_with_signs() -> None:
    """H[i, j] = (-1)^popcount(i & j) / 4 times sign j."""
    matrix = hadamard(4 * np.eye(16, dtype=np.float32)) / 4
    parity = [[(-1) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)]
    assert np.array_equal(matrix, np.array(parity) * SIGNS)
    assert "".join("+" if sign > 0 else "-" for sign in SIGNS) == "+++-+------+-+--"


def test_a_product_of_transformed_operands_is_the_product(rng: np.random.Generator) -> None:
    """sum over rows of H x times H dy is that of x times dy: exact for small integers."""
    x, dy = (rng.integers(-1, 2, (32, 8)).astype(np.float32) * 4 for _ in range(2))
    assert np.array_equal(hadamard(x).T @ hadamard(dy), x.T @ dy)


def test_runs_of_16_rows_do_not_mix(rng: np.random.Generator) -> None:
    """Each run alone gives the same bits."""
    x = rng.standard_normal((48, 5)).astype(np.float32)
    assert np.array_equal(hadamard(x)[16:32], hadamard(x[16:32]))


def test_the_input_is_rounded_first_and_the_output_once(rng: np.random.Generator) -> None:
    """fp32 input gives what its bfloat16 rounding gives; the output holds bfloat16 values."""
    x = rng.standard_normal((16, 9)).astype(np.float32)
    assert np.array_equal(hadamard(x), hadamard(round_bfloat16(x)))
    assert np.array_equal(hadamard(x), round_bfloat16(hadamard(x)))


def test_overflow_inside_shows() -> None:
    """16 equal huge numbers overflow the butterflies; the result is not finite."""
    x = np.where(SIGNS[:, None] > 0, np.float32(3e38), np.float32(-3e38))
    assert not np.isfinite(hadamard(x)).all()


def test_other_row_counts_are_refused() -> None:
    """Padding is the caller's."""
    with pytest.raises(ValueError, match="x has 17 rows; the transform takes multiples of 16"):
        hadamard(np.zeros((17, 2), dtype=np.float32))
