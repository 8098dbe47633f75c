"""What the graph-safe backend can do, said without importing torch or the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo_registry.contract import BackendCard, hookimpl
from octavo_torch_native import plugin as native

if TYPE_CHECKING:
    from octavo_registry.contract import Backend

NAME = "torch-cudagraph"

CARD = BackendCard(
    name=NAME,
    api_level=native.CARD.api_level,
    # as torch-native's: of equal ones this card comes first for graph-safe requests and the other one for the rest
    priority=native.CARD.priority,
    needs=("torch>=2.11", "octavo-native>=0.2", "octavo-torch-native>=0.2"),
    summary="The kernels of torch-native in plans for CUDA graphs: sizes on the device, nothing from the host.",
    # the same kernels: whatever of torch-native's may be captured
    capabilities=tuple(row for row in native.CARD.capabilities if row.graph_safe),
)


@hookimpl
def octavo_backends() -> Iterable[BackendCard]:
    """The graph-safe backend's card."""
    return (CARD,)


@hookimpl
def octavo_load(name: str) -> Backend | None:
    """The graph-safe backend; imports torch and the kernels."""
    if name != NAME:
        return None
    from octavo_torch_cudagraph.backend import CudaGraphBackend

    return CudaGraphBackend()
