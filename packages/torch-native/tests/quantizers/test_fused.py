"""Fused launches: the codes are those of the rounded tensor that they return, and that is right to its last bits."""

from __future__ import annotations

import math
from typing import Any

import native_calls as native
import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_native
import octavo_torch
from octavo import QuantizerSpec
from octavo_conformance.cards.variants import RAGGED, STACKED
from octavo_registry.contract.cards import GATED, Activation
from octavo_torch_native.quantizers.launches import launch_of
from octavo_torch_native.quantizers.spec import LaunchSpec, spec_text

ACTIVATIONS = tuple(octavo_native.ACTIVATIONS)
NAMES = ("delayed.e4m3", "current.e5m2", "row.e4m3.pow2", "block.e4m3.fp32", "mxfp8.e4m3", "nvfp4.stochastic.hadamard")
SIZES = [40, 0, 129, 1]
ROWS, USED, F = 190, 170, 72


def arguments(spec: QuantizerSpec) -> dict[str, Any]:
    given: dict[str, Any] = {"seed": 11, "group_offset": 2} if spec.stochastic else {}
    if spec.scaling == "delayed":
        given["scale"] = torch.tensor([1.0, 8.0, 0.5, 3.0])
    return given


def halves(activation: str) -> int:
    return 2 if activation in GATED else 1


def assert_of(made: native.Quantized, spec: QuantizerSpec, layouts: tuple[str, str] = ("plain", "plain")) -> None:
    """The codes, amax and dequantized copy are what `quantize` makes of the tensor that was quantized."""
    assert made.activated is not None
    values = made.activated.clone()
    values[USED:] = torch.nan
    unfused = native.quantize(values, spec, SIZES, layouts=layouts, **arguments(spec)).codes
    assert made.codes.spec == unfused.spec
    for direction in spec.directions:
        ours, theirs = native.dequantize(made.codes, direction), native.dequantize(unfused, direction)
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), direction
        for part in ("_scale", "_global"):
            a, b = getattr(made.codes, direction + part), getattr(unfused, direction + part)
            assert (a is None) == (b is None)
    assert torch.equal(made.amax, native.group_amax(values, SIZES))
    copied = native.dequantize(made.codes, "rowwise", dtype=torch.bfloat16)
    assert torch.equal(made.dequantized[:USED].view(torch.int16), copied[:USED].view(torch.int16))


def act64(name: str, x: Tensor) -> Tensor:
    """The activation in float64; torch's own gelu cancels where x is far below zero."""
    x = x.double()
    if name in ("silu", "swiglu"):
        return x * torch.sigmoid(x)
    if name == "relu2":
        return x.clamp(min=0).square()
    if name == "clamped_swiglu":
        gate = clamped64(x, -math.inf)
        return gate * torch.sigmoid(1.702 * gate)
    if name.endswith("tanh"):
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return x * 0.5 * torch.erfc(x * -math.sqrt(0.5))


def clamped64(x: Tensor, low: float) -> Tensor:
    """Between `low` and 7, with the slope 1 at a limit, which torch's clamp had up to torch 2.14 and has no more."""
    return torch.where(x > 7, 7.0, torch.where(x < low, low, x))


def factor64(name: str, up: Tensor) -> Tensor:
    """What a gate multiplies, in float64."""
    return clamped64(up.double(), -7) + 1 if name == "clamped_swiglu" else up.double()


def rounding_bound(dtype: torch.dtype, exact: Tensor, factors: Tensor | float) -> Tensor:
    """One rounding to `dtype`, 8 ulp of fp32 for the function and the products after it, and beside a derivative's root
    an absolute error of 2^-24 times what multiplies it, twice where two products share it (activations.h)."""
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[dtype]
    floor = 2.0**-24 if dtype is torch.float16 else 2.0**-133  # half of the smallest step
    return exact.abs() * (unit + 2.0**-20) + torch.as_tensor(factors).abs() * 2.0**-23 + floor


def assert_close(got: Tensor, exact: Tensor, factors: Tensor | float = 0.0) -> None:
    error = (got.double() - exact).abs()
    worst = error / rounding_bound(got.dtype, exact, factors)
    assert float(worst.max()) <= 1.0, f"error is {float(worst.max()):.2f} of its bound"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: Activation, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """act(x), act(gate) * up, times probabilities; every quantizer takes the rounded tensor; NaN tails stay out."""
    x = (3 * torch.randn(ROWS, halves(activation) * F)).to(dtype)
    x[USED:] = torch.nan
    for name in NAMES:
        for probs in (None, torch.rand(ROWS)):
            spec = RAGGED[name]
            made = native.act_quantize(
                x, spec, SIZES, activation=activation, probs=probs, amax=True, dequantized=True, activated=True,
                **arguments(spec),
            )  # fmt: skip
            assert made.activated.shape == (ROWS, F)
            assert made.codes.shape == (ROWS, F)
            assert_of(made, spec)
            value = act64(activation, x[:USED, :F])
            if activation in GATED:
                value = value * factor64(activation, x[:USED, F:])
            if probs is not None:
                value = value * probs[:USED, None].double()
            assert_close(made.activated[:USED], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_activations(activation: Activation, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """d act(x) / dx times dy, both halves where gated, and their sums by group in a fixed order."""
    x = (3 * torch.randn(ROWS, halves(activation) * F)).to(dtype)
    dy = torch.randn(ROWS, F).to(dtype)
    probs = torch.rand(ROWS)
    x[USED:], dy[USED:], probs[USED:] = torch.nan, torch.nan, torch.nan
    leaf = x[:USED].double().requires_grad_()
    y = act64(activation, leaf[:, :F]) * probs[:USED, None].double()
    if activation in GATED:
        y = y * factor64(activation, leaf[:, F:])
    (exact,) = torch.autograd.grad(y, leaf, dy[:USED].double())
    factors = (dy[:USED].double() * probs[:USED, None].double()).abs()
    if activation in GATED:
        gate, up = x[:USED, :F].double(), factor64(activation, x[:USED, F:])
        factors = torch.cat([factors * up.abs(), factors * act64(activation, gate).abs()], 1)
    for name in NAMES:
        spec = RAGGED[name]
        call = {"activation": activation, "probs": probs, "dbias": True, "amax": True, "dequantized": True}
        made = native.dact_quantize(dy, x, spec, SIZES, activated=True, **call, **arguments(spec))
        assert made.codes.shape == tuple(x.shape)
        assert_of(made, spec)
        assert_close(made.activated[:USED], exact, factors)
        again = native.dact_quantize(dy, x, spec, SIZES, **call, **arguments(spec))
        assert torch.equal(made.dbias.view(torch.int32), again.dbias.view(torch.int32))
        assert_sums(made.dbias, made.activated)


def assert_sums(dbias: Tensor, values: Tensor) -> None:
    """fp32 sums of each group's rows: n additions err by at most n 2^-24 of the sum of magnitudes."""
    start = 0
    for group, size in enumerate(SIZES):
        rows = values[start : start + size].double()
        error = (dbias[group].double() - rows.sum(0)).abs()
        assert bool((error <= size * 2.0**-24 * rows.abs().sum(0)).all()), f"group {group}"
        start += size
    assert not dbias[1].any()  # a group without rows


@pytest.mark.parametrize("columns", [72, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", ["rms", "layer", "layer without beta"])
def test_normalizations(norm: str, dtype: torch.dtype, columns: int, rng: np.random.Generator) -> None:
    """RMSNorm and LayerNorm, with mean and rstd of every row; rows past the sum may be NaN."""
    x = (2 * torch.randn(ROWS, columns) + 1).to(dtype)
    x[USED:] = torch.nan
    gamma, beta = torch.randn(columns).to(dtype), torch.randn(columns).to(dtype)
    kind = "rms" if norm == "rms" else "layer"
    shift = beta if norm == "layer" else None
    rows = x[:USED].double()
    mean = rows.mean(1, keepdim=True) if kind == "layer" else torch.zeros(USED, 1, dtype=torch.float64)
    rstd = ((rows - mean).square().mean(1, keepdim=True) + 1e-5).rsqrt()
    exact = (rows - mean) * rstd * gamma.double()
    if shift is not None:
        exact = exact + shift.double()
    # the difference and the sum cancel: their errors are measured by what goes into them
    factors = (rows.abs() + mean.abs()) * rstd * gamma.double().abs() + beta.double().abs()
    for name in NAMES:
        spec = RAGGED[name]
        made = native.norm_quantize(
            x, gamma, shift, spec, SIZES, norm=kind, epsilon=1e-5, amax=True, dequantized=True, activated=True,
            **arguments(spec),
        )  # fmt: skip
        assert_of(made, spec)
        assert_close(made.activated[:USED], exact, 4 * factors)
        assert_close(made.rstd[:USED], rstd[:, 0])
        assert (made.mean is None) == (kind == "rms")
        if made.mean is not None:
            assert_close(made.mean[:USED], mean[:, 0], rows.abs().mean(1))


@pytest.mark.parametrize("layouts", [("rows", "panels"), ("plain", "panels"), ("rows", "plain")], ids="-".join)
@pytest.mark.parametrize("name", NAMES)
def test_fused_into_native_layouts(name: str, layouts: tuple[str, str], rng: np.random.Generator) -> None:
    """The same codes wherever the planes go."""
    spec = RAGGED[name]
    x, dy = torch.randn(ROWS, 2 * F), torch.randn(ROWS, F)
    made = native.act_quantize(
        x, spec, SIZES, layouts=layouts, amax=True, dequantized=True, activated=True, **arguments(spec)
    )
    assert_of(made, spec, layouts)
    made = native.dact_quantize(
        dy, x, spec, SIZES, layouts=layouts, amax=True, dequantized=True, activated=True, **arguments(spec)
    )
    assert_of(made, spec, layouts)


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", NAMES)
def test_fused_one_plane(name: str, orientation: str, rng: np.random.Generator) -> None:
    """One plane alone, with extras."""
    spec = QuantizerSpec(**{**dict(RAGGED[name]), "orientation": orientation})
    x = torch.randn(ROWS, 2 * F).bfloat16()
    made = native.act_quantize(x, spec, SIZES, activated=True, amax=True, **arguments(spec))
    unfused = native.quantize(made.activated, spec, SIZES, amax=True, **arguments(spec))
    ours, theirs = (native.dequantize(q.codes, orientation) for q in (made, unfused))  # type: ignore[arg-type]
    assert torch.equal(ours[:USED], theirs[:USED])
    assert torch.equal(made.amax, unfused.amax)


@pytest.mark.parametrize("name", RAGGED)
def test_amax_and_the_dequantized_copy(name: str, problem: Any) -> None:
    """quantize(amax=True, dequantized=True): NaN wins, empty groups give 0, the copy is rounded once."""
    drawn = problem(RAGGED[name], kinds=("gauss", "nonfinite", "wide", "zeros"))
    x, sizes = drawn.tensor(), drawn.group_sizes()
    made = native.quantize(x, drawn.spec, sizes, amax=True, dequantized=True, **drawn.arguments())
    rows = int(sizes.sum())
    groups = torch.split(x[:rows].abs(), sizes.tolist())
    expected = [group.max() if group.numel() else torch.zeros((), dtype=x.dtype) for group in groups]
    # no tolerance: a maximum is one of its elements, and which NaN it is has no meaning
    torch.testing.assert_close(made.amax, torch.stack(expected), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(native.group_amax(x, sizes), made.amax, rtol=0, atol=0, equal_nan=True)
    values = native.dequantize(made.codes, "rowwise", dtype=torch.bfloat16)
    assert torch.equal(made.dequantized[:rows].view(torch.int16), values[:rows].view(torch.int16))


@pytest.mark.skipif(
    not octavo_native.HAS_CUDA, reason="octavo-native has no CUDA kernels, whose workspace is asked for"
)
def test_a_dequantized_copy_of_rows_has_its_workspace() -> None:
    """Row scaling of rows alone needs none on a GPU; kernels that copy the values, too, keep the rows' scales there."""
    spec = RAGGED["row.e4m3.pow2"].model_copy(update={"orientation": "rowwise"})
    sizes = []
    for copied in (False, True):
        launch = launch_of(spec_text(LaunchSpec(spec, "x", native.PLAIN_LAYOUTS, dequantized=copied)))
        sizes.append(launch.new_shapes((ROWS, F), len(SIZES), torch.bfloat16, cuda=True).workspace)
    assert sizes[0] == 0
    assert sizes[1] >= 4 * ROWS


@pytest.mark.parametrize("name", [name for name, spec in STACKED.items() if not spec.mxfp4])
def test_amax_of_matrices(name: str, rng: np.random.Generator) -> None:
    """Each matrix's own."""
    w = torch.randn(3, 144, 40)
    given = {"scale": torch.ones(3)} if STACKED[name].scaling == "delayed" else {}
    made = native.quantize(w, STACKED[name], amax=True, **given)
    assert torch.equal(made.amax, w.abs().amax((1, 2)))
    assert torch.equal(native.group_amax(w), made.amax)


def test_dbias_does_not_depend_on_threads(rng: np.random.Generator) -> None:
    """Fixed order: one thread or five, the same bits (faults 22, 30: no float atomics)."""
    x, dy = torch.randn(1000, 2 * F), torch.randn(1000, F)
    sizes = [300, 0, 500, 129]
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 5, 2):
            torch.set_num_threads(threads)
            made = native.dact_quantize(dy, x, RAGGED["mxfp8.e4m3"], sizes, dbias=True, amax=True)
            results.append((made.dbias, made.amax))
    finally:
        torch.set_num_threads(before)
    for dbias, amax in results[1:]:
        assert torch.equal(dbias.view(torch.int32), results[0][0].view(torch.int32))
        assert torch.equal(amax, results[0][1])


def test_layers_agree_with_the_fused_form(rng: np.random.Generator) -> None:
    """act_quantize gives a GroupedTensor that the reference reads, too."""
    x = torch.randn(ROWS, 2 * F).bfloat16()
    spec = RAGGED["block.e4m3.pow2"]
    made = native.act_quantize(x, spec, SIZES, activated=True)
    values = octavo_torch.dequantize(made.codes, backend="torch-reference")
    assert torch.equal(values, native.dequantize(made.codes))
