"""The card of "jax-native". Neither imports JAX nor loads the kernels: `octavo_load` does, at first use."""

from __future__ import annotations

from typing import Any

from octavo_native import support
from octavo_native.layouts import LAYOUTS_OF_DIRECTION
from octavo_registry.contract import ALL_DTYPES, Backend, BackendCard, Capability, Weight, hookimpl

NAME = "jax-native"

_WEIGHTS: frozenset[Weight] = frozenset({"nk", "kn"})
_LAYOUTS = frozenset(layout for known in LAYOUTS_OF_DIRECTION.values() for layout in known)


def _rows(device: support.Device, **conditions: Any) -> tuple[Capability, ...]:
    return tuple(
        Capability(
            ops=row.ops,
            recipes=row.recipes,
            framework="jax",
            device=device,
            graph_safe=True,
            in_dtypes=row.in_dtypes or ALL_DTYPES,
            accumulation=row.accumulation,
            batch_invariant=row.batch_invariant,
            emulated=row.emulated,
            activations=support.ACTIVATIONS,
            square_columns=row.square_columns,
            **({"layouts": _LAYOUTS} if row.ops == support.QUANTIZE_OPS else {"weights": _WEIGHTS}),
            **conditions,
        )
        for row in support.SUPPORT[device]
    )


CARD = BackendCard(
    name=NAME,
    api_level=5,
    priority=100,
    needs=("jax>=0.10.2", "octavo-native>=0.2"),
    summary="Grouped quantization and GEMMs by octavo-native's kernels: AVX2 on CPUs, Hopper on GPUs.",
    capabilities=(*_rows("cpu"), *_rows("cuda", min_arch=support.HOPPER, max_arch=support.HOPPER)),
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
