"""How often a program quantizes and multiplies, and whether every quantized plane has its name, read from its jaxpr.

Backends run a quantizer inside a `jax.jit` called `octavo_quantize_*` and the GEMMs inside `octavo_gemm_fprop`,
`octavo_gemm_dgrad` and `octavo_wgrad`. The functions here count these calls by name, and so can other tools.
A jaxpr shows what `jax.checkpoint` computes again. A compiled program may not: XLA:CPU merges the recompute of a flat
jit with the forward pass, so that it says little about the cost of a layer inside `lax.scan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters import partial_eval

from octavo_jax.remat.name_checks import unnamed_planes

QUANTIZE = "octavo_quantize"
GEMMS = ("octavo_gemm_fprop", "octavo_gemm_dgrad", "octavo_wgrad")

_PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "ffi_call", "pallas_call")


@dataclass(frozen=True)
class Runs:
    """How often one call of a program runs quantizers and GEMMs.

    quantize             quantizers of x, kernels and gradients, alone or fused with what comes before
    fprop, dgrad, wgrad  the three GEMMs
    by_name              each jitted function, `octavo_quantize_mxfp8` and the like
    in_while             how many of all these are inside a `lax.while_loop`: they count once, because the jaxpr does
                         not say how often the loop runs
    """

    quantize: int
    fprop: int
    dgrad: int
    wgrad: int
    by_name: Mapping[str, int]
    in_while: int = 0


def count_runs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Runs:
    """How often `function(*args, **kwargs)` runs each quantizer and GEMM; nothing is computed.

    args     trees of arrays, or of `jax.ShapeDtypeStruct`
    kwargs   anything; arrays among them are constants

    The body of a loop of known length (`lax.scan`, `lax.map`, `fori_loop` with host bounds) counts as often as it runs,
    that of a `while_loop` once, and a `lax.cond` as its branch with the most runs. As under `jax.jit`, what only makes
    results that nobody reads is left out.
    """
    closed = jax.make_jaxpr(lambda *args: function(*args, **kwargs))(*args)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    total, in_while = _runs(jaxpr)
    quantize, fprop, dgrad, wgrad = (
        sum(n for name, n in total.items() if name.startswith(prefix)) for prefix in (QUANTIZE, *GEMMS)
    )
    return Runs(quantize, fprop, dgrad, wgrad, MappingProxyType({name: n for name, n in total.items() if n}), in_while)


def _runs(jaxpr: Jaxpr) -> tuple[Counter[str], int]:
    total: Counter[str] = Counter()
    in_while = 0
    for equation in jaxpr.eqns:
        name = str(equation.params.get("name", ""))
        if name.startswith((QUANTIZE, *GEMMS)):
            total[name] += _reads_matrix(equation) and (name.startswith(QUANTIZE) or _multiplies(equation))
            continue
        inner = [_runs(part) for part in jaxprs_in_params(equation.params)]
        if equation.primitive.name == "cond":
            inner = [max(inner, key=lambda runs: runs[0].total())]
        weight = equation.params["length"] if equation.primitive.name == "scan" else 1
        for runs, loose in inner:
            total.update({name: weight * n for name, n in runs.items()})
            in_while += weight * (runs.total() if equation.primitive.name == "while" else loose)
    return total, in_while


def _reads_matrix(equation: JaxprEqn) -> bool:
    """Whether a part of a quantizer or GEMM has an operand, in floats or in codes.

    `lax.scan` moves what depends on group sizes alone out of its body, still under the function's name.
    """
    return any(_is_operand(v.aval) for v in equation.invars)


def _is_operand(aval: Any) -> bool:
    return bool(aval.ndim > 1 and (jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype == jnp.uint8))


def _multiplies(equation: JaxprEqn) -> bool:
    """Whether a part of a GEMM forms products, and is not only what follows some that a policy has saved."""
    return any(name in _PRODUCTS or name.startswith("octavo") for name in _primitives(equation))


def _primitives(equation: JaxprEqn) -> Iterator[str]:
    for part in jaxprs_in_params(equation.params):
        for inner in part.eqns:
            yield inner.primitive.name
            yield from _primitives(inner)


__all__ = ["Runs", "count_runs", "unnamed_planes"]
