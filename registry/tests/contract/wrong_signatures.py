"""Answers whose functions do not fit, for the type checker: an error that it does not report is one itself.

`nox -s types` checks this file with `warn_unused_ignores`, so each `type: ignore` here is an assertion.
"""

from __future__ import annotations

from typing import Any

from octavo_registry.contract import (
    AnyBound,
    AnyRequest,
    Backend,
    BoundFprop,
    BoundQuantize,
    BoundWgrad,
    GemmRequest,
    QuantizeRequest,
)


class Array: ...


class Codes: ...


def right(
    x: Codes, w: Codes, sizes: Any, *, bias: Array | None = None, bias_scales: Array | None = None, out: Any = None
) -> Array:
    return Array()


def no_bias(x: Codes, w: Codes, sizes: Any, *, out: Array | None = None) -> Array:
    return Array()


def one_more(
    x: Codes, w: Codes, sizes: Any, *, bias: Any = None, bias_scales: Any = None, out: Any, fast: bool
) -> Array:
    return Array()


def no_codes(
    x: Array, sizes: Any = None, *, seed: Any = None, operand: Any = None, group_offset: Any = 0, scale: Any = None
) -> Array:
    return Array()


def gives_amax_alone(
    x: Array, sizes: Any = None, *, seed: Any = None, operand: Any = None, group_offset: Any = 0, scale: Any = None
) -> Array:
    return Array()


fits: BoundFprop[Array, Codes] = BoundFprop(right)
misses_an_argument: BoundFprop[Array, Codes] = BoundFprop(no_bias)  # type: ignore[arg-type]
needs_another: BoundFprop[Array, Codes] = BoundFprop(one_more)  # type: ignore[arg-type]
is_of_another_operation: BoundWgrad[Array, Codes] = BoundWgrad(right)  # type: ignore[arg-type]
returns_no_codes: BoundQuantize[Array, Codes] = BoundQuantize(no_codes)  # type: ignore[arg-type]
returns_amax_alone: BoundQuantize[Array, Array] = BoundQuantize(no_codes, with_amax=gives_amax_alone)  # type: ignore[arg-type]


class Whole(Backend):
    """`kernels` comes with the class."""

    def refuses(self, request: AnyRequest) -> str | None:
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        if isinstance(request, QuantizeRequest):
            return request.quantizer  # type: ignore[return-value]
        if isinstance(request, GemmRequest):
            return BoundFprop(right)
        raise ValueError(request.recipe.kind)  # type: ignore[union-attr]


backend: Backend = Whole()
kernels = backend.kernels(QuantizeRequest, 8)  # type: ignore[arg-type]
