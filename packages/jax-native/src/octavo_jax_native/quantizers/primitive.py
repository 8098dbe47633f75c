"""Quantizing as a JAX primitive whose unused planes are not computed.

`jax.ffi.ffi_call` keeps every result alive as long as one is used, and so does XLA; the kernels make each plane alone
as well as both. So this primitive leaves out unread results when JAX removes dead code: at every `jax.jit`, inside
scan, and where remat computes again. A plane may be asked for as codes, as values, or as both, and a program that reads
one of them makes that one. In everything else it is the ffi_call that it lowers to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

from octavo_jax_native.ffi.quantize import QuantizeCall
from octavo_jax_native.quantizers.forms import run_forms

_PLANES = ("row", "col")


def _run(*operands: Array, call: QuantizeCall) -> list[Array]:
    return run_forms(call, operands)


def _abstract(*avals: Any, call: QuantizeCall) -> Any:
    # The ffi_call's own rule knows shardings and manual axes, whose names differ from one JAX version to the next.
    return jax.make_jaxpr(partial(_run, call=call))(*avals).out_avals


def _batched(operands: Sequence[Array], axes: Sequence[Any], *, call: QuantizeCall) -> tuple[list[Array], list[int]]:
    made = jax.vmap(partial(_run, call=call), in_axes=tuple(axes))(*operands)
    return made, [0] * len(made)


def _form(name: str) -> str:
    """The form of a plane that a result belongs to, such as "row" of codes and scales or "row_values"; else itself."""
    prefix, _, part = name.partition("_")
    return prefix if prefix in _PLANES and part in ("codes", "scales") else name


def needed_results(names: Sequence[str], used: Sequence[bool]) -> list[bool]:
    """Which results are made where these are used: codes of a plane with their scales or not at all, and one plane at
    least, or where there is none what would be quantized.

    The dequantized copy is made from the row plane, and a second level beside codes or values of its plane.
    """
    wanted = {_form(name) for name, is_used in zip(names, used, strict=True) if is_used}
    # by plane: its forms, of which the first is made where something else needs the plane
    forms = {plane: [f for f in (plane, f"{plane}_values") if f in map(_form, names)] for plane in _PLANES}
    if "dequantized" in wanted:
        wanted.add("row")
    for plane, own in forms.items():
        if f"{plane}_global" in wanted and not wanted.intersection(own):
            wanted.add(own[0])
    every = [form for own in forms.values() for form in own]
    if not wanted.intersection(every):
        wanted.update(every[:1] or ["activated"])
    wanted.update(f"{plane}_global" for plane, own in forms.items() if wanted.intersection(own))
    return [_form(name) in wanted for name in names]


def _without_unused(used: list[bool], equation: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return [False] * len(equation.invars), None
    call: QuantizeCall = equation.params["call"]
    keep = needed_results([name for name, _, _ in call.results], used)
    smaller = replace(call, results=tuple(r for r, is_kept in zip(call.results, keep, strict=True) if is_kept))
    outvars = [v for v, is_kept in zip(equation.outvars, keep, strict=True) if is_kept]
    return [True] * len(equation.invars), equation.replace(params={"call": smaller}, outvars=outvars)


quantize_p = Primitive("octavo_native_quantize")
quantize_p.multiple_results = True
quantize_p.def_impl(_run)  # type: ignore[no-untyped-call]
quantize_p.def_abstract_eval(_abstract)  # type: ignore[no-untyped-call]
mlir.register_lowering(quantize_p, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[quantize_p] = _batched
partial_eval.dce_rules[quantize_p] = _without_unused


def quantize_call(call: QuantizeCall, operands: Mapping[str, Array]) -> dict[str, Array]:
    """The results of `call` by name."""
    made = quantize_p.bind(*(operands[name] for name in call.operands), call=call)  # type: ignore[no-untyped-call]
    return {name: value for (name, _, _), value in zip(call.results, made, strict=True)}
