"""Targets of a run: one backend on one framework and one kind of device of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo import OctavoError
from octavo_registry import backends, framework, framework_records
from octavo_registry.contract.cards import BackendCard
from octavo_registry.contract.frameworks import Device, Framework


class UnknownBackend(ValueError):
    """The backend that was asked for cannot be tested; the message says why, and which backends there are."""


@dataclass(frozen=True, slots=True)
class Target:
    """A backend's card, the bridge to its framework's arrays, and a device that the framework sees."""

    card: BackendCard
    distribution: str
    version: str
    bridge: Framework
    device: Device

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.card.name

    @property
    def id(self) -> str:
        """Stable text for test ids: backend and device kind, with the framework where the card has several."""
        several = len({row.framework for row in self.card.capabilities}) > 1
        return "-".join([self.name, *([self.bridge.name] if several else []), self.device.kind])


def find_targets(names: Sequence[str]) -> list[Target]:
    """The targets of the named backends; `UnknownBackend` where one is absent, broken, or has no device here."""
    records = {record.name: record for record in backends()}
    targets: list[Target] = []
    for name in dict.fromkeys(names):
        record = records.get(name)
        if record is None:
            known = ", ".join(sorted(records)) or "none"
            raise UnknownBackend(f"backend {name!r} is not installed; installed backends: {known}")
        if record.card is None or record.verdict is not None:
            raise UnknownBackend(f"backend {name!r} cannot be tested: it is {record.verdict}: {record.reason}")
        usable, obstacles = _usable(record.card, record.distribution, record.version)
        if not usable:
            raise UnknownBackend(f"backend {name!r} cannot be tested here: {'; '.join(obstacles)}")
        targets += usable
    return targets


def _usable(card: BackendCard, distribution: str, version: str) -> tuple[list[Target], list[str]]:
    """The targets of a card, and for each of its frameworks without any the reason."""
    targets: list[Target] = []
    obstacles: list[str] = []
    for name in sorted({row.framework for row in card.capabilities}):
        try:
            bridge = framework(name)
        except OctavoError as error:
            if any(record.name == name for record in framework_records()):
                raise UnknownBackend(str(error)) from None  # it is installed and does not load
            obstacles.append(str(error))
            continue
        found = [Target(card, distribution, version, bridge, device) for device in _devices(bridge, card)]
        targets += found
        if not found:
            served = ", ".join(sorted({row.device for row in card.capabilities if row.framework == name}))
            here = ", ".join(dict.fromkeys(device.kind for device in bridge.devices()))
            obstacles.append(f"it serves {name} on {served}, and {name} sees {here} here")
    return targets, obstacles


def _devices(bridge: Framework, card: BackendCard) -> list[Device]:
    """One device per kind that the card serves: the first that the framework lists."""
    kinds = {row.device for row in card.capabilities if row.framework == bridge.name}
    first: dict[str, Device] = {}
    for device in bridge.devices():
        if device.kind in kinds:
            first.setdefault(device.kind, device)
    return list(first.values())
