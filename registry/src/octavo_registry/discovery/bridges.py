"""Front ends, found by the entry-point group `octavo.frameworks` and loaded when one is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from octavo import OctavoError
from octavo_registry.contract.frameworks import Framework
from octavo_registry.discovery.entry_points import published
from octavo_registry.discovery.guard import Fault
from octavo_registry.discovery.install import how_to_install
from octavo_registry.discovery.locks import ForkSafeLock
from octavo_registry.discovery.names import FRONT_ENDS, void_claims

GROUP = "octavo.frameworks"


@dataclass(frozen=True, slots=True)
class FrameworkRecord:
    """One front end: its bridge, or the reason why there is none."""

    name: str
    distribution: str
    version: str
    value: str
    bridge: Framework | None
    reason: str = ""


_lock = ForkSafeLock()
_records: dict[str, FrameworkRecord] = {}


def framework_names() -> tuple[str, ...]:
    """Names of the front ends that are installed; nothing is imported."""
    return tuple(sorted({entry.name for entry in published(GROUP)}))


def framework_record(name: str) -> FrameworkRecord | None:
    """The front end called `name`, loaded in a guard, or None where none is installed."""
    with _lock:
        if name in _records:
            return _records[name]
        entries = [entry for entry in published(GROUP) if entry.name == name]
        if not entries:
            return None
        void = void_claims([entry.claim for entry in entries], FRONT_ENDS)
        best = next((i for i in range(len(entries)) if i not in void), 0)
        entry = entries[best]
        bridge, reason = None, void.get(best, "")
        if not reason:
            try:
                bridge = entry.load()
            except Fault as fault:
                reason = str(fault)
        record = FrameworkRecord(name, entry.distribution, entry.version, entry.value, bridge, reason)
        _records[name] = record
        return record


def framework_records() -> tuple[FrameworkRecord, ...]:
    """Every front end by name, broken ones too; this imports the frameworks."""
    records = (framework_record(name) for name in framework_names())
    return tuple(record for record in records if record is not None)


def frameworks() -> dict[str, Framework]:
    """The front ends that load, by name; this imports the frameworks. `framework_records` tells of the others."""
    return {record.name: record.bridge for record in framework_records() if record.bridge is not None}


def framework(name: str) -> Framework:
    """The front end called `name`; OctavoError says what to install, or why the installed one does not load."""
    record = framework_record(name)
    if record is None:
        known = ", ".join(framework_names()) or "none is installed"
        fix = how_to_install(FRONT_ENDS[name]) if name in FRONT_ENDS else f"known front ends are {known}"
        raise OctavoError(f"framework: no front end for {name!r} is installed; {fix}")
    if record.bridge is None:
        raise OctavoError(f"framework: {name!r} of {record.distribution} does not load: {record.reason}")
    return record.bridge
