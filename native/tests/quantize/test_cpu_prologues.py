"""Prologues on the CPU: close to float64 before the one rounding, and fused equal to unfused bit for bit; dbias.

Activations are held to 4 ulp (activations.h), each product after one of them adds half an ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cpu_calls import DTYPE, NATIVE, Operand, run
from cpu_operands import SPECS, random_values
from guarded import POISON

from octavo_native.layouts import PLAIN

F64 = np.ndarray
_erfc = np.vectorize(math.erfc, otypes=[np.float64])
_U = 2.0**-24


def _silu(x: F64) -> tuple[F64, F64]:
    s = 1 / (1 + np.exp(-x))
    return x * s, s * (1 + x * (1 - s))


def _gelu(x: F64) -> tuple[F64, F64]:
    phi = 0.5 * _erfc(-x / math.sqrt(2))
    return x * phi, phi + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


@np.errstate(over="ignore")  # of exp, where the logistic function is 0
def _gelu_tanh(x: F64) -> tuple[F64, F64]:
    c = 2 * math.sqrt(2 / math.pi)
    s = 1 / (1 + np.exp(-c * (x + 0.044715 * x**3)))
    return x * s, s * (1 + (1 - s) * x * c * (1 + 3 * 0.044715 * x * x))


def _relu2(x: F64) -> tuple[F64, F64]:
    kept = np.maximum(x, 0)
    return kept * kept, 2 * kept


def _clamped(x: F64) -> tuple[F64, F64]:
    v = 1.702 * np.minimum(x, 7)
    s = 1 / (1 + np.exp(-v))
    return np.minimum(x, 7) * s, np.where(x > 7, 0, s * (1 + v * (1 - s)))


def _factor(name: str, up: np.ndarray) -> tuple[F64, F64]:
    """What a gate multiplies, and its derivative in the up projection; the sum up + 1 is fp32."""
    if name != "clamped_swiglu":
        return up.astype(np.float64), np.ones(up.shape)
    return (np.clip(up, np.float32(-7), np.float32(7)) + np.float32(1)).astype(np.float64), np.abs(up) <= 7.0


FUNCTIONS: dict[str, Callable[[F64], tuple[F64, F64]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "swiglu": _silu,
    "geglu": _gelu,
    "geglu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped,
}
GATED = ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu")
BLOCK = SPECS["block.e4m3"].model_copy(update={"orientation": "both"})
PLANES = {"rowwise": PLAIN, "columnwise": NATIVE["columnwise"]}


def activated(x: np.ndarray, prologue: dict[str, Any], out_cols: int, *more: str) -> dict[str, np.ndarray]:
    """What is quantized, and other outputs, of fp32 input: nothing is rounded after fp32."""
    sizes = (len(x) - 3,)
    result = run(BLOCK, Operand(x, sizes), PLANES, wanted=("activated", *more), prologue=prologue, out_cols=out_cols)
    assert (result.extra["activated"].array[sizes[0] :].view(np.uint8) == POISON).all()
    return {name: array.array[: sizes[0]] for name, array in result.extra.items()}


def ulps(values: np.ndarray, truth: F64) -> F64:
    """|values - truth| in ulp of the truth rounded to fp32."""
    return np.abs(values.astype(np.float64) - truth) / np.spacing(np.abs(truth.astype(np.float32))).astype(np.float64)


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations(name: str, with_probs: bool, rng: np.random.Generator) -> None:
    """act(x) (* up) (* probs[row]) in fp32."""
    features = 150
    x = (rng.standard_normal((203, features * (2 if name in GATED else 1))) * 4).astype(np.float32)
    prologue: dict[str, Any] = {"kind": "activation", "activation": name}
    value = FUNCTIONS[name](x[:, :features].astype(np.float64))[0]
    factor = np.ones_like(value)
    if name in GATED:
        factor = _factor(name, x[:, features:])[0]
    if with_probs:
        prologue["probs"] = rng.random(203).astype(np.float32)
        factor = factor * prologue["probs"][:, None]
    made = activated(x, prologue, features)["activated"]
    truth = (value * factor)[:200]
    products = (name in GATED) + with_probs
    if not products:
        assert ulps(made, truth).max() <= 4
    # 4 ulp of the function, at most 2^-21 of it, or 2^-147 where it is subnormal; half an ulp for each product.
    allowed = np.abs(factor) * np.maximum(np.abs(value) * 2.0**-21, 2.0**-147) + 2.0**-148 * (1 + np.abs(x).max())
    allowed += products * _U * np.abs(value * factor)
    assert (np.abs(made - truth) <= allowed[:200]).all()


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str, with_probs: bool, rng: np.random.Generator) -> None:
    """Gradient of the input: dy act'(x) (* up), and of the up projection dy act(gate), dy times probs[row]."""
    features = 150
    gated = name in GATED
    x = (rng.standard_normal((203, features * (1 + gated))) * 4).astype(np.float32)
    dy = rng.standard_normal((203, features)).astype(np.float32)
    prologue: dict[str, Any] = {"kind": "activation_grad", "activation": name, "dy": dy}
    wide = dy.astype(np.float64)
    if with_probs:
        prologue["probs"] = rng.random(203).astype(np.float32)
        wide = wide * prologue["probs"][:, None]
    gate = x[:, :features].astype(np.float64)
    value, slope = FUNCTIONS[name](gate)
    of_up, passes = _factor(name, x[:, features:]) if gated else (1.0, 1.0)
    factor = wide * of_up
    made = activated(x, prologue, x.shape[1])["activated"].astype(np.float64)
    # A slope is within 4 ulp (2^-21 of it, or 2^-147 where it is subnormal), near its root within 2^-24; three products
    # of half an ulp each follow, of which the last multiplies what the others lost to subnormal results.
    tiny = 2.0**-148 * (1 + np.abs(x).max())
    slope_error = np.maximum(np.abs(slope) * 2.0**-21, 2.0**-147)
    slope_error = np.where((gate >= -4) & (gate <= -0.25), np.maximum(slope_error, 2.0**-24), slope_error)
    allowed = np.abs(factor) * slope_error + 3 * _U * np.abs(factor * slope) + tiny
    assert (np.abs(made[:, :features] - factor[:200] * slope[:200]) <= allowed[:200]).all()
    if gated:
        truth = wide * value * passes
        error = np.abs(made[:, features:] - truth[:200])
        allowed = np.abs(wide) * np.maximum(np.abs(value) * 2.0**-21, 2.0**-147) + 2 * _U * np.abs(truth) + tiny
        assert (error <= allowed[:200]).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_probabilities(name: str, rng: np.random.Generator) -> None:
    """dprobs [M] is the sum along a row of dy act(x) (* up), whatever probs are; 0 for rows of no group, which hold
    NaN (faults.md 1, 3)."""
    features, used = 1150, 40
    x = (rng.standard_normal((43, features * (1 + (name in GATED)))) * 4).astype(np.float32)
    dy = rng.standard_normal((43, features)).astype(np.float32)
    x[used:], dy[used:] = np.nan, np.nan
    prologue = {"kind": "activation_grad", "activation": name, "dy": dy, "probs": rng.random(43).astype(np.float32)}
    op, planes = Operand(x, (7, 0, used - 7)), {"rowwise": PLAIN}
    spec = BLOCK.model_copy(update={"orientation": "rowwise"})
    made = run(spec, op, planes, wanted=("dprobs",), prologue=prologue, out_cols=x.shape[1]).extra["dprobs"].array
    value = FUNCTIONS[name](x[:used, :features].astype(np.float64))[0]
    terms = value * dy[:used] * (_factor(name, x[:used, features:])[0] if name in GATED else 1.0)
    allowed = np.abs(terms).sum(1) * (2.0**-21 + 2 * _U) + 2.0**-140
    assert (np.abs(made[:used] - terms.sum(1)) <= allowed).all()
    assert not made[used:].any()


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_norms(norm: str, offset: float, rng: np.random.Generator) -> None:
    """4 ulp of float64, also where x - mean cancels; mean and rstd are written for the rows in use alone."""
    x = (rng.standard_normal((103, 1300)) * 2 + offset).astype(np.float32)
    gamma, beta = (rng.standard_normal(1300).astype(np.float32) for _ in range(2))
    epsilon = float(np.float32(1e-5))
    prologue: dict[str, Any] = {"kind": "norm", "norm": norm, "gamma": gamma, "epsilon": epsilon}
    wide = x.astype(np.float64)
    mean = wide.mean(axis=1, keepdims=True) if norm == "layer" else np.zeros((103, 1))
    rstd = 1 / np.sqrt(((wide - mean) ** 2).mean(axis=1, keepdims=True) + epsilon)
    truth = (wide - mean) * rstd * gamma
    if norm == "layer":
        prologue["beta"] = beta
        truth = truth + beta
    made = activated(x, prologue, 1300, "mean", "rstd")
    # float64's own error: some 2^-50 of the terms, which an fp32 result that cancels to 2^-20 of them still shows
    noise = 2.0**-48 * (np.abs(wide * rstd * gamma) + np.abs(beta))[:100]
    spacing = np.spacing(np.abs(truth[:100].astype(np.float32))).astype(np.float64)
    assert (np.abs(made["activated"] - truth[:100]) <= 4 * spacing + noise).all()
    assert ulps(made["rstd"], rstd[:100, 0]).max() <= 1
    if norm == "layer":
        assert np.abs(made["mean"] - mean[:100, 0]).max() <= 2.0**-24 * np.abs(x).max()
    else:
        assert (made["mean"].view(np.uint8) == POISON).all()


def random_prologue(rng: np.random.Generator, rows: int, cols: int, dtype: str) -> tuple[dict[str, Any], int, int]:
    """(prologue, columns of the input, columns of what is quantized)."""
    kind = str(rng.choice(["activation", "activation_grad", "norm"]))
    if kind == "norm":
        norm = str(rng.choice(["rms", "layer"]))
        prologue: dict[str, Any] = {"kind": kind, "norm": norm, "epsilon": 1e-5}
        prologue["gamma"] = rng.standard_normal(cols).astype(DTYPE[dtype])
        if norm == "layer" and rng.random() < 0.7:
            prologue["beta"] = rng.standard_normal(cols).astype(DTYPE[dtype])
        return prologue, cols, cols
    name = str(rng.choice(list(FUNCTIONS)))
    prologue = {"kind": kind, "activation": name}
    if rng.random() < 0.5:
        prologue["probs"] = rng.random(rows).astype(np.float32)
    given = cols * 2 if name in GATED else cols
    if kind == "activation":
        return prologue, given, cols
    prologue["dy"] = rng.standard_normal((rows, cols)).astype(DTYPE[dtype])
    return prologue, given, given


@pytest.mark.parametrize("name", SPECS)
def test_fused_equals_unfused(name: str, rng: np.random.Generator) -> None:
    """The planes of a call with a prologue are those of its `activated` output, quantized by a plain call."""
    spec = SPECS[name].model_copy(update={"orientation": "both"})
    for dtype in DTYPE:
        for _ in range(3):
            sizes = tuple(int(size) for size in rng.choice([0, 1, 17, 40, 129, 130], 3))
            rows = sum(sizes) + int(rng.integers(0, 4))
            prologue, given, made = random_prologue(rng, rows, int(rng.choice([1, 40, 128, 145])), dtype)
            x = random_values(rng, (rows, given), dtype)
            x[sum(sizes) :] = np.nan
            scale = np.array([0.5, 3, 100], dtype=np.float32) if spec.scaling == "delayed" else None
            more: dict[str, Any] = {"seed": 9, "scale": scale, "out_cols": made}
            extra = ("amax", "dequantized", "dbias")
            op = Operand(x, sizes, given + 3)
            fused = run(spec, op, PLANES, wanted=("activated", *extra), prologue=prologue, **more)
            between = fused.extra["activated"].array
            plain = run(spec, Operand(between, sizes), PLANES, wanted=extra, **more)
            for key, array in plain.everything.items():
                assert (array.bytes == fused.everything[key].bytes).all(), (key, dtype, prologue["kind"], sizes, made)


def dbias_by_hand(values: np.ndarray) -> np.ndarray:
    """[R, C] of one group: slots of 8 rows summed in row order, slots in order within a panel, panels in order."""
    total = np.zeros(values.shape[1], dtype=np.float32)
    for panel in range(0, len(values), 128):
        part = np.zeros_like(total)
        for slot in range(panel, min(panel + 128, len(values)), 8):
            eight = np.zeros_like(total)
            for row in values[slot : min(slot + 8, panel + 128)]:
                eight = eight + row
            part = part + eight
        total = total + part
    return total


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
def test_dbias_is_a_sum_in_a_fixed_order(threads: int, rng: np.random.Generator) -> None:
    """The documented order bit for bit, for any number of threads; within its error bound of float64.

    The bound is Higham's for a sum of depth d: |error| <= d u / (1 - d u) sum |x|; no term passes more than 8 additions
    within its slot, 16 within its panel and one for each panel.
    """
    sizes = (600, 0, 1, 130)
    x = (rng.standard_normal((733, 600)) * np.exp2(rng.integers(-8, 8, (733, 1)))).astype(np.float32)
    dy = rng.standard_normal((733, 600)).astype(np.float32)
    prologue = {"kind": "activation_grad", "activation": "silu", "dy": dy}
    result = run(BLOCK, Operand(x, sizes), PLANES, wanted=("activated", "dbias"), prologue=prologue, threads=threads)
    start = 0
    for group, size in enumerate(sizes):
        rows = result.extra["activated"].array[start : start + size]
        made = result.extra["dbias"].array[group]
        assert (made.view(np.uint32) == dbias_by_hand(rows).view(np.uint32)).all()
        depth = (8 + 16 + -(-size // 128)) * _U
        bound = depth / (1 - depth) * np.abs(rows.astype(np.float64)).sum(axis=0)
        assert (np.abs(made - rows.astype(np.float64).sum(axis=0)) <= bound).all()
        start += size
