"""The card of "jax-native". Imports neither JAX nor the kernels: `octavo_load` does, at first use."""

from __future__ import annotations

from typing import Any

from octavo_registry.cards import BackendCard, Capability, Op
from octavo_registry.hookspecs import hookimpl
from octavo_registry.request import Backend

NAME = "jax-native"

_RECIPES = frozenset({"delayed", "current", "row", "block", "mxfp8", "nvfp4"})
_OPS: frozenset[Op] = frozenset({"quantize", "dequantize"})
_LAYOUTS = frozenset({"plain", "rows", "panels"})  # octavo_native.layouts says what the last two are


def _row(device: str, **conditions: Any) -> Capability:
    return Capability(
        ops=_OPS,
        recipes=_RECIPES,
        framework="jax",
        device=device,
        graph_safe=True,
        layouts=_LAYOUTS,
        **conditions,
    )


CARD = BackendCard(
    name=NAME,
    api_level=1,
    priority=100,
    needs=("jax>=0.10.2", "octavo-native>=0.1"),
    summary="quantizers of every recipe as compiled kernels, for CPUs and for Hopper GPUs",
    capabilities=(_row("cpu"), _row("cuda", min_arch=(9, 0), max_arch=(9, 0))),
)


@hookimpl
def octavo_backends() -> tuple[BackendCard, ...]:
    """The native backend alone."""
    return (CARD,)


@hookimpl
def octavo_load(name: str) -> Backend | None:
    """The native backend, which imports JAX and the kernels and hands these to XLA."""
    if name != NAME:
        return None
    from octavo_jax_native.backend import NativeBackend

    return NativeBackend()
