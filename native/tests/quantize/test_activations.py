"""Activations and their derivatives against float64: 4 ulp before the one rounding (docs/numerics, "Fused forms").

Inputs are fp32, so that what is read back has been rounded no further. The measured maxima stand in activations.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 - names bfloat16 to NumPy
import numpy as np
import numpy.typing as npt
import pytest
from devices import PLACES
from quantize_call import run_quantizer

import octavo_native as native

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

PLAIN = ("silu", "gelu", "gelu_tanh", "relu2")
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "clamped_swiglu": "clamped"}
ALPHA, LIMIT = 1.702, 7.0  # of clamped_swiglu, which exists with a gate alone
CUBIC = 0.044715
SLOPE = 2 * math.sqrt(2 / math.pi)
EDGES = (0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 3.4e38, -3.4e38, -86.9, -88.8, -100.0, -128.5, 88.8, 20.0, 6.0)


def phi(x: F64) -> F64:
    """The normal distribution function."""
    return np.array([0.5 * math.erfc(value) for value in (-x / math.sqrt(2)).tolist()])


def sigmoid(v: F64) -> F64:
    """1 / (1 + exp(-v))."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-v))


def gelu_tanh_argument(x: F64) -> F64:
    """v of x * sigmoid(v)."""
    return SLOPE * x * (1 + CUBIC * x * x)


def gelu_tanh_slope(x: F64) -> F64:
    """s (1 + (1 - s) x v'); past 1000 s is 0 or 1 and the cube would overflow."""
    x = np.clip(x, -1e3, 1e3)
    v = gelu_tanh_argument(x)
    return sigmoid(v) * (1 + sigmoid(-v) * SLOPE * x * (1 + 3 * CUBIC * x * x))


def clamped(x: F64) -> F64:
    """g sigmoid(1.702 g) of g = min(x, 7)."""
    g = np.minimum(x, LIMIT)
    return g * sigmoid(ALPHA * g)


def clamped_slope(x: F64) -> F64:
    """Its derivative, 0 past the limit; past -1000 the sigmoid is 0."""
    v = ALPHA * np.clip(x, -1e3, LIMIT)
    return np.where(x > LIMIT, 0, sigmoid(v) * (1 + sigmoid(-v) * v))


VALUES: dict[str, Callable[[F64], F64]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * phi(x),
    "gelu_tanh": lambda x: x * sigmoid(gelu_tanh_argument(x)),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "clamped": clamped,
}

SLOPES: dict[str, Callable[[F64], F64]] = {
    "silu": lambda x: sigmoid(x) * (1 + x * sigmoid(-x)),
    "gelu": lambda x: phi(x) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi),
    "gelu_tanh": gelu_tanh_slope,
    "relu2": lambda x: 2 * np.maximum(x, 0),
    "clamped": clamped_slope,
}


def arguments(rng: np.random.Generator, rows: int, cols: int) -> F32:
    """Finite fp32 numbers: half of them any bits, the rest where the functions bend and where they underflow."""
    count = rows * cols
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    width = rng.choice(np.array([6.0, 15.0, 120.0]), count)
    x = np.where(rng.random(count) < 0.5, bits, rng.uniform(-1, 1, count) * width).astype(np.float32)
    x = np.where(np.isfinite(x), x, np.float32(0.5))
    x[: len(EDGES)] = np.array(EDGES, dtype=np.float32)
    return x.reshape(rows, cols)


def placed(device: str, array: npt.NDArray[Any]) -> Any:
    """The array, or a copy on the GPU."""
    if device == "cpu":
        return array
    import torch

    return torch.from_numpy(array).to(device)


def address(held: Any) -> int:
    """Where its first element is."""
    at: int = held.ctypes.data if isinstance(held, np.ndarray) else held.data_ptr()
    return at


def run(
    device: str, activation: str, x: F32, dy: F32 | None = None, probs: F32 | None = None, dtype: str = "float32"
) -> F32:
    """What was quantized, in fp32: the activation of `x`, or the gradient of `x` where `dy` is given.

    dtype   that of the kernel's arrays: `x` and `dy` are rounded to it
    """
    rows, cols = x.shape
    narrow, bits = np.dtype(dtype), np.uint32 if dtype == "float32" else np.uint16
    halves = activation in GATED and dy is None
    out_cols = cols // 2 if halves else cols
    quantizer = native.Quantizer(format=native.FORMATS["e4m3"], scaling=native.SCALINGS["mxfp8"])
    held = {"x": placed(device, x.astype(narrow).view(bits))}
    if dy is not None:
        held["dy"] = placed(device, dy.astype(narrow).view(bits))
    if probs is not None:
        held["probs"] = placed(device, probs)
    held["row_codes"] = placed(device, np.zeros(rows * out_cols, dtype=np.uint8))
    held["row_scales"] = placed(device, np.zeros(rows * -(-out_cols // 32), dtype=np.uint8))
    held["activated"] = placed(device, np.full((rows, out_cols), np.iinfo(bits).max, dtype=bits))
    sides: dict[str, Any] = {
        "cuda": device == "cuda",
        "dtype": native.DTYPES[dtype],
        "rows": rows,
        "cols": cols,
        "groups": 1,
        "matrix_rows": rows,
        "prologue": native.PROLOGUES["activation" if dy is None else "activation_grad"],
        "activation": native.ACTIVATIONS[activation],
    }
    size = quantizer.workspace_bytes(**sides, rowwise=True, columnwise=False)
    held["workspace"] = placed(device, np.zeros(size + 256, dtype=np.uint8))
    addresses = {name: address(array) for name, array in held.items()}
    addresses["workspace"] = -(-addresses["workspace"] // 256) * 256
    # on the default stream, as the copies are: the copy back waits for it
    run_quantizer(
        quantizer,
        **sides,
        **addresses,
        row_stride=cols,
        dy_stride=0 if dy is None else dy.shape[1],
        workspace_bytes=size,
    )
    result = held["activated"] if device == "cpu" else held["activated"].cpu().numpy()
    return result.view(narrow).astype(np.float32)


def of_gate(device: str, activation: str, gate: F32, dy: F32 | None = None) -> F32:
    """The function of a gate alone, or its derivative times `dy`: clamped_swiglu multiplies it by fl(0 + 1)."""
    if activation != "clamped":
        return run(device, activation, gate, dy)
    return run(device, "clamped_swiglu", np.concatenate([gate, np.zeros_like(gate)], 1), dy)[:, : gate.shape[1]]


def ulps(got: F32, want: F64) -> F64:
    """|got - want| in units of the last place of `want` in fp32; past fp32's range got must be that infinity."""
    exponent = np.maximum(np.frexp(want)[1], -125) - 24
    limit = 2.0**128 * (1 - 2.0**-25)
    past = np.abs(want) >= limit
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(got.astype(np.float64) - np.where(past, 0, want)) / np.exp2(exponent.astype(np.float64))
    return np.where(past, np.where(got == np.copysign(np.inf, want), 0.0, np.inf), error)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("activation", VALUES)
def test_values_are_within_four_ulp(rng: np.random.Generator, activation: str, device: str) -> None:
    """Over all finite arguments, subnormal results included."""
    x = arguments(rng, 64, 4096)
    error = ulps(of_gate(device, activation, x).reshape(-1), VALUES[activation](x.reshape(-1).astype(np.float64)))
    worst = int(np.argmax(error))
    assert error[worst] <= 4, f"{error[worst]} ulp at {x.reshape(-1)[worst]!r}"


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("activation", SLOPES)
def test_slopes_are_within_four_ulp_or_near_a_root(rng: np.random.Generator, activation: str, device: str) -> None:
    """Where the derivative has its roots, in [-4, -1/4], the absolute error is at most 2^-23."""
    x = arguments(rng, 64, 4096)
    got = of_gate(device, activation, x, dy=np.ones_like(x)).reshape(-1)
    at = x.reshape(-1).astype(np.float64)
    want = SLOPES[activation](at)
    near = (at >= -4) & (at <= -0.25)
    error = np.where(near, np.abs(got - want) * 2.0**25, ulps(got, want))
    worst = int(np.argmax(error))
    assert error[worst] <= 4, f"{error[worst]} at {x.reshape(-1)[worst]!r}"


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("activation", GATED)
def test_gates_and_probabilities_add_half_an_ulp_each(rng: np.random.Generator, activation: str, device: str) -> None:
    """fl(fl(act(gate) * up) * prob); dup = fl(fl(dy * prob) * act(gate)), dgate = fl(fl(fl(dy * prob) * act') * up).

    clamped_swiglu has fl(u + 1) in up's place, and no gradient of what it clamps. Magnitudes are such that no
    intermediate product is subnormal, where its rounding would not be half an ulp.
    """
    rows, features = 96, 512
    low = {"swiglu": -12, "clamped_swiglu": -7}.get(activation, -4)
    gate = rng.uniform(low, 12, (rows, features)).astype(np.float32)
    up, dy = (np.ldexp(rng.uniform(1, 2, gate.shape), rng.integers(-9, 9, gate.shape)).astype(np.float32) for _ in "ab")
    up *= rng.choice(np.array([1, -1], dtype=np.float32), gate.shape)
    probs = rng.uniform(0.01, 1, rows).astype(np.float32)
    x = np.concatenate([gate, up], axis=1)
    wide, p = gate.astype(np.float64), probs[:, None].astype(np.float64)
    shape = gate.shape
    value = VALUES[GATED[activation]](wide.reshape(-1)).reshape(shape)
    slope = SLOPES[GATED[activation]](wide.reshape(-1)).reshape(shape)
    passes = np.ones(shape, bool)
    if activation == "clamped_swiglu":
        passes = np.abs(up) <= LIMIT
        up = np.clip(up, -np.float32(LIMIT), np.float32(LIMIT)) + np.float32(1)  # fl(u + 1), as the definition rounds

    # half an ulp of a product may be a whole one of the next: the significand can halve
    assert ulps(run(device, activation, x), value * up).max() <= 5
    assert ulps(run(device, activation, x, probs=probs), value * up * p).max() <= 6
    got = run(device, activation, x, dy=dy, probs=probs)
    assert ulps(got[:, features:], dy * p * value * passes).max() <= 6
    steep = (gate < -4) | (gate > -0.25)
    assert ulps(got[:, :features], dy * p * slope * up)[steep].max() <= 7
    # no quotient: fl(u + 1) is 0 where u is -1
    assert (np.abs(got[:, :features] - dy * p * slope * up) <= 2.0**-22 * np.abs(dy * p * up))[~steep].all()


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("activation", PLAIN)
def test_limits(activation: str, device: str) -> None:
    """NaN stays, +inf stays, -inf and what underflows are zeros; the slope's limits are 0 and 1 (relu2: inf)."""
    x = np.array([[np.nan, np.inf, -np.inf, -200.0, -3.4e38, 3.4e38]], dtype=np.float32)
    value, slope = run(device, activation, x)[0], run(device, activation, x, dy=np.ones_like(x))[0]
    assert np.isnan(value[0])
    assert np.isnan(slope[0])
    assert value[1] == np.inf
    assert slope[1] == (np.inf if activation == "relu2" else 1)
    assert (value[2:5] == 0).all()
    assert (slope[2:5] == 0).all()
    assert value[5] == (np.inf if activation == "relu2" else x[0, 5])
    assert slope[5] == (np.inf if activation == "relu2" else 1)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_clamps(dtype: str, device: str) -> None:
    """At a limit of clamped_swiglu a gradient is whole, past it 0, as torch's clamp has it; NaN stays."""
    past = np.float32(7.0625)
    # 64 columns, of which bf16's rows run in the kernels that are tuned for SwiGLU
    gate = np.resize(np.array([7, past, np.inf, -np.inf, np.nan, 1, 1, 1, 1, 1, 1], np.float32), (1, 64))
    up = np.resize(np.array([1, 1, 1, 1, 1, 7, past, np.inf, -7, -past, np.nan], np.float32), (1, 64))
    x = np.concatenate([gate, up], 1)
    value = run(device, "clamped_swiglu", x, dtype=dtype)[0]
    both = run(device, "clamped_swiglu", x, dy=np.ones_like(gate), dtype=dtype)[0]
    dgate, dup = both[:64], both[64:]
    assert value[0] == value[1] == value[2] > 13.9
    assert value[3] == 0
    assert value[5] == value[6] == value[7] > 6.7
    assert value[8] == value[9] < -5
    assert dgate[0] > 1.9
    assert (dgate[1:4] == 0).all()
    assert dup[5] == dup[8] > 0.8
    assert (dup[[6, 7, 9]] == 0).all()
    assert np.isnan([*value[[4, 10]], *dgate[[4, 10]], dup[4]]).all()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped"])
def test_negative_zero_is_kept(activation: str) -> None:
    """The sign of a zero is a bit of its code."""
    value = of_gate("cpu", activation, np.array([[-0.0, 0.0]], dtype=np.float32))
    assert np.signbit(value).tolist() == [[True, False]]
