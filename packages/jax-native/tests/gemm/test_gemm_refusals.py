"""GEMMs that are refused: by the backend before a plan is made, by the call before anything is traced."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import octavo_jax
import octavo_native
import octavo_registry
from octavo import MXFP8, NVFP4, BlockScaling, HighPrecision, QuantizerSpec
from octavo_jax_native.backend import NativeBackend
from octavo_registry import QuantizeRequest, Request
from octavo_registry.contract import TokenRows

SIZES = jnp.array([3, 5])
X, W, DY = jnp.ones((8, 32)), jnp.ones((2, 16, 32)), jnp.ones((8, 16))


def _request(op: Any, recipe: Any, **fields: Any) -> Request:
    return Request(**{"op": op, "framework": "jax", "device": "cpu", "in_dtype": "bfloat16", "out_dtype": "bfloat16",
                      "recipe": recipe, **fields})  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "recipe", "refused"),
    [
        ({"k": 64, "n": 40}, MXFP8(), "n is 40, and its cuda GEMMs take multiples of 16"),
        ({"k": 45, "n": 77}, MXFP8(), "k is 45 and n is 77, and its cuda GEMMs take multiples of 16"),
        ({"k": 45, "n": 64}, HighPrecision(), "k is 45, and its cuda GEMMs take multiples of 16"),
        (
            {"in_dtype": "float32"},
            HighPrecision(),
            "the unquantized operands are float32; its cuda GEMMs multiply bfloat16 or float16",
        ),
        ({"other_dtype": "float16"}, HighPrecision(), "; its cuda GEMMs multiply unquantized operands of one dtype"),
        ({"other_dtype": "bfloat16"}, HighPrecision(), None),
        ({"other_dtype": "float16", "device": "cpu", "arch": None}, HighPrecision(), None),
        ({"in_dtype": "float32", "k": 64, "n": 64}, MXFP8(), None),
        ({"in_dtype": "float16", "k": 64, "n": 64}, HighPrecision(), None),
        ({"k": None, "n": None}, MXFP8(), None),
        ({"k": 45, "n": 77, "device": "cpu", "arch": None}, MXFP8(), None),
        ({"in_dtype": "float32", "device": "cpu", "arch": None}, HighPrecision(), None),
    ],
)
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_gemms_that_the_cuda_kernels_do_not_take(
    op: str, fields: dict[str, Any], recipe: Any, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both values in the sentence; what the request leaves open is not refused, and the CPU takes any size."""
    monkeypatch.setattr(octavo_native, "HAS_CUDA", True)
    reason = NativeBackend().refuses(_request(op, recipe, **{"device": "cuda", "arch": (9, 0), **fields}))
    assert (reason is None) if refused is None else (refused in (reason or "")), reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"x": jnp.ones((8, 24), jnp.bfloat16), "w": jnp.ones((2, 16, 24), jnp.bfloat16)},
            r"x \[8, 24\] and w \[2, 16, 24\] .* k is 24, and its cuda GEMMs take multiples of 16",
        ),
        ({"x": X, "w": W}, "the unquantized operands are float32"),
        ({"x": X.astype(jnp.bfloat16), "w": W.astype(jnp.float16)}, "x is bfloat16 and w is float16"),
    ],
)
def test_what_a_request_leaves_open_is_refused_by_the_call(fields: dict[str, Array], message: str) -> None:
    """A plan for CUDA without K and N meets them when it is called, and says so before anything is launched."""
    run = NativeBackend().bind(_request("fprop", HighPrecision(), device="cuda", arch=(9, 0))).run
    with pytest.raises(ValueError, match=message):
        run(fields["x"], fields["w"], SIZES)


@pytest.mark.parametrize(
    ("op", "operands", "arguments", "message"),
    [
        ("fprop", (X, jnp.ones((2, 16, 33))), {}, r"x \[8, 32\] and w \[2, 16, 33\] with 2 groups"),
        ("fprop", (X, jnp.ones((3, 16, 32))), {}, r"w \[3, 16, 32\] with 2 groups; it takes x \[M, K\]"),
        ("fprop", (X, jnp.ones((2, 0, 32))), {}, "N and K of 1 or more"),
        ("fprop", (X, jnp.ones((16, 32))), {}, r"w has shape \[16, 32\]; it is \[G, N, C\]"),
        ("fprop", (np.ones((8, 32), np.float32), W), {}, "x is a ndarray"),
        ("fprop", (X, W.astype(jnp.int32)), {}, "w has dtype int32"),
        ("dgrad", (X, W), {}, r"dy \[8, 32\] and w \[2, 16, 32\]"),
        ("wgrad", (X, jnp.ones((9, 16))), {}, r"dy \[9, 16\] and x \[8, 32\]"),
        ("fprop", (X, W), {"out": DY}, "out was given"),
        ("dgrad", (DY, W), {"out": X}, "out was given"),
        ("fprop", (X, W), {"bias": jnp.ones((2, 15))}, r"bias has shape \[2, 15\] .* shape \[2, 16\]"),
        ("fprop", (X, W), {"bias": jnp.ones((2, 16), jnp.int32)}, "bias has .* dtype int32"),
        ("fprop", (X, W), {"bias": np.ones((2, 16), np.float32)}, "bias is a ndarray"),
        ("fprop", (X, W), {"bias_scales": jnp.ones(8)}, "bias_scales was given and bias is None"),
        (
            "fprop",
            (X, W),
            {"bias": jnp.ones((2, 16)), "bias_scales": jnp.ones(7)},
            r"bias_scales has shape \[7\]",
        ),
        ("wgrad", (X, DY), {"out": W}, "accumulate=False and out is given"),
        ("wgrad", (X, DY), {"accumulate": True}, "accumulate=True and out is not given"),
        ("wgrad", (X, DY), {"out": X, "accumulate": True}, r"out has shape \[8, 32\] .*\[2, 16, 32\]"),
        (
            "wgrad",
            (X, DY),
            {"out": W.astype(jnp.int32), "accumulate": True},
            "out has .* dtype int32",
        ),
    ],
)
def test_arguments_of_gemms_are_refused_by_name(
    op: str, operands: Any, arguments: dict[str, Any], message: str
) -> None:
    """Shapes with both values, before anything is traced (issue: bad input)."""
    run = octavo_registry.plan(_request(op, HighPrecision(), in_dtype="float32"), backend="jax-native").run
    with pytest.raises(ValueError, match=message):
        run(*operands, SIZES, **arguments)


def _quantized(recipe: Any, operand: Any, array: Array, **changes: Any) -> Any:
    spec = QuantizerSpec(**{**dict(recipe.quantizer(operand)), **changes})
    return octavo_jax.quantize(
        array, spec, None if operand == "w" else SIZES, seed=1 if spec.stochastic else None, backend="jax-native"
    )


def test_quantized_operands_that_do_not_fit_are_refused() -> None:
    """Unquantized where codes are read, codes where they are not, another scaling, another domain, square blocks of x,
    sizes of another number of groups, a plane that was not made."""
    mx, fours = MXFP8(), NVFP4()
    x, w, dy = (_quantized(mx, name, a) for name, a in (("x", X), ("w", W), ("dy", DY)))

    def run(op: str, recipe: Any, *operands: Any, sizes: Any = SIZES) -> None:
        octavo_registry.plan(_request(op, recipe), backend="jax-native").run(*operands, sizes)

    with pytest.raises(ValueError, match=r"x is a .* and fprop of recipe 'mxfp8' multiplies quantized operands"):
        run("fprop", mx, X, w)
    with pytest.raises(ValueError, match=r"x is quantized with scaling 'mxfp8' and .* 'high_precision'; give the unq"):
        run("fprop", HighPrecision(), x, W)
    with pytest.raises(ValueError, match=r"x is quantized with scaling 'mxfp8' and .* 'block'; quantize it"):
        run("fprop", BlockScaling(), x, w)
    square = QuantizerSpec(format="e4m3", scaling="mxfp8", square=True)
    with pytest.raises(ValueError, match="x is quantized in square blocks"):
        run("wgrad", mx, octavo_jax.quantize(X, square, SIZES, backend="jax-native"), dy)
    with pytest.raises(ValueError, match="with 2 and 3 groups"):
        run("fprop", mx, x, w, sizes=jnp.array([1, 2, 3]))
    with pytest.raises(ValueError, match="columnwise plane was not made"):
        run("wgrad", mx, _quantized(mx, "x", X, orientation="rowwise"), dy)
    wrong = dataclasses.replace(x, columnwise_scale=jnp.zeros((1, 1), jnp.uint8))
    with pytest.raises(ValueError, match=r"x.columnwise_scale has .* must have shape"):
        run("wgrad", mx, wrong, dy)
    mixed = _quantized(fours, "x", X), _quantized(fours, "dy", DY, hadamard=False)
    with pytest.raises(ValueError, match="one operand of wgrad is in the Hadamard domain"):
        run("wgrad", fours, *mixed)


def _rows_of(tokens: Any, each: int = 2) -> TokenRows[Array]:
    """Every choice of 4 tokens, in the order of the choices."""
    position = jnp.arange(8).reshape(-1, each)
    return TokenRows(tokens, jnp.arange(8), position, position >= 0)


def test_tokens_that_do_not_fit_are_refused() -> None:
    """In the place of both operands, or of a weight; codes of another scaling, of a weight gradient, in another layout,
    of rows in groups; tokens of another width, and values where codes are read."""
    block, mx, high = BlockScaling(), MXFP8(), HighPrecision()

    def run(op: str, recipe: Any, *operands: Any, dtype: str = "float32") -> None:
        octavo_registry.plan(_request(op, recipe, in_dtype=dtype), backend="jax-native").run(*operands, SIZES)

    def codes(recipe: Any, operand: Any, array: Array) -> Any:
        spec = recipe.quantizer(operand).with_orientation("rowwise")
        return octavo_jax.quantize(array[None], spec, backend="jax-reference")

    in_rows = NativeBackend().bind(
        QuantizeRequest(op="quantize", framework="jax", device="cpu", in_dtype="float32", out_dtype="float32",
                        quantizer=block.quantizer("x"), layouts=("rows", "panels"), stacked=True)
    ).run  # fmt: skip
    with pytest.raises(ValueError, match="both operands of wgrad are TokenRows; permute the rows of one of them"):
        run("wgrad", high, _rows_of(X[:4]), _rows_of(DY[:4]))
    with pytest.raises(ValueError, match="w is TokenRows, which are rows of x or dy"):
        run("fprop", high, X, _rows_of(X[:4]))
    with pytest.raises(ValueError, match=r"fprop has x \[8, 16\] and w \[2, 16, 32\]"):
        run("fprop", high, _rows_of(DY[:4]), W)
    with pytest.raises(ValueError, match="x is tokens quantized in mxfp8, whose codes are not those of rows in fprop"):
        run("fprop", mx, _rows_of(codes(mx, "x", X[:4])), _quantized(mx, "w", W))
    both = octavo_jax.quantize(DY[:4][None], block.quantizer("dy"), backend="jax-reference")
    with pytest.raises(ValueError, match="dy is tokens quantized in block, whose codes are not those of rows in wgrad"):
        run("wgrad", block, _quantized(block, "x", X), _rows_of(both))
    matrix = r"quantize them as one matrix \[1, T, 32\] in plain"
    with pytest.raises(ValueError, match=rf"x is tokens \[1, 4, 32\] quantized in the layout rows; {matrix}"):
        run("fprop", block, _rows_of(in_rows(X[:4][None])), _quantized(block, "w", W))
    with pytest.raises(ValueError, match=rf"x is tokens \[8, 32\] quantized in the layout plain; {matrix}"):
        run("fprop", block, _rows_of(_quantized(block, "x", X)), _quantized(block, "w", W))
    with pytest.raises(ValueError, match=r"x is a .* and fprop of recipe 'block' multiplies quantized operands"):
        run("fprop", block, _rows_of(X[:4]), _quantized(block, "w", W))
