"""Fresh random inputs from a seed that a failing test prints, quantizer specs, and comparison with the definition."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import octavo_numerics
from octavo import QuantizerSpec
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
    "nvfp4-square": QuantizerSpec(format="e2m1", scaling="nvfp4", square=True),
    "nvfp4-hadamard-stochastic": QuantizerSpec(
        format="e2m1", scaling="nvfp4", rounding="stochastic", hadamard=True, role="dy"
    ),
}

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
def one_a_scaling(request: pytest.FixtureRequest) -> QuantizerSpec:
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
