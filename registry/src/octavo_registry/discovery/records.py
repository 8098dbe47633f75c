"""Backends as the registry knows them: the card, where it came from, and what stands against it from the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo_registry.contract.cards import BackendCard
from octavo_registry.contract.hookspecs import API_LEVEL
from octavo_registry.contract.plan import Decision, Verdict
from octavo_registry.discovery.loader import Plugin, PluginRecord
from octavo_registry.discovery.names import RESERVED, Claim, void_claims
from octavo_registry.discovery.needs import unmet

OLDEST_API_LEVEL = max(1, API_LEVEL - 1)
"""The last two levels are honoured."""


@dataclass(frozen=True, slots=True)
class BackendRecord:
    """One backend, or one broken plugin whose backends are unknown (`card` is None, `name` is the plugin's).

    verdict   "refused" (needs, API level) or "broken" whatever the request; None: it depends on the request
    reason    of the verdict, a sentence
    """

    name: str
    plugin: str
    distribution: str
    version: str
    card: BackendCard | None
    verdict: Verdict | None = None
    reason: str = ""

    def decision(self, verdict: Verdict, reason: str) -> Decision:
        """This backend's verdict on a request."""
        return Decision(self.name, self.distribution, self.version, verdict, reason)


def api_level_refusal(card: BackendCard, distribution: str) -> str | None:
    """The sentence for a card of a level that is not honoured, with both numbers; or None."""
    if OLDEST_API_LEVEL <= card.api_level <= API_LEVEL:
        return None
    span = str(API_LEVEL) if OLDEST_API_LEVEL == API_LEVEL else f"{OLDEST_API_LEVEL} and {API_LEVEL}"
    upgrade = "octavo-registry" if card.api_level > API_LEVEL else distribution
    return f"was written for API level {card.api_level}, this octavo-registry honours {span}; upgrade {upgrade}"


def backend_records(
    plugins: Iterable[Plugin], broken: Iterable[PluginRecord], reserved: Mapping[str, str] = RESERVED
) -> tuple[BackendRecord, ...]:
    """Every backend of `plugins`, then one record for each broken plugin."""
    claimants = [(plugin, card) for plugin in plugins for card in plugin.cards]
    void = void_claims([Claim(card.name, p.name, p.distribution, p.version) for p, card in claimants], reserved)
    records = []
    for position, (plugin, card) in enumerate(claimants):
        verdict: Verdict | None = None
        reason = ""
        if position in void:
            verdict, reason = "broken", void[position]
        elif refusal := api_level_refusal(card, plugin.distribution) or unmet(card.needs):
            verdict, reason = "refused", refusal
        records.append(
            BackendRecord(card.name, plugin.name, plugin.distribution, plugin.version, card, verdict, reason)
        )
    records.extend(
        BackendRecord(record.name, record.name, record.distribution, record.version, None, "broken", record.reason)
        for record in broken
    )
    return tuple(records)
