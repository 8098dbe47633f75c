"""What installed distributions publish in an entry-point group. Finding imports nothing of theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from octavo_registry.discovery.guard import Fault, describe, guard
from octavo_registry.discovery.names import Claim

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Published:
    """One entry point, and the distribution that it came with.

    fault  why it cannot be loaded, known without trying; "" otherwise
    """

    name: str
    value: str
    distribution: str
    version: str
    summary: str = ""
    point: metadata.EntryPoint | None = None
    fault: str = ""

    @property
    def claim(self) -> Claim:
        """Its claim to its name."""
        return Claim(self.name, self.name, self.distribution, self.version)

    def load(self) -> Any:
        """The object that it names, imported in a guard; `Fault` says why there is none."""
        if self.fault or self.point is None:
            raise Fault(self.fault or "there is no entry point to load")
        return guard(self.point.load)


def published(group: str) -> tuple[Published, ...]:
    """The entry points of `group` by distribution and name. Of two copies of one distribution the first counts.

    Distributions are read one by one, because `importlib.metadata.entry_points` raises for all of them when the
    file of one is damaged.
    """
    entries: list[Published] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
        except Exception:  # unreadable, or not UTF-8: it publishes nothing that could be named
            continue
        if not text or group not in text:
            continue
        name, version, summary = _about(distribution)
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen and name != UNKNOWN:
            continue
        seen.add(key)
        entries.extend(_entries(distribution, group, name, version, summary))
    return tuple(sorted(entries, key=lambda entry: (entry.distribution, entry.name, entry.value)))


def _about(distribution: metadata.Distribution) -> tuple[str, str, str]:
    try:
        fields = distribution.metadata
        name = str(fields["Name"] or UNKNOWN) if "Name" in fields else UNKNOWN
        version = str(fields["Version"] or "") if "Version" in fields else ""
        summary = str(fields["Summary"] or "") if "Summary" in fields else ""
    except Exception:
        return UNKNOWN, "", ""
    return name, version, summary


def _entries(
    distribution: metadata.Distribution, group: str, name: str, version: str, summary: str
) -> Iterator[Published]:
    try:
        points = [point for point in distribution.entry_points if point.group == group]
    except Exception as error:
        yield Published(name, "", name, version, summary, fault=f"its entry_points.txt is damaged: {describe(error)}")
        return
    for point in points:
        yield Published(point.name, point.value, name, version, summary, point)
