"""The card of "jax-reference". Imports no framework: `octavo_load` does, at first use."""

from __future__ import annotations

from octavo_registry.contract.backend import Backend
from octavo_registry.contract.cards import ALL_ACTIVATIONS, QUANTIZERS, BackendCard, Capability, Op
from octavo_registry.contract.hookspecs import hookimpl

NAME = "jax-reference"

_RECIPES = frozenset({"high_precision", "delayed", "current", "row", "block", "mxfp8", "nvfp4"})
_OPS: frozenset[Op] = QUANTIZERS | {"dequantize", "fprop", "dgrad", "wgrad"}

CARD = BackendCard(
    name=NAME,
    api_level=5,
    priority=-100,
    needs=("jax>=0.10.2",),
    summary="Every recipe in plain jax.numpy: exact and slow, on any CPU and any NVIDIA GPU.",
    capabilities=tuple(
        Capability(
            ops=_OPS,
            recipes=_RECIPES,
            framework="jax",
            device=device,
            graph_safe=True,
            weights=frozenset({"nk", "kn"}),
            activations=ALL_ACTIVATIONS,
            square_columns=True,
            accumulation="fp32",
            emulated="fp32 products of dequantized operands",
        )
        for device in ("cpu", "cuda")
    ),
)


@hookimpl
def octavo_backends() -> tuple[BackendCard, ...]:
    """The reference backend alone."""
    return (CARD,)


@hookimpl
def octavo_load(name: str) -> Backend | None:
    """The reference backend, which imports JAX."""
    if name != NAME:
        return None
    from octavo_jax.reference.backend import ReferenceBackend

    return ReferenceBackend()
