"""A backend that is quick to trace: what a front end runs and names does not depend on how a kernel computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo_registry
from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.quantizer import Direction
from octavo_jax import GroupedTensor
from octavo_jax.dispatch.device import device_of
from octavo_jax.quantizers.fused import Extras
from octavo_jax.remat.checkpoint_names import DIRECTIONS
from octavo_registry import BackendCard, Bound, Capability, Request, hookimpl
from octavo_registry.contract.cards import GATED, QUANTIZERS, Op

NAMES = ("remat-probe", "remat-probe-fused")
_PAYLOADS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "e2m1": jnp.uint8}
_SCALES = {"fp32": jnp.float32, "e8m0": jnp.uint8, "e4m3": jnp.float8_e4m3fn}


class _Probe:
    """Planes of the right shapes and dtypes from one sum of what is quantized; GEMMs that read all of their planes."""

    def __init__(self, name: str) -> None:
        everything = frozenset({"high_precision", "delayed", "current", "row", "block", "mxfp8", "nvfp4"})
        ops: set[Op] = {"quantize", "fprop", "dgrad", "wgrad"}
        if name == NAMES[1]:
            ops |= {"act_quantize", "dact_quantize", "norm_quantize"}
        capability = Capability(
            ops=frozenset(ops),
            recipes=everything,
            framework="jax",
            device=device_of(np.ones(1)).kind,
            square_columns=True,
        )
        self.card = BackendCard(name=name, api_level=4, priority=-300, capabilities=(capability,))

    @hookimpl
    def octavo_backends(self) -> tuple[BackendCard, ...]:
        return (self.card,)

    @hookimpl
    def octavo_load(self, name: str) -> _Probe | None:
        return self if name == self.card.name else None

    def refuses(self, request: Request) -> str | None:
        return None

    def bind(self, request: Request) -> Bound:
        if request.op == "quantize":
            return Bound(_quantizer(request), run_with_amax=_quantizer(request, with_amax=True))
        return Bound(_fused(request) if request.op in QUANTIZERS else _gemm(request))


def _jitted(function: Callable[..., Any], name: str, **options: Any) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    return jax.jit(function, **options)


def _planes(spec: QuantizerSpec, shape: tuple[int, ...], groups: int, total: Any) -> dict[Direction, list[Any]]:
    """Payload, scale and second level of each plane that is made; shared codes are made once."""
    tensor = _tensor(spec, shape, groups)

    def plane(direction: Direction) -> list[Any]:
        payload = jnp.full(tensor.payload_shape(direction), total).astype(_PAYLOADS[spec.format])
        # no device agrees with another on what a negative number is as an unsigned one
        scale = jnp.full(tensor.scale_shape(direction), 1 + jnp.abs(total)).astype(_SCALES[spec.scale_format])
        return [payload, scale, jnp.full(groups, total) if spec.scaling == "nvfp4" else None]

    made = spec.directions[:1] if spec.shares_codes else spec.directions
    return {direction: plane(direction) for direction in made}


def _tensor(spec: QuantizerSpec, shape: tuple[int, ...], groups: int) -> GroupedTensorSpec:
    return GroupedTensorSpec(shape=shape, groups=groups, quantizer=spec, ragged_axis=0 if len(shape) == 2 else None)


def _grouped(spec: QuantizerSpec, shape: tuple[int, ...], group_sizes: Any, made: dict[Direction, list[Any]]) -> Any:
    groups = shape[0] if group_sizes is None else group_sizes.shape[0]
    first = made[spec.directions[0]]
    arrays = [made.get(d, first) if d in spec.directions else [None] * 3 for d in DIRECTIONS]
    return GroupedTensor(_tensor(spec, shape, groups), group_sizes, *arrays[0], *arrays[1])


def _quantizer(request: Request, *, with_amax: bool = False) -> Callable[..., Any]:
    spec = request.quantizer
    assert spec is not None

    def quantize(x: Any, groups: int) -> Any:
        amax = jnp.full(groups, jnp.max(jnp.abs(x)).astype(jnp.float32))
        made = _planes(spec, x.shape, groups, jnp.sum(x.astype(jnp.float32)))
        return made, amax if with_amax else None

    compiled = _jitted(quantize, f"octavo_quantize_{spec.scaling}", static_argnames="groups")

    def run(x: Any, group_sizes: Any = None, **_: Any) -> Any:
        made, amax = compiled(x, groups=x.shape[0] if group_sizes is None else group_sizes.shape[0])
        q = _grouped(spec, x.shape, group_sizes, made)
        return (q, amax) if with_amax else q

    return run


def _fused(request: Request) -> Callable[..., Any]:
    """All that a fused quantizer makes comes out of the one call, statistics and the amax, too."""
    spec = request.quantizer
    assert spec is not None

    def quantize(arrays: Any, shape: tuple[int, int], groups: int) -> Any:
        total = sum(jnp.sum(array.astype(jnp.float32)) for array in arrays)
        rows, columns, whole = jnp.full(shape[0], total), jnp.full((groups, shape[1]), total), jnp.full(groups, total)
        activated = jnp.full(shape, total).astype(arrays[0].dtype)
        extras = Extras(activated=activated, amax=whole, dbias=columns, mean=rows, rstd=rows)
        return _planes(spec, shape, groups, total), extras

    compiled = _jitted(quantize, f"octavo_quantize_{spec.scaling}", static_argnames=("shape", "groups"))

    def run(*arguments: Any, group_sizes: Any = None, **_: Any) -> Any:
        *arrays, sizes = arguments
        given = tuple(array for array in arrays if array is not None)
        columns = arrays[-1].shape[1] if request.op == "dact_quantize" else arrays[0].shape[1]
        if request.op == "act_quantize" and request.activation in GATED:
            columns //= 2
        shape = (arrays[0].shape[0], columns)
        made, extras = compiled(given, shape=shape, groups=sizes.shape[0])
        extras = extras._replace(mean=extras.mean if request.norm == "layer" else None)
        return _grouped(spec, shape, sizes, made), extras

    return run


def _gemm(request: Request) -> Callable[..., Any]:
    equation = {"fprop": "mk,gnk->mn", "dgrad": "mn,gnk->mk", "wgrad": "mk,mn->nk"}[request.op]
    directions: dict[str, tuple[Direction, Direction]] = {
        "fprop": ("rowwise", "rowwise"),
        "dgrad": ("rowwise", "columnwise"),
        "wgrad": ("columnwise", "columnwise"),
    }

    def product(a: Any, b: Any, group_sizes: Any, bias: Any) -> Any:
        values = [_values(q, direction) for q, direction in zip((a, b), directions[request.op], strict=True)]
        made = jnp.einsum(equation, *values)
        if request.op == "wgrad":
            made = jnp.broadcast_to(made, (group_sizes.shape[0], *made.shape))
        return (made if bias is None else made + jnp.sum(bias)).astype(request.out_dtype)

    name = "octavo_wgrad" if request.op == "wgrad" else f"octavo_gemm_{request.op}"
    compiled = _jitted(product, name)
    return lambda a, b, group_sizes, *, bias=None, **_: compiled(a, b, group_sizes, bias)


def _values(operand: Any, direction: Direction) -> Any:
    if not isinstance(operand, GroupedTensor):
        return operand.astype(jnp.float32)
    payload, scale, second = operand.plane(direction)
    factor = jnp.sum(scale.astype(jnp.float32)) * (1 if second is None else jnp.sum(second))
    return payload.astype(jnp.float32) * factor


@pytest.fixture(scope="session")
def probes() -> Iterator[tuple[str, str]]:
    """Names for `backend=`: one with plain quantizers, which the front end composes with, and one with fused ones."""
    for name in NAMES:
        octavo_registry.register(_Probe(name), name)
    yield NAMES
    for name in NAMES:
        octavo_registry.unregister(name)


@pytest.fixture
def probe(probes: tuple[str, str]) -> str:
    """The one with plain quantizers."""
    return probes[0]
