"""What is said of a backend on a device where nobody has run it, according to its card."""

from __future__ import annotations

from collections.abc import Sequence

from octavo_registry.contract.cards import BackendCard, Capability
from octavo_registry.contract.frameworks import Device
from octavo_registry.dispatch.match import within_arch


def untried_words(row: Capability, backend: str) -> str:
    """A sentence on a row that has not run on its devices, with the command that would tell; "" for others."""
    if row.untried is None:
        return ""
    return (
        f"{row.untried}, not yet run there: `octavo conform {backend} --report {backend}.json` tells whether it works"
    )


def untried_lines(card: BackendCard, framework: str, devices: Sequence[Device]) -> tuple[str, ...]:
    """Those sentences of the card's rows for devices of this machine, each once."""
    return tuple(
        dict.fromkeys(
            f"{device.label}: {untried_words(row, card.name)}"
            for device in devices
            for row in card.capabilities
            if row.untried is not None and row.framework == framework and row.device == device.kind
            if within_arch(row, device.arch)
        )
    )
