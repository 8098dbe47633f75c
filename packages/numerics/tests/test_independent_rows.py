"""`QuantizerSpec.independent_rows` against the definition: rows that go elsewhere keep their row data, or do not."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import QuantizerSpec
from octavo_numerics import quantize

SPECS = {
    "row": QuantizerSpec(scaling="row", format="e4m3"),
    "row pow2": QuantizerSpec(scaling="row", format="e5m2", power_of_two=True, role="dy"),
    "block": QuantizerSpec(scaling="block", format="e4m3"),
    "block columns": QuantizerSpec(scaling="block", format="e4m3", square_columns=True),
    "mxfp8": QuantizerSpec(scaling="mxfp8", format="e4m3"),
    "block square": QuantizerSpec(scaling="block", format="e4m3", square=True),
    "mxfp8 square": QuantizerSpec(scaling="mxfp8", format="e4m3", square=True),
    "current": QuantizerSpec(scaling="current", format="e4m3"),
    "nvfp4": QuantizerSpec(scaling="nvfp4", format="e2m1"),
    "nvfp4 stochastic": QuantizerSpec(scaling="nvfp4", format="e2m1", rounding="stochastic", role="dy"),
}


@pytest.mark.parametrize("name", SPECS)
def test_rows_keep_their_row_data(name: str, rng: np.random.Generator) -> None:
    """Tokens as one matrix, and rows of them in groups and another order, each token twice: a product may read the
    codes of tokens in the place of those of rows exactly where the spec says so."""
    spec, tokens = SPECS[name], 48
    x = rng.standard_normal((tokens, 272), dtype=np.float32)
    x[0] *= 2.0**30  # whoever shares a scale with this token has another one elsewhere
    order = rng.permutation(2 * tokens) // 2
    sizes = rng.multinomial(2 * tokens, (0.3, 0.0, 0.5, 0.2))
    seed = 7 if spec.stochastic else None
    once, rows = quantize(x[None], spec, seed=seed), quantize(x[order], spec, sizes, seed=seed)
    assert once.rowwise is not None
    assert rows.rowwise is not None
    same = np.array_equal(once.rowwise[0][order].view(np.uint8), rows.rowwise.view(np.uint8))
    assert same == spec.independent_rows
    if same:
        assert once.rowwise_scale is not None
        assert np.array_equal(once.rowwise_scale[0][order], rows.rowwise_scale)
