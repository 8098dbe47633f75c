"""Activation, its gradient, or a normalization, and the quantizer: one function of a backend's, or composed here.

A quantizer's plan is where these begin: it has the spec and the layouts that the GEMMs want. Composed, the function is
plain JAX, rounded once, and then the plan's own `run`; so from the rounded array on the bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax import Array

import octavo_registry
from octavo import NoBackendError
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.functions.composed import ComposedActivation, ComposedGradient, ComposedNorm, ComposedQuantizer, Extras
from octavo_jax.functions.norms import NormSpec
from octavo_registry import Plan, Request
from octavo_registry.contract.cards import Activation

Run = Callable[..., tuple[GroupedTensor, Extras]]


def _served(quantizer: Plan, request: Request, backend: BackendNames) -> Plan | None:
    """The plan of the fused operation, unless its backend could quantize, too, and was not chosen for that."""
    try:
        plan = octavo_registry.plan(request, backend=backend)
    except NoBackendError:
        return None
    verdicts = {decision.backend: decision.verdict for decision in quantizer.decisions}
    return None if verdicts.get(plan.backend) == "eligible" else plan


def _quantizer(plan: Plan) -> ComposedQuantizer:
    assert plan.request.quantizer is not None
    return ComposedQuantizer.of(plan, plan.request.quantizer)


@dataclass(frozen=True, slots=True)
class _WithEpsilon:
    run: Run
    epsilon: float

    def __call__(self, *arrays: Array | None, **how: Any) -> tuple[GroupedTensor, Extras]:
        return self.run(*arrays, epsilon=self.epsilon, **how)


def activation_run(quantizer: Plan, activation: Activation, backend: BackendNames) -> Run:
    """`run(x, group_sizes, *, probs, seed, operand, group_offset, scale)`, as `octavo_registry.Bound` has it."""
    plan = _served(quantizer, replace(quantizer.request, op="act_quantize", activation=activation), backend)
    return ComposedActivation(_quantizer(quantizer), activation) if plan is None else plan.run


def gradient_run(quantizer: Plan, activation: Activation, backend: BackendNames) -> Run:
    """`run(dy, x, group_sizes, *, probs, ...)`; dy and x have one dtype, and the extras hold dbias."""
    plan = _served(quantizer, replace(quantizer.request, op="dact_quantize", activation=activation), backend)
    return ComposedGradient(_quantizer(quantizer), activation) if plan is None else plan.run


def norm_run(quantizer: Plan, spec: NormSpec, backend: BackendNames) -> Run:
    """`run(x, gamma, beta, group_sizes, *, seed, operand, group_offset, scale)`; the extras hold the statistics."""
    plan = _served(quantizer, replace(quantizer.request, op="norm_quantize", norm=spec.norm), backend)
    run = ComposedNorm(_quantizer(quantizer), spec.norm) if plan is None else plan.run
    return _WithEpsilon(run, spec.epsilon)
