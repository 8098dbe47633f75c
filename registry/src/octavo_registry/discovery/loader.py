"""The guarded loader: from entry points to plugins whose hooks may be called.

Each plugin is loaded in its own guard. It registers whole or not at all: one that cannot be imported, has a
misspelt hook, or gives a card that does not validate is recorded as broken with the reason, and the rest live.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import pluggy
from pluggy import HookImpl

from octavo import Recipe
from octavo.presets import PRESETS
from octavo_registry.contract.cards import BackendCard, QuantizerCard
from octavo_registry.contract.hookspecs import PROJECT, HookSpecs
from octavo_registry.discovery.entry_points import Published
from octavo_registry.discovery.guard import Fault, guard
from octavo_registry.discovery.needs import check_requirement, missing_need

GROUP = "octavo.backends"
PREFIX = "octavo_"
HOOKS = tuple(name for name in vars(HookSpecs) if name.startswith(PREFIX))

THIS_PROCESS = "(this process)"
"""Stands for the distribution of a plugin that was registered by a call."""


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin that was found.

    value      what its entry point names, or the object's own name
    status     "ok", or "broken": none of its hooks is called
    reason     why it is broken, a sentence; "" otherwise
    """

    name: str
    distribution: str
    version: str
    value: str
    status: Literal["ok", "broken"]
    reason: str = ""
    backends: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    quantizers: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Distribution and version, for sentences."""
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that loaded: what it declares, and its hook implementations by name."""

    name: str
    distribution: str
    version: str
    value: str
    module: object
    hooks: Mapping[str, HookImpl]
    cards: tuple[BackendCard, ...]
    recipes: tuple[Recipe, ...]
    quantizers: tuple[QuantizerCard, ...]

    def record(self) -> PluginRecord:
        """What there is to tell about it."""
        return PluginRecord(
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            value=self.value,
            status="ok",
            backends=tuple(card.name for card in self.cards),
            recipes=tuple(recipe.kind for recipe in self.recipes),
            quantizers=tuple(card.name for card in self.quantizers),
        )


class _Manager(pluggy.PluginManager):
    """pluggy's manager, for which a plain function called `octavo_*` is a hook; `hookimpl` adds options only."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        options = super().parse_hookimpl_opts(plugin, name)
        if options is not None or not name.startswith(PREFIX):
            return options
        if not inspect.isroutine(getattr(plugin, name, None)):
            return None
        return {
            "wrapper": False,
            "hookwrapper": False,
            "optionalhook": False,
            "tryfirst": False,
            "trylast": False,
            "specname": None,
        }


def manager() -> pluggy.PluginManager:
    """A plugin manager that knows the hooks and no plugin."""
    empty = _Manager(PROJECT)
    empty.add_hookspecs(HookSpecs)
    return empty


def call(hook: HookImpl, **arguments: object) -> Any:
    """One implementation of one hook, called with the arguments that it names; what it raises becomes a `Fault`."""
    return guard(hook.function, *(arguments[name] for name in hook.argnames))


def _hooks(plugin: object, name: str) -> dict[str, HookImpl]:
    """Implementations by hook name; `Fault` where one is misspelt, has a wrong argument or wraps."""
    scratch = manager()  # pluggy leaves a plugin that fails half registered, so it fails in a manager of its own
    try:
        guard(scratch.register, plugin, name)
    except Fault as fault:
        if isinstance(fault.__cause__, pluggy.PluginValidationError):
            raise Fault(" ".join(str(fault.__cause__).split())) from fault.__cause__
        raise
    hooks: dict[str, HookImpl] = {}
    for caller in scratch.get_hookcallers(plugin) or ():
        if caller.name not in HOOKS:
            close = difflib.get_close_matches(caller.name, HOOKS, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; the hooks are {', '.join(HOOKS)}"
            raise Fault(f"{caller.name} is not a hook of octavo-registry{hint}")
        hook = caller.get_hookimpls()[0]
        if hook.wrapper or hook.hookwrapper:
            raise Fault(f"{caller.name} is a wrapper; Octavo's hooks take plain functions")
        hooks[caller.name] = hook
    return hooks


def _declared(hooks: Mapping[str, HookImpl], hook: str, kind: type[Any]) -> tuple[Any, ...]:
    if hook not in hooks:
        return ()
    try:
        answer = call(hooks[hook])
        alone = isinstance(answer, kind)  # cards and recipes are iterable themselves, over their fields
        listed = isinstance(answer, Iterable) and not alone
        items = guard(tuple, answer) if listed else ()
    except Fault as fault:
        raise Fault(f"{hook} raised {fault}") from fault
    if alone:
        raise Fault(f"{hook} gave one {kind.__name__} by itself; return a tuple of it, such as (CARD,)")
    if not listed:
        given = "None" if answer is None else f"a {type(answer).__name__}"
        raise Fault(f"{hook} gave {given}; it returns a list of {kind.__name__} objects")
    for item in items:
        if not isinstance(item, kind):
            raise Fault(f"{hook} gave a {type(item).__name__}; it gives {kind.__name__} objects")
    return items


def _check_unique(hook: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Fault(f"{hook} gave {twice[0]!r} twice; each name stands once")


def _check_recipes(recipes: Iterable[Recipe]) -> None:
    own = {preset.kind for preset in PRESETS.values()}
    for recipe in recipes:
        if recipe.kind in own or recipe.kind in PRESETS:
            raise Fault(
                f"octavo_recipes gave kind {recipe.kind!r}, which is Octavo's own; give the recipe another kind"
            )


def load(plugin: object, *, name: str, distribution: str, version: str, value: str) -> Plugin | PluginRecord:
    """`plugin` with its hooks checked and its declarations read, or the record that says why it is broken."""
    try:
        hooks = _hooks(plugin, name)
        if not hooks:
            raise Fault(f"{value} has none of the hooks {', '.join(HOOKS)}; name the module that defines them")
        # validated once more: `model_copy` and `model_construct` make cards that never were
        cards = tuple(guard(BackendCard, **dict(card)) for card in _declared(hooks, "octavo_backends", BackendCard))
        _check_unique("octavo_backends", [card.name for card in cards])
        for card in cards:
            for need in card.needs:
                try:
                    check_requirement(need)
                except ValueError as error:
                    raise Fault(f"the card of {card.name} {error}") from None
        if cards and "octavo_load" not in hooks:
            raise Fault("octavo_backends gives cards and there is no octavo_load to load them")
        recipes = _declared(hooks, "octavo_recipes", Recipe)
        _check_recipes(recipes)
        quantizers = _declared(hooks, "octavo_quantizers", QuantizerCard)
        _check_unique("octavo_quantizers", [card.name for card in quantizers])
    except Fault as fault:
        return PluginRecord(name, distribution, version, value, "broken", str(fault))
    return Plugin(name, distribution, version, value, plugin, MappingProxyType(hooks), cards, recipes, quantizers)


def load_published(entry: Published) -> Plugin | PluginRecord:
    """The plugin that an entry point names, imported in a guard."""
    try:
        module = entry.load()
    except Fault as fault:
        return broken(entry, missing_need(entry.distribution, fault) or str(fault))
    return load(module, name=entry.name, distribution=entry.distribution, version=entry.version, value=entry.value)


def broken(entry: Published, reason: str) -> PluginRecord:
    """The record of a plugin that is not loaded."""
    return PluginRecord(entry.name, entry.distribution, entry.version, entry.value, "broken", reason)
