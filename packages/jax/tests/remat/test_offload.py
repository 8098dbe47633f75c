"""Offloading policies: quantized planes wait for the backward pass in the host's memory, and come back as they left."""

from __future__ import annotations

from collections import Counter
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params

import octavo
import octavo_jax
from octavo import GroupedTensorSpec
from octavo_jax.counting import count_runs
from octavo_jax.policies import plane_names, save_quantized

M, K, G, LAYERS = 64, 128, 2, 3
SIZES = [30, 20]


def _offloaded(*names: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def _gradients(kernels: Any, x: Any, recipe: octavo.Recipe, policy: Any, backend: str) -> Any:
    def layer(x: Any, kernel: Any) -> Any:
        y = octavo_jax.grouped_dense(x, kernel, SIZES, recipe=recipe, seed=1, backend=backend)
        return y * 2  # needs no y, so that one plane of each operand is read again

    def loss(kernels: Any, x: Any) -> Any:
        under = jax.checkpoint(layer, policy=policy)
        return jax.lax.scan(lambda x, kernel: (under(x, kernel), None), x, kernels)[0].astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1))(kernels, x)


def _arrays() -> tuple[Any, Any]:
    return jnp.ones((LAYERS, G, K, K), jnp.bfloat16), jnp.ones((M, K), jnp.bfloat16)


def _moved(jaxpr: Jaxpr, bytes_to: Counter[str]) -> Counter[str]:
    """Bytes that one layer's forward pass sends to the host and one layer's backward pass fetches, by where they go."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            for aval in (v.aval for v in equation.outvars):
                bytes_to[aval.memory_space.name] += aval.size * aval.dtype.itemsize  # type: ignore[attr-defined]
        for inner in jaxprs_in_params(equation.params):
            _moved(inner, bytes_to)
    return bytes_to


def _plane_bytes(recipe: octavo.Recipe, operand: Any, shape: tuple[int, ...]) -> int:
    """Of the columnwise plane, codes and scales."""
    quantizer = recipe.quantizer(operand)
    assert quantizer is not None
    spec = GroupedTensorSpec(shape=shape, groups=G, quantizer=quantizer, ragged_axis=0 if len(shape) == 2 else None)
    scale = {"fp32": 4, "e8m0": 1, "e4m3": 1}[quantizer.scale_format]
    second = 4 * G if quantizer.scaling == "nvfp4" else 0
    return prod(spec.payload_shape("columnwise")) + scale * prod(spec.scale_shape("columnwise")) + second


@pytest.mark.parametrize("name", ["fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_bytes_that_travel(name: str, probe: str) -> None:
    """One plane of x and one of the kernel go to the host in each layer's forward pass and come back in its backward
    pass, a byte an element where bf16 has two; nothing is quantized again. Names choose: x's planes alone travel where
    the policy says so, and the kernel is then quantized twice, unless another policy saves its planes."""
    recipe, of_x = octavo.recipe(name), _offloaded(*plane_names("x"))
    for policy, operands, again in (
        (_offloaded("quantization"), ("x", "w"), 0),
        (of_x, ("x",), LAYERS),
        (save_quantized(*plane_names("kernel"), base=of_x), ("x",), 0),
    ):
        step = partial(_gradients, recipe=recipe, policy=policy, backend=probe)
        wanted = sum(_plane_bytes(recipe, o, (M, K) if o == "x" else (G, K, K)) for o in operands)
        assert _moved(jax.make_jaxpr(step)(*_arrays()).jaxpr, Counter()) == {"Host": wanted, "Device": wanted}
        assert count_runs(step, *_arrays()).quantize == 3 * LAYERS + again


def test_bits_that_come_back(probe: str, rng: np.random.Generator) -> None:
    """The gradients are those of planes that stayed on the device: codes travel as bits, which no cast touches."""
    kernels, x = (jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in _arrays())
    results = [
        jax.jit(lambda *given, policy=policy: _gradients(*given, octavo.recipe("mxfp8"), policy, probe))(kernels, x)
        for policy in (_offloaded("quantization"), save_quantized())
    ]
    for made, wanted in zip(*results, strict=True):
        assert np.asarray(made).tobytes() == np.asarray(wanted).tobytes()
        assert np.asarray(wanted, np.float32).any()
