"""What the native backend can do, said without importing torch or loading the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from octavo.grouped_tensor import PLAIN
from octavo_native import support
from octavo_native.layouts import LAYOUTS_OF_DIRECTION
from octavo_registry.contract import ALL_DTYPES, BackendCard, Capability, hookimpl

if TYPE_CHECKING:
    from octavo_registry.contract import Backend, Weight

NAME = "torch-native"

# [G, N, K] and [G, K, N], both as they lie: see octavo_registry.contract.weights
_WEIGHTS: frozenset[Weight] = frozenset({"nk", "kn"})
_LAYOUTS = frozenset(layout for known in LAYOUTS_OF_DIRECTION.values() for layout in known)


def _rows(device: support.Device, **conditions: Any) -> tuple[Capability, ...]:
    return tuple(
        Capability(
            ops=row.ops,
            recipes=row.recipes,
            framework="torch",
            device=device,
            in_dtypes=row.in_dtypes or ALL_DTYPES,
            layouts=_LAYOUTS if row.ops == support.QUANTIZE_OPS else frozenset({PLAIN}),
            weights=_WEIGHTS if row.ops == support.GEMM_OPS else frozenset({"nk"}),
            activations=support.ACTIVATIONS,
            square_columns=row.square_columns,
            accumulation=row.accumulation,
            batch_invariant=row.batch_invariant,
            emulated=row.emulated,
            **conditions,
        )
        for row in support.SUPPORT[device]
    )


# codes of a master are those of the weights of block scaling
_STEP = Capability(
    ops=frozenset({"adamw_step"}),
    recipes=frozenset({"high_precision", "block"}),
    framework="torch",
    device="cuda",
    out_dtypes=frozenset({"float32", "bfloat16"}),
    min_arch=support.HOPPER,
    max_arch=support.HOPPER,
    layouts=_LAYOUTS,
    sizes=frozenset({"device"}),
    graph_safe=True,
)

_HOPPER = {"min_arch": support.HOPPER, "max_arch": support.HOPPER}

CARD = BackendCard(
    name=NAME,
    api_level=5,
    priority=100,
    needs=("torch>=2.11", "octavo-native>=0.2"),
    summary="Grouped quantization and GEMMs by octavo-native's kernels: AVX2 on CPUs, Hopper on GPUs.",
    capabilities=(
        # on a CPU sizes are in host memory whatever a request calls them, and they are checked there
        *_rows("cpu"),
        *_rows("cuda", **_HOPPER, sizes=frozenset({"device"}), graph_safe=True),
        # host sizes are copied to the device, which a captured graph may not do
        *_rows("cuda", **_HOPPER, sizes=frozenset({"host"}), graph_safe=False),
        _STEP,
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
