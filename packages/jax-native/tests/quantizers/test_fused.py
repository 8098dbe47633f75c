"""Fused functions: within 4 ulp of float64, rounded once, and the quantizer has the bits it has on that array."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo_numerics
from octavo import QuantizerSpec
from octavo_jax import Extras, act_quantize, dact_quantize, norm_quantize
from octavo_jax_native.backend import NativeBackend
from octavo_jax_native.quantizers.fused import ActQuantizer, DactQuantizer, NormQuantizer
from octavo_native import ACTIVATIONS, GATED, HAS_CUDA
from octavo_registry.contract import Extra, Wanted

M, F = 90, 48
PLAIN = ("plain", "plain")
SIZES = np.array([40, 0, 33], np.int32)
USED = int(SIZES.sum())


def _close(actual: np.ndarray, exact: np.ndarray, terms: np.ndarray | float = 0.0) -> None:
    """Within 4 ulp of fp32 of the exact value (of its terms, where these cancel), and one rounding to the dtype."""
    info = jnp.finfo(actual.dtype)
    half_ulp = np.maximum(np.abs(exact) * float(info.eps) / 2, float(info.smallest_subnormal) / 2)
    allowed = half_ulp * (1 + 2.0**-8) + 8 * 2.0**-24 * np.maximum(np.abs(exact), terms)
    error = np.abs(actual.astype(np.float64) - exact)
    assert np.all(error <= allowed), f"{np.max(error / allowed):.2f} times the bound at {np.argmax(error / allowed)}"


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    x = (rng.standard_normal(shape) * 2).astype(dtype)
    x[USED:] = np.nan
    return x


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    """The kernels handed to XLA, as the registry does when it loads the backend."""
    NativeBackend()


EVERYTHING: tuple[Extra, ...] = ("activated", "amax", "dequantized", "dbias", "rstd", "mean")


def _on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(value) if name == "scale" else value for name, value in arguments.items()}


def _check_extras(extras: Extras, q: Any, spec: QuantizerSpec, same_tensor: Any, arguments: dict[str, Any]) -> Any:
    """The quantizer's bits on the array that was quantized, amax and the dequantized copy of it."""
    activated = np.asarray(extras.activated)
    expected = octavo_numerics.quantize(activated, spec, SIZES, **arguments)
    same_tensor(q, expected)
    starts = np.cumsum(SIZES) - SIZES
    groups = [activated[start : start + size] for start, size in zip(starts, SIZES, strict=True)]
    amax = [np.abs(group.astype(np.float32)).max(initial=0) for group in groups]
    np.testing.assert_array_equal(np.asarray(extras.amax), np.array(amax, np.float32))
    values = octavo_numerics.dequantize(expected, "rowwise")[:USED].astype(jnp.bfloat16)
    copy = np.asarray(extras.dequantized)[:USED]
    np.testing.assert_array_equal(copy.view(np.uint16), values.view(np.uint16))
    return activated


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_quantize(
    activation: Any, dtype: str, rng: Any, specs: Any, same_tensor: Any, arguments_for: Any
) -> None:
    """Every activation, gated ones too, probabilities multiplied in; a NaN tail reaches nothing (faults.md 8, 14)."""
    for name in ("block", "nvfp4-hadamard-stochastic", "delayed"):
        spec, arguments = specs[name], arguments_for(specs[name], rng, len(SIZES))
        x = _draw(rng, (M, 2 * F if activation in GATED else F), jnp.dtype(dtype))
        probs = rng.random(M).astype(np.float32) if name != "delayed" else None
        run = ActQuantizer(spec, PLAIN, activation)
        q, extras = run(
            jnp.asarray(x),
            jnp.asarray(SIZES),
            probs=None if probs is None else jnp.asarray(probs),
            wanted=EVERYTHING,
            **_on_device(arguments),
        )
        activated = _check_extras(extras, q, spec, same_tensor, arguments)
        _close(activated[:USED], octavo_numerics.activate(x, activation, probs)[:USED])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_and_quantize(
    activation: Any, dtype: str, rng: Any, specs: Any, same_tensor: Any, arguments_for: Any, same_bits: Any
) -> None:
    """The derivative, quantized, and dbias: fp32 column sums of the rounded gradient, the same each time."""
    spec = specs["mxfp8"]
    arguments = arguments_for(spec, rng, len(SIZES))
    x = _draw(rng, (M, 2 * F if activation in GATED else F), jnp.dtype(dtype))
    dy, probs = _draw(rng, (M, F), jnp.dtype(dtype)), rng.random(M).astype(np.float32)

    function = DactQuantizer(spec, PLAIN, activation)

    def run() -> Any:
        arrays = jnp.asarray(dy), jnp.asarray(x), jnp.asarray(SIZES)
        return function(*arrays, probs=jnp.asarray(probs), wanted=EVERYTHING, **_on_device(arguments))

    q, extras = run()
    activated = _check_extras(extras, q, spec, same_tensor, arguments)
    scale = np.abs(np.concatenate([dy, dy], 1) if activation in GATED else dy).astype(np.float64)
    wide = np.abs(x.astype(np.float64)).max(initial=1, where=~np.isnan(x.astype(np.float64)))
    _close(
        activated[:USED],
        octavo_numerics.activate_gradient(dy, x, activation, probs)[:USED],
        (scale * (1 + wide))[:USED],
    )
    starts = np.cumsum(SIZES) - SIZES
    for group, (start, size) in enumerate(zip(starts, SIZES, strict=True)):
        rows = activated[start : start + size].astype(np.float64)
        bound = size * 2.0**-24 * np.abs(rows).sum(0)
        assert np.all(np.abs(np.asarray(extras.dbias[group], np.float64) - rows.sum(0)) <= bound)
    same_bits(run()[1].dbias, extras.dbias, "dbias of a second run")


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_normalization_and_quantize(norm: Any, rng: Any, specs: Any, same_tensor: Any, arguments_for: Any) -> None:
    """RMSNorm and LayerNorm with their statistics, which the backward pass needs."""
    spec = specs["row"]
    x = _draw(rng, (M, F), np.float32)
    gamma, beta = (rng.standard_normal(F).astype(np.float32) for _ in range(2))
    arrays = jnp.asarray(x), jnp.asarray(gamma), jnp.asarray(beta) if norm == "layer" else None, jnp.asarray(SIZES)
    q, extras = NormQuantizer(spec, PLAIN, norm)(*arrays, epsilon=1e-5, wanted=EVERYTHING)
    activated = _check_extras(extras, q, spec, same_tensor, {})
    rows = x[:USED].astype(np.float64)
    mean = rows.mean(1, keepdims=True) if norm == "layer" else np.zeros((USED, 1))
    rstd = 1 / np.sqrt(((rows - mean) ** 2).mean(1, keepdims=True) + 1e-5)
    exact = (rows - mean) * rstd * gamma + (beta if norm == "layer" else 0)
    terms = (np.abs(rows) + np.abs(mean)) * rstd * np.abs(gamma) + (np.abs(beta) if norm == "layer" else 0)
    _close(activated[:USED], exact, terms)
    _close(np.asarray(extras.rstd)[:USED], rstd[:, 0])
    if norm == "layer":
        _close(np.asarray(extras.mean)[:USED], mean[:, 0], np.abs(rows).mean(1))
    else:
        assert extras.mean is None


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_public_function_returns_the_statistics(norm: Any, specs: Any, same_bits: Any, rng: Any) -> None:
    """Through the registry: what was quantized, rstd, and the mean of LayerNorm alone; the bits of the kernel."""
    x, gamma = _draw(rng, (M, F), np.float32), rng.standard_normal(F).astype(np.float32)
    q, extras = norm_quantize(
        jnp.asarray(x), jnp.asarray(gamma), specs["row"], SIZES, norm=norm, epsilon=1e-5, backend="jax-native"
    )
    function = NormQuantizer(specs["row"], PLAIN, norm)
    expected, results = function(jnp.asarray(x), jnp.asarray(gamma), None, jnp.asarray(SIZES), epsilon=1e-5)
    assert (extras.mean is None) == (norm == "rms")
    assert (extras.amax, extras.dbias) == (None, None)
    same_bits(np.asarray(q.rowwise)[:USED], np.asarray(expected.rowwise)[:USED], "row codes")
    for name in ("activated", "rstd", *(("mean",) if norm == "layer" else ())):
        same_bits(np.asarray(getattr(extras, name))[:USED], np.asarray(getattr(results, name))[:USED], name)


def test_extras_that_are_not_wanted_are_none(specs: Any) -> None:
    """Called alone, a function computes no more than its caller reads."""
    run = ActQuantizer(specs["delayed"], PLAIN, "silu")
    x, scale = jnp.ones((M, F)), jnp.ones(len(SIZES))
    cases: tuple[tuple[Wanted, set[str]], ...] = ((None, {"activated", "amax"}), (("amax",), {"amax"}), ((), set()))
    for wanted, names in cases:
        _, extras = run(x, jnp.asarray(SIZES), scale=scale, wanted=wanted)
        assert {name for name, array in extras._asdict().items() if array is not None} == names


@pytest.mark.skipif(not HAS_CUDA, reason="octavo-native has no CUDA kernels, whose workspace is asked for")
def test_a_dequantized_copy_of_rows_has_its_workspace() -> None:
    """Row scaling of rows alone needs none on a GPU; kernels that copy the values, too, keep the rows' scales there."""
    spec = QuantizerSpec(format="e4m3", scaling="row", orientation="rowwise")
    quantizer, x = ActQuantizer(spec, PLAIN, "silu"), jnp.ones((M, F), jnp.bfloat16)
    sizes = []
    for wanted in ((), ("dequantized",)):
        run = jax.jit(lambda x, wanted=wanted: quantizer(x, jnp.asarray(SIZES), wanted=wanted))
        results = re.findall(r"octavo_quantize_row.*-> \(?(.*)", run.lower(x).as_text())
        sizes.append(sum(int(size) for size in re.findall(r"tensor<(\d+)xui8>", results[-1])))
    assert sizes[1] - sizes[0] >= 4 * M


def test_only_what_is_read_is_made(specs: Any) -> None:
    """Under jit an extra or a plane that nobody reads costs nothing."""

    def run(x: jax.Array, sizes: jax.Array) -> jax.Array:
        q, extras = act_quantize(x, specs["mxfp8"], sizes, activation="silu", backend="jax-native")
        del extras
        return q.columnwise

    text = jax.jit(run).lower(jnp.ones((M, F)), jnp.asarray(SIZES)).as_text()
    (names,) = (part.split('"')[1] for part in text.split("results = ")[1:])
    assert set(names.split(",")) - {"workspace"} == {"col_codes", "col_scales"}


@pytest.mark.parametrize("columns", [False, True], ids=["alone", "beside the columnwise plane"])
def test_a_dequantized_copy_keeps_the_plane_that_it_is_made_from(columns: bool, specs: Any, rng: Any) -> None:
    """Nobody reads the row plane's codes and it is made all the same, because the copy is its values; the columnwise
    plane is made where it is read."""
    quantizer, x = ActQuantizer(specs["mxfp8"], PLAIN, "silu"), jnp.asarray(_draw(rng, (M, F), np.float32))

    def read(x: jax.Array, sizes: jax.Array) -> tuple[Any, ...]:
        q, extras = quantizer(x, sizes, wanted=("dequantized",))
        return extras.dequantized, *((q.columnwise, q.columnwise_scale) if columns else ())

    lowered = jax.jit(read).lower(x, jnp.asarray(SIZES))
    (names,) = (part.split('"')[1] for part in lowered.as_text().split("results = ")[1:])
    wanted = {"dequantized", "row_codes", "row_scales"} | ({"col_codes", "col_scales"} if columns else set())
    assert set(names.split(",")) - {"workspace"} == wanted
    for made, whole in zip(lowered.compile()(x, jnp.asarray(SIZES)), read(x, jnp.asarray(SIZES)), strict=True):
        bits = np.uint16 if made.dtype == jnp.bfloat16 else np.uint8
        used = slice(None, USED) if made.shape[0] == M else slice(0)
        assert np.array_equal(np.asarray(made)[used].view(bits), np.asarray(whole)[used].view(bits))


def test_native_layouts(specs: Any, rng: Any, same_bits: Any) -> None:
    """Fused functions write the layouts that the Hopper GEMMs read, too."""
    x, sizes = jnp.asarray(_draw(rng, (M, 2 * F), np.float32)), jnp.asarray(SIZES)
    plain, native = (
        ActQuantizer(specs["block"], layouts, "swiglu")(x, sizes)[0]
        for layouts in (("plain", "plain"), ("rows", "panels"))
    )
    assert (native.spec.rowwise_layout, native.spec.columnwise_layout) == ("rows", "panels")
    same_bits(np.asarray(native.rowwise)[:USED], np.asarray(plain.rowwise)[:USED], "row codes")
    same_bits(np.asarray(native.rowwise_scale).T[:USED], np.asarray(plain.rowwise_scale)[:USED], "row scales")
    same_bits(np.asarray(native.columnwise)[0, :, :40].T, np.asarray(plain.columnwise)[:40], "first panel")


X, ONES = jnp.ones((8, 32)), jnp.ones(32)
BLOCK = QuantizerSpec(format="e4m3", scaling="block")
COLUMNWISE = QuantizerSpec(**{**dict(BLOCK), "orientation": "columnwise"})
NATIVE: dict[str, Any] = {"backend": "jax-native"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: act_quantize(X, BLOCK, activation="tanh", **NATIVE), "activation is 'tanh'"),
        (
            lambda: act_quantize(X[:, :31], BLOCK, activation="swiglu", **NATIVE),
            r"x \[8, 31\] has 31 columns; swiglu needs",
        ),
        (lambda: act_quantize(X, BLOCK, activation="silu", probs=jnp.ones(7), **NATIVE), r"probs has shape \[7\]"),
        (lambda: act_quantize(X, BLOCK, [9], activation="silu", **NATIVE), "group_sizes sum to 9"),
        (lambda: act_quantize(jnp.ones((2, 8, 32)), BLOCK, activation="silu", **NATIVE), r"x has shape \[2, 8, 32\]"),
        (lambda: act_quantize(X, BLOCK, activation="silu", scale=jnp.ones(1), **NATIVE), "scale was given"),
        (lambda: dact_quantize(X, X, BLOCK, activation="swiglu", **NATIVE), r"dy has shape \[8, 32\] .* \[8, 16\]"),
        (lambda: dact_quantize(X.astype(jnp.bfloat16), X, BLOCK, activation="silu", **NATIVE), "dy has .* bfloat16"),
        (lambda: norm_quantize(X, jnp.ones(8), BLOCK, **NATIVE), r"gamma has shape \[8\]"),
        (lambda: norm_quantize(X, ONES, BLOCK, beta=ONES, **NATIVE), "beta was given and norm is 'rms'"),
        (lambda: norm_quantize(X, ONES, BLOCK, epsilon=0.0, **NATIVE), "epsilon is 0.0"),
        (lambda: norm_quantize(X, ONES, BLOCK, norm="batch", **NATIVE), "norm is 'batch'"),
    ],
)
def test_arguments_are_refused_by_name(call: Callable[[], Any], message: str) -> None:
    """At the Python edge, with what was given."""
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ActQuantizer(BLOCK, PLAIN, "tanh"), "activation is 'tanh'"),  # type: ignore[arg-type]
        (lambda: ActQuantizer(BLOCK, PLAIN, "swiglu")(X[:, :31]), r"x \[8, 31\] has 31 columns; swiglu needs"),
        (lambda: ActQuantizer(BLOCK, PLAIN, "silu")(X, probs=jnp.ones(7)), r"probs has shape \[7\]"),
        (lambda: ActQuantizer(BLOCK, PLAIN, "silu")(jnp.ones((2, 8, 32))), r"x has shape \[2, 8, 32\]"),
        (lambda: DactQuantizer(BLOCK, PLAIN, "swiglu")(X, X), r"dy has shape \[8, 32\] .* \[8, 16\]"),
        (lambda: NormQuantizer(BLOCK, PLAIN, "rms")(X, jnp.ones(8)), r"gamma has shape \[8\]"),
        (lambda: NormQuantizer(BLOCK, PLAIN, "rms")(X, ONES, epsilon=0.0), "epsilon is 0.0"),
        (
            lambda: ActQuantizer(COLUMNWISE, PLAIN, "silu")(X, wanted=("dequantized",)),
            "wanted holds 'dequantized', which is the row data's values, and orientation is 'columnwise'",
        ),
    ],
)
def test_a_bound_function_refuses_by_name(call: Callable[[], Any], message: str) -> None:
    """A front end that did not check learns what was wrong from a sentence, and the kernels are not called."""
    with pytest.raises(ValueError, match=message):
        call()
