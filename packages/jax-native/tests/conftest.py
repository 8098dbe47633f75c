"""Fresh random inputs from a seed that a failing test prints, quantizer specs, recipes, and comparison with the
definition: quantizers bit for bit, GEMMs within their error bound."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import octavo_numerics
from octavo import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    HighPrecision,
    QuantizerSpec,
    Recipe,
    RowScaling,
)
from octavo.quantizer import Direction, Operand
from octavo.recipe_base import READERS, Gemm
from octavo_jax import GroupedTensor

SPECS = {
    "delayed": QuantizerSpec(format="e4m3", scaling="delayed"),
    "delayed-e5m2": QuantizerSpec(format="e5m2", scaling="delayed", role="dy"),
    "current": QuantizerSpec(format="e4m3", scaling="current"),
    "current-e5m2-pow2-eps": QuantizerSpec(format="e5m2", scaling="current", power_of_two=True, amax_epsilon=0.3),
    "row": QuantizerSpec(format="e4m3", scaling="row", power_of_two=True),
    "block": QuantizerSpec(format="e4m3", scaling="block", power_of_two=True),
    "block-fp32": QuantizerSpec(format="e4m3", scaling="block"),
    "block-square": QuantizerSpec(format="e4m3", scaling="block", square=True, power_of_two=True),
    "mxfp8": QuantizerSpec(format="e4m3", scaling="mxfp8"),
    "mxfp8-e5m2-square": QuantizerSpec(format="e5m2", scaling="mxfp8", square=True),
    "nvfp4": QuantizerSpec(format="e2m1", scaling="nvfp4"),
    "block-square-columns": QuantizerSpec(format="e4m3", scaling="block", square_columns=True),
    "nvfp4-square": QuantizerSpec(format="e2m1", scaling="nvfp4", square=True),
    "nvfp4-hadamard-stochastic": QuantizerSpec(
        format="e2m1", scaling="nvfp4", rounding="stochastic", hadamard=True, role="dy"
    ),
}

RECIPES: dict[str, Recipe] = {
    "bf16": HighPrecision(),
    "delayed": DelayedScaling(),
    "current": CurrentScaling(),
    "current-fast": CurrentScaling(fast_accumulation=frozenset({"fprop", "dgrad"})),
    "row": RowScaling(),
    "block": BlockScaling(),
    "block-fp32": BlockScaling(power_of_two=False),
    "block-square-columns": BlockScaling(square_columns=True),
    "mxfp8": MXFP8(),
    "mxfp8-square-e5m2": MXFP8(square_weights=True, gradient_format="e5m2"),
    "nvfp4": NVFP4(),
    "nvfp4-plain": NVFP4(square_weights=False, stochastic_gradients=False, hadamard=False),
}

SEED = 20_261_122
"""Of stochastic rounding."""

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def specs() -> dict[str, QuantizerSpec]:
    """Quantizers by name, every scaling among them."""
    return SPECS


@pytest.fixture(scope="session", params=SPECS)
def spec(request: pytest.FixtureRequest) -> QuantizerSpec:
    """Each quantizer."""
    return SPECS[request.param]


@pytest.fixture(scope="session", params=[name for name, spec in SPECS.items() if not spec.hadamard])
def stackable(request: pytest.FixtureRequest) -> QuantizerSpec:
    """Each quantizer that takes stacked matrices."""
    return SPECS[request.param]


@pytest.fixture(scope="session", params=[name for name, spec in SPECS.items() if spec.shares_codes])
def sharing(request: pytest.FixtureRequest) -> QuantizerSpec:
    """Each quantizer whose column data are the transpose of the row codes."""
    return SPECS[request.param]


@pytest.fixture(scope="session", params=["delayed", "current", "row", "block", "mxfp8", "nvfp4-hadamard-stochastic"])
def one_per_scaling(request: pytest.FixtureRequest) -> QuantizerSpec:
    """One quantizer a scaling."""
    return SPECS[request.param]


@pytest.fixture(scope="session")
def sizes_of() -> Callable[[np.random.Generator, int, int], np.ndarray]:
    """int32 group sizes that sum to less than `rows`, drawn around the block sizes, zeros among them."""

    def draw(rng: np.random.Generator, groups: int, rows: int) -> np.ndarray:
        sizes = rng.choice(np.array([0, 0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129]), groups)
        while sizes.sum() >= rows:
            sizes[rng.integers(groups)] = 0
        return sizes.astype(np.int32)

    return draw


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., np.ndarray]:
    """[M, C] values over many binades, with subnormals, zeros of both signs, and NaN in every row past the sum."""

    def draw(
        rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32", sizes: np.ndarray | None = None
    ) -> np.ndarray:
        x = np.ldexp(rng.standard_normal(shape), rng.integers(-30, 8, shape)).astype(np.float32)
        small = rng.random(shape) < 0.05
        x[small] = rng.integers(0, 1 << 23, int(small.sum()), np.uint32).view(np.float32)
        x[rng.random(shape) < 0.05] = -0.0
        if sizes is not None:
            x[int(sizes.sum()) :] = np.nan
        with np.errstate(over="ignore", under="ignore"):
            return x.astype(DTYPES[dtype])

    return draw


@pytest.fixture(scope="session")
def arguments_for() -> Callable[..., dict[str, Any]]:
    """The seed, the first group's number and the scales that a spec takes, random."""

    def draw(spec: QuantizerSpec, rng: np.random.Generator, groups: int) -> dict[str, Any]:
        if spec.stochastic:
            return {"seed": int(rng.integers(1 << 62)), "group_offset": int(rng.integers(1 << 20))}
        if spec.scaling == "delayed":
            return {"scale": np.exp2(rng.uniform(-8, 8, groups)).astype(np.float32)}
        return {}

    return draw


@pytest.fixture(scope="session")
def as_definition() -> Callable[[GroupedTensor], octavo_numerics.QuantizedArray]:
    """A GroupedTensor as the definition's own type."""

    def convert(q: GroupedTensor) -> octavo_numerics.QuantizedArray:
        planes = {name: getattr(q, name) for name in octavo_numerics.PLANES}
        sizes = None if q.group_sizes is None else np.asarray(q.group_sizes, np.int64)
        return octavo_numerics.QuantizedArray(
            spec=q.spec, group_sizes=sizes, **{n: None if a is None else np.asarray(a) for n, a in planes.items()}
        )

    return convert


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Any, Any, str], None]:
    """Fails at the first byte by which two arrays differ."""

    def check(actual: Any, expected: Any, what: str) -> None:
        actual, expected = np.asarray(actual), np.asarray(expected)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
        a, b = (np.ascontiguousarray(array).view(np.uint8) for array in (actual, expected))
        assert np.array_equal(a, b), f"{what} differs first at byte {np.argwhere(a != b)[0]}"

    return check


@pytest.fixture(scope="session")
def same_tensor(as_definition: Any, same_bits: Any) -> Callable[[GroupedTensor, Any], None]:
    """Fails where a GroupedTensor's planes have other bytes than the definition's, rows past the sum aside."""

    def check(q: GroupedTensor, expected: octavo_numerics.QuantizedArray) -> None:
        wanted, got = octavo_numerics.valid(expected), octavo_numerics.valid(as_definition(q))
        assert wanted.keys() == got.keys()
        for name, plane in wanted.items():
            same_bits(got[name], plane, name)

    return check


@pytest.fixture(scope="session")
def equations() -> Callable[..., int]:
    """How often a program binds a primitive, or calls a jitted function, of that name; scans weighted by length."""

    def count(jaxpr: Any, name: str) -> int:
        total = 0
        for equation in jaxpr.eqns:
            if name in (equation.primitive.name, equation.params.get("name")):
                total += 1
                continue
            weight = equation.params["length"] if equation.primitive.name == "scan" else 1
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_holds_equations):
                if _holds_equations(value):
                    total += weight * count(getattr(value, "jaxpr", value), name)
        return total

    return count


def _holds_equations(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@dataclass(frozen=True)
class Layer:
    """A grouped linear layer's inputs: x [M, K], w [G, N, K], dy [M, N], sizes [G], bias [G, N], and the encode scales
    [G] that delayed scaling takes of each operand. Rows past the sum are NaN."""

    x: np.ndarray
    w: np.ndarray
    dy: np.ndarray
    sizes: np.ndarray
    bias: np.ndarray
    scales: dict[str, np.ndarray]

    @property
    def total(self) -> int:
        """Rows that belong to a group."""
        return int(self.sizes.sum())

    def quantized(self, recipe: Recipe, operand: Operand) -> octavo_numerics.QuantizedArray:
        """An operand as the definition quantizes it."""
        spec = recipe.quantizer(operand)
        assert spec is not None
        return octavo_numerics.quantize(
            getattr(self, operand),
            spec,
            None if operand == "w" else self.sizes,
            seed=SEED if spec.stochastic else None,
            scale=self.scales[operand] if spec.scaling == "delayed" else None,
        )

    def values(self, recipe: Recipe, gemm: Gemm, operand: Operand) -> np.ndarray:
        """What a GEMM multiplies, in float64."""
        if not recipe.quantizes(gemm):
            return np.asarray(getattr(self, operand), np.float64)
        direction: Direction = "rowwise" if READERS[operand][0] == gemm else "columnwise"
        return octavo_numerics.dequantize(self.quantized(recipe, operand), direction).astype(np.float64)

    def operand(self, recipe: Recipe, gemm: Gemm, operand: Operand) -> Any:
        """What a bound GEMM takes: the definition's planes in the plain layout, or the array."""
        if not recipe.quantizes(gemm):
            return jnp.asarray(getattr(self, operand))
        q = self.quantized(recipe, operand)
        planes = {n: None if getattr(q, n) is None else jnp.asarray(getattr(q, n)) for n in octavo_numerics.PLANES}
        return GroupedTensor(q.spec, None if operand == "w" else jnp.asarray(self.sizes), **planes)


@pytest.fixture(scope="session", params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """Each recipe, and options that reach the GEMMs."""
    return RECIPES[request.param]


@pytest.fixture(scope="session")
def layer_of(sizes_of: Any) -> Callable[..., Layer]:
    """A layer of (M, K, N, G) with drawn or given sizes."""

    def draw(
        rng: np.random.Generator,
        shape: tuple[int, int, int, int],
        dtype: str = "bfloat16",
        sizes: np.ndarray | None = None,
    ) -> Layer:
        m, k, n, g = shape
        sizes = sizes_of(rng, g, m) if sizes is None else sizes
        x, dy = (rng.standard_normal((m, c)).astype(np.float32) for c in (k, n))
        for rows in (x, dy):
            rows[int(sizes.sum()) :] = np.nan
        w = rng.standard_normal((g, n, k)).astype(np.float32) / np.float32(np.sqrt(k))
        bias = rng.standard_normal((g, n)).astype(np.float32)
        scales = {name: np.exp2(rng.uniform(4, 6, g)).astype(np.float32) for name in ("x", "w", "dy")}
        return Layer(*(a.astype(DTYPES[dtype]) for a in (x, w, dy)), sizes, bias.astype(DTYPES[dtype]), scales)

    return draw


@pytest.fixture(scope="session")
def assert_product() -> Callable[..., None]:
    """Fails where a GEMM's result is outside its bound, a row past the sum or an empty group's dw not +0."""

    def check(
        layer: Layer,
        recipe: Recipe,
        gemm: Gemm,
        actual: Any,
        *,
        bias: np.ndarray | None = None,
        start: np.ndarray | None = None,
        accumulation: Any = "fp32",
    ) -> None:
        actual = np.asarray(actual)
        left, right = (layer.values(recipe, gemm, name) for name in _OPERANDS[gemm])
        padded = 16 if gemm == "wgrad" and recipe.quantizes(gemm) and getattr(recipe, "hadamard", False) else 1
        rows = np.concatenate([[0], np.cumsum(layer.sizes)])
        inner = np.concatenate([[0], np.cumsum(-(-layer.sizes // padded) * padded)])
        for g in range(len(layer.sizes)):
            here, summed = slice(*rows[g : g + 2]), slice(*inner[g : g + 2])
            if gemm == "wgrad":
                a, b, mine = left[summed].T, right[summed].T, actual[g]
                extra = None if start is None else (np.eye(len(a)), start[g].T)
            else:
                a, b, mine = left[here], right[g] if gemm == "fprop" else right[g].T, actual[here]
                extra = None if bias is None else (np.ones((len(a), 1)), bias[g][:, None])
            if extra is not None:
                # One more product of each element: its sum ends with it.
                a, b = np.hstack([a, extra[0]]), np.hstack([b, extra[1].astype(np.float64)])
            bound = octavo_numerics.error_bound(
                recipe.for_gemm(gemm),
                a.shape[1],
                gemm=gemm,
                out_dtype=mine.dtype.name,
                accumulation=accumulation,
            )
            report = bound.check(mine, a, b, zero_mean=False)
            assert report.passed, f"{gemm} of group {g}: {report.describe()}"
        bits = actual[layer.total :] if gemm != "wgrad" else actual[layer.sizes == 0]
        if start is None:
            assert not bits.view(np.uint8).any(), "a row past the sum, or an empty group's dw, is not +0"

    return check


_OPERANDS: dict[Gemm, tuple[Operand, Operand]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
