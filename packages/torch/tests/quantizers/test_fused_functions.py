"""The public fused quantizers, composed where no backend fuses: codes of the rounded rows, extras, refusals."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_registry
from octavo import NoBackendError, QuantizerSpec
from octavo_registry.contract.backend import Backend
from octavo_registry.contract.fused import BoundActQuantize
from octavo_torch import (
    Extras,
    GroupedTensor,
    act_quantize,
    activate,
    convert_layout,
    dact_quantize,
    dequantize,
    group_amax,
    norm_quantize,
    quantize,
)
from octavo_torch.functions.norms import normalize
from octavo_torch.plugin import CARD

SPECS = {
    "delayed": QuantizerSpec(scaling="delayed", format="e4m3"),
    "current": QuantizerSpec(scaling="current", format="e5m2"),
    "block": QuantizerSpec(scaling="block", format="e4m3"),
    "mxfp8": QuantizerSpec(scaling="mxfp8", format="e4m3"),
    "nvfp4": QuantizerSpec(scaling="nvfp4", format="e2m1", rounding="stochastic"),
}
SIZES, M, F = [20, 0, 33], 60, 48
USED = sum(SIZES)


def given(spec: QuantizerSpec) -> dict[str, Any]:
    how: dict[str, Any] = {"seed": 11, "group_offset": 2} if spec.stochastic else {}
    return how | ({"scale": torch.tensor([1.0, 8.0, 0.5])} if spec.scaling == "delayed" else {})


def assert_codes_of(q: GroupedTensor, rows: Tensor | None, spec: QuantizerSpec, backend: str | None) -> None:
    """`q` holds what `quantize` makes of `rows`, of which those past the sum are not read."""
    assert rows is not None
    values = rows.clone()
    values[USED:] = torch.nan
    expected = quantize(values, spec, SIZES, backend=backend, **given(spec))
    for direction in spec.directions:
        ours, theirs = dequantize(q, direction), dequantize(expected, direction)
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), direction


@pytest.mark.parametrize("name", SPECS)
def test_activation_and_quantize(name: str, backend: str | None, rng: np.random.Generator) -> None:
    """The rows are `activate`'s, NaN past the sum reaches no code, and every extra has its definition's value."""
    spec, x, probs = SPECS[name], torch.randn(M, 2 * F), torch.rand(M)
    x[USED:] = torch.nan
    how = {"backend": backend, **given(spec)}
    wanted = ("activated", "amax", "dequantized")
    q, extras = act_quantize(x, spec, SIZES, activation="swiglu", probs=probs, wanted=wanted, **how)
    assert q.shape == (M, F)
    assert_codes_of(q, extras.activated, spec, backend)
    if backend is not None:
        assert torch.equal(extras.activated[:USED], activate(x, "swiglu", probs=probs)[:USED])
    assert torch.equal(extras.amax, group_amax(extras.activated, SIZES))
    copied = dequantize(q, dtype=torch.bfloat16)
    assert torch.equal(extras.dequantized[:USED].view(torch.int16), copied[:USED].view(torch.int16))
    _, usual = act_quantize(x, spec, SIZES, activation="swiglu", probs=probs, **how)
    assert (usual.amax is not None) == (spec.scaling == "delayed")
    assert usual.activated is not None
    _, fewer = act_quantize(x, spec, SIZES, activation="swiglu", probs=probs, wanted=(), **how)
    assert not [value for value in vars(fewer).values() if value is not None]


@pytest.mark.parametrize("name", SPECS)
def test_gradient_and_quantize(name: str, backend: str | None, rng: np.random.Generator) -> None:
    """The gradients of autograd in float64, within fp32's roundings; sums repeat, and are 0 for an empty group."""
    spec, x, dy, probs = SPECS[name], torch.randn(M, 2 * F), torch.randn(M, F), torch.rand(M)
    leaf, weight = x[:USED].double().requires_grad_(), probs[:USED].double().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    y = torch.nn.functional.silu(gate) * up * weight[:, None]
    exact, dprobs = torch.autograd.grad(y, (leaf, weight), dy[:USED].double())
    for value in (x, dy, probs):
        value[USED:] = torch.nan
    how = {"activation": "swiglu", "probs": probs, "backend": backend, **given(spec)}
    q, extras = dact_quantize(dy, x, spec, SIZES, **how)
    assert_codes_of(q, extras.activated, spec, backend)
    # one rounding of fp32 and at most 16 ulp of what goes into it: |dy| (|x| + 1) (|x| + 1)
    inputs = (dy[:USED].abs() * probs[:USED, None]).repeat(1, 2).double() * (x[:USED].abs().double() + 1).amax(1)[
        :, None
    ] ** 2
    assert bool(((extras.activated[:USED].double() - exact).abs() <= inputs * 2.0**-20).all())
    starts = np.cumsum([0, *SIZES])
    for group, (start, end) in enumerate(pairwise(starts)):
        rows = extras.activated[start:end].double()
        allowed = (end - start) * 2.0**-24 * rows.abs().sum(0)
        assert bool(((extras.dbias[group].double() - rows.sum(0)).abs() <= allowed).all()), group
    assert not extras.dbias[1].any()
    terms = (dy[:USED].double() * y.detach() / weight.detach()[:, None]).abs().sum(1)
    assert bool(((extras.dprobs[:USED].double() - dprobs).abs() <= (F + 16) * 2.0**-24 * terms + 2.0**-40).all())
    assert not extras.dprobs[USED:].any()
    again = dact_quantize(dy, x, spec, SIZES, wanted=("dbias", "dprobs"), **how)[1]
    assert torch.equal(again.dbias, extras.dbias)
    assert torch.equal(again.dprobs, extras.dprobs)
    assert again.activated is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_fp32_gamma_beside_narrow_rows(norm: Any, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """gamma and beta of float32 are multiplied and added as they are: the codes of rows that are normalized in fp32 and
    rounded once, which gamma in the rows' dtype does not give; the installed backend quantizes, whichever it is."""
    spec, x = SPECS["mxfp8"], torch.randn(M, F).to(dtype)
    gamma, beta = 1 + torch.rand(F) * 2**-9, torch.rand(F) * 2**-9 if norm == "layer" else None
    q, extras = norm_quantize(x, gamma, spec, SIZES, beta=beta, norm=norm)
    exact = normalize(x.float(), gamma, beta, norm, 1e-6).y.to(dtype)
    assert torch.equal(extras.activated[:USED], exact[:USED])  # type: ignore[index]
    expected = quantize(exact, spec, SIZES)
    for direction in ("rowwise", "columnwise"):
        ours, theirs = dequantize(q, direction), dequantize(expected, direction)  # type: ignore[arg-type]
        assert torch.equal(ours[:USED], theirs[:USED])
    narrow = None if beta is None else beta.to(dtype)
    rounded = norm_quantize(x, gamma.to(dtype), spec, SIZES, beta=narrow, norm=norm)[1].activated
    assert not torch.equal(rounded[:USED], exact[:USED])  # type: ignore[index]


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("name", SPECS)
def test_normalization_and_quantize(name: str, norm: Any, backend: str | None, rng: np.random.Generator) -> None:
    """Rows, rstd and mean are float64's within fp32's roundings; the codes are those of the rows."""
    spec, x = SPECS[name], 2 * torch.randn(M, F) + 1
    gamma, beta = torch.randn(F), torch.randn(F) if norm == "layer" else None
    x[USED:] = torch.nan
    q, extras = norm_quantize(x, gamma, spec, SIZES, beta=beta, norm=norm, epsilon=1e-5, backend=backend, **given(spec))
    assert_codes_of(q, extras.activated, spec, backend)
    rows = x[:USED].double()
    mean = rows.mean(1) if norm == "layer" else torch.zeros(USED, dtype=torch.float64)
    rstd = ((rows - mean[:, None]).square().mean(1) + 1e-5).rsqrt()
    exact = (rows - mean[:, None]) * rstd[:, None] * gamma.double() + (0 if beta is None else beta.double())
    size = (rows.abs() + mean.abs()[:, None]) * rstd[:, None] * gamma.double().abs() + 1 + exact.abs()
    assert bool(((extras.activated[:USED].double() - exact).abs() <= size * 2.0**-20).all())
    assert bool(((extras.rstd[:USED].double() - rstd).abs() <= rstd * 2.0**-20).all())
    assert (extras.mean is None) == (norm == "rms")
    if extras.mean is not None:
        assert bool(((extras.mean[:USED].double() - mean).abs() <= rows.abs().mean(1) * 2.0**-20).all())


def test_one_graph(rng: np.random.Generator) -> None:
    """torch.compile takes the functions into one graph, with the bits of eager."""
    torch.compiler.reset()
    spec, x, sizes = SPECS["mxfp8"], torch.randn(M, 2 * F), torch.tensor(SIZES)

    def run(x: Tensor, sizes: Tensor) -> tuple[Tensor | None, ...]:
        how: dict[str, Any] = {"backend": "torch-reference"}
        q, extras = act_quantize(x, spec, sizes, activation="geglu", wanted=("amax",), **how)
        _, gradients = dact_quantize(x[:, :F], x, spec, sizes, activation="geglu", **how)
        _, statistics = norm_quantize(x, x[0], spec, sizes, beta=x[1], norm="layer", epsilon=1e-3, **how)
        return dequantize(q, "columnwise"), extras.amax, gradients.dbias, statistics.mean, group_amax(x, sizes)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(x, sizes), run(x, sizes), strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def fused_only(x: Tensor, group_sizes: Any = None, *, wanted: Any = None, probs: Any = None, **how: Any) -> Any:
    """A third party's act_quantize, which makes nothing but what was quantized."""
    rows = x * 2
    q = quantize(rows, SPECS["mxfp8"], group_sizes, backend="torch-reference")
    return q, Extras(activated=rows if "activated" in wanted else None)


class FusedPlugin(Backend):
    """A backend of the operation that the reference has not."""

    def refuses(self, request: Any) -> None:
        return None

    def bind(self, request: Any) -> BoundActQuantize[Tensor, GroupedTensor]:
        return BoundActQuantize(fused_only)

    @octavo_registry.hookimpl
    def octavo_backends(self) -> Any:
        rows = [row for row in CARD.capabilities if "quantize" in row.ops and row.device == "cpu"]
        rows = [row.model_copy(update={"ops": frozenset({"act_quantize"})}) for row in rows]
        return [CARD.model_copy(update={"name": "fused-only", "capabilities": tuple(rows)})]

    @octavo_registry.hookimpl
    def octavo_load(self, name: str) -> Any:
        return self if name == "fused-only" else None


def test_another_backend_fuses_and_leaves_extras_out(rng: np.random.Generator) -> None:
    """A backend that serves the fused operation alone is asked, and the extras that it does not make are computed."""
    octavo_registry.register(FusedPlugin(), "fused-only")
    try:
        x = torch.randn(M, F)
        both = ["torch-reference", "fused-only"]
        _, extras = act_quantize(
            x, SPECS["mxfp8"], SIZES, activation="silu", wanted=("amax", "dequantized"), backend=both
        )
        assert torch.equal(extras.amax, group_amax(x * 2, SIZES))
        expected = dequantize(quantize(x * 2, SPECS["mxfp8"], SIZES, backend="torch-reference"), dtype=torch.bfloat16)
        assert torch.equal(extras.dequantized, expected)
        assert extras.activated is None
        composed = act_quantize(x, SPECS["mxfp8"], SIZES, activation="silu", backend="torch-reference")[1]
        assert not torch.equal(composed.activated, x * 2)
    finally:
        octavo_registry.unregister("fused-only")


def test_quantize_writes_what_an_earlier_call_returned(backend: str | None, rng: np.random.Generator) -> None:
    """out= is returned with the new codes at its addresses; a flag on the device leaves it as it is (fault 37)."""
    spec, w, other = SPECS["mxfp8"], torch.randn(3, 40, F), torch.randn(3, 40, F)
    out = quantize(w, spec, backend=backend)
    address, first = out.rowwise.data_ptr(), dequantize(out)
    flag = torch.ones(1, dtype=torch.int32)
    assert quantize(other, spec, out=out, unchanged=flag, backend=backend) is out
    assert torch.equal(dequantize(out), first)
    flag.zero_()
    for how in ({"unchanged": flag}, {}):
        quantize(other, spec, out=out, backend=backend, **how)
        assert torch.equal(dequantize(out), dequantize(quantize(other, spec, backend=backend)))
    assert out.rowwise.data_ptr() == address


X = torch.zeros(8, 32)
SPEC = SPECS["mxfp8"]
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "activation": (lambda: act_quantize(X, SPEC, activation="tanh"), "activation is 'tanh'; give one of silu"),  # type: ignore[arg-type]
    "odd columns": (
        lambda: act_quantize(X[:, :31], SPEC, activation="swiglu"),
        "x has 31 columns and swiglu reads a gate and an up projection side by side",
    ),
    "matrices": (
        lambda: act_quantize(torch.zeros(2, 4, 8), SPEC, activation="silu"),
        r"x has shape \[2, 4, 8\]; give \[M, K\]",
    ),
    "dy": (
        lambda: dact_quantize(X, X, SPEC, activation="swiglu"),
        r"dy is float32 \[8, 32\]; give float32 \[8, 16\]",
    ),
    "beta of rms": (
        lambda: norm_quantize(X, X[0], SPEC, beta=X[0]),
        "beta was given and RMSNorm has no shift; leave it out",
    ),
    "wanted": (
        lambda: norm_quantize(X, X[0], SPEC, wanted=["dbias"]),
        r"wanted is \['dbias'\]; give a list of names out of activated, amax, dequantized, rstd",
    ),
    "layouts": (lambda: quantize(X, SPEC, layouts="plain"), "layouts is 'plain'; give two names"),  # type: ignore[arg-type]
    "one layout": (lambda: quantize(X, SPEC, layouts=("plain", 3)), "layouts is a tuple; give two names"),  # type: ignore[arg-type]
    "out": (lambda: quantize(X, SPEC, out=X), "out is a Tensor; give the GroupedTensor"),  # type: ignore[arg-type]
    "unchanged": (
        lambda: quantize(X, SPEC, unchanged=torch.zeros(1, dtype=torch.int32)),
        "unchanged was given without out",
    ),
    "dtype": (lambda: dequantize(quantize(X, SPEC), dtype=torch.float64), "dtype is torch.float64; give torch.float32"),
    "convert": (lambda: convert_layout(X, ("plain", "plain")), "q is a Tensor; give the GroupedTensor"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    """One line each: the argument, its value, the fix."""
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_layouts_that_nobody_makes_are_refused() -> None:
    """By the registry, with every backend's reason; planes that have their layout already need no backend."""
    q = quantize(X, SPEC)
    assert convert_layout(q, ("plain", "plain")) is q
    with pytest.raises(NoBackendError, match=r"torch-reference .* makes layouts plain"):
        convert_layout(q, ("acme-tiles", "plain"), backend="torch-reference")
    q.spec = q.spec.model_copy(update={"rowwise_layout": "acme-tiles"})
    with pytest.raises(NoBackendError, match="reads layouts plain, the data are in acme-tiles"):
        dequantize(q, backend="torch-reference")
    assert not dequantize(q, "columnwise", backend="torch-reference").any()
