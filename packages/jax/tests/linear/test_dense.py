"""dense: one matrix, several contracted axes, the same bits as one group of grouped_dense."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax.linear.dense import dense

K, N = (4, 8), (2, 24)


def _arrays(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    shapes = ((3, 5, *K), (*K, *N), N, (3, 5, *N))
    return tuple(rng.integers(-4, 5, shape).astype(np.float32) for shape in shapes)


def test_axes_as_dot_general_has_them(rng: np.random.Generator) -> None:
    """x [3, 5, 4, 8] with a kernel [4, 8, 2, 24] or [2, 24, 4, 8]: y [3, 5, 2, 24] and gradients, exact of integers."""
    x, kernel, bias, dy = _arrays(rng)
    turned = np.moveaxis(kernel, (2, 3), (0, 1)).copy()
    y = np.tensordot(x, kernel, 2) + bias
    dx = np.tensordot(dy, turned, 2)
    dw = np.tensordot(x, dy, ((0, 1), (0, 1)))
    for dims, w, dw_expected, recipe in (
        (((-2, -1), (0, 1)), kernel, dw, None),
        (((2, 3), (-2, -1)), turned, np.moveaxis(dw, (2, 3), (0, 1)), octavo.RowScaling()),
    ):

        def layer(x: Any, w: Any, bias: Any, dims: Any = dims, recipe: Any = recipe) -> Any:
            return dense(x, w, recipe=recipe, contracting_dims=dims, bias=bias)

        made, pull = jax.vjp(layer, *map(jnp.asarray, (x, w, bias)))
        assert np.array_equal(made, y)
        for got, wanted in zip(pull(jnp.asarray(dy)), (dx, dw_expected, dy.sum((0, 1))), strict=True):
            assert np.array_equal(got, wanted)


def test_it_is_grouped_dense_of_one_group(rng: np.random.Generator) -> None:
    """y, dx and dw bit for bit, with the names."""
    x, kernel = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((20, 32), (32, 48)))
    more: Any = {"recipe": octavo.CurrentScaling(), "output_checkpoint_name": "y"}
    y, pull = jax.vjp(lambda x, w: dense(x, w, **more), x, kernel)
    one, pull_one = jax.vjp(lambda x, w: octavo_jax.grouped_dense(x, w[None], [20], **more), x, kernel)
    for mine, other in zip((y, *pull(y)), (one, *pull_one(one)), strict=True):
        assert np.array_equal(mine, other)
    program = str(jax.make_jaxpr(lambda x: jax.vjp(lambda x: dense(x, kernel, **more), x)[0])(x))
    assert "name=quantization" in program
    assert "name=y" in program


def test_delayed_scaling_of_one_group(rng: np.random.Generator) -> None:
    """The state is that of one group, and its gradient holds the amaxes of x, kernel and dy."""
    recipe = octavo.DelayedScaling(history=2)
    x, kernel = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 6, 16), (16, 16)))
    state = octavo_jax.init_delayed(recipe, 1)

    def loss(state: Any) -> Any:
        y, _ = dense(x, kernel, recipe=recipe, state=state)
        return jnp.sum(3 * y)

    after = jax.jit(jax.grad(loss))(state)
    found = [float(one.history[0, 0]) for one in (after.x, after.kernel, after.grad)]
    assert found == [float(jnp.abs(x).max()), float(jnp.abs(kernel).max()), 3.0]


def test_a_vector_and_no_rows() -> None:
    """x [K] gives y [N]; no rows give none, and a zero dw."""
    kernel = jnp.ones((16, 32))
    assert np.array_equal(dense(jnp.ones(16), kernel, recipe=None), np.full(32, 16))
    dw = jax.grad(lambda w: jnp.sum(dense(jnp.ones((0, 16)), w, recipe=octavo.RowScaling())))(kernel)
    assert not dw.any()


X, KERNEL = np.ones((8, 16), np.float32), np.ones((16, 4), np.float32)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "sizes": ({"kernel": np.ones((4, 16), np.float32)}, r"has \[16\] in the contracted axes and kernel \[4, 16\]"),
    "first of x": ({"contracting_dims": ((0,), (0,))}, "last axes of x meet the first or the last ones"),
    "order": ({"x": np.ones((8, 4, 4)), "contracting_dims": ((-1, -2), (0, 1))}, "in one order"),
    "none": ({"contracting_dims": ((), ())}, "at least one"),
    "counts": ({"contracting_dims": ((-1,), (0, 1))}, "as many axes of one as of the other"),
    "no pair": ({"contracting_dims": 1}, "give two sequences of axes"),
    "bias": ({"bias": np.ones(5, np.float32)}, r"bias has shape \[5\].*needs \[4\]"),
    "bias of integers": ({"bias": np.ones(4, np.int32)}, "bias has dtype int32"),
    "state": ({"recipe": octavo.DelayedScaling(), "state": None}, "init_delayed"),
    "groups": (
        {"recipe": octavo.DelayedScaling(), "state": octavo_jax.init_delayed(octavo.DelayedScaling(history=2), 2)},
        "state is for 2 groups and kernel has 1",
    ),
    "seed": ({"recipe": octavo.NVFP4()}, "seed is None"),
    "no columns": ({"kernel": np.ones((16, 0), np.float32)}, "every axis is one or more"),
    "dtype": ({"kernel": np.ones((16, 4), np.int8)}, "kernel has dtype int8"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit(case: str) -> None:
    """ValueError in one line with the argument, what it is and what it should be, eager and while tracing."""
    changes, message = CASES[case]
    arguments: dict[str, Any] = {"x": X, "kernel": KERNEL, "recipe": None} | changes
    with pytest.raises(ValueError, match=message) as caught:
        dense(**arguments)
    assert "\n" not in str(caught.value)
    x = jnp.asarray(arguments.pop("x"), jnp.float32)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x: dense(x, **arguments), x)
