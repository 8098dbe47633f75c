"""The plugin registry of Octavo: discovers backends at first use, picks one for each request and says why.

Importing this package loads no plugin.
"""

from __future__ import annotations

from octavo_registry.contract.backend import Backend, KernelChoice, Refused
from octavo_registry.contract.cards import (
    ALL_ACTIVATIONS,
    ALL_DTYPES,
    ALL_NORMS,
    GATED,
    MOVES,
    OPTIMIZERS,
    QUANTIZERS,
    ROUTERS,
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
from octavo_registry.contract.plan import Decision, Plan, Verdict
from octavo_registry.contract.request import (
    ActivationRequest,
    ChooseRequest,
    DequantizeRequest,
    GemmRequest,
    MoveRequest,
    NormRequest,
    QuantizeRequest,
    Request,
)
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
from octavo_registry.dispatch.fallbacks import FallbackWarning
from octavo_registry.dispatch.layer_plan import GemmPlan, LayerPlan, QuantizePlan
from octavo_registry.dispatch.preference import UnknownBackendError, mirror_preference, prefer, state_token
from octavo_registry.dispatch.preference import current as current_preference
from octavo_registry.level4.bound import Bound
from octavo_registry.registry import Registry

__version__ = "0.2.0"

_registry = Registry()

plan = _registry.plan
plan_if_served = _registry.plan_if_served
explain = _registry.explain
plan_layer = _registry.plan_layer
check_backend = _registry.check_backend
kernel_choices = _registry.kernel_choices
hypothesize = _registry.hypothesize
plugins = _registry.plugins
backends = _registry.backends
register = _registry.register
unregister = _registry.unregister
recipe = _registry.recipe
recipes = _registry.recipes
quantizer = _registry.quantizer
strange_names = _registry.strange_names
strange_recipes = _registry.strange_recipes

__all__ = [
    "ALL_ACTIVATIONS",
    "ALL_DTYPES",
    "ALL_NORMS",
    "API_LEVEL",
    "GATED",
    "MOVES",
    "OLDEST_API_LEVEL",
    "OPTIMIZERS",
    "PLANES",
    "QUANTIZERS",
    "ROUTERS",
    "Accumulation",
    "Activation",
    "ActivationRequest",
    "Backend",
    "BackendCard",
    "BackendRecord",
    "Bound",
    "Capability",
    "ChooseRequest",
    "Decision",
    "DequantizeRequest",
    "Device",
    "FallbackWarning",
    "Framework",
    "FrameworkRecord",
    "GemmPlan",
    "GemmRequest",
    "HookSpecs",
    "KernelChoice",
    "LayerPlan",
    "LayerResult",
    "MoveRequest",
    "Norm",
    "NormRequest",
    "Op",
    "Plan",
    "PluginRecord",
    "QuantizePlan",
    "QuantizeRequest",
    "QuantizerCard",
    "Refused",
    "Registry",
    "Request",
    "UnknownBackendError",
    "Verdict",
    "Weight",
    "backends",
    "check_backend",
    "current_preference",
    "explain",
    "framework",
    "framework_names",
    "framework_record",
    "framework_records",
    "frameworks",
    "hookimpl",
    "hypothesize",
    "kernel_choices",
    "mirror_preference",
    "plan",
    "plan_if_served",
    "plan_layer",
    "plugins",
    "prefer",
    "quantizer",
    "recipe",
    "recipes",
    "register",
    "state_token",
    "strange_names",
    "strange_recipes",
    "unregister",
]
