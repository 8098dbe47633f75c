"""What installed distributions publish in an entry-point group. Finding imports nothing of theirs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from octavo.errors import did_you_mean
from octavo_registry.discovery.guard import Fault, describe, guard
from octavo_registry.discovery.names import Claim

UNKNOWN = "unknown"

_OURS = re.compile(r"^\s*\[\s*(octavo\S*?)\s*\]", re.MULTILINE)


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


def _with_entry_points() -> Iterator[tuple[metadata.Distribution, str]]:
    """Distributions that publish anything, and the text in which they do.

    They are read one by one, because `importlib.metadata.entry_points` raises for all of them when the file of one is
    damaged.
    """
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
        except Exception:  # unreadable, or not UTF-8: it publishes nothing that could be named
            continue
        if text:
            yield distribution, text


def unread_groups(known: Collection[str]) -> Iterator[str]:
    """A sentence for each group of entry points that is spelled much like a `known` one: nothing reads it."""
    for distribution, text in _with_entry_points():
        for group in dict.fromkeys(_OURS.findall(text)):
            hint = "" if group in known else did_you_mean(group, known)
            if hint:
                name, version, _ = _about(distribution)
                yield f"{name} {version} has entry points in the group {group!r}, which nothing reads{hint}"


def published(group: str) -> tuple[Published, ...]:
    """The entry points of `group` by distribution and name. Of two copies of one distribution the first counts."""
    entries: list[Published] = []
    seen: set[str] = set()
    for distribution, text in _with_entry_points():
        if group not in text:
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
        fault = "" if point.pattern.match(point.value) else _no_module(point.value)
        yield Published(point.name, point.value, name, version, summary, point, fault)


def _no_module(value: str) -> str:
    """A sentence on an entry point that is written like no module; importlib's own error does not quote it."""
    return f"its entry point is {value!r}; name a module, such as acme_plugin, or what is in one, such as acme_plugin:f"
