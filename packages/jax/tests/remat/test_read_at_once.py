"""What a GEMM reads in the place of codes under `jax.checkpoint`: made of codes that a policy saves, else quantized."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params

import octavo
from octavo import GroupedTensorSpec
from octavo_jax import GroupedTensor
from octavo_jax.policies import save_quantized
from octavo_jax.remat.checkpoint_names import name_planes, names_of_plane
from octavo_jax.remat.read_at_once import read_at_once

M, C = 4, 32
_QUANTIZER = octavo.MXFP8().quantizer("x")
assert _QUANTIZER is not None
SPEC = GroupedTensorSpec(shape=(M, C), groups=1, quantizer=_QUANTIZER.with_orientation("rowwise"))


def _multiply(q: GroupedTensor) -> GroupedTensor:
    """Halves of the codes."""
    codes, _, _ = q.plane("rowwise")
    return GroupedTensor(q.spec, rowwise=codes.astype(jnp.bfloat16) / 2)


@jax.jit
def _quantize(x: Any) -> Any:
    """Codes, scales, and halves of the codes: a sine tells that x is quantized."""
    codes = (x + jnp.sin(jnp.float32(0))).astype(jnp.float8_e4m3fn)
    return codes, jnp.zeros((M, 1), jnp.uint8), codes.astype(jnp.bfloat16) / 2


def _read(x: Any, name: str | None) -> Any:
    codes, scales, halves = _quantize(x)
    q = name_planes(GroupedTensor(SPEC, rowwise=codes, rowwise_scale=scales), name)
    return read_at_once(halves, q, _multiply, "rowwise", names_of_plane(q, "rowwise", name))


def _loss(x: Any, factor: Any, policy: Any, name: str | None = "quantization") -> Any:
    def layer(factor: Any) -> Any:
        return jnp.sum(_read(x, name).astype(jnp.float32) * factor)

    return jax.checkpoint(layer, policy=policy)(factor) if policy != "no remat" else layer(factor)


def _count(jaxpr: Jaxpr, found: Counter[str]) -> Counter[str]:
    for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        found["of codes"] += equation.params.get("codes") == len(equation.invars)
        for inner in jaxprs_in_params(equation.params):
            _count(inner, found)
    return found


def _all_but_casts(primitive: Any, *_: Any, **__: Any) -> bool:
    """Saves the halves, and codes without a name, too."""
    return bool(primitive.name != "convert_element_type")


def _offloaded(name: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[name],
        offload_src="device",
        offload_dst="pinned_host",
    )


OFFLOADED = _offloaded("quantization")


@pytest.mark.parametrize(
    ("policy", "quantized", "of_codes", "kept"),
    [
        (None, 2, 0, 0),
        (jax.checkpoint_policies.dots_saveable, 2, 0, 0),
        (save_quantized(), 1, 1, 1),
        (save_quantized("quantization.x.rowwise"), 1, 1, 1),
        (save_quantized("quantization.x.columnwise"), 2, 0, 0),
        (_all_but_casts, 1, 1, 1),
        (OFFLOADED, 1, 1, 1),
        (_offloaded("y"), 2, 0, 0),
    ],
    ids=["none", "dots", "planes", "rows", "columns", "all but casts", "offloaded", "others offloaded"],
)
def test_what_a_backward_pass_makes_again(policy: Any, quantized: int, of_codes: int, kept: int) -> None:
    """How often x is quantized and its codes are read, and the bytes of an element that are kept: those of codes, and
    never of what a GEMM reads."""
    x, name = jnp.ones((M, C), jnp.float32), None if policy is _all_but_casts else "quantization"

    def pulled(factor: Any) -> Any:
        return jax.vjp(lambda factor: _loss(x, factor, policy, name), factor)[1]

    def gradient(factor: Any) -> Any:
        return jax.value_and_grad(lambda factor: _loss(x, factor, policy, name))(factor)

    jaxpr = jax.make_jaxpr(gradient)(1.0).jaxpr
    live, _ = jax.interpreters.partial_eval.dce_jaxpr(jaxpr, [True, True])
    found = _count(live, Counter())
    assert (found["sin"], found["of codes"]) == (quantized, of_codes)
    if policy is OFFLOADED:
        return
    leaves = jax.tree.leaves(jax.eval_shape(pulled, 1.0))
    assert sum(leaf.dtype.itemsize for leaf in leaves if leaf.size == M * C and leaf.dtype != jnp.float32) == kept


def test_unread_codes_are_let_go() -> None:
    """A program of values makes no codes where dead code is removed. A batch of them is a batch."""
    x = jnp.asarray(np.arange(2 * M * C).reshape(2, M, C) % 16, jnp.float32)
    closed = jax.make_jaxpr(lambda x: _read(x, "quantization"))(x[0])
    live, _ = jax.interpreters.partial_eval.dce_jaxpr(closed.jaxpr, [True])
    assert _count(closed.jaxpr, Counter())["name"] > 0
    assert _count(live, Counter())["name"] == 0

    def gradient(x: Any, policy: Any) -> Any:
        return jax.grad(lambda factor: _loss(x, factor, policy))(1.0)

    for policy in ("no remat", None, save_quantized()):
        batch = jax.jit(jax.vmap(lambda x, policy=policy: gradient(x, policy)))(x)
        np.testing.assert_array_equal(batch, jnp.sum(x, axis=(1, 2)) / 2)


@pytest.mark.parametrize("inner", [None, save_quantized()], ids=["none", "planes"])
@pytest.mark.parametrize("outer", [None, save_quantized()], ids=["none", "planes"])
def test_remat_inside_remat(inner: Any, outer: Any) -> None:
    """What one `jax.checkpoint` has settled another one around it can settle again."""
    x = jnp.asarray(np.arange(M * C).reshape(M, C) % 16, jnp.float32)
    around = jax.checkpoint(lambda factor: _loss(x, factor, inner) ** 2, policy=outer)
    assert jax.jit(jax.grad(around))(0.5) == jnp.sum(x / 2) ** 2  # integers
