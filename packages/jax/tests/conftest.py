"""Fresh random inputs from a seed that a failing test prints, and what several test files share."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import octavo_numerics
from octavo_jax import DelayedState, GroupedTensor, record_amax

Make = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    return np.random.default_rng(seed)


@pytest.fixture
def on_a_cpu() -> None:
    """Skips a test of what holds where JAX's default device is a CPU, whose values this process can read."""
    if jax.default_backend() != "cpu":
        pytest.skip(f"JAX's default device is a {jax.default_backend()}")


@pytest.fixture(scope="session")
def as_users_have_it() -> dict[str, Any]:
    """Options of `lowered.compile`, for a program that XLA:CPU optimizes as users have it, where tests are compiled in
    a hurry: only then does it contract products and sums, and make of two comparisons one."""
    return {
        "xla_backend_optimization_level": 3,
        "xla_cpu_use_fusion_emitters": True,
        "xla_llvm_disable_expensive_passes": False,
    }


def _patterns(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Any finite or infinite fp32 pattern, and a few NaN."""
    return rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32)


def _finite_patterns(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = _patterns(rng, shape)
    return np.where(np.isfinite(x), x, np.float32(0))


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape), np.float32)


def _subnormal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    bits = rng.integers(0, 1 << 23, shape, np.uint32) | (rng.integers(0, 2, shape, np.uint32) << 31)
    return np.asarray(bits.view(np.float32))


def _mixed_small(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Subnormal and just normal numbers, zeros of both signs."""
    x = _subnormal(rng, shape) * np.float32(4)
    return np.where(rng.random(shape) < 0.2, np.copysign(np.float32(0), x), x)


def _huge(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.float32(3.4e38) * rng.uniform(-1, 1, shape).astype(np.float32))


def _wide(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.ldexp(_normal(rng, shape), rng.integers(-149, 126, shape)), np.float32)


def _nonfinite(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A few NaN and infinities among numbers, so that most units stay finite."""
    x: np.ndarray = _normal(rng, shape)
    chosen = rng.random(shape) < 0.002
    return np.asarray(np.where(chosen, rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), shape), x))


def _zero(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.copysign(np.zeros(shape, np.float32), _normal(rng, shape)))


def _ties(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of a quarter, where casts of power-of-two scales meet midpoints."""
    return np.asarray(rng.integers(-96, 97, shape) / 4, np.float32)


INPUTS: dict[str, Make] = {
    "normal": _normal,
    "subnormal": _subnormal,
    "mixed_small": _mixed_small,
    "huge": _huge,
    "wide": _wide,
    "nonfinite": _nonfinite,
    "patterns": _patterns,
    "finite_patterns": _finite_patterns,
    "zero": _zero,
    "ties": _ties,
}


@pytest.fixture(scope="session")
def inputs() -> dict[str, Make]:
    """Classes of fp32 inputs by name."""
    return INPUTS


@pytest.fixture(scope="session")
def narrowed() -> Callable[[np.ndarray, str], np.ndarray]:
    """fp32 to a dtype by name, overflow to infinity included."""

    def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    return narrow


@pytest.fixture(scope="session")
def as_definition() -> Callable[[GroupedTensor], octavo_numerics.QuantizedArray]:
    """A GroupedTensor as the definition's own type."""

    def convert(q: GroupedTensor) -> octavo_numerics.QuantizedArray:
        planes: dict[str, Any] = {name: getattr(q, name) for name in octavo_numerics.PLANES}
        sizes = None if q.group_sizes is None else np.asarray(q.group_sizes, np.int64)
        return octavo_numerics.QuantizedArray(
            spec=q.spec, group_sizes=sizes, **{n: None if a is None else np.asarray(a) for n, a in planes.items()}
        )

    return convert


@pytest.fixture(scope="session")
def sizes_of() -> Callable[[np.random.Generator, int, int], np.ndarray]:
    """int32 group sizes that sum to at most `rows`, drawn around the block sizes, zeros among them."""

    def draw(rng: np.random.Generator, groups: int, rows: int) -> np.ndarray:
        edges = np.array([0, 0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129])
        sizes = rng.choice(edges, groups)
        while sizes.sum() > rows:
            sizes[rng.integers(groups)] = 0
        return sizes.astype(np.int32)

    return draw


@jax.custom_vjp
def _layer(x: Any, kernel: Any, state: DelayedState) -> Any:
    return jnp.nan_to_num(x) @ kernel[0], _recorded(state, x, kernel)


def _recorded(state: DelayedState, x: Any, kernel: Any, dy: Any = None) -> DelayedState:
    made = [
        history if array is None else record_amax(history, jnp.full_like(history.scale, jnp.nanmax(jnp.abs(array))))
        for history, array in ((state.x, x), (state.kernel, kernel), (state.grad, dy))
    ]
    return DelayedState(*made)


def _pulled(saved: Any, given: Any) -> Any:
    (x, kernel, state), (dy, later) = saved, given
    dkernel = jnp.zeros_like(kernel).at[0].set(jnp.nan_to_num(x).T @ dy)
    return dy @ kernel[0].T, dkernel, jax.tree.map(jnp.maximum, later, _recorded(state, x, kernel, dy))


_layer.defvjp(lambda *given: (_layer(*given), given), _pulled)


@pytest.fixture(scope="session")
def recording_layer() -> Callable[..., Any]:
    """`grouped_dense` in what concerns a delayed state, of one matrix and without codes: it compiles at once."""
    return lambda x, kernel, *_, state, **__: _layer(x, kernel, state)
