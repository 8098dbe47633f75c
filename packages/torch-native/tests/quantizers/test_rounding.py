"""Weights that are rounded to MXFP4 first: by the kernels that quantize, or by torch's operations."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import MARKS

import octavo_registry as registry
from octavo import MXFP4Weights, QuantizerSpec
from octavo_numerics import quantize, valid
from octavo_registry.contract import QuantizeRequest
from octavo_torch import convert_layout
from octavo_torch import quantize as octavo_quantize
from octavo_torch.arithmetic import operators
from octavo_torch.bridge import BRIDGE

DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]
_W = MXFP4Weights().quantizer("w")
assert _W is not None
SPEC: QuantizerSpec = _W
NATIVE = ("rows", "panels")


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch's operations round from here on."""
    seen: list[Any] = []
    real = operators.mxfp4_values

    def spied(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(x)
        return real(x, *rest)

    monkeypatch.setattr(operators, "mxfp4_values", spied)
    return seen


def weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows of every magnitude that the dtype has, one NaN and one infinity."""
    low, high = (-12, 10) if dtype is torch.float16 else (-140, 125)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(low, high, (*shape[:-1], 1)).astype(np.float64))
    values[..., 1, 0], values[..., -1, -1] = np.nan, -np.inf
    return torch.from_numpy(values).to(device, dtype)


def same(q: Any, x: torch.Tensor, spec: QuantizerSpec, sizes: Any = None) -> None:
    """Plain planes of the definition's bits, and the spec as it was asked for."""
    assert q.spec.quantizer == spec
    plain = convert_layout(q, ("plain", "plain"), backend="torch-native")
    for name, wanted in valid(quantize(BRIDGE.to_numpy(x.cpu()), spec, sizes)).items():
        made = BRIDGE.to_numpy(getattr(plain, name))
        assert made[: len(wanted)].tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "axis"), list(product((torch.bfloat16, torch.float32, torch.float16), ("rowwise", "columnwise")))
)
def test_bits_are_the_definitions_whoever_rounds(
    dtype: torch.dtype, axis: Any, device: str, rng: np.random.Generator, composed: list[Any]
) -> None:
    """Matrices and rows, sides inside of 32s and of tiles, either plane or both, plain and native, steps in memory."""
    serves = dtype is not torch.float16
    for orientation, layouts in product(("rowwise", "columnwise", "both"), (("plain", "plain"), NATIVE)):
        spec = QuantizerSpec(**{**dict(SPEC), "mxfp4": axis, "orientation": orientation})
        for shape in ((2, 130, 272), (1, 33, 37), (3, 16, 8)):
            w = weights(rng, shape, dtype, device)
            for x in (w, w.mT.contiguous().mT):
                same(octavo_quantize(x, spec, layouts=layouts, backend="torch-native"), w, spec)
            rows, sizes = w.flatten(0, 1), [5, 0, len(w.flatten(0, 1)) - 9]
            q = octavo_quantize(rows, spec, sizes, layouts=layouts, backend="torch-native")
            same(q, rows, spec, sizes)
    assert bool(composed) != serves


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_codes_are_written_over_unless_the_flag_is_set(
    dtype: Any, device: str, rng: np.random.Generator, composed: list[Any]
) -> None:
    """`into`, at the addresses of the first codes, by the kernels that round and by those that are given values."""
    request = QuantizeRequest(
        op="quantize", framework="torch", device=device, in_dtype=dtype, out_dtype=dtype, quantizer=SPEC,
        layouts=NATIVE, stacked=True, arch=torch.cuda.get_device_capability() if device == "cuda" else None,
    )  # fmt: skip
    bound: Any = registry.plan(request, backend="torch-native").bound
    first, second = (weights(rng, (2, 130, 272), getattr(torch, dtype), device) for _ in range(2))
    q = bound.run(first)
    same(q, first, SPEC)
    for flag, now in ((1, first), (0, second)):
        held = q.rowwise.data_ptr()
        bound.into(second, out=q, unchanged=torch.full((1,), flag, dtype=torch.int32, device=device))
        assert q.rowwise.data_ptr() == held
        same(q, now, SPEC)
    same(bound.from_plain(bound.to_plain(q)), second, SPEC)
    assert bool(composed) == (dtype == "float16")
    assert {bound.with_amax, bound.of_tokens, bound.of_mxfp4, bound.round_first} == {None}
