"""Forward-mode differentiation of a custom_vjp function: a TypeError that names it, wherever it is evaluated.

JAX refuses to push tangents through one with a sentence that names nothing, where the derivative is compiled or run:
long after the function was called, if `jax.jit` or `jax.linearize` is in between. So the function's arrays pass through
an identity whose tangent passes through a primitive. In reverse mode that is transposed away; evaluated or lowered, it
raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Tree = TypeVar("Tree")


def refuse_forward_mode(name: str, arguments: Tree, spared: Callable[[Any], bool] = lambda _: False) -> Tree:
    """The arguments of the public function called `name`, an array or a tree of arrays; TypeError where forward-mode
    differentiation reaches one. Parts that are `spared` stay as they are."""

    def passed(leaf: Any) -> Any:
        return _refuse_forward_mode(name, leaf) if not spared(leaf) and is_differentiable(leaf) else leaf

    result: Tree = jax.tree.map(passed, arguments, is_leaf=spared)
    return result


def is_differentiable(leaf: Any) -> bool:
    """Whether a derivative may be taken through it, as far as is known before."""
    return isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(leaf.dtype, jnp.inexact)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refuse_forward_mode(name: str, x: Array) -> Array:
    return x


@_refuse_forward_mode.defjvp
def _pushed(name: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    tangent: Array = _tangent_p.bind(*tangents, name=name)  # type: ignore[no-untyped-call]
    return primals[0], tangent


def _refuse(*_: Any, name: str, **__: Any) -> NoReturn:
    raise TypeError(
        f"{name} was given to forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize, jax.hessian) and is a "
        "custom_vjp function, which is differentiated in reverse alone: use jax.grad or jax.vjp"
    )


_tangent_p = Primitive("octavo_tangent")
_tangent_p.def_impl(_refuse)  # type: ignore[no-untyped-call]
_tangent_p.def_abstract_eval(lambda tangent, **_: tangent)  # type: ignore[no-untyped-call]
ad.deflinear2(_tangent_p, lambda cotangent, *_, **__: [cotangent])  # type: ignore[no-untyped-call]
batching.primitive_batchers[_tangent_p] = lambda operands, axes, **how: (_tangent_p.bind(*operands, **how), axes[0])  # type: ignore[no-untyped-call]
mlir.register_lowering(_tangent_p, _refuse)
