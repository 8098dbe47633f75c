"""The numpy backend's fused quantizers: the suite's float64 functions, rounded once, and the definition's quantizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from octavo_conformance.oracles.functions import activated, activated_gradient, normalized
from octavo_registry.contract.request import Request

Quantize = Callable[..., Any]


class Extras(NamedTuple):
    """As `octavo_registry.contract.fused` has them."""

    activated: Any
    forward: Any = None
    amax: Any = None
    dbias: Any = None
    mean: Any = None
    rstd: Any = None


def _rounded(values: Any, like: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(like.dtype)


def _finish(quantize: Quantize, request: Request, exact: Any, x: Any, sizes: Any, fault: str | None, how: Any) -> Any:
    made = _rounded(exact, x)
    quantized = exact.astype(np.float32) if fault == "unrounded" else made
    return quantize(request, quantized, sizes, **how), made


def act_quantize(
    quantize: Quantize, fault: str | None, request: Request, x: Any, sizes: Any, *, probs: Any = None, **how: Any
) -> Any:
    """act(x) probs."""
    kept = None if fault == "no-probs" else probs
    exact = activated(x, str(request.activation), kept).value
    q, made = _finish(quantize, request, exact, x, sizes, fault, how)
    return q, Extras(made)


def dact_quantize(
    quantize: Quantize,
    fault: str | None,
    request: Request,
    dy: Any,
    x: Any,
    sizes: Any,
    *,
    probs: Any = None,
    **how: Any,
) -> Any:
    """The gradient and its column sums."""
    exact = activated_gradient(dy, x, str(request.activation), probs).value
    q, made = _finish(quantize, request, exact, x, sizes, fault, how)
    return q, Extras(made, dbias=_column_sums(made, sizes, fault))


def _column_sums(made: Any, sizes: Any, fault: str | None) -> Any:
    ends = np.cumsum(sizes)
    if fault == "tail-in-dbias":
        ends[-1] = len(made)
    starts = [0, *ends[:-1]]
    sums = [made[a:b].astype(np.float64).sum(0) for a, b in zip(starts, ends, strict=True)]
    return np.array(sums, np.float32)


def act_values(
    fault: str | None, request: Request, x: Any, sizes: Any, *, probs: Any = None, wanted: Any = None
) -> Extras:
    """act(x) probs without codes."""
    kept = None if fault == "other-values" else probs
    return Extras(_rounded(activated(x, str(request.activation), kept).value, x))


def dact_values(
    fault: str | None, request: Request, dy: Any, x: Any, sizes: Any, *, probs: Any = None, wanted: Any = None
) -> Extras:
    """The gradient without codes, and beside it act(x) probs."""
    made = _rounded(activated_gradient(dy, x, str(request.activation), probs).value, x)
    kept = None if fault == "other-forward" else probs
    forward = _rounded(activated(x, str(request.activation), kept).value, x)

    def where_wanted(name: str, value: Any) -> Any:
        return value if wanted is None or name in wanted else None

    return Extras(made, where_wanted("forward", forward), dbias=where_wanted("dbias", _column_sums(made, sizes, fault)))


def norm_quantize(
    quantize: Quantize,
    fault: str | None,
    request: Request,
    x: Any,
    gamma: Any,
    beta: Any,
    sizes: Any,
    *,
    epsilon: float = 1e-6,
    **how: Any,
) -> Any:
    """The normalized rows and their statistics."""
    exact = normalized(x, gamma, beta, str(request.norm), 0.0 if fault == "no-epsilon" else epsilon)
    q, made = _finish(quantize, request, exact.y.value, x, sizes, fault, how)
    mean = None if exact.mean is None else exact.mean.value.astype(np.float32)
    return q, Extras(made, mean=mean, rstd=exact.rstd.value.astype(np.float32))
