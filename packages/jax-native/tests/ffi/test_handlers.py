"""The handlers check what they are given again: a wrong call is an error, never a crash (issue: bad input).

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

M, C, G = 40, 64, 3
BLOCK_COLUMNS = C // 32
WORDS = octavo_native.plan_words(M, G)

ORDER = jnp.zeros(2 * M, jnp.int32)
"""The first choice for each row, as int64."""

Arrays = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    NativeBackend()


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _plan(sizes: Any, words: Any = (2 * WORDS,), dtype: Any = jnp.int32, **attributes: Any) -> Any:
    return jax.ffi.ffi_call("octavo_plan", _struct(words, dtype))(sizes, **{"rows": M, **attributes})


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        (jnp.ones(G), {}, r"operand sizes is f32\[3\] and must be s32\[G\] or s64\[G\]"),
        (jnp.ones((G, 1), jnp.int32), {}, r"operand sizes is s32\[3, 1\]"),
        (jnp.ones(G, jnp.int32), {"words": (2 * WORDS - 2,)}, r"result plan is s32\[.*\] and must be s32\["),
        (jnp.ones(G, jnp.int32), {"dtype": jnp.uint8}, r"result plan is u8\["),
        (jnp.ones(0, jnp.int32), {"words": (2 * octavo_native.layouts.plan_words(M, 0),)}, "group"),
        (jnp.ones(G, jnp.int32), {"rows": -1}, "rows is -1"),
        (jnp.ones(G, jnp.int32), {"rows": 1 << 40}, "rows is 1099511627776"),
        (jnp.ones(G, jnp.int32), {"rows": np.float32(1)}, "expected S64 but got F32"),
        (jnp.ones(G, jnp.int32), {"other": 1}, "attributes"),
    ],
)
def test_a_wrong_plan_call_is_an_error(sizes: Any, changes: dict[str, Any], message: str) -> None:
    """Element type, rank, room and attributes."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(_plan(sizes, **changes))


def _operands() -> Arrays:
    return {"x": jnp.ones((M, C)), "plan": _plan(jnp.array([20, 0, 15]))}


def _results() -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "row_codes": _struct((M, C), jnp.float8_e4m3fn),
        "row_scales": _struct((M, BLOCK_COLUMNS), jnp.uint8),
    }


VALUES = _struct((M, C), jnp.bfloat16)

ATTRIBUTES: dict[str, Any] = {
    "format": 0,
    "operand": 0,
    "square": False,
    "square_columns": False,
    "mxfp4": -1,
    "stochastic": False,
    "hadamard": False,
    "power_of_two": False,
    "amax_epsilon": np.float32(0),
    "groups": G,
    "row_layout": 0,
    "col_layout": 0,
    "prologue": 0,
    "activation": 0,
    "norm": 0,
    "epsilon": np.float32(0),
    "threads": 1,
    "each": 0,
}


def _quantize(given: Arrays, asked: Arrays, target: str = "octavo_quantize_mxfp8", **changes: Any) -> Any:
    names = {"operands": ",".join(given), "results": ",".join(asked)}
    call = jax.ffi.ffi_call(target, list(asked.values()))
    return jax.block_until_ready(call(*given.values(), **{**names, **ATTRIBUTES, **changes}))


def test_the_right_call_is_none() -> None:
    """What the wrong calls below are changed from."""
    codes, scales = _quantize(_operands(), _results())
    # 1 in a block of ones: scale byte 127 - 8, code 256, whose e4m3 byte is 0x78
    assert np.all(np.asarray(codes).view(np.uint8)[:35] == 0x78)
    assert np.all(np.asarray(scales)[:35] == 119)


def test_numbers_that_are_no_choice_are_not_followed() -> None:
    """Rows of a token are its own; a number that no token has, before the first or past the last, stands for zeros."""
    numbers = np.full(M, 7, np.int64)
    numbers[[0, 1, 2]] = -1, 3 * 5, 1 << 40
    order = jnp.asarray(numbers.view(np.int32))
    x = jnp.arange(1, 6, dtype=jnp.float32)[:, None] * jnp.ones((5, C))
    codes, scales = _quantize({**_operands(), "x": x, "order": order}, _results(), each=3)
    # token 7 // 3 = 2 is 3 throughout: scale byte 127 - 7, code 384
    assert not np.any(np.asarray(codes).view(np.uint8)[:3])
    assert np.all(np.asarray(codes).view(np.uint8)[3:35] == 0x7C)
    assert np.all(np.asarray(scales)[3:35] == 120)


@pytest.mark.parametrize("room", [(0,), (8,), (1 << 16,), (1 << 6, 1 << 10)], ids=str)
def test_a_workspace_of_any_size_serves_the_cpu(room: tuple[int, ...]) -> None:
    """Programs are made for the CUDA kernels' need; what is missing here the handler takes itself. One of more than a
    gigabyte has two dimensions."""
    results = {"row_codes": _struct((M, C), jnp.float8_e4m3fn), "row_scales": _struct((G,), jnp.float32)}
    with_room = {**results, "workspace": _struct(room, jnp.uint8)}
    expected = _quantize(_operands(), results, "octavo_quantize_current")
    made = _quantize(_operands(), with_room, "octavo_quantize_current")
    for one, other in zip(made, expected, strict=False):
        assert np.array_equal(np.asarray(one).view(np.uint8)[:35], np.asarray(other).view(np.uint8)[:35])


@pytest.mark.parametrize(
    ("operands", "results", "attributes", "message"),
    [
        ({"x": jnp.ones((M, C), jnp.int32)}, {}, {}, r"operand x is s32\[40, 64\] and must be f32, f16 or bf16"),
        ({"x": jnp.ones(M)}, {}, {}, r"operand x is f32\[40\]"),
        ({"x": jnp.ones((2, M, C))}, {}, {}, "stacked matrices are"),
        ({"x": jnp.ones((M + 1, C))}, {}, {}, r"row_codes is .*\[40, 64\] .*\[41, 64\]"),
        ({"plan": jnp.zeros(8, jnp.int32)}, {}, {}, r"operand plan is s32\[8\] and must be s32\["),
        ({"plan": jnp.zeros(2 * WORDS)}, {}, {}, "operand plan is f32"),
        ({"plan": None}, {}, {}, "operand plan is missing"),
        ({"seed": jnp.zeros(2, jnp.uint32)}, {}, {}, "operand seed is not known to this call"),
        ({}, {"row_codes": _struct((M, C), jnp.float8_e5m2)}, {}, "result row_codes is f8e5m2.* must be f8e4m3fn"),
        ({}, {"row_codes": _struct((M, C - 1), jnp.float8_e4m3fn)}, {}, r"result row_codes is .*\[40, 63\]"),
        ({}, {"row_scales": _struct((M, 1), jnp.uint8)}, {}, r"row_scales is u8\[40, 1\] and must be u8\[40, 2\]"),
        ({}, {"row_scales": None}, {}, "result row_scales is missing"),
        ({}, {"col_codes": _struct((M, C), jnp.float8_e4m3fn)}, {}, "result col_scales is missing"),
        ({}, {"mean": _struct((M,), jnp.float32)}, {}, "result mean is not known to this call"),
        ({}, {"workspace": _struct((4, 4), jnp.int32)}, {}, "result workspace is s32.* must be bytes, u8"),
        ({"order": ORDER[:-1]}, {}, {"each": 1}, r"operand order is s32\[79\] and must be s32\[2 M\]"),
        ({"order": ORDER.astype(jnp.uint32)}, {}, {"each": 1}, r"operand order is u32\[80\] and must be s32"),
        ({"order": ORDER}, {}, {}, "attribute each is 0 for 40 rows"),
        ({"order": ORDER}, {}, {"each": 1 << 40}, "attribute each is 1099511627776 for 40 rows"),
        ({"order": ORDER, "x": jnp.ones((G, M, C))}, {}, {"each": 1}, "attribute each is 1 for 120 rows"),
        ({"order": ORDER[2:]}, {}, {"each": 1}, r"row_codes is f8e4m3fn\[40, 64\] and must be f8e4m3fn\[39, 64\]"),
        ({}, {}, {"format": 9}, "attribute format is 9; it takes 0 to 2"),
        ({}, {}, {"row_layout": -1}, "attribute row_layout is -1"),
        ({}, {}, {"row_layout": 3}, "attribute row_layout is 3; it takes 0 to 2"),
        ({}, {}, {"row_layout": 2}, r"row_codes is f8e4m3fn\[40, 64\] and must be bf16"),
        ({}, {"row_codes": VALUES}, {"row_layout": 2}, "result row_scales is not known to this call"),
        (
            {},
            {"row_codes": VALUES, "row_scales": None},
            {"row_layout": 2, "target": "octavo_quantize_block"},
            "layout is values, which are made of mxfp8 and nvfp4",
        ),
        ({}, {}, {"mxfp4": 7}, "attribute mxfp4 is 7"),
        ({}, {}, {"groups": 0}, "groups is 0"),
        ({}, {}, {"groups": 1 << 40}, "groups is 1099511627776"),
        ({}, {}, {"operands": "x"}, "names 1 operands and 2 are given"),
        ({}, {}, {"operands": "x,x"}, "operand x is named twice"),
        ({}, {}, {"stochastic": True}, "operand seed is missing"),
        ({}, {}, {"prologue": 2}, "operand dy is missing"),
        ({}, {}, {"prologue": 3}, "operand gamma is missing"),
        ({}, {}, {"square": 1}, "expected PRED but got S64"),
        ({}, {}, {"target": "octavo_quantize_delayed"}, "operand encode_scales is missing"),
        (
            {},
            {"row_codes": _struct((M, C), jnp.uint8), "row_scales": _struct((M, C // 16), jnp.float8_e4m3fn)},
            {"target": "octavo_quantize_nvfp4", "format": 2},
            "result row_global is missing",
        ),
    ],
)
def test_a_wrong_quantize_call_is_an_error(operands: Arrays, results: Arrays, attributes: Any, message: str) -> None:
    """Missing, surplus, unnamed, wrongly typed and wrongly sized operands and results; numbers that are no enum."""
    given = {k: v for k, v in {**_operands(), **operands}.items() if v is not None}
    asked = {k: v for k, v in {**_results(), **results}.items() if v is not None}
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        _quantize(given, asked, **attributes)


def test_combinations_that_the_kernels_refuse_are_errors() -> None:
    """What is no combination of fields at all is the native library's own refusal, in its words."""
    results = {**_results(), "row_codes": _struct((M, C), jnp.float8_e4m3fn)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="octavo_quantize_mxfp8: "):
        _quantize(_operands(), results, hadamard=True)


@pytest.mark.parametrize(
    ("changes", "attributes", "message"),
    [
        ({"codes": jnp.zeros((M, C), jnp.uint8)}, {}, "operand codes is u8.* must be f8e4m3fn"),
        ({"scales": jnp.zeros((M, 1), jnp.uint8)}, {}, r"operand scales is u8\[40, 1\]"),
        ({"plan": None}, {}, "operand plan is missing"),
        ({}, {"rows": 1 << 50}, "are not the shape of an operand"),
        ({}, {"rows": -4}, "are not the shape of an operand"),
        ({}, {"cols": 1 << 60}, "are not the shape of an operand"),
        ({}, {"matrix_rows": 7}, "are not the shape of an operand"),
        ({}, {"direction": 2}, "attribute direction is 2"),
        ({}, {"out": jnp.int32}, "result out is s32"),
        ({}, {"out_shape": (M, C + 1)}, r"result out is f32\[40, 65\]"),
    ],
)
def test_a_wrong_dequantize_call_is_an_error(changes: Arrays, attributes: dict[str, Any], message: str) -> None:
    """The attributes give the logical size, and every buffer is held against it."""
    operands = {
        "codes": jnp.zeros((M, C), jnp.float8_e4m3fn),
        "scales": jnp.zeros((M, BLOCK_COLUMNS), jnp.uint8),
        "plan": _plan(jnp.array([20, 0, 15])),
    }
    operands = {k: v for k, v in {**operands, **changes}.items() if v is not None}
    right = {
        "format": 0,
        "scaling": octavo_native.SCALINGS["mxfp8"],
        "square": False,
        "hadamard": False,
        "direction": 0,
        "layout": 0,
        "out_layout": 0,
        "rows": M,
        "cols": C,
        "groups": G,
        "matrix_rows": 0,
        "threads": 1,
    }
    attributes = dict(attributes)
    out = _struct(attributes.pop("out_shape", (M, C)), attributes.pop("out", jnp.float32))
    call = jax.ffi.ffi_call("octavo_dequantize", out)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(*operands.values(), operands=",".join(operands), **{**right, **attributes}))
