"""What the native backend can do, said without importing torch or the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.grouped_tensor import PLAIN
from octavo_registry.cards import BackendCard, Capability, Op
from octavo_registry.hookspecs import hookimpl

if TYPE_CHECKING:
    from octavo_registry.request import Backend

NAME = "torch-native"

# octavo_native.layouts has these names too; importing it would load the kernels
ROWS, PANELS = "rows", "panels"

_OPS: frozenset[Op] = frozenset({"quantize", "dequantize"})
_SCALINGS = frozenset({"delayed", "current", "row", "block", "mxfp8", "nvfp4"})
_LAYOUTS = frozenset({PLAIN, ROWS, PANELS})

CARD = BackendCard(
    name=NAME,
    api_level=1,
    priority=100,
    needs=("torch>=2.11", "octavo-native>=0.1"),
    summary="Grouped quantization by octavo-native's kernels: AVX2 on CPUs, Hopper on GPUs.",
    capabilities=(
        # on a CPU sizes are in host memory whatever a request calls them, and they are checked there
        Capability(ops=_OPS, recipes=_SCALINGS, framework="torch", device="cpu", layouts=_LAYOUTS),
        Capability(
            ops=_OPS,
            recipes=_SCALINGS,
            framework="torch",
            device="cuda",
            min_arch=(9, 0),
            max_arch=(9, 0),
            sizes=frozenset({"device"}),
            graph_safe=True,
            layouts=_LAYOUTS,
        ),
        # host sizes are copied to the device, which a captured graph may not do
        Capability(
            ops=_OPS,
            recipes=_SCALINGS,
            framework="torch",
            device="cuda",
            min_arch=(9, 0),
            max_arch=(9, 0),
            sizes=frozenset({"host"}),
            layouts=_LAYOUTS,
        ),
    ),
)


@hookimpl
def octavo_backends() -> Iterable[BackendCard]:
    """The native backend's card."""
    return (CARD,)


@hookimpl
def octavo_load(name: str) -> Backend | None:
    """The native backend; imports torch and the kernels."""
    if name != NAME:
        return None
    from octavo_torch_native.backend import NativeBackend

    return NativeBackend()
