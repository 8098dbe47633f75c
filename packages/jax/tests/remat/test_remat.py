"""Quantize once, on the reference backend (promise 7, faults.md 42); `remat` has the whole table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax.counting import count_runs
from octavo_jax.policies import save_quantized

LAYERS, M, K, G = 5, 32, 32, 2


def _loss(recipe: octavo.Recipe, policy: Any, name: str | None) -> Callable[..., Any]:
    """A scan over layers; the activation after each layer needs y, so naming residuals alone would not do."""

    def layer(x: Any, kernel: Any) -> Any:
        names = {"checkpoint_name": name, "output_checkpoint_name": "y"}
        y = octavo_jax.grouped_dense(x, kernel, [20, 10], recipe=recipe, seed=1, backend="jax-reference", **names)
        return jnp.tanh(y)

    def loss(kernels: Any, x: Any) -> Any:
        step = jax.checkpoint(layer, policy=policy)
        out, _ = jax.lax.scan(lambda carry, kernel: (step(carry, kernel), None), x, kernels)
        return jnp.sum(out)

    return loss


POLICIES = {
    "nothing saved": (None, "quantization", 25, 10),
    "saved": (save_quantized(), "quantization", 15, 10),
    "not named": (save_quantized(), None, 25, 10),
    "another name": (save_quantized("mine"), "mine", 15, 10),
    "saved with y": (save_quantized("quantization", "y"), "quantization", 15, 5),
    "with a base": (save_quantized(base=jax.checkpoint_policies.dots_saveable), "quantization", 15, 5),
}


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "fp8-current") for case in POLICIES),
        pytest.param("saved", "nvfp4", marks=pytest.mark.slow),  # test_table.py has it with a backend that traces fast
    ],
)
def test_quantizations_of_a_training_step(case: str, kind: str) -> None:
    """Five layers quantize x and the kernel once each and dy once: 15, where the outputs are saved by name
    (faults.md 42)."""
    policy, name, quantized, products = POLICIES[case]
    kernels, x = jnp.ones((LAYERS, G, K, K)), jnp.ones((M, K))
    runs = count_runs(jax.grad(_loss(octavo.recipe(kind), policy, name), argnums=(0, 1)), kernels, x)
    assert (runs.quantize, runs.fprop, runs.dgrad, runs.wgrad) == (quantized, products, LAYERS, LAYERS)


def test_saved_planes_keep_their_bits(rng: np.random.Generator) -> None:
    """Gradients with and without remat are equal bit for bit, codes above e4m3's IEEE range included (faults.md
    42, 50)."""
    kernels, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((LAYERS, G, K, K), (M, K)))
    recipe = octavo.recipe("fp8-current")
    results = [
        jax.jit(jax.grad(_loss(recipe, policy, "quantization"), argnums=(0, 1)))(kernels, x)
        for policy in (jax.checkpoint_policies.everything_saveable, save_quantized())
    ]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.array_equal(a, b)


def test_the_spec_names_what_quantize_makes() -> None:
    """`quantize` names each array twice, as a plane and plainly; None names nothing."""
    for name, wanted in (("mine", 4), (None, 0)):
        spec = octavo.MXFP8().quantizer("x", checkpoint_name=name)
        assert spec is not None
        program = str(jax.make_jaxpr(lambda x, s=spec: octavo_jax.quantize(x, s).rowwise)(jnp.ones((32, 32))))
        assert program.count("name=mine]") == program.count("name=mine.x.") == wanted
