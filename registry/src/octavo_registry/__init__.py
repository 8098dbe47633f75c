"""The plugin registry of Octavo: discovers backends at first use, picks one for each request and says why.

Importing this package loads no plugin.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo import QuantizerSpec, Recipe
from octavo.formats import DType
from octavo_registry.contract.cards import (
    ALL_ACTIVATIONS,
    ALL_DTYPES,
    ALL_NORMS,
    GATED,
    MOVES,
    QUANTIZERS,
    Accumulation,
    Activation,
    BackendCard,
    Capability,
    Norm,
    Op,
    QuantizerCard,
    Weight,
)
from octavo_registry.contract.frameworks import PLANES, Device, Framework, LayerResult
from octavo_registry.contract.hookspecs import API_LEVEL, HookSpecs, hookimpl
from octavo_registry.contract.kernels import KernelChoice, KernelModel
from octavo_registry.contract.request import Backend, Bound, Decision, Plan, Refused, Request, Verdict
from octavo_registry.discovery.bridges import (
    FrameworkRecord,
    framework,
    framework_names,
    framework_record,
    framework_records,
    frameworks,
)
from octavo_registry.discovery.loader import PluginRecord
from octavo_registry.discovery.records import OLDEST_API_LEVEL, BackendRecord
from octavo_registry.dispatch.compose import LayerPlan
from octavo_registry.dispatch.preference import UnknownBackendError, mirror_preference, prefer, state_token
from octavo_registry.dispatch.preference import current as current_preference
from octavo_registry.registry import Registry

__version__ = "0.1.0"

_registry = Registry()


def plan(request: Request, *, backend: str | Sequence[str] | None = None) -> Plan:
    """The best backend for `request`, bound once and cached.

    backend   a name or a list of names, best first, closed unless it holds "*"; overrides `prefer` and OCTAVO_BACKEND

    Raises NoBackendError with one verdict a backend where nothing serves it, UnknownBackendError (a ValueError, too)
    where the preference names a backend that is not installed.
    """
    return _registry.plan(request, backend=backend)


def explain(request: Request, *, backend: str | Sequence[str] | None = None) -> tuple[Decision, ...]:
    """One verdict a backend, in the order in which they are considered: what `plan` decides, and why."""
    return _registry.explain(request, backend=backend)


def plan_layer(
    request: Request,
    *,
    backend: str | Sequence[str] | None = None,
    wgrad_dtype: DType | None = None,
    dgrad_dtype: DType | None = None,
    w_dtype: DType | None = None,
    product_dtype: DType | None = None,
) -> LayerPlan:
    """The GEMMs of a grouped linear layer and the quantizers that feed them, each in the layouts that the GEMMs want.

    request        the layer's fprop request, with the whole recipe
    wgrad_dtype    dtype of dw; None: the recipe's, else the request's in_dtype
    dgrad_dtype    dtype of dx; None: the recipe's output_dtype, else the request's out_dtype
    w_dtype        dtype of w; None: the request's in_dtype
    product_dtype  dtype that operands have which no slot quantizes, because the front end casts them; None: their own

    A request with weight "kn" is served as it lies where the backends that would serve "nk" take that; else the plans
    are those of "nk", and `LayerPlan.transposes` says so. Operations may come from different backends. Raises as
    `plan` does, for the operation that nothing serves.
    """
    return _registry.plan_layer(
        request,
        backend=backend,
        wgrad_dtype=wgrad_dtype,
        dgrad_dtype=dgrad_dtype,
        w_dtype=w_dtype,
        product_dtype=product_dtype,
    )


def kernel_choices(
    request: Request, *, rows: int, backend: str | Sequence[str] | None = None
) -> tuple[str, tuple[KernelChoice, ...] | None]:
    """The backend that serves a GEMM, and the kernels that it chooses from for `rows` rows in equal groups.

    The second result is None where the backend has no model of its kernels. Raises as `plan` does, and OctavoError
    where the backend's model is broken.
    """
    return _registry.kernel_choices(request, rows=rows, backend=backend)


def plugins() -> tuple[PluginRecord, ...]:
    """Every plugin that was found, broken ones with the reason, by name."""
    return _registry.plugins()


def backends() -> tuple[BackendRecord, ...]:
    """Every backend, with what stands against it whatever the request; broken plugins last."""
    return _registry.backends()


def register(plugin: object, name: str) -> PluginRecord:
    """Add a plugin of this process: a module or an object with hooks. Plans that were made before are stale.

    Raises OctavoError, and adds nothing, where the plugin is broken or a name is taken.
    """
    return _registry.register(plugin, name)


def unregister(name: str) -> None:
    """Remove the plugin called `name`. Plans that were made before are stale."""
    _registry.unregister(name)


def recipe(name: str) -> Recipe:
    """`octavo.recipe(name)`, with the recipes that plugins add known by their kinds."""
    return _registry.recipe(name)


def recipes() -> tuple[Recipe, ...]:
    """The recipes that plugins add."""
    return _registry.recipes()


def quantizer(name: str) -> QuantizerSpec:
    """The quantizer that a plugin calls `name`; OctavoError lists those there are."""
    return _registry.quantizer(name)


__all__ = [
    "ALL_ACTIVATIONS",
    "ALL_DTYPES",
    "ALL_NORMS",
    "API_LEVEL",
    "GATED",
    "MOVES",
    "OLDEST_API_LEVEL",
    "PLANES",
    "QUANTIZERS",
    "Accumulation",
    "Activation",
    "Backend",
    "BackendCard",
    "BackendRecord",
    "Bound",
    "Capability",
    "Decision",
    "Device",
    "Framework",
    "FrameworkRecord",
    "HookSpecs",
    "KernelChoice",
    "KernelModel",
    "LayerPlan",
    "LayerResult",
    "Norm",
    "Op",
    "Plan",
    "PluginRecord",
    "QuantizerCard",
    "Refused",
    "Registry",
    "Request",
    "UnknownBackendError",
    "Verdict",
    "Weight",
    "backends",
    "current_preference",
    "explain",
    "framework",
    "framework_names",
    "framework_record",
    "framework_records",
    "frameworks",
    "hookimpl",
    "kernel_choices",
    "mirror_preference",
    "plan",
    "plan_layer",
    "plugins",
    "prefer",
    "quantizer",
    "recipe",
    "recipes",
    "register",
    "state_token",
    "unregister",
]
