"""What does not fit is refused in one line that says what was given, what is needed and what to do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo import NoBackendError

X, KERNEL = np.ones((8, 16), np.float32), np.ones((2, 16, 4), np.float32)
MX = octavo.recipe("mxfp8")

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"group_sizes": [-1, 4]}, r"group_sizes\[0\] is -1"),
    "sum past M": ({"group_sizes": np.array([5, 4])}, "sum to 9 and the tensor has 8 rows"),
    "count": ({"group_sizes": [1, 2, 3]}, "3 entries and kernel 2 matrices"),
    "float sizes": ({"group_sizes": jnp.ones(2)}, "one integer per group"),
    "orientation": ({"kernel": np.ones((2, 4, 16), np.float32)}, r"contracting_dims=\(\(-1,\), \(2,\)\)"),
    "rank": ({"x": np.ones(8, np.float32)}, r"\[M, K\], or \[..., M, K\], and \[G, K, N\]"),
    "dtype": ({"x": np.ones((8, 16), np.int8)}, "x has dtype int8"),
    "bias": ({"bias": np.ones(4, np.float32)}, r"needs \[G, N\] = \[2, 4\]"),
    "bias of integers": ({"bias": np.ones((2, 4), np.int32)}, "bias has dtype int32; it must be bfloat16, float16"),
    "seed": ({"recipe": octavo.recipe("nvfp4")}, "seed is None"),
    "seed type": ({"recipe": octavo.recipe("nvfp4"), "seed": 1.5}, "seed is 1.5"),
    "state": ({"recipe": octavo.recipe("fp8-delayed")}, "init_delayed"),
    "offset": ({"group_offset": -1}, "group_offset is -1"),
    "offset type": ({"group_offset": 1.5}, "group_offset is 1.5; it is the number of the first group"),
    "offset array": ({"group_offset": jnp.ones(2)}, r"group_offset is an array of shape \[2\] and dtype float32"),
    "contracted axes": ({"contracting_dims": ((0,), (1,))}, r"give \(\(-1,\), \(1,\)\) for \[G, K, N\]"),
    "groups contracted": ({"contracting_dims": ((-1,), (0,))}, "contracts the last axis of x with axis 1 or 2"),
    "no axes": ({"contracting_dims": None}, "give two sequences of axes"),
    "features": ({"x": np.ones((8, 12), np.float32)}, r"takes K = 16; give x \[..., 16\]"),
    "wrong state": ({"recipe": octavo.recipe("fp8-delayed"), "state": {"x": 1}}, "state is a dict"),
    "y's dtype": ({"preferred_element_type": jnp.int8}, "preferred_element_type has dtype int8"),
    "turned bias": (
        {"contracting_dims": ((-1,), (2,)), "kernel": np.ones((2, 4, 16)), "bias": np.ones((2, 16), np.float32)},
        r"kernel \[G, N, K\] = \[2, 4, 16\] needs \[G, N\] = \[2, 4\]",
    ),
    "sharding": ({"sharding": "fsdp"}, "give octavo_jax.MeshAxes"),
}


@pytest.mark.parametrize("case", CASES)
def test_grouped_dense(case: str) -> None:
    """Each argument that does not fit raises ValueError before anything is computed."""
    changes, message = CASES[case]
    arguments: dict[str, Any] = {"x": X, "kernel": KERNEL, "group_sizes": [3, 5], "recipe": MX} | changes
    with pytest.raises(ValueError, match=message) as caught:
        octavo_jax.grouped_dense(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "case", ["negative", "sum past M", "count", "float sizes", "orientation", "dtype", "y's dtype"]
)
def test_explain_refuses_what_the_layer_refuses(case: str) -> None:
    """With its sentence: no report of a layer that would not run."""
    changes, message = CASES[case]
    arguments: dict[str, Any] = {"x": X, "kernel": KERNEL, "group_sizes": [3, 5], "recipe": MX} | changes
    with pytest.raises(ValueError, match=message):
        octavo_jax.explain(**arguments)


def test_a_state_of_another_history() -> None:
    """A state remembers the steps of the recipe that it was made for: another number would roll another history."""
    short, long = octavo.DelayedScaling(history=4), octavo.DelayedScaling(history=6)
    state = octavo_jax.init_delayed(short, 2)
    message = r"state\.x remembers 4 steps and the recipe has history=6; make the state with octavo_jax\.init_delayed"
    with pytest.raises(ValueError, match=message):
        octavo_jax.grouped_dense(X, KERNEL, [3, 5], recipe=long, state=state)
    with pytest.raises(ValueError, match=message):
        octavo_jax.update_delayed(state, long)
    mixed = octavo_jax.DelayedState(state.x, state.kernel, octavo_jax.init_delayed(long, 2).grad)
    with pytest.raises(ValueError, match=r"state\.grad remembers 6 steps and the recipe has history=4"):
        octavo_jax.grouped_dense(X, KERNEL, [3, 5], recipe=short, state=mixed)
    other = octavo_jax.DelayedState(state.x, octavo_jax.init_delayed(short, 3).kernel, state.grad)
    with pytest.raises(ValueError, match=r"state\.kernel is for 3 groups and kernel has 2"):
        octavo_jax.grouped_dense(X, KERNEL, [3, 5], recipe=short, state=other)


def test_a_state_for_a_recipe_without_one() -> None:
    """A state that nothing reads is an error, not a silent argument."""
    state = octavo_jax.init_delayed(octavo.DelayedScaling(), 2)
    with pytest.raises(ValueError, match="keeps none"):
        octavo_jax.grouped_dense(X, KERNEL, [3, 5], recipe=MX, state=state)


def test_quantize() -> None:
    """The quantizer's own arguments."""
    delayed, current = octavo.DelayedScaling().quantizer("x"), octavo.CurrentScaling().quantizer("x")
    assert delayed is not None
    assert current is not None
    with pytest.raises(ValueError, match="stacked matrices take none"):
        octavo_jax.quantize(KERNEL, current, [1, 1])
    with pytest.raises(ValueError, match="scale is None"):
        octavo_jax.quantize(X, delayed)
    with pytest.raises(ValueError, match="makes its own"):
        octavo_jax.quantize(X, current, scale=np.ones(1, np.float32))
    with pytest.raises(ValueError, match="finite and more than 0"):
        octavo_jax.quantize(X, delayed, scale=np.zeros(1, np.float32))
    forward = octavo.MXFP8(dgrad="high_precision", wgrad="high_precision").quantizer("x")
    assert forward is not None
    q = octavo_jax.quantize(X, forward)
    with pytest.raises(ValueError, match="plane was not made"):
        octavo_jax.dequantize(q, "columnwise")


def test_nothing_serves_a_closed_preference() -> None:
    """NoBackendError tells why each backend was refused; an unknown name is an error too (faults.md 57)."""
    with pytest.raises(NoBackendError):
        octavo_jax.grouped_dense(X, KERNEL, [3, 5], recipe=MX, backend="torch-reference")
