"""The card: what acme-jax can do. Octavo reads it in every process, so this module imports no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_registry.contract import BackendCard, Capability, hookimpl

if TYPE_CHECKING:
    from acme_jax_octavo.backend import AcmeJaxBackend

NAME = "acme-jax"

CARD = BackendCard(
    name=NAME,
    api_level=5,
    # Below the reference backend's -100: installed, the example serves those who name it and nobody else.
    # A portable backend takes 0, one that is tuned for an architecture 100.
    priority=-200,
    needs=("jax>=0.10.2", "octavo-jax>=0.2"),
    summary="FP8 GEMMs in JAX on the CPU: the template for backends in JAX.",
    capabilities=(
        Capability(
            ops=frozenset({"fprop", "dgrad", "wgrad"}),
            recipes=frozenset({"current", "row"}),
            framework="jax",
            device="cpu",
            # Sizes may be traced: nothing here looks at their values.
            sizes=frozenset({"host", "device"}),
            accumulation="fp32",
        ),
    ),
)


@hookimpl
def octavo_backends() -> tuple[BackendCard, ...]:
    """One card; a package may have several."""
    return (CARD,)


@hookimpl
def octavo_load(name: str) -> AcmeJaxBackend | None:
    """Called at first use, so this is the place for heavy imports."""
    if name != NAME:
        return None
    from acme_jax_octavo.backend import AcmeJaxBackend

    return AcmeJaxBackend()
