"""What `jax.checkpoint` keeps of a quantized operand are its bits, on the device that would change floats."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
import octavo_numerics
from octavo_jax.policies import save_quantized

M, K, N, G = 40, 32, 16, 2
SIZES = [22, 10]
KINDS = ("fp8-delayed", "fp8-block", "mxfp8", "nvfp4")
"""Every dtype of codes and scales, given and found, with the planes of the two operands alike and not."""


def _read(q: Any, factor: Any) -> Any:
    """Something whose gradient with respect to `factor` reads every array of q."""
    planes = [getattr(q, name) for name in octavo_numerics.PLANES]
    return sum(jnp.sum(plane.astype(jnp.float32) * factor) for plane in planes if plane is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_planes_are_the_ones_computed(kind: str, rng: np.random.Generator) -> None:
    """Every plane of x and of a kernel that a compiled, rematerialized program keeps has the bytes of the definition.

    XLA:CPU would turn named floats above e4m3's IEEE range, 240, into NaN, and E8M0 and E2M1 into others; such codes
    are here: scales are made from the largest element, or are 1.
    """
    recipe = octavo.recipe(kind)
    x = (rng.standard_normal((M, K)) * 300).astype(np.float32)
    w = (rng.standard_normal((G, N, K)) * 300).astype(np.float32)
    scale = np.ones(G, np.float32) if recipe.stateful else None
    specs: dict[str, Any] = {operand: recipe.quantizer(operand) for operand in ("x", "w")}  # type: ignore[arg-type]
    operands = {"x": (x, SIZES), "w": (w, None)}

    @jax.jit
    def kept(factor: Any) -> Any:
        def step(factor: Any) -> Any:
            read = 0.0
            for name, (values, sizes) in operands.items():
                q = octavo_jax.quantize(values, specs[name], sizes, scale=scale, backend="jax-reference")
                read += _read(q, factor)
            return read

        return jax.tree.leaves(jax.vjp(jax.checkpoint(step, policy=save_quantized()), factor)[1])

    top = 0.0
    found = [np.asarray(leaf) for leaf in kept(1.0)]
    for name, spec in specs.items():
        values, sizes = operands[name]
        sizes = None if sizes is None else np.array(sizes)
        q = octavo_numerics.quantize(values, spec, sizes, operand=name, scale=scale)  # type: ignore[arg-type]
        for plane_name, plane in octavo_numerics.valid(q).items():
            assert any(_begins_with(leaf, plane) for leaf in found), f"{name}.{plane_name}"
        assert q.rowwise is not None
        top = max(top, float(np.nanmax(np.abs(q.rowwise.astype(np.float32)))))
    assert top > 240 or kind == "nvfp4"


def _begins_with(leaf: np.ndarray, plane: np.ndarray) -> bool:
    """Rows of no group follow in what is kept."""
    if leaf.ndim != plane.ndim or leaf.shape[1:] != plane.shape[1:]:
        return False
    return leaf[: len(plane)].tobytes() == plane.tobytes()


POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "everything but a name": jax.checkpoint_policies.save_anything_except_these_names("quantization"),
}


@pytest.mark.parametrize("name", ["quantization", None])
@pytest.mark.parametrize("policy", POLICIES)
def test_codes_that_a_policy_saves_without_a_name(policy: str, name: str | None, rng: np.random.Generator) -> None:
    """A layer of one's own keeps codes for its backward pass and reads them in the forward pass, too: then
    `jax.checkpoint` rounds whatever floats it saves of them, and codes above 240 would be NaN."""
    spec = octavo.CurrentScaling().quantizer("x", checkpoint_name=name)
    assert spec is not None
    values = jnp.asarray(rng.standard_normal((M, K)), jnp.float32)

    def forward(x: Any) -> Any:
        q = octavo_jax.quantize(x, spec, backend="jax-reference")
        return octavo_jax.dequantize(q, backend="jax-reference"), q

    layer = jax.custom_vjp(lambda x: forward(x)[0])
    layer.defvjp(forward, lambda q, dy: (octavo_jax.dequantize(q, backend="jax-reference") * dy,))

    def gradient(layer: Any) -> Any:
        return jax.jit(jax.grad(lambda x: jnp.sum(layer(x))))(values)

    wanted = gradient(layer)
    found = gradient(jax.checkpoint(layer, policy=POLICIES[policy]))
    assert np.isfinite(wanted).all()
    assert found.tobytes() == wanted.tobytes()


def test_layers_without_jit_save_bits(rng: np.random.Generator) -> None:
    """`jax.disable_jit` shows JAX the codes that a layer keeps, which are in programs of its own otherwise."""
    x, kernel = jnp.asarray(rng.standard_normal((M, K)), jnp.float32), jnp.asarray(rng.standard_normal((G, K, N)))

    def layer(x: Any, kernel: Any) -> Any:
        return octavo_jax.grouped_dense(x, kernel, SIZES, recipe="fp8-current", backend="jax-reference")

    with jax.disable_jit():
        _, pull = jax.eval_shape(
            lambda *a: jax.vjp(jax.checkpoint(layer, policy=POLICIES["everything"]), *a), x, kernel
        )
    assert {leaf.dtype for leaf in jax.tree.leaves(pull)} <= {jnp.dtype(kind) for kind in ("f4", "u1", "u4", "i4")}
