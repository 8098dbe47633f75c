"""Who may use a name: Octavo's own names are reserved, and a name that two plugins claim belongs to neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from octavo import OctavoError, QuantizerSpec
from octavo_registry.contract.cards import QuantizerCard

RESERVED: Mapping[str, str] = MappingProxyType(
    {
        "torch-reference": "octavo-torch",
        "jax-reference": "octavo-jax",
        "torch-native": "octavo-torch-native",
        "torch-cudagraph": "octavo-torch-cudagraph",
        "torch-triton": "octavo-torch-triton",
        "torch-triton-interpreter": "octavo-torch-triton",
        "jax-native": "octavo-jax-native",
        "jax-triton": "octavo-jax-triton",
        "jax-triton-interpreter": "octavo-jax-triton",
    }
)
"""Names of Octavo's own plugins and backends, and the distribution that alone may use each."""

FRONT_ENDS: Mapping[str, str] = MappingProxyType({"torch": "octavo-torch", "jax": "octavo-jax"})
"""The distribution that brings a framework's front end and its reference backend."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A plugin uses a name, for itself, a backend, a recipe or a quantizer."""

    name: str
    plugin: str
    distribution: str
    version: str

    @property
    def claimant(self) -> str:
        """Who claims it, for sentences."""
        return f"{self.distribution} {self.version} (plugin {self.plugin})".replace(" ()", "").replace("  ", " ")


def void_claims(claims: Sequence[Claim], reserved: Mapping[str, str] = RESERVED) -> dict[int, str]:
    """Positions of the claims that do not hold, and why.

    Of two claims to a free name neither holds: to pick one would be a guess, and installing a package must not take
    a name over from another. A reserved name is its distribution's, whoever else claims it.
    """
    void: dict[int, str] = {}
    for position, claim in enumerate(claims):
        owner = reserved.get(claim.name)
        if owner is not None and claim.distribution != owner:
            void[position] = f"{claim.name!r} belongs to {owner}; {claim.claimant} needs a name of its own"
            continue
        rivals = [
            other.claimant
            for place, other in enumerate(claims)
            if place != position and other.name == claim.name and (owner is None or other.distribution == owner)
        ]
        if rivals:
            all_claimants = " and ".join(sorted([claim.claimant, *rivals]))
            void[position] = f"{claim.name!r} is claimed by {all_claimants}; none runs until one is left"
    return void


def claimed_quantizer(name: str, claims: Sequence[tuple[Claim, QuantizerCard]]) -> QuantizerSpec:
    """The quantizer that one plugin calls `name`; OctavoError where several do, or none."""
    void = void_claims([claim for claim, _ in claims], {})
    for position, (claim, card) in enumerate(claims):
        if claim.name == name:
            if position in void:
                raise OctavoError(f"quantizer {void[position]}")
            return card.spec
    known = ", ".join(sorted({claim.name for claim, _ in claims})) or "none; no plugin names one"
    raise OctavoError(f"quantizer: got {name!r}; known names are {known}")
