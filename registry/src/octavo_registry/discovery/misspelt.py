"""Names on a card that nobody has or that look misspelt: nothing asks for them, and nobody would be told."""

from __future__ import annotations

from collections.abc import Iterator

from octavo import Recipe
from octavo.errors import did_you_mean
from octavo_registry.contract.cards import BackendCard
from octavo_registry.discovery.bridges import framework_names
from octavo_registry.discovery.names import FRONT_ENDS

_DEVICES = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}
"""What Octavo calls a device, by other spellings in lower case."""


def misspelt(card: BackendCard) -> Iterator[str]:
    """A sentence for each framework or device on `card` that is meant to be another one."""
    known = [*FRONT_ENDS, *framework_names()]
    for name in sorted({row.framework for row in card.capabilities} - set(known)):
        if hint := did_you_mean(name, known):
            yield f"the card of {card.name} names the framework {name!r}{hint}"
    for name in sorted({row.device for row in card.capabilities}):
        kind = name.partition(":")[0]  # a card is for every device of a kind, and cuda:0 is one of them
        meant = _DEVICES.get(kind.lower(), kind)  # an xpu is no misspelt cpu
        if meant != name:
            yield f"the card of {card.name} names the device {name!r}; did you mean {meant}?"


def undefined_recipes(card: BackendCard) -> Iterator[str]:
    """A sentence for each recipe on `card` that neither Octavo nor a plugin that has been loaded defines."""
    known = sorted(Recipe.kinds())
    for kind in sorted({kind for row in card.capabilities for kind in row.recipes} - set(known)):
        hint = did_you_mean(kind, known) or f"; the kinds are {', '.join(known)}"
        yield f"the card of {card.name} names the recipe {kind!r}, which nobody defines{hint}"
