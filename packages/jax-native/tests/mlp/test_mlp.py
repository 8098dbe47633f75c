"""MLPs on the kernels: fused quantizers in forward and backward, against the same layers one after another.

With relu2 kernels and plain JAX round alike (one product, exact slope), so everything but sums is equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax.counting import count_runs
from octavo_jax.functions.activations import activate
from octavo_jax.linear.normalized_dense import layernorm_dense
from octavo_jax.mlp.mlp import grouped_mlp

M, K, F, N, G = 96, 64, 96, 48, 3
SIZES = np.array([50, 0, 37], np.int32)
USED = int(SIZES.sum())
NATIVE: dict[str, Any] = {"backend": "jax-native"}

RECIPES: dict[str, octavo.Recipe] = {
    "bf16": octavo.HighPrecision(),
    "delayed": octavo.DelayedScaling(history=4),
    "current": octavo.CurrentScaling(),
    "row": octavo.RowScaling(),
    "block": octavo.BlockScaling(),
    "mxfp8": octavo.MXFP8(),
    "nvfp4": octavo.NVFP4(),
    "forward alone": octavo.MXFP8(dgrad="high_precision", wgrad="high_precision"),
    "backward alone": octavo.RowScaling(fprop="high_precision"),
    "no wgrad": octavo.DelayedScaling(history=4, wgrad="high_precision"),
}


def _arrays(rng: np.random.Generator) -> tuple[Any, ...]:
    """x, wi, wo, bi, bo, probs and dy; NaN past the sum."""
    shapes = ((M, K), (G, K, F), (G, F, N), (G, F), (G, N), (M,), (M, N))
    arrays = [np.asarray(rng.standard_normal(shape), np.float32) / np.float32(np.sqrt(8)) for shape in shapes]
    for rows in (0, 5, 6):
        arrays[rows][USED:] = np.nan
    dtypes = [jnp.bfloat16] * 5 + [jnp.float32, jnp.bfloat16]
    return tuple(jnp.asarray(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True))


@pytest.mark.parametrize("kind", RECIPES)
def test_layers_in_a_row_give_the_same(kind: str, rng: np.random.Generator) -> None:
    """Every recipe, slots and states: y, gradients and histories; those of bi and probs, which the kernels sum in
    orders of their own, within their bounds; zeros in tails and empties."""
    recipe = RECIPES[kind]
    *given, dy = _arrays(rng)
    states: Any = (octavo_jax.init_delayed(recipe, G),) * 2 if isinstance(recipe, octavo.DelayedScaling) else None
    seeds = (9, 9 ^ 1 << 63) if recipe.stochastic else (None, None)

    def layer(x: Any, kernel: Any, bias: Any, state: Any, seed: Any) -> Any:
        y = octavo_jax.grouped_dense(x, kernel, SIZES, recipe=recipe, bias=bias, seed=seed, state=state, **NATIVE)
        return y if state is not None else (y, None)

    def unfused(x: Any, wi: Any, wo: Any, bi: Any, bo: Any, probs: Any, states: Any) -> Any:
        s1, s2 = states or (None, None)
        y1, s1 = layer(x, wi, bi, s1, seeds[0])
        y, s2 = layer(activate(y1, "relu2", probs=probs), wo, bo, s2, seeds[1])
        return y, s1 and (s1, s2)

    def fused(x: Any, wi: Any, wo: Any, bi: Any, bo: Any, probs: Any, states: Any) -> Any:
        how: dict[str, Any] = {"recipe": recipe, "seed": seeds[0], "state": states, **NATIVE}
        made = grouped_mlp(x, wi, wo, SIZES, activation="relu2", probs=probs, bi=bi, bo=bo, **how)
        return made if states else (made, None)

    def sums_of_probs(x: Any, wi: Any, wo: Any, bi: Any, bo: Any, probs: Any, states: Any) -> Any:
        """Of magnitudes: of each row of fc2's dx times the activation."""
        s1, s2 = states or (None, None)
        y1, _ = layer(x, wi, bi, s1, seeds[0])
        a = activate(y1, "relu2", probs=probs)
        (_, later), pull = jax.vjp(lambda a, s2: layer(a, wo, bo, s2, seeds[1]), a, s2)
        da, _ = pull((dy, jax.tree.map(jnp.zeros_like, later)))
        return jnp.sum(jnp.abs(da.astype(jnp.float32) * activate(y1.astype(jnp.float32), "relu2")), axis=1)

    @jax.jit
    def run(*given: Any) -> Any:
        def both(function: Any) -> Any:
            made, pull = jax.vjp(function, *given)
            return made, pull((dy, jax.tree.map(jnp.zeros_like, made[1])))

        return both(fused), both(unfused), sums_of_probs(*given)

    ((y, after), grads), ((y_2, after_2), grads_2), terms = run(*given, states)
    names = ("x", "wi", "wo", "bi", "bo", "probs")
    for name, one, other in zip(("y", *names), (y, *grads), (y_2, *grads_2), strict=False):
        if name == "bi":  # the kernel and plain JAX sum in orders of their own, and round once to bf16
            allowed = 2.0**-7 * np.abs(np.asarray(other, np.float32)) + M * 2.0**-24 * 8
            assert np.all(np.abs(np.asarray(one, np.float32) - np.asarray(other, np.float32)) <= allowed)
        elif name == "probs":
            allowed = 2 * (F + 2) * 2.0**-24 * np.asarray(terms)[:USED]  # two sums of F products in fp32
            assert np.all(np.abs(np.asarray(one - other)[:USED]) <= allowed), name
        else:
            assert np.array_equal(one, other), name
    for one, other in zip(jax.tree.leaves((after, grads[6])), jax.tree.leaves((after_2, grads_2[6])), strict=True):
        assert np.array_equal(one, other)
    for rows in (y, grads[0], grads[5]):
        assert not np.asarray(rows[USED:]).any()
    for group in grads[1:5]:
        assert not np.asarray(group[1]).any()


def test_one_call_for_what_is_fused() -> None:
    """Six quantizer calls in a step, and no activation or normalization beside them where nothing reads one."""
    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((M, K), (1, K, 2 * F), (1, F, N))]

    def loss(*arrays: Any) -> Any:
        return grouped_mlp(*arrays, [M], recipe=octavo.MXFP8(), **NATIVE).sum()

    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    assert count_runs(step, *avals).quantize == 6
    text = jax.jit(step).lower(*avals).as_text()
    calls = [part.split("(")[0] for part in text.split("custom_call @octavo_quantize_mxfp8")[1:]]
    assert len(calls) == 6
    assert "octavo_activation" not in text
    assert text.count("prologue = 1") == text.count("prologue = 2") == 1


def test_statistics_of_the_kernel_reach_the_gradient(rng: np.random.Generator) -> None:
    """dx and dgamma of layernorm_dense, made of the fused kernel's mean and rstd, are near the reference's."""
    x, kernel, gamma, dy = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((M, K), (K, N), (K,), (M, N))
    )

    def run(backend: str) -> Any:
        def layer(x: Any, gamma: Any) -> Any:
            return layernorm_dense(x, kernel, gamma, norm="layer", recipe=octavo.RowScaling(), backend=backend)

        return jax.jit(lambda *a: jax.vjp(layer, *a)[1](dy))(x, gamma)

    for one, other in zip(run("jax-native"), run("jax-reference"), strict=True):
        share = 4 * 4 * np.sqrt(K + N + M) * 2.0**-24  # four sums in a row, each within 4 sqrt(n) 2^-24 (docs/numerics)
        assert np.all(np.abs(one - other) <= share * float(np.abs(other).max()))


@pytest.mark.parametrize(
    ("kind", "message"),
    [("block", "codes have no derivative"), ("bf16", r"activation of octavo was differentiated.*differentiate once")],
)
def test_the_gradients_slope_in_the_probabilities_is_refused(kind: str, message: str) -> None:
    """By a sentence that says what has one, in place of JAX's about the primitive of the kernel."""
    x, wi, wo = (jnp.ones(shape) for shape in ((M, K), (G, K, F), (G, F, N)))
    how: dict[str, Any] = {"activation": "relu2", "recipe": RECIPES[kind], **NATIVE}

    def slope(probs: Any) -> Any:
        return jnp.sum(jax.grad(lambda x: jnp.sum(grouped_mlp(x, wi, wo, SIZES, probs=probs, **how)))(x))

    with pytest.raises(TypeError, match=message):
        jax.eval_shape(jax.grad(slope), jnp.ones(M))
