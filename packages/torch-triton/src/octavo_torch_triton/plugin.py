"""The cards: what torch-triton can do, and where. Octavo reads them in every process, so nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from octavo_registry.contract import BackendCard, Capability, hookimpl
from octavo_triton import support

if TYPE_CHECKING:
    from octavo_registry.contract import Arch, Backend
    from octavo_triton.support import Support

NAME = "torch-triton"
INTERPRETER = "torch-triton-interpreter"

_RUN: frozenset[Arch] = frozenset({(9, 0)})
"""Where the conformance suite has passed: on an H100 and an H200."""


def _row(row: Support, device: str, **conditions: Any) -> Capability:
    return Capability(framework="torch", device=device, **row.fields, **conditions)


def _on_gpus() -> Iterable[Capability]:
    for first, last in support.CHIPS:
        for row in support.support_on(first, _RUN):
            on: dict[str, Any] = {"device": "cuda", "min_arch": first, "max_arch": last}
            if row.ops == support.MOVES:  # these take no sizes
                yield _row(row, graph_safe=True, **on)
                continue
            yield _row(row, sizes=frozenset({"device"}), graph_safe=True, **on)
            yield _row(row, sizes=frozenset({"host"}), **on)


CARD = BackendCard(
    name=NAME,
    api_level=5,
    priority=0,
    needs=("torch>=2.11", "triton>=3.6"),
    summary="Grouped quantization, GEMMs and moved rows in Triton, for NVIDIA GPUs from sm_80 on.",
    capabilities=tuple(_on_gpus()),
)

INTERPRETER_CARD = BackendCard(
    name=INTERPRETER,
    api_level=5,
    # below the reference backend's: it is for tests of the kernels, and serves those who name it
    priority=-200,
    needs=("torch>=2.11", "triton>=3.6"),
    summary="torch-triton's kernels on a CPU, where Triton interprets them (TRITON_INTERPRET=1): for tests.",
    capabilities=tuple(_row(row, "cpu") for row in support.INTERPRETED),
)


@hookimpl
def octavo_backends() -> Iterable[BackendCard]:
    """The backend, and its kernels in Triton's interpreter."""
    return (CARD, INTERPRETER_CARD)


@hookimpl
def octavo_load(name: str) -> Backend | None:
    """Either backend; imports torch and Triton."""
    if name not in (NAME, INTERPRETER):
        return None
    from octavo_torch_triton.backend import TritonBackend

    return TritonBackend(name)
