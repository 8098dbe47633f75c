"""Programs of `jax.export` whose arguments and results are octavo's pytrees: written, read, and called."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

import octavo
import octavo_jax
from octavo_jax.optimizers import AdamW


def _arguments() -> dict[str, Any]:
    logits = jnp.ones((4, 2))
    spec, ones, sizes = octavo.MXFP8().quantizer("x"), jnp.ones((32, 64), jnp.bfloat16), jnp.array([10, 22])
    assert spec is not None
    return {
        "a state of delayed scaling": lambda: octavo_jax.init_delayed("fp8-delayed", 2),
        "a quantized tensor": lambda: octavo_jax.quantize(ones, spec, sizes, backend="jax-reference"),
        "a routing": lambda: octavo_jax.moe.arrange(jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1)), 2),
        "statistics of a router": lambda: octavo_jax.moe.router_stats(octavo_jax.moe.route(logits, 1)),
        "a choice of experts": lambda: octavo_jax.choose_experts(logits, 1),
        "a tap": lambda: octavo_jax.new_tap(2),
        "statistics of a tensor": lambda: octavo_jax.tensor_stats(ones, spec, sizes),
        "a normalized tensor": lambda: octavo_jax.norm_quantize(ones, ones[0], spec, sizes, backend="jax-reference"),
        "quantizers": lambda: octavo_jax.quantizer_set("fp8-delayed", groups=2),
        "a state of AdamW, its moments signed and unsigned": lambda: AdamW(1e-3, state_bits=8).init([ones]),
        "losses of a router": lambda: octavo_jax.router_losses(logits, octavo_jax.choose_experts(logits, 1).choices),
    }


@pytest.mark.parametrize("argument", _arguments())
def test_a_program_is_written_and_read(argument: str) -> None:
    """Its bytes name the types of its arguments, static fields included; JAX refuses types that it does not know."""
    value = jax.eval_shape(_arguments()[argument])
    exported = export.export(jax.jit(lambda value: value))(value)
    read = export.deserialize(exported.serialize())
    assert read.in_tree == exported.in_tree
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), value)
    assert jax.tree.structure(read.call(zeros)) == jax.tree.structure(value)
