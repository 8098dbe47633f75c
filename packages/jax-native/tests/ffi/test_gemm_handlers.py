"""The handlers of GEMMs and conversions check what they are given: a wrong call is an error, never a crash.

Here the custom calls are made without this package's own checks, as a hand-written or an edited exported program would.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo_native
from octavo_jax_native.backend import NativeBackend

M, K, N, G = 40, 64, 48, 3
WORDS = octavo_native.plan_words(M, G)
PANELS = octavo_native.layouts.panel_bound(M, G)

Arrays = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    NativeBackend()


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _plan() -> Any:
    return jax.ffi.ffi_call("octavo_plan", _struct((2 * WORDS,), jnp.int32))(jnp.array([20, 0, 15]), rows=M)


def _call(target: str, given: Arrays, asked: Arrays, attributes: Arrays, aliases: Any = None) -> Any:
    given = {name: value for name, value in given.items() if value is not None}
    asked = {name: value for name, value in asked.items() if value is not None}
    call = jax.ffi.ffi_call(target, list(asked.values()), input_output_aliases=aliases)
    names = {"operands": ",".join(given), "results": ",".join(asked)}
    return jax.block_until_ready(call(*given.values(), **{**names, **attributes}))


GEMM: Arrays = {
    "gemm": 0,
    "quantized": False,
    "scaling": 0,
    "left_format": 0,
    "right_format": 0,
    "left_square": False,
    "right_square": False,
    "hadamard": False,
    "accumulate": False,
    "fast_accumulation": False,
    "rows": M,
    "n": N,
    "k": K,
    "groups": G,
    "gathered": 0,
    "tokens": 0,
    "each": 1,
    "ctas": 0,
    "threads": 1,
}
GATHERED: Arrays = {"gathered": 1, "tokens": M // 2, "each": 2}
MXFP8: Arrays = {"quantized": True, "scaling": 4}
VALUES: Arrays = {"left": jnp.ones((M, K), jnp.bfloat16), "right": jnp.ones((G, N, K), jnp.bfloat16)}
TOKENS: Arrays = {"left": jnp.ones((M // 2, K)), "order": jnp.zeros(2 * M, jnp.int32)}


def _operands() -> Arrays:
    return {"left": jnp.ones((M, K)), "right": jnp.ones((G, N, K)), "plan": _plan()}


def test_the_right_gemm_call_is_none() -> None:
    """What the wrong calls below are changed from; a workspace of any size serves the CPU."""
    for room in (None, (0,), (8,), (1 << 16,), (1 << 6, 1 << 10)):
        results = {"out": _struct((M, N), jnp.float32)}
        if room is not None:
            results["workspace"] = _struct(room, jnp.uint8)
        out = np.asarray(_call("octavo_gemm", _operands(), results, GEMM)[0])
        np.testing.assert_array_equal(out, np.where(np.arange(M)[:, None] < 35, np.float32(K), np.float32(0)) + 0 * out)


@pytest.mark.parametrize(
    ("operands", "results", "attributes", "message"),
    [
        ({"left": jnp.ones((M, K), jnp.int32)}, {}, {}, r"operand left is s32\[40, 64\] and must be f32, f16 or bf16"),
        ({"left": jnp.ones((M, K + 1))}, {}, {}, r"operand left is f32\[40, 65\] and must be f32\[40, 64\]"),
        ({"right": jnp.ones((G, N, K), jnp.bfloat16)}, {}, {}, "operand right is bf16.* must be f32"),
        ({"right": None}, {}, {}, "operand right is missing"),
        ({"plan": None}, {}, {}, "operand plan is missing"),
        ({"plan": jnp.zeros(8, jnp.int32)}, {}, {}, r"operand plan is s32\[8\]"),
        ({"left_scales": jnp.ones(G)}, {}, {}, "operand left_scales is not known to this call"),
        ({"bias": jnp.ones((G, N + 1))}, {}, {}, r"operand bias is f32\[3, 49\]"),
        ({"bias_scales": jnp.ones(M)}, {}, {}, "operand bias_scales is not known to this call"),
        ({"out": jnp.ones((M, N))}, {}, {}, "operand out is not known to this call"),
        ({}, {"out": _struct((M, N), jnp.int32)}, {}, "result out is s32"),
        ({}, {"out": _struct((M, K), jnp.float32)}, {}, r"result out is f32\[40, 64\] and must be f32\[40, 48\]"),
        ({}, {"workspace": _struct((4, 4), jnp.int32)}, {}, "result workspace is s32.* must be bytes, u8"),
        ({}, {"other": _struct((4,), jnp.uint8)}, {}, "result other is not known to this call"),
        ({}, {}, {"gemm": 3}, "attribute gemm is 3; it takes 0 to 2"),
        ({}, {}, {"scaling": 6}, "attribute scaling is 6"),
        ({}, {}, {"rows": -1}, "rows -1"),
        ({}, {}, {"rows": 1 << 40}, "rows 1099511627776"),
        ({}, {}, {"n": 0}, "n 0"),
        ({}, {}, {"k": 1 << 50}, "are not the shape of a GEMM"),
        ({}, {}, {"groups": 0}, "groups 0"),
        ({}, {}, {"hadamard": True}, "octavo_gemm: "),
        ({}, {}, {"accumulate": True}, "operand out is missing"),
        ({}, {}, {"quantized": True}, "operand left is f32.* must be f8e4m3fn"),
        (VALUES, {}, {**MXFP8, "scaling": 3}, "operand left is bf16.* must be f8e4m3fn"),
        ({**VALUES, "left_scales": jnp.ones((M, 2), jnp.uint8)}, {}, MXFP8, "operand left_scales is not known"),
        ({**VALUES, "right": jnp.ones((G, N, K + 1), jnp.bfloat16)}, {}, MXFP8, r"right is bf16\[3, 48, 65\]"),
        ({**TOKENS, **VALUES}, {}, {**MXFP8, **GATHERED}, "operand left is bf16.* must be f8e4m3fn"),
        ({}, {}, {"n": np.float32(1)}, "expected S64 but got F32"),
        ({}, {}, {"operands": "left,left,plan"}, "operand left is named twice"),
        (TOKENS, {}, {}, r"operand left is f32\[20, 64\] and must be f32\[40, 64\]"),
        (TOKENS, {}, {**GATHERED, "tokens": 21}, r"operand left is f32\[20, 64\] and must be f32\[21, 64\]"),
        (TOKENS, {}, {**GATHERED, "gathered": 2}, "operand left is f32"),
        (TOKENS, {}, {**GATHERED, "gathered": 3}, "gathered, tokens and each are 3, 20 and 2; gathered is 0, 1"),
        (TOKENS, {}, {**GATHERED, "each": 0}, "gathered, tokens and each are 1, 20 and 0"),
        (TOKENS, {}, {**GATHERED, "tokens": -1}, "gathered, tokens and each are 1, -1 and 2"),
        (TOKENS, {}, {**GATHERED, "each": 1 << 60}, "have tokens \\* each choices, at most 2\\^30"),
        ({**TOKENS, "order": None}, {}, GATHERED, "operand order is missing"),
        ({**TOKENS, "order": jnp.zeros(M, jnp.int32)}, {}, GATHERED, r"order is s32\[40\] and must be s32\[80\]"),
        ({"order": TOKENS["order"]}, {}, {}, "operand order is not known to this call"),
    ],
)
def test_a_wrong_gemm_call_is_an_error(operands: Arrays, results: Arrays, attributes: Arrays, message: str) -> None:
    """Missing, surplus, wrongly typed and wrongly sized operands and results; numbers that are no enum."""
    asked = {"out": _struct((M, N), jnp.float32), **results}
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        _call("octavo_gemm", {**_operands(), **operands}, asked, {**GEMM, **attributes})


def test_values_of_mxfp8_are_multiplied_as_they_are() -> None:
    """An operand of bf16 stands for codes and their scales."""
    given = {**_operands(), **VALUES}
    out = np.asarray(_call("octavo_gemm", given, {"out": _struct((M, N), jnp.float32)}, {**GEMM, **MXFP8})[0])
    np.testing.assert_array_equal(out, np.where(np.arange(M)[:, None] < 35, np.float32(K), np.float32(0)) + 0 * out)


def test_gathered_rows_are_those_of_the_choices() -> None:
    """Row i is the token of choice order[i]; a number that is no choice is followed nowhere and gives zeros."""
    tokens = jnp.arange(M // 2 * K, dtype=jnp.float32).reshape(M // 2, K)
    order = np.random.default_rng(0).permutation(M)
    order[3] = M
    words = jnp.asarray(np.stack([order, 0 * order], -1).reshape(-1), jnp.int32)
    given = {**_operands(), "left": tokens, "right": jnp.stack([jnp.eye(N, K)] * G), "order": words}
    out = np.asarray(_call("octavo_gemm", given, {"out": _struct((M, N), jnp.float32)}, {**GEMM, **GATHERED})[0])
    rows = np.where((order < M)[:, None], np.asarray(tokens)[np.minimum(order, M - 1) // 2, :N], 0)
    np.testing.assert_array_equal(out, np.where(np.arange(M)[:, None] < 35, rows, 0))


def test_an_accumulator_that_is_not_aliased_is_an_error() -> None:
    """The kernel adds to the result's memory; without the alias that holds nothing."""
    given = {"left": jnp.ones((M, N)), "right": jnp.ones((M, K)), "plan": _plan(), "out": jnp.ones((G, N, K))}
    asked, attributes = {"out": _struct((G, N, K), jnp.float32)}, {**GEMM, "gemm": 2, "accumulate": True}
    with pytest.raises(jax.errors.JaxRuntimeError, match="alias the two with input_output_aliases"):
        _call("octavo_gemm", given, asked, attributes)
    (out,) = _call("octavo_gemm", given, asked, attributes, {3: 0})
    assert np.asarray(out)[:, 0, 0].tolist() == [21, 1, 16]


CONVERT: Arrays = {
    "format": 0,
    "scaling": 4,
    "square": False,
    "hadamard": False,
    "direction": 1,
    "to": 1,
    "rows": M,
    "cols": K,
    "groups": G,
    "matrix_rows": 0,
    "threads": 1,
}


@pytest.mark.parametrize(
    ("operands", "results", "attributes", "message"),
    [
        ({}, {}, {}, None),
        ({"codes": jnp.zeros((M, K), jnp.uint8)}, {}, {}, "operand codes is u8.* must be f8e4m3fn"),
        ({"scales": jnp.zeros((M, 1), jnp.uint8)}, {}, {}, r"operand scales is u8\[40, 1\]"),
        ({"plan": None}, {}, {}, "operand plan is missing"),
        ({}, {"codes": _struct((M, K), jnp.float8_e4m3fn)}, {}, r"result codes is f8e4m3fn\[40, 64\]"),
        ({}, {"scales": None}, {}, "result scales is missing"),
        ({}, {}, {"to": 2}, "attribute to is 2"),
        ({}, {}, {"direction": 2}, "attribute direction is 2"),
        ({}, {}, {"rows": 1 << 50}, "are not the shape of an operand"),
        ({}, {}, {"matrix_rows": 7}, "are not the shape of an operand"),
    ],
)
def test_convert_calls(operands: Arrays, results: Arrays, attributes: Arrays, message: str | None) -> None:
    """The right call, and wrong ones that are changed from it."""
    blocks = octavo_native.layouts.block_bound(M, G, 32)
    given = {
        "codes": jnp.zeros((M, K), jnp.float8_e4m3fn),
        "scales": jnp.zeros((blocks, K), jnp.uint8),
        "plan": _plan(),
    }
    asked = {
        "codes": _struct((PANELS, K, 128), jnp.float8_e4m3fn),
        "scales": _struct((PANELS, K, 4), jnp.uint8),
    }
    arguments = ({**given, **operands}, {**asked, **results}, {**CONVERT, **attributes})
    if message is None:
        _call("octavo_convert", *arguments)
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        _call("octavo_convert", *arguments)
