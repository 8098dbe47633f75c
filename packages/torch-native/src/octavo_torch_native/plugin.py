"""What the native backend can do, said without importing torch or the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo_registry.contract import ALL_DTYPES, MOVES, Accumulation, BackendCard, Capability, Op, hookimpl

if TYPE_CHECKING:
    from octavo_registry.contract import Backend

NAME = "torch-native"

# octavo_native.layouts has these names too; importing it would load the kernels
ROWS, PANELS = "rows", "panels"

_SCALINGS = frozenset({"delayed", "current", "row", "block", "mxfp8", "nvfp4"})
_QUANTIZERS: frozenset[Op] = frozenset({"quantize", "dequantize", "act_quantize", "dact_quantize", "norm_quantize"})
_GEMMS: frozenset[Op] = frozenset({"fprop", "dgrad", "wgrad"})
_HIGH_PRECISION = frozenset({"high_precision"})
_HALVES: frozenset[DType] = frozenset({"bfloat16", "float16"})
_LAYOUTS = frozenset({PLAIN, ROWS, PANELS})


def _on_hopper(sizes: frozenset[Literal["host", "device"]], graph_safe: bool) -> tuple[Capability, ...]:
    def row(
        ops: frozenset[Op],
        recipes: frozenset[str],
        accumulation: Accumulation = "fp32",
        in_dtypes: frozenset[DType] = ALL_DTYPES,
        emulated: str | None = None,
    ) -> Capability:
        return Capability(
            ops=ops,
            recipes=recipes,
            framework="torch",
            device="cuda",
            in_dtypes=in_dtypes,
            min_arch=(9, 0),
            max_arch=(9, 0),
            sizes=sizes,
            graph_safe=graph_safe,
            layouts=_LAYOUTS if ops == _QUANTIZERS else frozenset({PLAIN}),
            accumulation=accumulation,
            emulated=emulated,
        )

    return (
        row(_QUANTIZERS, _SCALINGS),
        row(_GEMMS, _HIGH_PRECISION, "hopper_bf16", _HALVES),
        row(_GEMMS, _SCALINGS - {"mxfp8", "nvfp4"}, "hopper_fp8"),
        row(
            _GEMMS,
            frozenset({"mxfp8", "nvfp4"}),
            "hopper_bf16",
            emulated="bf16 products of exact dequantized copies",
        ),
        row(MOVES, _HIGH_PRECISION),
    )


CARD = BackendCard(
    name=NAME,
    api_level=5,
    priority=100,
    needs=("torch>=2.11", "octavo-native>=0.1"),
    summary="Grouped quantization and GEMMs by octavo-native's kernels: AVX2 on CPUs, Hopper on GPUs.",
    capabilities=(
        # on a CPU sizes are in host memory whatever a request calls them, and they are checked there
        Capability(ops=_QUANTIZERS, recipes=_SCALINGS, framework="torch", device="cpu", layouts=_LAYOUTS),
        Capability(ops=_GEMMS, recipes=_HIGH_PRECISION, framework="torch", device="cpu"),
        Capability(
            ops=_GEMMS,
            recipes=_SCALINGS,
            framework="torch",
            device="cpu",
            emulated="fp32 products of dequantized operands",
        ),
        Capability(ops=MOVES, recipes=_HIGH_PRECISION, framework="torch", device="cpu"),
        *_on_hopper(frozenset({"device"}), graph_safe=True),
        # host sizes are copied to the device, which a captured graph may not do
        *_on_hopper(frozenset({"host"}), graph_safe=False),
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
