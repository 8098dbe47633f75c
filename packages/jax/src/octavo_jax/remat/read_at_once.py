"""Planes that GEMMs read in the pass that quantizes, in a form that is never kept (`TwoForms.multiplied`).

Such an array has no checkpoint name, and takes more bytes than codes. Naming codes would be in vain if `jax.checkpoint`
saved this array in their place, or quantized again to have it although a policy saves the codes. So it passes through
an identity whose operands are the codes, too. Where a policy saves the codes, the backward pass makes the array of them
again. Where none does, nothing reads the codes, and they are not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import Recompute, checkpoint_name
from jax.extend.core import Primitive, Var
from jax.interpreters import batching, mlir, partial_eval

from octavo.quantizer import Direction
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.remat.partial_eval_rules import operands_to_compute


def read_at_once(
    multiplied: Array,
    codes: GroupedTensor,
    multiply: Callable[[GroupedTensor], GroupedTensor],
    direction: Direction,
    names: tuple[str, ...],
) -> Array:
    """`multiplied`, the payload of the plane of this direction; a backward pass makes it of saved `codes` again.

    codes      with this plane alone
    multiply   TwoForms.multiply; hashable
    names      the checkpoint names of these codes
    """
    leaves, tree = jax.tree.flatten(codes)
    return _bound((*leaves, multiplied), of_codes=_OfCodes(multiply, tree, direction), codes=len(leaves), names=names)


def _bound(operands: tuple[Array, ...], **params: Any) -> Array:
    made: Array = _read_at_once_p.bind(*operands, **params)  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True)
class _OfCodes:
    """The payload, from the leaves of codes."""

    multiply: Callable[[GroupedTensor], GroupedTensor]
    tree: Any
    direction: Direction

    def __call__(self, *leaves: Array) -> Array:
        made: Array = getattr(self.multiply(jax.tree.unflatten(self.tree, leaves)), self.direction)
        return made


@dataclass(frozen=True)
class _Batched:
    """`_OfCodes` for leaves with a batch axis each, or None; the payload has it in front."""

    of_codes: Callable[..., Array]
    axes: tuple[int | None, ...]

    def __call__(self, *leaves: Array) -> Array:
        made: Array = jax.vmap(self.of_codes, in_axes=self.axes)(*leaves)
        return made


def _run(*operands: Array, of_codes: Callable[..., Array], codes: int, names: tuple[str, ...]) -> Array:
    return of_codes(*operands) if len(operands) == codes else operands[-1]


def _abstract(*avals: Any, of_codes: Callable[..., Array], codes: int, names: tuple[str, ...]) -> Any:
    return jax.make_jaxpr(of_codes)(*avals).out_avals[0] if len(avals) == codes else avals[-1]


def _batch(
    operands: Sequence[Array], axes: Sequence[Any], *, of_codes: Any, codes: int, names: tuple[str, ...]
) -> tuple[Array, int]:
    of_batch = _Batched(of_codes, tuple(axes[:codes])) if codes else of_codes
    if len(operands) == codes:
        return of_batch(*operands), 0
    *leaves, multiplied = operands
    if axes[codes] is None:
        size = next(leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=False) if axis is not None)
        multiplied = jnp.broadcast_to(multiplied, (size, *multiplied.shape))
    else:
        multiplied = jnp.moveaxis(multiplied, axes[codes], 0)
    return _bound((*leaves, multiplied), of_codes=of_batch, codes=codes, names=names), 0


def _partial_eval_rule(
    saveable: Callable[..., Any], unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Var]]:
    """What the forward pass runs and what the recompute runs; whether the result is unknown to the first, and known to
    the second; and the operands that the recompute has to compute before."""
    codes = equation.params["codes"]
    alone = len(equation.invars) == codes
    # Codes are smaller than the array: the recompute starts from codes if the policy saves them, or if it would have to
    # compute the array first.
    if codes and (alone or _saves(saveable, equation) or not instantiated[-1]):
        recomputed, is_present = equation.replace(invars=equation.invars[:codes]), instantiated[:codes]
    else:
        recomputed, is_present = _of_values(equation), instantiated[codes:]
    inputs = operands_to_compute(recomputed, is_present)
    return None if any(unknown) else equation, recomputed, [any(unknown)], [True], inputs


def _saves(saveable: Callable[..., Any], equation: Any) -> bool:
    """Whether the policy saves codes by one of their names, or moves them to the host."""
    aval = equation.invars[0].aval
    answers = (saveable(_name_primitive(), aval, name=name) for name in equation.params["names"])
    return any(answer and answer is not Recompute for answer in answers)


@cache
def _name_primitive() -> Primitive:
    """That of `jax.ad_checkpoint.checkpoint_name`."""
    primitive: Primitive = jax.make_jaxpr(lambda x: checkpoint_name(x, "any"))(0.0).eqns[0].primitive  # type: ignore[no-untyped-call]
    return primitive


def _of_values(equation: Any) -> Any:
    """The equation without codes among its operands."""
    codes = equation.params["codes"]
    return equation.replace(invars=equation.invars[codes:], params={**equation.params, "codes": 0})


def _without_codes(used: list[bool], equation: Any) -> tuple[list[bool], Any]:
    """Dead code is removed once it is decided what is saved: codes that nothing else reads are not computed."""
    codes, count = equation.params["codes"], len(equation.invars)
    if not any(used):
        return [False] * count, None
    if count == codes:
        return [True] * count, equation
    return [False] * codes + [True], _of_values(equation)


_read_at_once_p = Primitive("octavo_read_at_once")
_read_at_once_p.def_impl(_run)  # type: ignore[no-untyped-call]
_read_at_once_p.def_abstract_eval(_abstract)  # type: ignore[no-untyped-call]
mlir.register_lowering(_read_at_once_p, mlir.lower_fun(_run, multiple_results=False))
batching.primitive_batchers[_read_at_once_p] = _batch
partial_eval.dce_rules[_read_at_once_p] = _without_codes
partial_eval.partial_eval_jaxpr_custom_rules[_read_at_once_p] = _partial_eval_rule
