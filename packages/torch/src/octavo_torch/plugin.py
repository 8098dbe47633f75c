"""What the reference backend can do, said without importing torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from octavo_registry.contract.cards import BackendCard, Capability, Op
from octavo_registry.contract.hookspecs import hookimpl

if TYPE_CHECKING:
    from octavo_registry.contract.backend import Backend

NAME = "torch-reference"

_SCALINGS = frozenset({"delayed", "current", "row", "block", "mxfp8", "nvfp4"})
_QUANTIZERS: frozenset[Op] = frozenset({"quantize", "dequantize"})
_GEMMS: frozenset[Op] = frozenset({"fprop", "dgrad", "wgrad"})


def _rows(device: str, sizes: frozenset[Literal["host", "device"]], graph_safe: bool) -> tuple[Capability, ...]:
    products = "fp32" if device == "cpu" else "fp64"

    def row(ops: frozenset[Op], recipes: frozenset[str], emulated: str | None = None) -> Capability:
        return Capability(
            ops=ops,
            recipes=recipes,
            framework="torch",
            device=device,
            sizes=sizes,
            graph_safe=graph_safe,
            emulated=emulated,
            square_columns="block" in recipes,
        )

    return (
        row(_QUANTIZERS, _SCALINGS),
        row(_GEMMS, frozenset({"high_precision"})),
        row(_GEMMS, _SCALINGS, f"{products} products of dequantized operands"),
    )


CARD = BackendCard(
    name=NAME,
    api_level=5,
    priority=-100,
    needs=("torch>=2.11",),
    summary="Every recipe in plain torch operations: exact and slow, on any CPU and any NVIDIA GPU.",
    capabilities=(
        # on a CPU sizes are in host memory whatever a request calls them, and the GEMMs loop over their values
        *_rows("cpu", frozenset({"host", "device"}), graph_safe=False),
        # on a GPU device sizes are never read; host sizes are copied to it, which a captured graph may not do
        *_rows("cuda", frozenset({"device"}), graph_safe=True),
        *_rows("cuda", frozenset({"host"}), graph_safe=False),
    ),
)


@hookimpl
def octavo_backends() -> Iterable[BackendCard]:
    """The reference backend's card."""
    return (CARD,)


@hookimpl
def octavo_load(name: str) -> Backend | None:
    """The reference backend; imports torch."""
    if name != NAME:
        return None
    from octavo_torch.reference.backend import ReferenceBackend

    return ReferenceBackend()
