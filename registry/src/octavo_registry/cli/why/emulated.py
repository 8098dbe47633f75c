"""What `octavo why` says of emulated products: how, as the card of the backend that serves them declares it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import octavo_registry
from octavo.recipe_base import GEMMS
from octavo_registry.contract.request import Request
from octavo_registry.dispatch.layer_plan import LayerPlan
from octavo_registry.dispatch.match import match


@dataclass(frozen=True, slots=True)
class Emulated:
    """Products of one recipe that a backend computes without instructions for it, and how."""

    backend: str
    recipe: str
    how: str

    def sentence(self, where: str) -> str:
        """That they are emulated `where`, what it costs, and how."""
        costs = "which usually takes longer than the recipe bf16"
        return f"On {where}, {self.backend} emulates the products in {self.recipe}, {costs}: {self.how}."


def emulated_in(layers: Iterable[LayerPlan]) -> tuple[Emulated, ...]:
    """The emulated products of layers, those of one backend and recipe once. None on a CPU, where all are."""
    gemms = (plan for layer in layers for _, plan in layer.gemms)
    plans = [plan for plan in gemms if plan is not None and plan.request.device != "cpu"]
    return _found((plan.backend, plan.request.kind, plan.capability.emulated) for plan in plans)


def emulated_by_cards(served: Iterable[tuple[Request, str]]) -> tuple[Emulated, ...]:
    """Those among requests and the backends that would serve them, for a device that need not be here."""
    products = [(request, name) for request, name in served if request.op in GEMMS and request.device != "cpu"]
    return _found((name, request.kind, _declared(request, name)) for request, name in products)


def _declared(request: Request, backend: str) -> str | None:
    cards = (record.card for record in octavo_registry.backends() if record.name == backend)
    row = next((match(card, request) for card in cards if card is not None), "")
    return None if isinstance(row, str) else row.emulated


def _found(products: Iterable[tuple[str, str, str | None]]) -> tuple[Emulated, ...]:
    return tuple(dict.fromkeys(Emulated(backend, recipe, how) for backend, recipe, how in products if how))
