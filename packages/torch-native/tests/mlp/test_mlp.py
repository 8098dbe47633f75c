"""grouped_mlp through the fused launches, and those as the registry serves them: bits of the operations in a row."""

from __future__ import annotations

from typing import Any

import native_calls as native
import numpy as np
import pytest
import torch
from mlp_layers import assert_equal, assert_without_rows, composed, draw_mlp, fused, results

import octavo_registry
from octavo import MXFP8, HighPrecision, Recipe
from octavo_conformance.cards.variants import MORE_RECIPES, RAGGED, RECIPES
from octavo_native import ACTIVATIONS
from octavo_registry.contract.cards import GATED, Activation
from octavo_registry.contract.request import Request
from octavo_torch import explain_mlp

SHAPE = (150, 80, 72, 144, 5)
SIZES = [33, 0, 70, 1, 30]
ALL: dict[str, Recipe] = {**RECIPES, **MORE_RECIPES}


@pytest.mark.parametrize("name", ALL)
def test_bits_of_the_operations_in_a_row(name: str, rng: np.random.Generator) -> None:
    """y, gradients and amax histories of every recipe, in poisoned memory with NaN tails (faults.md 1, 3, 14)."""
    recipe, activation = ALL[name], str(rng.choice(list(ACTIVATIONS)))
    given = draw_mlp(SHAPE, SIZES, activation)
    dy = torch.randn(SHAPE[0], SHAPE[3]).bfloat16()
    dy[sum(SIZES) :] = torch.nan
    call = given, torch.tensor(SIZES), activation, recipe, dy, int(rng.integers(0, 1 << 62))
    made = results(fused, *call)
    assert_equal(made, results(composed, *call), activation)
    assert all(bool(value.isfinite().all()) for value in made.values())


@pytest.mark.parametrize("name", ALL)
def test_an_mlp_without_rows(name: str, rng: np.random.Generator) -> None:
    """A rank that no token was sent to (faults.md 1, 54)."""
    assert_without_rows(SHAPE, str(rng.choice(list(ACTIVATIONS))), ALL[name])


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_what_is_fused(activation: str, rng: np.random.Generator) -> None:
    """Both quantizers between the layers are this backend's, for a recipe that quantizes everything; gpt-oss's
    activation had no kernels once, and was composed."""
    given = draw_mlp(SHAPE, SIZES, activation)
    how: Any = {"activation": activation, "backend": "torch-native"}
    plan = explain_mlp(given["x"], given["w1"], given["w2"], SIZES, recipe=MXFP8(), **how)
    assert {name: str(part) for name, part in plan.fused.items()} == dict.fromkeys(
        ("activation", "gradient"), "fused by torch-native"
    )
    assert plan.prepare is plan.fc1.prepare
    plain = explain_mlp(given["x"], given["w1"], given["w2"], SIZES, recipe=None, **how)
    assert f"{activation}: in one pass by torch-native, not quantized" in str(plain)


def test_bf16_reads_fc1s_result_once_in_backward(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that makes its gradient makes the activation again, too, and no pass writes codes. A bias's gradient is
    summed by other kernels, which make the gradient alone."""
    given = {name: leaf for name, leaf in draw_mlp(SHAPE, SIZES, "swiglu").items() if not name.startswith("bias")}
    specs = native.watch_quantizers(monkeypatch)
    dy = torch.randn(SHAPE[0], SHAPE[3]).bfloat16()
    y = fused(given, torch.tensor(SIZES), "swiglu", HighPrecision(), None, 0)
    torch.autograd.grad(y, list(given.values()), dy)
    assert [(spec.prologue, spec.forward) for spec in specs] == [("activation", False), ("activation_grad", True)]
    assert not any(spec.planes for spec in specs)


def group_index_of(op: Any, spec: Any, **fields: Any) -> Any:
    base: dict[str, Any] = {"framework": "torch", "device": "cpu", "in_dtype": "float32", "out_dtype": "float32"}
    return octavo_registry.plan(Request(op=op, quantizer=spec, **base, **fields), backend="torch-native")


@pytest.mark.parametrize("name", ["delayed.e4m3", "mxfp8.e4m3", "nvfp4.stochastic.hadamard"])
def test_operations_of_the_registry(name: str, rng: np.random.Generator) -> None:
    """Codes and extras are those of this package's functions; `wanted` leaves out what nobody reads."""
    spec, sizes = RAGGED[name], torch.tensor([40, 0, 129, 1])
    rows, f = 190, 72
    given: dict[str, Any] = {"seed": 11, "group_offset": 2} if spec.stochastic else {}
    if spec.scaling == "delayed":
        given["scale"] = torch.tensor([1.0, 8.0, 0.5, 3.0])
    activation: Activation = str(rng.choice(list(ACTIVATIONS)))  # type: ignore[assignment]
    x = torch.randn(rows, f * (2 if activation in GATED else 1))
    dy, probs, gamma = torch.randn(rows, f), torch.rand(rows), torch.rand(x.shape[1])
    delayed = spec.scaling == "delayed"
    act = native.act_quantize(x, spec, sizes, activation=activation, probs=probs, activated=True, amax=True, **given)
    dact = native.dact_quantize(
        dy, x, spec, sizes, activation=activation, probs=probs, activated=True, amax=True, dbias=True, **given
    )
    norm = native.norm_quantize(x, gamma, None, spec, sizes, norm="rms", epsilon=1e-3, activated=True, **given)
    calls = [
        (group_index_of("act_quantize", spec, activation=activation), (x, sizes), {"probs": probs}, act),
        (group_index_of("dact_quantize", spec, activation=activation), (dy, x, sizes), {"probs": probs}, dact),
        (group_index_of("norm_quantize", spec, norm="rms"), (x, gamma, None, sizes), {"epsilon": 1e-3}, norm),
    ]
    for plan, arrays, how, expected in calls:
        codes, extras = plan.run(*arrays, **how, **given)
        assert codes.spec == expected.codes.spec
        for direction in spec.directions:
            first, second = native.dequantize(codes, direction), native.dequantize(expected.codes, direction)
            assert torch.equal(first.view(torch.int32), second.view(torch.int32))
        used = int(sizes.sum())
        assert torch.equal(extras.activated[:used], expected.activated[:used])
        assert (extras.amax is not None) == delayed
        if plan.request.op == "dact_quantize":
            assert torch.equal(extras.dbias, expected.dbias)
        if plan.request.op == "norm_quantize":
            assert torch.equal(extras.rstd[:used], expected.rstd[:used])
        prepared = plan.prepare(sizes, rows, x)
        _, fewer = plan.run(*arrays[:-1], prepared, **how, **given, wanted=("amax",))
        assert fewer.activated is None
        assert fewer.dbias is None
        assert torch.equal(fewer.amax, native.group_amax(expected.activated, prepared.group_sizes))
