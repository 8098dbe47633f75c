"""Names of recipes wherever a recipe is taken, and what is neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import octavo
import octavo_jax
from octavo_jax import linen as octavo_linen
from octavo_jax import moe
from octavo_jax import nnx as octavo_nnx
from octavo_jax.adapters.tokamax import implementation
from octavo_jax.counting import count_runs

M, K, G = 16, 32, 2
NAME = "fp8-current"
X, KERNEL, SIZES, GAMMA = jnp.ones((M, K)), jnp.ones((K, K)), [9, 5], jnp.ones(K)
KERNELS, WIDE = jnp.ones((G, K, K)), jnp.ones((G, K, 2 * K))
HOW: dict[str, Any] = {"backend": "jax-reference"}


def _linen(recipe: Any) -> Any:
    module = octavo_linen.GroupedDense(G, K, recipe=recipe, **HOW)
    return module.apply({"params": {"kernel": KERNELS}}, X, SIZES)


CALLS: dict[str, Callable[[Any], Any]] = {
    "grouped_dense": lambda r: octavo_jax.grouped_dense(X, KERNELS, SIZES, recipe=r, **HOW),
    "dense": lambda r: octavo_jax.dense(X, KERNEL, recipe=r, **HOW),
    "layernorm_dense": lambda r: octavo_jax.layernorm_dense(X, KERNEL, GAMMA, recipe=r, **HOW),
    "ragged_dot": lambda r: octavo_jax.ragged_dot(X, KERNELS, SIZES, recipe=r, **HOW),
    "grouped_mlp": lambda r: octavo_jax.grouped_mlp(X, WIDE, KERNELS, SIZES, recipe=r, **HOW),
    "layernorm_mlp": lambda r: octavo_jax.layernorm_mlp(X, GAMMA, WIDE[0], KERNEL, recipe=r, **HOW),
    "moe_mlp": lambda r: moe.moe_mlp(X, jnp.ones((K, G)), WIDE, KERNELS, k=1, recipe=r, **HOW)[0],
    "linen": _linen,
    "nnx": lambda r: octavo_nnx.GroupedLinear(G, K, K, recipe=r, rngs=nnx.Rngs(0), **HOW)(X, SIZES),
    "tokamax": lambda r: implementation(r, **HOW)(X, KERNELS, group_sizes=jnp.array(SIZES)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_name_is_its_recipe(name: str) -> None:
    """Every door takes what configuration files hold: it quantizes as the recipe of that name does."""
    wanted = 4 if "mlp" in name else 2  # operands of one layer or of two
    assert count_runs(lambda: CALLS[name](NAME)).quantize == wanted


def test_names_beside_layers() -> None:
    """Quantizers, reports, payloads and delayed scaling's state take names, too."""
    assert octavo_jax.quantizer_set("mxfp8") == octavo_jax.quantizer_set(octavo.MXFP8())
    assert octavo_jax.quantizer_set(None).x is None
    assert moe.Exchange(payload="mxfp8") == moe.Exchange(payload=octavo.MXFP8())
    report = octavo_jax.explain(X, KERNELS, SIZES, recipe="mxfp8", **HOW)
    assert report.plan.recipe == octavo.MXFP8()
    state = octavo_jax.init_delayed("fp8-delayed", G)
    assert state.x.history.shape == (octavo.DelayedScaling().history, G)
    assert octavo_jax.update_delayed(state, "fp8-delayed").x.scale.shape == (G,)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a misspelt name": ("mxpf8", octavo.RecipeError, "recipe: got 'mxpf8'; .*known names are"),
    "a class": (octavo.MXFP8, ValueError, r"recipe is the class MXFP8; give a Recipe, such as octavo.MXFP8\(\)"),
    "a number": (8, ValueError, "recipe is a int; give a Recipe, the name of one"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_recipe(what: str) -> None:
    """A sentence that says what a recipe is, and no AttributeError from the inside."""
    given, error, message = WRONG[what]
    for name in ("grouped_dense", "linen", "nnx"):
        with pytest.raises(error, match=message):
            CALLS[name](given)
    with pytest.raises(ValueError, match=r"recipe is 'mxfp8', which keeps no state; give octavo\.DelayedScaling"):
        octavo_jax.init_delayed("mxfp8", G)


def _grouped(x: Any, kernels: Any, bias: Any, recipe: octavo.Recipe | None) -> Any:
    return octavo_jax.grouped_dense(x, kernels, SIZES, recipe=recipe, bias=bias, **HOW)


def _normalized(x: Any, kernels: Any, bias: Any, recipe: octavo.Recipe | None) -> Any:
    return octavo_jax.layernorm_dense(x, kernels[0], bias[0], bias[0], norm="layer", recipe=recipe, **HOW)


def _block(x: Any, kernels: Any, bias: Any, recipe: octavo.Recipe | None) -> Any:
    how: dict[str, Any] = {"activation": "gelu", "bi": bias, "bo": bias, "recipe": recipe, **HOW}
    how["choice_bias"] = jnp.zeros(G, jnp.float32)
    return moe.moe_mlp(x, KERNEL[:, :G], kernels, kernels, k=1, **how)[0]


def _trace(function: Callable[..., Any], recipe: octavo.Recipe | None) -> None:
    step = jax.grad(lambda *given: function(*given, recipe).sum(), (0, 1, 2))
    jax.eval_shape(step, X, KERNELS, jnp.ones((G, K), jnp.float32))


def test_no_mixing_of_ranks() -> None:
    """Programs that forbid JAX to promote ranks trace every layer, forward and backward, in every kind of scaling."""
    nvfp4 = octavo.NVFP4(stochastic_gradients=False, fprop="high_precision", dgrad="high_precision")
    with jax.numpy_rank_promotion("raise"):
        _trace(_grouped, octavo.recipe("fp8-row"))
        _trace(_normalized, octavo.recipe("mxfp8"))
        _trace(_grouped, nvfp4)
        _trace(_block, None)
        states = octavo_jax.ScalingHistory(jnp.zeros((2, 4, G)), jnp.ones((2, G)))  # a batch of them meets one tensor
        jax.eval_shape(jax.vmap(octavo_jax.record_amax, in_axes=(0, None)), states, jnp.ones(G))


def test_no_mixing_of_dtypes() -> None:
    """Programs that forbid JAX to promote dtypes trace every layer. 64-bit types are on, which have all dtypes of
    programs without them, and one trap more: sums of int32 sizes, which JAX makes int64 then, stay int32. A router
    in fp32 takes tokens in bf16, as a module's does."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        _trace(_grouped, octavo.recipe("fp8-row"))
        _trace(_normalized, None)
        _trace(_block, None)
        jax.eval_shape(lambda x: _block(x, KERNELS, jnp.ones((G, K), jnp.float32), None), X.astype(jnp.bfloat16))
