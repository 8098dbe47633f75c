"""A whole layer on the native kernels under JAX's transformations: the bits that it has alone, and no false alarms."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import octavo
import octavo_jax
from octavo_jax_native import TARGETS

M, K, N, G = 40, 48, 32, 3
SIZES = np.array([17, 0, 9], np.int32)


def _layer(x: Any, kernel: Any, sizes: Any, seed: Any, recipe: octavo.Recipe) -> Any:
    given = seed if recipe.stochastic else None
    return octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, seed=given, backend="jax-native")


def _step(x: Any, kernel: Any, sizes: Any, dy: Any, seed: Any, recipe: octavo.Recipe) -> tuple[Any, ...]:
    y, pull = jax.vjp(lambda x, kernel: _layer(x, kernel, sizes, seed, recipe), x, kernel)
    return (y, *pull(dy))


STEP = jax.jit(_step, static_argnames="recipe")


def _arrays(rng: np.random.Generator, *lead: int) -> list[Any]:
    """x with a NaN tail, kernel, dy with one."""
    x, kernel, dy = (rng.standard_normal((*lead, *side)).astype(np.float32) for side in ((M, K), (G, K, N), (M, N)))
    x[..., SIZES.sum() :, :] = np.nan
    dy[..., SIZES.sum() :, :] = np.nan
    return [jnp.asarray(one) for one in (x, kernel, dy)]


KINDS = ("bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_of_a_training_step_is_its_loop(kind: str, rng: Any, same_bits: Any) -> None:
    """Everything in the batch, seeds too; then the kernel alone, as an ensemble would: each call's own bits."""
    recipe = octavo.recipe(kind)
    x, kernel, dy = _arrays(rng, 2)
    batch = [x, kernel, jnp.asarray(np.stack([SIZES, [0, 26, 0]])), dy, jnp.array([5, 6])]
    for axes in ((0, 0, 0, 0, 0), (None, 0, None, None, None)):
        given = [one if axis == 0 else one[0] for one, axis in zip(batch, axes, strict=True)]
        batched = jax.jit(jax.vmap(lambda *a: _step(*a, recipe), in_axes=axes))(*given)
        for i in range(2):
            alone = STEP(*(one[i] if axis == 0 else one for one, axis in zip(given, axes, strict=True)), recipe)
            for many, one in zip(batched, alone, strict=True):
                same_bits(many[i], one, f"call {i} of {axes}")


def test_a_training_step_is_exported(rng: Any, same_bits: Any) -> None:
    """One artefact for CPUs and GPUs, with the documented list of targets; without it JAX says which one it met."""
    recipe = octavo.recipe("nvfp4")
    x, kernel, dy = _arrays(rng)
    given = (x, kernel, jnp.asarray(SIZES), dy, jnp.uint32(3))
    step = jax.jit(lambda *a: _step(*a, recipe))
    with pytest.raises(ValueError, match="octavo_"):
        export.export(step)(*given)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    exported = export.export(step, platforms=("cpu", "cuda"), disabled_checks=checks)(*given)
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cpu", "cuda")
    for mine, expected in zip(again.call(*given), step(*given), strict=True):
        same_bits(mine, expected, "result of the exported step")


def test_debug_nans_sees_no_tail(rng: Any) -> None:
    """Rows past the sum are neither read nor written: NaN there, and whatever memory held before, is no finding, in an
    eager forward pass and its residuals either (faults.md 8, 9, 11, 12); a NaN in a row that is read is one."""
    x, kernel, dy = _arrays(rng)
    worse = x.at[3, 5].set(jnp.nan)
    filled = [jnp.full((M, 4 * K), jnp.nan) for _ in range(8)]  # memory that later results may be given
    jax.clear_caches()  # a program that was traced before looks for nothing
    with jax.debug_nans(True):
        del filled
        for recipe in map(octavo.recipe, KINDS):
            y, pull = jax.vjp(lambda x, kernel, recipe=recipe: _layer(x, kernel, SIZES, 1, recipe), x, kernel)
            for found in (y, *pull(dy)):
                assert np.isfinite(np.asarray(found)).all(), recipe
            if (spec := recipe.quantizer("x")) is not None:
                octavo_jax.quantize(x, spec, SIZES, backend="jax-native")
        with pytest.raises(FloatingPointError):
            jax.jit(lambda x: _layer(x, kernel, SIZES, 1, octavo.recipe("fp8-block")) * 2)(worse)
    jax.clear_caches()


def test_zeros_under_debug_nans_change_no_bit(rng: Any, same_bits: Any) -> None:
    """What looks for NaN gives the results of what does not."""
    recipe = octavo.recipe("mxfp8")
    x, kernel, dy = _arrays(rng)
    given = (x, kernel, jnp.asarray(SIZES), dy, 1)
    expected = STEP(*given, recipe)
    with jax.debug_nans(True):
        jax.clear_caches()
        text = STEP.lower(*given, recipe).as_text()
        found = STEP(*given, recipe)
    jax.clear_caches()
    assert "start_row_codes" in text
    assert "start_" not in STEP.lower(*given, recipe).as_text()
    for mine, one in zip(found, expected, strict=True):
        same_bits(mine, one, "with debug_nans")


def test_donated_arguments(rng: Any, same_bits: Any) -> None:
    """x and the kernel are given away, their gradients take the memory over, and JAX warns of nothing."""
    recipe = octavo.recipe("fp8-block")
    x, kernel, dy = _arrays(rng)
    expected = STEP(x, kernel, SIZES, dy, 1, recipe)[1:]
    given = jnp.array(x), jnp.array(kernel)
    step = jax.jit(lambda x, kernel, dy: _step(x, kernel, jnp.asarray(SIZES), dy, 1, recipe)[1:], donate_argnums=(0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = step(*given, dy)
    assert all(one.is_deleted() for one in given)
    for mine, one in zip(made, expected, strict=True):
        same_bits(mine, one, "gradient")


def test_scan_stacks_quantized_tensors(rng: Any, same_bits: Any) -> None:
    """Native layouts keep their shapes under a leading axis; the next scan multiplies with what it takes from there."""
    recipe = octavo.recipe("mxfp8")
    spec = recipe.quantizer("x")
    assert spec is not None
    x, _, _ = _arrays(rng, 3)

    def quantize(x: Any) -> Any:
        return octavo_jax.quantize(x, spec, jnp.asarray(SIZES), backend="jax-native")

    stacked = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, quantize(x)), 0, x)[1])(x)
    back = jax.jit(lambda q: jax.lax.scan(lambda c, q: (c, octavo_jax.dequantize(q, backend="jax-native")), 0, q)[1])(
        stacked
    )
    for i in range(3):
        same_bits(back[i], octavo_jax.dequantize(quantize(x[i]), backend="jax-native"), f"layer {i}")


def test_without_jit_and_with_64_bit_types(rng: Any, same_bits: Any) -> None:
    """Each call dispatched alone, and sizes in int64: the bits of the jitted step."""
    recipe = octavo.recipe("fp8-current")
    x, kernel, dy = _arrays(rng)
    expected = STEP(x, kernel, jnp.asarray(SIZES), dy, 1, recipe)
    with jax.disable_jit():
        eager = _step(x, kernel, jnp.asarray(SIZES), dy, 1, recipe)
    with jax.enable_x64(True):
        wide = STEP(x, kernel, jnp.asarray(SIZES.astype(np.int64)), dy, 1, recipe)
    for found in (eager, wide):
        for mine, one in zip(found, expected, strict=True):
            same_bits(mine, one, "result")


def test_a_second_derivative_of_high_precision_is_refused(rng: Any) -> None:
    """By a sentence that says what has one, in place of JAX's about the call of the kernel: for x, kernel and bias."""
    x, kernel, _ = _arrays(rng)
    given = x, kernel, jnp.ones((G, N))

    def slope(backend: str, argument: int) -> Any:
        def loss(x: Any, kernel: Any, bias: Any) -> Any:
            y = octavo_jax.grouped_dense(x, kernel, SIZES, recipe=None, bias=bias, backend=backend)
            return jnp.sum(y**2)

        return jax.grad(lambda *of: jnp.sum(jax.grad(loss, argument)(*of)), argument)

    for argument in range(3):
        with pytest.raises(TypeError, match=r"GEMM of jax-native was differentiated.*backend='jax-reference'"):
            slope("jax-native", argument)(*given)
    assert jnp.isfinite(slope("jax-reference", 1)(x.at[SIZES.sum() :].set(0), *given[1:])).all()
