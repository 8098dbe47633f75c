"""Operators inside functions of elements: what jnp's give, in operations of lax."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic.elements import clip, elementwise, maximum, minimum, where

INTEGERS = ("and_", "or_", "xor", "lshift", "rshift")
ANY = ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")
OPERATORS = {
    "uint32": (*ANY, *INTEGERS),
    "int32": (*ANY, *INTEGERS, "truediv"),
    "float32": (*ANY, "truediv"),
    "bfloat16": ANY,
}


def _array(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> jax.Array:
    """No zeros; of both signs where the dtype has them."""
    magnitude = rng.integers(1, 30, shape)
    return jnp.asarray(magnitude if dtype.startswith("u") else magnitude * rng.choice([-1, 1], shape), dtype)


def _same(ours: Any, theirs: Any, what: str = "") -> None:
    assert isinstance(ours, jax.Array)
    assert (ours.dtype, ours.shape, ours.weak_type) == (theirs.dtype, theirs.shape, theirs.weak_type), what
    assert np.array_equal(np.asarray(ours), np.asarray(theirs)), what


@pytest.mark.parametrize("dtype", OPERATORS)
def test_an_operator_is_jnps(dtype: str, rng: np.random.Generator) -> None:
    """Arrays of one shape and of two, of another dtype, numbers of Python and numpy, on either side."""
    x = _array(rng, dtype, (3, 4))
    other = "uint8" if dtype != "uint8" else "int32"
    shapes = {"one": (dtype, (3, 4)), "row": (dtype, (4,)), "scalar": (dtype, ()), "other dtype": (other, (3, 4))}
    arrays = {key: _array(rng, *of) for key, of in shapes.items()}
    numbers = [3] if dtype == "bfloat16" else [3, np.dtype(dtype).type(3)]

    @jax.jit
    def applied(x: jax.Array, arrays: dict[str, jax.Array]) -> dict[str, Any]:
        found: dict[str, Any] = {name: [] for name in OPERATORS[dtype]}
        for name, partner in product(found, (*arrays.values(), *numbers)):
            apply: Callable[[Any, Any], Any] = getattr(operator, name)
            found[name].append((elementwise(lambda a, b: apply(a, b))(x, partner), apply(x, partner)))  # noqa: B023
            found[name].append((elementwise(lambda a, b: apply(b, a))(x, partner), apply(partner, x)))  # noqa: B023
        return found

    for name, pairs in applied(x, arrays).items():
        for ours, theirs in pairs:
            _same(ours, theirs, name)


def test_functions_of_elements_are_jnps(rng: np.random.Generator) -> None:
    """where, minimum, maximum and clip, with numbers, arrays of a row's shape, and cases of two dtypes."""
    x, row, signed = (_array(rng, *of) for of in (("uint32", (3, 4)), ("uint32", (4,)), ("int32", (3, 4))))

    @jax.jit
    def applied(x: jax.Array, row: jax.Array, signed: jax.Array) -> list[Any]:
        cases = ((x, row), (np.uint32(7), x), (x, 0), (np.uint32(1), np.uint32(2)), (x, signed))
        found = [(elementwise(lambda c, a=a, b=b: where(c, a, b))(x < 15), jnp.where(x < 15, a, b)) for a, b in cases]
        found.append((elementwise(where)(row < 15, x, x + 1), jnp.where(row < 15, x, x + 1)))
        for ours, theirs in ((minimum, jnp.minimum), (maximum, jnp.maximum)):
            found += [(elementwise(ours)(x, partner), theirs(x, partner)) for partner in (row, np.uint32(9), 9)]
        found.append((elementwise(clip)(x, 4, 20), jnp.clip(x, 4, 20)))
        found.append((elementwise(lambda a: ~-a)(x), ~-x))
        as_float = (x << 20).view(jnp.float32).astype(jnp.int32)
        return [*found, (elementwise(lambda a: (a << 20).view(jnp.float32).astype(jnp.int32))(x), as_float)]

    for ours, theirs in applied(x, row, signed):
        _same(ours, theirs)


def test_a_product_is_traced_without_functions_of_jnp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would promote dtypes and broadcast anew: a third of the time that tracing a quantized layer took."""
    magnitude = jnp.ones((3, 4), jnp.uint32)
    for name in ("bitwise_and", "bitwise_or", "add", "subtract", "multiply", "less", "equal", "not_equal", "where"):
        monkeypatch.setattr(jnp, name, None)
    assert jax.make_jaxpr(fp32.multiply)(magnitude, magnitude).out_avals[0].shape == (3, 4)
