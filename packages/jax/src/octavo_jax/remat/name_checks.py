"""The trace-time check that every quantized plane is named before anything reads it.

It follows the results of each `octavo_quantize_*` call through a differentiated program. Codes and scales of one byte
must meet a name first. A float32 result may be a scale, or an amax or a statistic, which have no names; a scale is
what a GEMM reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

_QUANTIZE = "octavo_quantize"
_READERS = ("octavo_gemm", "octavo_wgrad", "octavo_dequantize")
_CASTS = frozenset({"bitcast_convert_type", "convert_element_type", "copy", "optimization_barrier", "reduce_precision"})
_CASTS |= {"octavo_from_bits"}
_VIEWS = _CASTS | {"broadcast_in_dim", "dynamic_slice", "reshape", "slice", "squeeze", "transpose"}


@dataclass(frozen=True)
class _Plane:
    """One result of a quantize call that has no name yet."""

    maker: str
    kind: str
    one_byte: bool


@dataclass(frozen=True)
class _Fact:
    """What is known about a value: the unnamed planes it consists of, and whether a cotangent went into it."""

    planes: frozenset[_Plane] = frozenset()
    backward: bool = False

    def __or__(self, other: _Fact) -> _Fact:
        return _Fact(self.planes | other.planes, self.backward or other.backward)


_NOTHING = _Fact()


def unnamed_planes(function: Callable[..., Any], *args: Any) -> tuple[str, ...]:
    """A sentence for each quantized output of x or of a kernel that is read before it is named; () where all is well.

    function   differentiable, as a layer or a loss is; not itself a gradient. Where it differentiates inside, the
               quantized dy of that, which has no name, is reported too
    """

    def both(args: tuple[Any, ...], cotangents: Any) -> Any:
        results, pull = jax.vjp(function, *args)
        return results, pull(cotangents)

    results = jax.eval_shape(function, *args)
    cotangents = jax.tree.map(_cotangent, results)
    closed = jax.make_jaxpr(both)(args, cotangents)
    first = len(jax.tree.leaves(args))
    facts = [_Fact(backward=number >= first) for number in range(len(closed.jaxpr.invars))]
    sentences: dict[str, None] = {}
    _follow(closed.jaxpr, facts, sentences)
    return tuple(sentences)


def _cotangent(result: jax.ShapeDtypeStruct) -> Any:
    real = jnp.issubdtype(result.dtype, jnp.inexact)
    return jnp.zeros(result.shape, result.dtype if real else jax.dtypes.float0)


def _follow(jaxpr: Jaxpr, arguments: Sequence[_Fact], sentences: dict[str, None]) -> list[_Fact]:
    known: dict[Any, _Fact] = dict(zip(jaxpr.invars, arguments, strict=True))

    def fact(value: Any) -> _Fact:
        return _NOTHING if isinstance(value, Literal) else known.get(value, _NOTHING)

    for equation in jaxpr.eqns:
        results = _results(equation, [fact(value) for value in equation.invars], sentences)
        known.update(zip(equation.outvars, results, strict=True))
    return [fact(value) for value in jaxpr.outvars]


def _results(equation: JaxprEqn, facts: list[_Fact], sentences: dict[str, None]) -> list[_Fact]:
    called = str(equation.params.get("name", ""))
    primitive = equation.primitive.name
    everything = _Fact(backward=any(fact.backward for fact in facts))
    if primitive == "name":
        return [everything]
    if called.startswith(_QUANTIZE):
        _tell(facts, called, sentences, only_bytes=True)
        return [everything if everything.backward else _made(called, v.aval, equation) for v in equation.outvars]
    if called.startswith(_READERS):
        _tell(facts, called, sentences, only_bytes=False)
        return [everything] * len(equation.outvars)
    inner = list(jaxprs_in_params(equation.params))
    if inner:
        return _through(equation, inner, facts, sentences)
    if primitive in _VIEWS:
        return [replace(everything, planes=facts[0].planes) for _ in equation.outvars]
    _tell(facts, primitive, sentences, only_bytes=True)
    return [everything] * len(equation.outvars)


def _made(maker: str, aval: Any, equation: JaxprEqn) -> _Fact:
    """A plane, or nothing for a fused quantizer's other results: the array that it quantized, tables of sizes."""
    one_byte = aval.dtype.itemsize == 1 and aval.dtype != bool
    avals: list[Any] = [v.aval for v in equation.outvars]
    payloads = {made.shape for made in avals if made.ndim > 1 and made.dtype.itemsize == 1}
    scale = aval.dtype == jnp.float32 and aval.shape not in payloads
    if not one_byte and not scale:
        return _NOTHING
    return _Fact(frozenset({_Plane(maker, aval.str_short(), one_byte)}))


def _tell(facts: list[_Fact], reader: str, sentences: dict[str, None], *, only_bytes: bool) -> None:
    for plane in sorted({plane for fact in facts for plane in fact.planes}, key=lambda plane: plane.kind):
        if plane.one_byte or not only_bytes:
            sentences[
                f"{plane.maker} makes {plane.kind}, which {reader} reads before it is named; "
                "read what octavo_jax.name_planes returns"
            ] = None


def _through(equation: JaxprEqn, inner: list[Jaxpr], facts: list[_Fact], sentences: dict[str, None]) -> list[_Fact]:
    """Through a call, a branch or a loop; loops until nothing new goes around."""
    results = [_NOTHING] * len(equation.outvars)
    loop = equation.primitive.name in ("scan", "while")
    for _ in range(1 + loop * len(results)):
        before = results
        for jaxpr in inner:
            # Leading operands that a part does not take: a condition, the other part's constants.
            made = _follow(jaxpr, _for_part(equation, jaxpr, facts, results), sentences)
            if len(made) == len(results):
                results = [a | b for a, b in zip(results, made, strict=True)]
        if results == before:
            break
    return results


def _for_part(equation: JaxprEqn, part: Jaxpr, facts: list[_Fact], results: list[_Fact]) -> list[_Fact]:
    parameters = equation.params
    if equation.primitive.name == "scan":
        count, around = _consts_and_carried(parameters)
        carried = [a | b for a, b in zip(facts[count : count + around], results[:around], strict=True)]
        return [*facts[:count], *carried, *facts[count + around :]]
    if equation.primitive.name == "while":
        consts = (parameters["cond_nconsts"], parameters["body_nconsts"])
        carried = [a | b for a, b in zip(facts[sum(consts) :], results, strict=True)]
        own = facts[: consts[0]] if part is parameters["cond_jaxpr"].jaxpr else facts[consts[0] : sum(consts)]
        return [*own, *carried]
    return facts[len(facts) - len(part.invars) :]


def _consts_and_carried(parameters: dict[str, Any]) -> tuple[int, int]:
    """Of a scan: how many operands every turn reads, and how many a turn hands to the next one."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    consts, carried, _ = parameters["ft_in"].unpack()  # JAX 0.11 and later
    return len(consts), len(carried)
