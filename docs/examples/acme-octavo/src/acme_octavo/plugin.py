"""The card: what acme can do. Octavo reads it in every process, so this module imports no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_registry.contract import BackendCard, Capability, hookimpl

if TYPE_CHECKING:
    from acme_octavo.backend import AcmeBackend

NAME = "acme"

CARD = BackendCard(
    name=NAME,
    api_level=5,
    # Below the reference backend's -100: installed, the example serves those who name it and nobody else.
    # A portable backend takes 0, one that is tuned for an architecture 100.
    priority=-200,
    needs=("torch>=2.11", "octavo-torch>=0.2"),
    summary="FP8 on the CPU, one tile at a time: the template for backends.",
    capabilities=(
        Capability(
            ops=frozenset({"quantize", "fprop", "dgrad", "wgrad"}),
            recipes=frozenset({"current", "row", "block"}),
            framework="torch",
            device="cpu",
            # The loops here run over sizes as integers, so sizes on another device would have to be read back.
            sizes=frozenset({"host"}),
            accumulation="fp32",
        ),
    ),
)


@hookimpl
def octavo_backends() -> tuple[BackendCard, ...]:
    """One card; a package may have several."""
    return (CARD,)


@hookimpl
def octavo_load(name: str) -> AcmeBackend | None:
    """Called at first use, so this is the place for heavy imports."""
    if name != NAME:
        return None
    from acme_octavo.backend import AcmeBackend

    return AcmeBackend()
