"""Forward-mode differentiation of a layer: a TypeError that names the layer, wherever the derivative is evaluated.

A layer is a custom_vjp function, and JAX refuses to push tangents through one with a sentence that names nothing, where
the derivative is compiled or run: long after the layer was called, if `jax.jit` or `jax.linearize` is in between. So
the layer's arrays pass through an identity whose tangent passes through a primitive. In reverse mode that is transposed
away; evaluated or lowered, it raises.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def reverse_alone(name: str, x: Array) -> Array:
    """x; TypeError where a derivative of the function called `name` is pushed forward through it."""
    return x


@reverse_alone.defjvp
def _pushed(name: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    tangent: Array = _tangent_p.bind(*tangents, name=name)  # type: ignore[no-untyped-call]
    return primals[0], tangent


def _refuse(*_: Any, name: str, **__: Any) -> NoReturn:
    raise TypeError(
        f"{name} was given to forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize, jax.hessian) and is a "
        "custom_vjp function: rounding to codes has no derivative to push forward, so use jax.grad or jax.vjp"
    )


_tangent_p = Primitive("octavo_tangent")
_tangent_p.def_impl(_refuse)  # type: ignore[no-untyped-call]
_tangent_p.def_abstract_eval(lambda tangent, **_: tangent)  # type: ignore[no-untyped-call]
ad.deflinear2(_tangent_p, lambda cotangent, *_, **__: [cotangent])  # type: ignore[no-untyped-call]
batching.primitive_batchers[_tangent_p] = lambda operands, axes, **how: (_tangent_p.bind(*operands, **how), axes[0])  # type: ignore[no-untyped-call]
mlir.register_lowering(_tangent_p, _refuse)
