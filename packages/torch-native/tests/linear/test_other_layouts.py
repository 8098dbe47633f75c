"""Codes in the layouts of one backend are nothing to another, which would read them as its own."""

from __future__ import annotations

import pytest
import torch

from octavo_torch import grouped_linear, quantize_input, quantize_weight

SIZES, RECIPE = [5, 0, 3], "fp8-block"
BACKENDS = ("torch-native", "torch-reference")


@pytest.mark.parametrize(("made", "called"), [BACKENDS, BACKENDS[::-1]])
def test_a_weight_is_read_by_the_backend_that_it_was_quantized_for(made: str, called: str) -> None:
    """Both serve it, each with its own codes; with the other's the result would be of permuted values."""
    x, w = torch.randn(8, 128), torch.randn(3, 128, 128)
    codes = quantize_weight(w, RECIPE, backend=made)
    assert torch.isfinite(grouped_linear(x, codes, SIZES, recipe=RECIPE, backend=made)).all()
    with pytest.raises(ValueError, match=r"weight was quantized to layouts .* wants .*; give .* the same backend"):
        grouped_linear(x, codes, SIZES, recipe=RECIPE, backend=called)


def test_rows_are_read_by_the_backend_that_they_were_quantized_for() -> None:
    """Plain ones by every backend."""
    x, w = torch.randn(8, 128), torch.randn(3, 128, 128, requires_grad=True)
    native, plain = (quantize_input(x, w, SIZES, RECIPE, backend=backend) for backend in BACKENDS)
    with pytest.raises(
        ValueError, match="x's rowwise data are in layout 'rows' and the chosen backend reads 'plain'; quantize"
    ):
        grouped_linear(native, w, None, recipe=RECIPE, backend="torch-reference")
    grouped_linear(plain, w, None, recipe=RECIPE, backend="torch-reference")
