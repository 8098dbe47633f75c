"""The hooks that a plugin may implement: the whole surface. Entry-point group `octavo.backends`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from octavo import Recipe
    from octavo_registry.contract.backend import Backend
    from octavo_registry.contract.cards import BackendCard, QuantizerCard
    from octavo_registry.contract.plan import Plan
    from octavo_registry.contract.request import Request

PROJECT = "octavo"

API_LEVEL = 5
"""The contract level of these hooks and of the card schema. `api-levels/` holds its golden file."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """Each hook is optional; `self` is the plugin manager's, a plugin module writes plain functions."""

    @hookspec
    def octavo_backends(self) -> Iterable[BackendCard]:  # type: ignore[empty-body]
        """The backends of this plugin, called once at discovery."""

    @hookspec(firstresult=True)
    def octavo_load(self, name: str) -> Backend | None:
        """The backend called `name`, or None if it is not yours; called at first use, may import a framework."""

    @hookspec
    def octavo_recipes(self) -> Iterable[Recipe]:  # type: ignore[empty-body]
        """Recipes that this plugin adds, known afterwards by their kind."""

    @hookspec
    def octavo_quantizers(self) -> Iterable[QuantizerCard]:  # type: ignore[empty-body]
        """Quantizers that this plugin names."""

    @hookspec
    def octavo_rank(self, request: Request, eligible: Sequence[str]) -> tuple[str, ...] | None:
        """A permutation of `eligible`, best first, or None for no opinion: site policy or an autotuner."""

    @hookspec
    def octavo_plan_made(self, plan: Plan, request: Request) -> None:
        """Called once for every new plan; what it raises is logged and changes nothing."""
