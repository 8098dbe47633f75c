"""Modes of the process that would change what the reference computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octavo import MXFP8
from octavo_torch import dequantize, grouped_linear, quantize

BACKEND = "torch-reference"
SPEC = MXFP8().quantizer("x")
assert SPEC is not None


@pytest.fixture(autouse=True)
def modes() -> Iterator[None]:
    """Torch's, put back."""
    yield
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")


def test_flushed_subnormals_are_refused(rng: np.random.Generator) -> None:
    """Codes and scales of small values would differ from the definition, without a word."""
    x = torch.randn(8, 32) * 2.0**-126
    q = quantize(x, SPEC, backend=BACKEND)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    for call in (lambda: quantize(x, SPEC, backend=BACKEND), lambda: dequantize(q, backend=BACKEND)):
        with pytest.raises(RuntimeError, match=r"flushes subnormal numbers to zero.*set_flush_denormal\(False\)"):
            call()
    torch.set_flush_denormal(False)
    again = quantize(x, SPEC, backend=BACKEND)
    assert torch.equal(q.rowwise_scale, again.rowwise_scale)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_keep_fp32(precision: str, rng: np.random.Generator) -> None:
    """A CPU with units for bf16 would take them, where torch may; then products are those of fp64, rounded once."""
    x, w, dy = torch.randn(40, 256), torch.randn(1, 24, 256), torch.randn(40, 24)
    w.requires_grad_()
    torch.set_float32_matmul_precision(precision)
    y = grouped_linear(x, w, [40], recipe=None, backend=BACKEND)
    y.backward(dy)
    assert torch.equal(y.detach(), (x.double() @ w[0].detach().double().t()).float())
    assert torch.equal(w.grad[0], (dy.double().t() @ x.double()).float())
