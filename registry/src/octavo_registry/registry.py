"""Registry: the plugins of one process, discovered at first use, and what they add."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

from octavo import NoBackendError, OctavoError, QuantizerSpec, Recipe
from octavo.formats import DType
from octavo.presets import PRESETS
from octavo.presets import recipe as core_recipe
from octavo_registry.contract.backend import KernelChoice
from octavo_registry.contract.cards import BackendCard
from octavo_registry.contract.plan import Decision, Plan
from octavo_registry.contract.request import GemmRequest, QuantizeRequest, Request
from octavo_registry.discovery import loader
from octavo_registry.discovery.entry_points import Published, published
from octavo_registry.discovery.loader import Plugin, PluginRecord
from octavo_registry.discovery.locks import ForkSafeLock
from octavo_registry.discovery.misspelt import misspelt, undefined_recipes
from octavo_registry.discovery.names import RESERVED, Claim, claimed_quantizer, void_claims
from octavo_registry.discovery.records import BackendRecord, backend_records
from octavo_registry.dispatch.dispatcher import Dispatcher, Names
from octavo_registry.dispatch.layer_plan import GemmPlan, LayerPlan, QuantizePlan
from octavo_registry.dispatch.layer_requests import LayerDtypes
from octavo_registry.dispatch.preference import UnknownBackendError, renew_tokens

Find = Callable[[], Iterable[Published]]


class Registry:
    """A set of plugins. The module-level functions of `octavo_registry` use one; tests make their own.

    Discovery runs once, at the first question, in whichever thread asks it; other threads wait.
    """

    def __init__(
        self,
        find: Find = lambda: published(loader.GROUP),
        *,
        reserved: Mapping[str, str] = RESERVED,
    ) -> None:
        self._find = find
        self._reserved = reserved
        self._lock = ForkSafeLock(self._abandoned)
        self._discovering = False
        self._plugins: list[Plugin] | None = None
        self._broken: list[PluginRecord] = []
        self._manager = loader.manager()
        self._dispatcher: Dispatcher | None = None

    @classmethod
    def from_plugins(cls, plugins: Mapping[str, object]) -> Registry:
        """A registry of these modules or objects by plugin name, which never looks at what is installed."""
        registry = cls(find=tuple, reserved=MappingProxyType({}))
        loaded = [
            loader.load(plugin, name=name, distribution=loader.THIS_PROCESS, version="", value=_value(plugin))
            for name, plugin in plugins.items()
        ]
        with registry._lock:
            registry._adopt(loaded)
        return registry

    # ---- plugins

    def plugins(self) -> tuple[PluginRecord, ...]:
        """Every plugin that was found, broken ones with the reason, by name."""
        with self._lock:
            records = [plugin.record() for plugin in self._discovered()] + self._broken
        return tuple(sorted(records, key=lambda record: (record.name, record.distribution)))

    def backends(self) -> tuple[BackendRecord, ...]:
        """Every backend by name, with what stands against it whatever the request; broken plugins last."""
        records = self._dispatch().records
        return tuple(sorted(records, key=lambda record: (record.card is None, record.name, record.distribution)))

    def register(self, plugin: object, name: str) -> PluginRecord:
        """Add a plugin of this process: a module or an object with hooks. Plans that were made before are stale.

        Raises OctavoError, and adds nothing, where it is broken, or where its name or one of its backends' is taken.
        """
        with self._lock:
            present = self._discovered()
            loaded = loader.load(plugin, name=name, distribution=loader.THIS_PROCESS, version="", value=_value(plugin))
            if isinstance(loaded, PluginRecord):
                raise OctavoError(f"plugin {name}: {loaded.reason}")
            taken = {known.name: known.distribution for known in present}
            if name in taken:
                raise OctavoError(f"plugin {name}: {taken[name]} has a plugin of that name; give this one another")
            owners = dict(self._reserved) | {
                record.name: record.distribution for record in self._dispatch().records if record.card is not None
            }
            for card in loaded.cards:
                if card.name in owners:
                    raise OctavoError(f"plugin {name}: backend {card.name!r} belongs to {owners[card.name]}; rename it")
            self._adopt([loaded])
            return loaded.record()

    def unregister(self, name: str) -> None:
        """Remove the plugin called `name`; every plan that was made before is stale. OctavoError: no such plugin."""
        with self._lock:
            for plugin in self._discovered():
                if plugin.name == name:
                    self._manager.unregister(plugin.module)
                    self._plugins = [other for other in self._discovered() if other is not plugin]
                    self._changed()
                    return
        raise OctavoError(f"plugin {name}: no plugin of that name is registered")

    def _discovered(self) -> list[Plugin]:
        if self._plugins is None:
            self._plugins, self._discovering = [], True
            try:
                self._discover()
            except BaseException:  # Ctrl-C while a framework is imported: the next question discovers again
                self._forget()
                raise
            finally:
                self._discovering = False
        return self._plugins

    def _forget(self) -> None:
        self._plugins, self._broken, self._manager = None, [], loader.manager()

    def _abandoned(self) -> None:
        """Undoes, in a forked child, what another thread of the parent was in the middle of."""
        if self._discovering:
            self._discovering = False
            self._forget()
        else:
            self._manager = loader.manager()
            for plugin in self._plugins or ():
                self._manager.register(plugin.module, plugin.name)
        self._changed()

    def _discover(self) -> None:
        found = list(self._find())
        void = void_claims([entry.claim for entry in found], self._reserved)
        # a plugin whose name is contested is not imported either: whose code it is cannot be told
        self._adopt(
            [
                loader.broken(entry, void[i]) if i in void else loader.load_published(entry)
                for i, entry in enumerate(found)
            ]
        )

    def _adopt(self, loaded: Sequence[Plugin | PluginRecord]) -> None:
        adopted = self._plugins = list(self._plugins or ())
        for item in loaded:
            if isinstance(item, PluginRecord):
                self._broken.append(item)
            elif self._manager.is_registered(item.module):
                first = next(plugin for plugin in adopted if plugin.module is item.module)
                reason = (
                    f"{item.value} is the plugin {first.name} of {first.distribution} already; remove one entry point"
                )
                self._broken.append(
                    PluginRecord(item.name, item.distribution, item.version, item.value, "broken", reason)
                )
            else:
                self._manager.register(item.module, item.name)
                adopted.append(item)
        self._changed()

    def _changed(self) -> None:
        self._dispatcher = None
        renew_tokens()

    def _dispatch(self) -> Dispatcher:
        dispatcher = self._dispatcher
        if dispatcher is None:
            with self._lock:
                present = self._discovered()
                dispatcher = self._dispatcher
                if dispatcher is None:
                    records = backend_records(present, self._broken, self._reserved)
                    dispatcher = self._dispatcher = Dispatcher(records, present, self._manager, self._lock)
        return dispatcher

    # ---- plans

    @overload
    def plan(self, request: QuantizeRequest, *, backend: Names = None) -> QuantizePlan: ...

    @overload
    def plan(self, request: GemmRequest, *, backend: Names = None) -> GemmPlan: ...

    @overload
    def plan(self, request: Request, *, backend: Names = None) -> Plan: ...

    def plan(self, request: Request, *, backend: Names = None) -> Plan[Any, Any]:
        """The best backend for `request`, bound once and cached.

        backend   a name or a list of names, best first, closed unless it holds "*"; overrides `prefer` and
                  OCTAVO_BACKEND

        Raises NoBackendError with one verdict per backend where nothing serves it, UnknownBackendError (a ValueError,
        too) where the preference names a backend that is not installed.
        """
        return self._dispatch().plan(request, backend)

    def plan_if_served(self, request: Request, *, backend: Names = None) -> Plan[Any, Any] | None:
        """The plan for `request`; None where no backend of the preference serves it, so that a front end does.

        Raises UnknownBackendError where the preference names a backend that is not installed: another one, or the
        framework, would take the place of what was meant.
        """
        try:
            return self.plan(request, backend=backend)
        except UnknownBackendError:
            raise
        except NoBackendError:
            return None

    def explain(self, request: Request, *, backend: Names = None) -> tuple[Decision, ...]:
        """One verdict per backend, in the order in which they are considered: what `plan` decides, and why."""
        return self._dispatch().explain(request, backend)

    def hypothesize(self, request: Request, *, backend: Names = None) -> tuple[Decision, ...]:
        """The verdicts of `explain` for a device that need not be here: what cards and the backends' shape rules say.

        Nothing is bound and no device is looked at; a machine may refuse more.
        """
        return self._dispatch().hypothesize(request, backend)

    def plan_layer(
        self,
        request: GemmRequest,
        *,
        backend: Names = None,
        wgrad_dtype: DType | None = None,
        dgrad_dtype: DType | None = None,
        w_dtype: DType | None = None,
        product_dtype: DType | None = None,
    ) -> LayerPlan:
        """The GEMMs of a grouped linear layer, and the quantizers that feed them in the layouts that the GEMMs need.

        request        the layer's fprop request, with the whole recipe
        wgrad_dtype    dtype of dw; None: the recipe's, else the request's in_dtype
        dgrad_dtype    dtype of dx; None: the request's in_dtype
        w_dtype        dtype of w; None: the request's in_dtype
        product_dtype  dtype of operands that no slot quantizes, because the front end casts them; None: their own

        A request with weight "kn" is served as it lies where the backends that would serve "nk" take that; else the
        plans are those of "nk", and `LayerPlan.transposes` says so. Operations may come from different backends.
        Raises as `plan` does, for the operation that nothing serves.
        """
        dtypes = LayerDtypes(wgrad_dtype, dgrad_dtype, w_dtype, product_dtype)
        return self._dispatch().plan_layer(request, backend, dtypes)

    def check_backend(self, backend: Names) -> None:
        """Raises `UnknownBackendError` for a `backend` that `plan` would refuse whatever the request.

        For modules, when they are constructed. Octavo's own names pass where they are not installed: a module may be
        made on another machine than the one that runs it. Imports plugins and no framework.
        """
        self._dispatch().check_backend(backend)

    def kernel_choices(
        self, request: GemmRequest, *, rows: int, backend: Names = None
    ) -> tuple[str, tuple[KernelChoice, ...] | None]:
        """The backend that serves a GEMM, and the kernels that it chooses from for `rows` rows in equal groups.

        The second result is None where the backend has no model of its kernels. Raises as `plan` does, and OctavoError
        where the backend's model is broken.
        """
        return self._dispatch().kernel_choices(request, rows, backend)

    # ---- recipes and quantizers

    def recipe(self, name: str) -> Recipe:
        """`octavo.recipe(name)`, with the recipes of plugins known; Octavo's own names load no plugin."""
        if name not in PRESETS:
            with self._lock:
                self._discovered()
        return core_recipe(name)

    def recipes(self) -> tuple[Recipe, ...]:
        """The recipes that plugins add."""
        with self._lock:
            return tuple(recipe for plugin in self._discovered() for recipe in plugin.recipes)

    def strange_recipes(self, card: BackendCard) -> tuple[str, ...]:
        """A sentence for each recipe on a card that neither Octavo nor an installed plugin defines."""
        self.recipes()  # those of plugins are known from here on
        return tuple(undefined_recipes(card))

    def strange_names(self, card: BackendCard) -> tuple[str, ...]:
        """`strange_recipes`, and a sentence for each framework or device that is spelled much like a known one.

        A name that is like none may be that of a front end which is not installed, and is not strange.
        """
        return (*self.strange_recipes(card), *misspelt(card))

    def quantizer(self, name: str) -> QuantizerSpec:
        """The quantizer that a plugin calls `name`; OctavoError lists those there are."""
        with self._lock:
            claims = [
                (Claim(card.name, plugin.name, plugin.distribution, plugin.version), card)
                for plugin in self._discovered()
                for card in plugin.quantizers
            ]
        return claimed_quantizer(name, claims)


def _value(plugin: Any) -> str:
    return str(getattr(plugin, "__name__", type(plugin).__qualname__))
