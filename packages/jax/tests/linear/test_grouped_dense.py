"""grouped_dense and its gradients: bounds against float64, tails, empty groups, bad sizes, transformations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
import octavo_numerics
from octavo.quantizer import Direction, Operand
from octavo_jax.arrays.sizes import NEGATIVE_SIZE, SUM_PAST_ROWS

pytestmark = pytest.mark.filterwarnings("ignore:a layer with delayed scaling")  # its scales are given and stay

M, K, N, G = 160, 96, 80, 5
NAMES = ("bf16", "fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4", "fp8-row-wgrad-high-precision")
RECIPES = {
    **{name: octavo.recipe(name) for name in NAMES},
    "fp8-delayed": octavo.DelayedScaling(history=4),
    "nvfp4 dgrad": octavo.NVFP4(fprop="high_precision", wgrad="high_precision"),
}

Layer = Callable[..., tuple[Any, ...]]


@pytest.fixture(scope="module")
def layers() -> Mapping[str, Layer]:
    """Jitted forward and backward of each recipe: (x, kernel, bias, sizes, dy, seed, scales) to (y, dx, dw, db)."""

    def make(recipe: octavo.Recipe) -> Layer:
        def run(x: Any, kernel: Any, bias: Any, sizes: Any, dy: Any, seed: Any, scales: Any) -> tuple[Any, ...]:
            state = None
            if recipe.stateful:
                history = jnp.zeros((4, G), jnp.float32)
                state = octavo_jax.DelayedState(*(octavo_jax.ScalingHistory(history, s) for s in scales))

            def forward(x: Any, kernel: Any, bias: Any) -> Any:
                rest: Any = {"bias": bias, "seed": seed, "state": state, "backend": "jax-reference"}
                out = octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, **rest)
                return out if state is None else out[0]

            y, pull = jax.vjp(forward, x, kernel, bias)
            return (y, *pull(dy))

        return jax.jit(run)

    return {name: make(recipe) for name, recipe in RECIPES.items()}


def _arrays(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    shapes = ((M, K), (G, K, N), (G, N), (M, N))
    return tuple(rng.standard_normal(shape).astype(np.float32).astype(jnp.bfloat16) for shape in shapes)


SIZES = (
    np.array([64, 0, 33, 0, 17], np.int32),
    np.array([0, 0, 0, 0, 160], np.int32),
    np.array([1, 2, 3, 4, 5], np.int32),
)
SCALES = tuple(np.full(G, 2.0**power, np.float32) for power in (5, 6, 4))


def _operand(
    recipe: octavo.Recipe, operand: Operand, gemm: str, direction: Direction, array: np.ndarray, sizes: Any, scale: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(dequantized operand of a GEMM as float64, rows of each group in it)."""
    counts = np.full(G, array.shape[-2]) if sizes is None else sizes
    spec = recipe.quantizer(operand) if recipe.quantizes(gemm) else None  # type: ignore[arg-type]
    if spec is None:
        return array.astype(np.float64), counts
    q = octavo_numerics.quantize(array, spec, sizes, seed=9, scale=scale if recipe.stateful else None)
    if direction == "columnwise" and spec.hadamard:
        counts = -(-counts // 16) * 16
    return octavo_numerics.dequantize(q, direction).astype(np.float64), counts


def _by_group(rows: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(counts)
    return [rows[end - count : end] for end, count in zip(ends, counts, strict=True)]


# The conformance suite has every recipe's layer on this backend; these three have slots or serve other tests here.
DEFAULT = ("fp8-current", "mxfp8", "nvfp4 dgrad")


@pytest.mark.parametrize(
    "name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name not in DEFAULT)]
)
def test_gemms_are_within_the_bounds(name: str, rng: np.random.Generator, layers: Mapping[str, Layer]) -> None:
    """fprop, dgrad, wgrad on the definition's dequantized operands; empty, tiny and single groups; NaN tails.

    The tail of y and dx is zero, an empty group's dw and db are exactly zero (faults.md 1 to 4, 6 to 12,
    15, 19, 24, 36, 59).
    """
    recipe = RECIPES[name]
    for sizes in SIZES:
        x, kernel, _, dy = _arrays(rng)
        total = sizes.sum()
        poisoned = [a.copy() for a in (x, dy)]
        for a in poisoned:
            a[total:] = np.nan
        bias = np.zeros((G, N), jnp.bfloat16)
        y, dx, dw, db = map(np.asarray, layers[name](poisoned[0], kernel, bias, sizes, poisoned[1], 9, SCALES))
        assert not y[total:].any()
        assert not dx[total:].any()
        assert not dw[sizes == 0].any()
        assert not db[sizes == 0].any()
        w = np.swapaxes(kernel, 1, 2)
        swapped = {"x": (x, sizes, SCALES[0]), "w": (w, None, SCALES[1]), "dy": (dy, sizes, SCALES[2])}

        def groups(operand: Operand, gemm: str, direction: Direction) -> list[np.ndarray]:
            array, of, scale = swapped[operand]  # noqa: B023
            values, counts = _operand(recipe, operand, gemm, direction, array, of, scale)
            return list(values) if of is None else _by_group(values, counts)

        checks = {
            "fprop": (K, _by_group(y, sizes), groups("x", "fprop", "rowwise"), groups("w", "fprop", "rowwise")),
            "dgrad": (
                N,
                _by_group(dx, sizes),
                groups("dy", "dgrad", "rowwise"),
                [m.T for m in groups("w", "dgrad", "columnwise")],
            ),
            "wgrad": (
                None,
                list(np.swapaxes(dw, 1, 2)),
                [m.T for m in groups("dy", "wgrad", "columnwise")],
                [m.T for m in groups("x", "wgrad", "columnwise")],
            ),
        }
        for gemm, (length, actual, lefts, rights) in checks.items():
            for got, left, right in zip(actual, lefts, rights, strict=True):
                if left.shape[1] == 0:
                    continue
                bound = octavo_numerics.error_bound(recipe, length or left.shape[1], gemm=gemm)  # type: ignore[arg-type]
                # norms presume many independent products (docs/numerics)
                report = bound.check(got, left, right, zero_mean=left.shape[1] >= 64)
                assert report.passed, f"{gemm}, sizes {sizes.tolist()}: {report.describe()}"
        for got, rows in zip(db.astype(np.float64), _by_group(dy.astype(np.float64), sizes), strict=True):
            assert np.all(np.abs(got - rows.sum(0)) <= 2.0**-8 * np.abs(rows.sum(0)) + 2.0**-20 * np.abs(rows).sum(0))


def test_bias_is_added_to_its_group(rng: np.random.Generator) -> None:
    """y with a bias is y without one plus the group's row; the tail stays zero."""
    x, kernel, bias, _ = (a.astype(jnp.float32) for a in _arrays(rng))
    sizes = SIZES[0]
    run = jax.jit(lambda b: octavo_jax.grouped_dense(x, kernel, jnp.asarray(sizes), recipe=None, bias=b))
    plain, biased = np.asarray(run(jnp.zeros_like(bias))), np.asarray(run(bias))
    wanted = plain.copy()
    wanted[: sizes.sum()] += np.repeat(bias, sizes, axis=0)
    assert np.array_equal(biased, wanted)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4 dgrad", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_bad_device_sizes_are_clamped_and_reported(
    name: str, rng: np.random.Generator, layers: Mapping[str, Layer]
) -> None:
    """A sum past M is cut off there and a negative size counts as 0; the status word says so (faults.md 61)."""
    x, kernel, bias, dy = _arrays(rng)
    bad = np.array([100, -7, 50, 1 << 30, 3], np.int32)
    good = np.array([100, 0, 50, 10, 0], np.int32)
    for a, b in zip(*(layers[name](x, kernel, bias, s, dy, 9, SCALES) for s in (bad, good)), strict=True):
        assert np.array_equal(a, b)
    status = jax.jit(lambda s: octavo_jax.grouped_dense(x, kernel, s, recipe=None, return_status=True)[1])
    assert int(status(bad)) == NEGATIVE_SIZE + SUM_PAST_ROWS
    assert int(status(np.array([160, 0, 0, 0, -1], np.int32))) == NEGATIVE_SIZE
    assert int(status(np.array([160, 0, 0, 0, 1], np.int32))) == SUM_PAST_ROWS
    assert int(status(np.array([2**31 - 1] * G, np.int32))) == SUM_PAST_ROWS
    assert int(status(good)) == 0


@pytest.mark.parametrize("name", ["fp8-current", "nvfp4 dgrad", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_the_same_call_gives_the_same_bits(name: str, rng: np.random.Generator, layers: Mapping[str, Layer]) -> None:
    """Twice the same bits, db included; another seed changes stochastic gradients alone (faults.md 22, 41)."""
    args = (*_arrays(rng)[:3], SIZES[0], _arrays(rng)[3])
    first, second, other = (layers[name](*args, seed, SCALES) for seed in (9, 9, 10))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert np.array_equal(first[0], other[0])
    assert np.array_equal(first[1], other[1]) == (not RECIPES[name].stochastic)


def test_a_group_alone_gives_the_same_rows(rng: np.random.Generator, layers: Mapping[str, Layer]) -> None:
    """Rows, dx and dw of a group do not depend on the other groups, whose rows may be NaN (promise 1)."""
    x, kernel, bias, dy = _arrays(rng)
    sizes = SIZES[0]
    whole = layers["mxfp8"](x, kernel, bias, sizes, dy, 9, SCALES)
    other = [a.copy() for a in (x, dy)]
    for a in other:
        a[:64], a[97:] = np.nan, np.nan
    alone = layers["mxfp8"](other[0], kernel, bias, sizes, other[1], 9, SCALES)
    assert np.array_equal(whole[0][64:97], alone[0][64:97])
    assert np.array_equal(whole[1][64:97], alone[1][64:97])
    assert np.array_equal(whole[2][2], alone[2][2])


def test_dtypes_follow_the_arguments(rng: np.random.Generator) -> None:
    """y has preferred_element_type, gradients the dtypes of their arguments, mixed ones too."""
    x, kernel = rng.standard_normal((8, 16)).astype(np.float16), rng.standard_normal((2, 16, 8)).astype(np.float32)

    def loss(x: Any, kernel: Any) -> Any:
        y = octavo_jax.grouped_dense(x, kernel, [5, 3], recipe=None, preferred_element_type=jnp.bfloat16)
        assert y.dtype == jnp.bfloat16
        return jnp.sum(y.astype(jnp.float32))

    dx, dw = jax.grad(loss, argnums=(0, 1))(jnp.asarray(x), jnp.asarray(kernel))
    assert (dx.dtype, dw.dtype) == (jnp.float16, jnp.float32)


def test_scan_and_vmap(rng: np.random.Generator) -> None:
    """A scan over layers and a vmap over a leading axis equal their loops."""
    kernels, x = (
        rng.standard_normal((3, 2, 16, 16)).astype(np.float32),
        rng.standard_normal((3, 12, 16)).astype(np.float32),
    )
    sizes = jnp.array([[5, 4], [0, 12], [3, 0]], jnp.int32)
    recipe = octavo.recipe("fp8-current")

    def layer(x: Any, kernel: Any, sizes: Any) -> Any:
        return octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe)

    one = jax.jit(layer)
    mapped = jax.jit(jax.vmap(layer))(x, kernels, sizes)
    assert all(np.array_equal(mapped[i], one(x[i], kernels[i], sizes[i])) for i in range(3))
    y = x[0]
    for kernel in kernels:
        y = one(y, kernel, sizes[0])
    scanned, _ = jax.jit(lambda x: jax.lax.scan(lambda c, k: (layer(c, k, sizes[0]), None), x, kernels))(x[0])
    assert np.array_equal(scanned, y)


def test_forward_mode_is_refused() -> None:
    """jax.jvp is refused with a sentence that says what to use."""
    x, kernel = jnp.ones((4, 8)), jnp.ones((1, 8, 8))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: octavo_jax.grouped_dense(x, kernel, [4], recipe=None), (x,), (x,))


@pytest.mark.parametrize(("dtype", "rows"), [("uint8", 256), ("int8", 200), ("int16", 1 << 15), ("uint16", 1 << 16)])
def test_narrow_integers_are_sizes(dtype: str, rows: int, rng: np.random.Generator) -> None:
    """The number of rows is no number of such a dtype: it may not wrap, so that rows are lost or the tail is read."""
    x = rng.standard_normal((rows, 4)).astype(np.float32)
    counts = [100, 20]
    x[sum(counts) :] = np.nan
    kernel = rng.standard_normal((2, 4, 3)).astype(np.float32)
    run = jax.jit(lambda s: octavo_jax.grouped_dense(x, kernel, s, recipe=None, return_status=True))
    (narrow, status), (wide, _) = (run(jnp.asarray(counts, d)) for d in (dtype, jnp.int32))
    assert int(status) == 0
    assert np.array_equal(narrow, wide)
    assert not np.asarray(narrow[sum(counts) :]).any()
    assert np.asarray(narrow[: sum(counts)]).all()
