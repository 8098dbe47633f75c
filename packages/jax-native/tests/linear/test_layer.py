"""Whole layers of this backend alone: gradients against the definition, and what JAX's transformations make of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, export
from jax.sharding import PartitionSpec as P

import octavo_jax
import octavo_registry
from octavo import MXFP8, NVFP4, CurrentScaling, DelayedScaling, HighPrecision, Recipe, RowScaling
from octavo_jax.policies import save_quantized
from octavo_jax_native import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore:a layer with delayed scaling")  # its scales are given and stay

BACKEND = "jax-native"
SHAPE = (200, 96, 48, 4)
SIZES = np.array([100, 0, 50, 7], np.int32)
SEED = 20_261_122
EAGER = (DelayedScaling(), MXFP8(), NVFP4())
"""Recipes whose calls are dispatched one by one, too: one with a state, one with blocks, one that takes a seed."""

Dense = Callable[..., Array]


def _dense(recipe: Recipe, layer: Any = None, **arguments: Any) -> Dense:
    """y of x [M, K], kernel [G, K, N], sizes and bias, with the layer's scales where the recipe takes some."""
    state = None
    if recipe.stateful:
        assert isinstance(recipe, DelayedScaling)
        state = octavo_jax.init_delayed(recipe, SHAPE[3])
        if layer is not None:
            made = {"x": state.x, "w": state.kernel, "dy": state.grad}
            scaled = [type(one)(one.history, jnp.asarray(layer.scales[name])) for name, one in made.items()]
            state = type(state)(*scaled)

    def run(x: Array, kernel: Array, sizes: Any, bias: Array | None = None) -> Array:
        y = octavo_jax.grouped_dense(
            x,
            kernel,
            sizes,
            recipe=recipe,
            bias=bias,
            seed=SEED if recipe.stochastic else None,
            state=state,
            backend=BACKEND,
            **arguments,
        )
        return y if state is None else y[0]  # type: ignore[no-any-return]

    return run


def _inputs(rng: Any, dtype: Any = jnp.bfloat16) -> tuple[Array, Array]:
    m, k, n, g = SHAPE
    return jnp.asarray(rng.standard_normal((m, k)), dtype), jnp.asarray(rng.standard_normal((g, k, n)) / 8, dtype)


def _gradients(dense: Dense) -> Callable[..., tuple[Array, Array]]:
    def loss(x: Array, kernel: Array, sizes: Array) -> Array:
        return jnp.sum(jnp.tanh(dense(x, kernel, sizes).astype(jnp.float32)))

    return jax.grad(loss, (0, 1))


@cache
def _program(recipe: Recipe) -> Callable[..., tuple[Array, Array]]:
    """A recipe's gradients, compiled once for the tests that compare something else with them."""
    return jax.jit(_gradients(_dense(recipe)))


def test_gradients_are_the_definitions(recipe: Recipe, rng: Any, layer_of: Any, assert_product: Any) -> None:
    """y, dx and dw of the definition's codes, in float64, within the GEMMs' bounds; db sums dy's rows; nothing of the
    NaN tail is seen (faults.md 2, 4, 9, 11, 12, 38, 65). Under jit, and of three recipes with the same bits without."""
    layer = layer_of(rng, SHAPE)
    dense = _dense(recipe, layer)

    def both(x: Array, kernel: Array, sizes: Array, bias: Array, dy: Array) -> tuple[Array, ...]:
        y, pull = jax.vjp(lambda x, kernel, bias: dense(x, kernel, sizes, bias), x, kernel, bias)
        return y, *pull(dy)

    kernel = jnp.swapaxes(jnp.asarray(layer.w), 1, 2)
    given = jnp.asarray(layer.x), kernel, *(jnp.asarray(a) for a in (layer.sizes, layer.bias, layer.dy))
    y, dx, dkernel, db = made = jax.jit(both)(*given)
    if recipe in EAGER:
        for mine, eager in zip(made, both(*given), strict=True):
            np.testing.assert_array_equal(mine, eager)
    assert_product(layer, recipe, "fprop", y, bias=layer.bias)
    assert_product(layer, recipe, "dgrad", dx)
    assert_product(layer, recipe, "wgrad", jnp.swapaxes(dkernel, 1, 2))
    rows = np.split(layer.dy.astype(np.float64), np.cumsum(layer.sizes))[:-1]
    # error_bound's terms of a sum of at most 200 normals: 2^-8, its one rounding to bf16; 1e-4, twenty times its alpha,
    # 0.4247 2^-24 sqrt(201), times the norm sqrt(200)
    np.testing.assert_allclose(np.asarray(db, np.float64), [r.sum(0) for r in rows], rtol=2**-8, atol=1e-4)


def test_wide_results_of_narrow_operands(rng: Any, layer_of: Any, assert_product: Any) -> None:
    """preferred_element_type float32 with bf16 x and kernel: dy is fp32 in dgrad and wgrad too."""
    layer = layer_of(rng, SHAPE)
    kernel = jnp.swapaxes(jnp.asarray(layer.w), 1, 2)
    for recipe in (HighPrecision(), MXFP8()):
        dense = _dense(recipe, preferred_element_type=jnp.float32)
        y, pull = jax.vjp(lambda x, kernel, run=dense: run(x, kernel, layer.sizes), jnp.asarray(layer.x), kernel)
        dx, dw = pull(jnp.asarray(layer.dy).astype(jnp.float32))
        assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
        assert_product(layer, recipe, "fprop", y)


def test_one_program_for_every_size_vector(recipe: Recipe, rng: Any, sizes_of: Any, same_bits: Any) -> None:
    """Sizes are values: traced once, and the same bits as with these sizes alone (faults.md 36)."""
    x, kernel = _inputs(rng)
    traced = jax.jit(_gradients(_dense(recipe)))
    for _ in range(3):
        sizes = jnp.asarray(sizes_of(rng, SHAPE[3], SHAPE[0]))
        found = traced(x, kernel, sizes)
    for mine, alone in zip(found, _program(recipe)(x, kernel, sizes), strict=True):
        same_bits(mine, alone, str(sizes))
    assert traced._cache_size() == 1


def _calls(text: str, target: str) -> int:
    return text.count(f"custom_call @{target}(") or text.count(f'custom_call_target="{target}"')


def test_a_training_step_makes_one_plan(recipe: Recipe) -> None:
    """GEMMs and quantizers of the same sizes share it after XLA's common-subexpression pass; three GEMMs, no more, and
    as many quantizers as operands."""
    x, kernel = jnp.ones(SHAPE[:2], jnp.bfloat16), jnp.ones((SHAPE[3], *SHAPE[1:3]), jnp.bfloat16)
    text = jax.jit(_gradients(_dense(recipe))).lower(x, kernel, jnp.asarray(SIZES)).compile().as_text()
    assert _calls(text, "octavo_plan") == 1
    assert _calls(text, "octavo_gemm") == 3
    assert text.count('custom_call_target="octavo_quantize_') == (0 if recipe.kind == "high_precision" else 3)
    assert _calls(text, "octavo_convert") == 0


def test_what_nobody_reads_is_not_computed() -> None:
    """A forward pass makes row data and one GEMM, the gradient of x alone no weight gradient, nor its operands."""
    x, kernel, sizes = jnp.ones(SHAPE[:2]), jnp.ones((SHAPE[3], *SHAPE[1:3])), jnp.asarray(SIZES)
    dense = _dense(MXFP8())
    text = jax.jit(dense).lower(x, kernel, sizes).as_text()
    assert _calls(text, "octavo_gemm") == 1
    # Rows of x, columns of the kernel, which lies as [G, K, N].
    assert (text.count("row_codes"), text.count("col_codes")) == (1, 1)
    gradient = jax.jit(lambda *a: _gradients(dense)(*a)[0]).lower(x, kernel, sizes).as_text()
    assert _calls(gradient, "octavo_gemm") == 2
    # Of w both planes are read, of x and dy the row data alone.
    assert gradient.count("col_codes") == 1
    assert _calls(jax.jit(lambda *a: dense(*a).shape[0] + a[0]).lower(x, kernel, sizes).as_text(), "octavo_gemm") == 0


def test_forward_in_fprop_slots_that_are_high_precision(rng: Any, layer_of: Any, assert_product: Any) -> None:
    """Quantized forward, unquantized backward: plain arrays where the slot says so."""
    recipe = RowScaling(wgrad="high_precision", dgrad="high_precision")
    layer = layer_of(rng, SHAPE)
    kernel = jnp.swapaxes(jnp.asarray(layer.w), 1, 2)
    y, pull = jax.vjp(lambda x, kernel: _dense(recipe)(x, kernel, layer.sizes), jnp.asarray(layer.x), kernel)
    dx, dkernel = pull(jnp.asarray(layer.dy))
    assert_product(layer, recipe, "fprop", y)
    assert_product(layer, recipe, "dgrad", dx)
    assert_product(layer, recipe, "wgrad", jnp.swapaxes(dkernel, 1, 2))


def test_eval_shape_and_lowering_for_cuda(recipe: Recipe) -> None:
    """Shapes without computing; a program for CUDA on a machine that has no GPU."""
    x, kernel, sizes = jnp.ones(SHAPE[:2], jnp.bfloat16), jnp.ones((SHAPE[3], *SHAPE[1:3]), jnp.bfloat16), SIZES
    gradients = _gradients(_dense(recipe))
    dx, dw = jax.eval_shape(gradients, x, kernel, sizes)
    assert (dx.shape, dx.dtype, dw.shape, dw.dtype) == (x.shape, x.dtype, kernel.shape, kernel.dtype)
    text = str(jax.jit(gradients).trace(x, kernel, jnp.asarray(sizes)).lower(lowering_platforms=("cuda",)).as_text())
    assert _calls(text, "octavo_gemm") == 3
    assert "callback" not in text
    assert "has_side_effect = true" not in text


def test_recomputation_has_the_bits(recipe: Recipe, rng: Any, same_bits: Any) -> None:
    """jax.checkpoint changes when things are computed, not what: where codes are saved, and where they are made again,
    with a seed and without (faults.md 42, 43)."""
    x, kernel = _inputs(rng)
    wanted = _program(recipe)(x, kernel, jnp.asarray(SIZES))
    for policy in (save_quantized(), None) if recipe in (MXFP8(), NVFP4()) else (save_quantized(),):
        again = jax.jit(_gradients(jax.checkpoint(_dense(recipe), policy=policy)))(x, kernel, jnp.asarray(SIZES))
        for mine, kept in zip(again, wanted, strict=True):
            same_bits(mine, kept, f"recomputed with the policy {policy}")


def test_scan_over_layers(rng: Any, same_bits: Any) -> None:
    """Stacked kernels in lax.scan, forward and backward, have the bits of the layers in a row."""
    m, k, _, g = SHAPE
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    kernels = jnp.asarray(rng.standard_normal((3, g, k, k)) / 8, jnp.bfloat16)
    dense = _dense(MXFP8())

    def scanned(x: Array, kernels: Array) -> Array:
        return jax.lax.scan(lambda x, kernel: (dense(x, kernel, SIZES), None), x, kernels)[0]

    def unrolled(x: Array, kernels: Array) -> Array:
        for kernel in kernels:
            x = dense(x, kernel, SIZES)
        return x

    def both(function: Callable[..., Array]) -> Any:
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(function(*a).astype(jnp.float32) ** 2), (0, 1)))(
            x, kernels
        )

    (_, (dx, dw)), (_, (dx_unrolled, dw_unrolled)) = both(scanned), both(unrolled)
    same_bits(dx, dx_unrolled, "dx")
    same_bits(dw, dw_unrolled, "dw")


@pytest.mark.parametrize("recipe", ["delayed", "block-square-columns", "mxfp8-square-e5m2"], indirect=True)
def test_vmap_over_tokens_and_sizes(recipe: Recipe, rng: Any, sizes_of: Any, same_bits: Any) -> None:
    """A batch of layers with their own sizes, one after the other, with gradients; the kernel shared. Other recipes are
    in test_layer_transformations.py."""
    _, kernel = _inputs(rng)
    x = jnp.asarray(rng.standard_normal((3, *SHAPE[:2])), jnp.bfloat16)
    sizes = jnp.asarray(np.stack([sizes_of(rng, SHAPE[3], SHAPE[0]) for _ in range(3)]))
    batched = jax.jit(jax.vmap(_gradients(_dense(recipe)), in_axes=(0, None, 0)))(x, kernel, sizes)
    for i in range(3):
        for many, one in zip(batched, _program(recipe)(x[i], kernel, sizes[i]), strict=True):
            same_bits(many[i], one, f"batch {i}")


def test_vmap_over_accumulators(rng: Any, same_bits: Any) -> None:
    """Accumulating into a batch of arrays."""
    from octavo_registry import Request

    m, k, n, g = SHAPE
    request = Request("wgrad", "jax", "cpu", "float32", "float32", recipe=HighPrecision())
    run = octavo_registry.plan(request, backend=BACKEND).run
    x, dy, out = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, m, k), (2, m, n), (2, g, n, k)))

    def add(x: Array, dy: Array, out: Array) -> Array:
        return run(x, dy, jnp.asarray(SIZES), out=out, accumulate=True)  # type: ignore[no-any-return]

    batched = jax.jit(jax.vmap(add))(x, dy, out)
    for i in range(2):
        same_bits(batched[i], add(x[i], dy[i], out[i]), f"batch {i}")


def test_repeats_and_threads_change_no_bit(recipe: Recipe, rng: Any, same_bits: Any) -> None:
    """The same call, the same bits (faults.md 22, 41)."""
    x, kernel = _inputs(rng)
    gradients = _program(recipe)
    first = gradients(x, kernel, jnp.asarray(SIZES))
    for _ in range(3):
        for mine, other in zip(gradients(x, kernel, jnp.asarray(SIZES)), first, strict=True):
            same_bits(mine, other, "repeated")


def test_ragged_dot_uses_it(rng: Any, same_bits: Any) -> None:
    """jax.lax.ragged_dot's signature, the same layer."""
    x, kernel = _inputs(rng)
    y = octavo_jax.ragged_dot(x, kernel, SIZES, recipe=MXFP8(), backend=BACKEND)
    same_bits(y, _dense(MXFP8())(x, kernel, SIZES), "ragged_dot")


def test_a_preference_that_ends_before_the_backward_pass(rng: Any, same_bits: Any) -> None:
    """What was planned with the forward pass runs the backward pass: its planes have that plan's layouts."""
    x, kernel = _inputs(rng)

    def layer(x: Array, kernel: Array) -> Array:
        y: Array = octavo_jax.grouped_dense(x, kernel, SIZES, recipe=CurrentScaling())  # which XLA compiles soonest
        return y

    with octavo_registry.prefer("jax-reference"):
        y, pull = jax.vjp(layer, x, kernel)
        inside = pull(y)
    for mine, other in zip(pull(y), inside, strict=True):
        same_bits(mine, other, "outside")


def test_jvp_is_refused(rng: Any) -> None:
    """Reverse mode alone, with a sentence of ours."""
    x, kernel = _inputs(rng)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: _dense(MXFP8())(x, kernel, SIZES), (x,), (x,))


def test_export_of_a_step(rng: Any, same_bits: Any) -> None:
    """Serialized and read again."""
    x, kernel = _inputs(rng)
    gradients, sizes = jax.jit(_gradients(_dense(CurrentScaling()))), jnp.asarray(SIZES)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    exported = export.export(gradients, disabled_checks=checks)(x, kernel, sizes)
    again = export.deserialize(exported.serialize()).call(x, kernel, sizes)
    for mine, other in zip(again, gradients(x, kernel, sizes), strict=True):
        same_bits(mine, other, "exported")


def test_inside_shard_map(rng: Any, same_bits: Any) -> None:
    """Eight virtual devices, a kernel for each two of them, with JAX's check of types (its default) and without it: the
    gradient of the kernel is summed over both devices once, and all else is one device's bits."""
    if jax.device_count() < 8:
        pytest.skip("fewer than eight devices")
    mesh = jax.make_mesh((4, 2), ("ep", "dp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jnp.asarray(rng.standard_normal((8, 40, 32)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((8, 32, 48)) / 6, jnp.bfloat16)
    sizes = jnp.asarray(rng.multinomial(35, [0.5, 0.5], 8), jnp.int32)
    local, both = _dense(MXFP8()), P(("ep", "dp"))

    def sharded(check: bool) -> tuple[Array, Array]:
        run = jax.shard_map(local, mesh=mesh, in_specs=(both, P("ep"), both), out_specs=both, check_vma=check)
        return jax.jit(_gradients(run))(x.reshape(-1, 32), kernel, sizes.reshape(-1))

    (dx, dw), unchecked = sharded(True), sharded(False)
    one = jax.jit(_gradients(local))
    parts = [one(x[i], kernel[i // 2 * 2 : i // 2 * 2 + 2], sizes[i]) for i in range(8)]
    same_bits(dx, jnp.concatenate([part[0] for part in parts]), "dx")
    same_bits(dw, jnp.concatenate([parts[i][1] + parts[i + 1][1] for i in range(0, 8, 2)]), "dw")
    for mine, other in zip(unchecked, (dx, dw), strict=True):
        same_bits(mine, other, "without a check of types")
