"""Chooses the functions of a router, and those that sort its choices and move rows: a backend's, where one serves them,
else JAX's operations.

A backend's function takes what one device holds. So it is chosen where the caller is manual over every axis of the mesh
in scope that has several devices, and in a process that sees one device; elsewhere XLA cuts JAX's operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
from jax import Array
from jax.sharding import AxisType

from octavo.formats import DType
from octavo.router import RouterRule
from octavo_jax.arrays.dtypes import DTYPES, dtype_name
from octavo_jax.dispatch.backends import BackendNames, hashable
from octavo_jax.dispatch.device import DeviceKind, device_of
from octavo_jax.memo import Memo
from octavo_registry import Plan, plan_if_served
from octavo_registry.contract.cards import Choose, Move
from octavo_registry.contract.moves import ChooseExperts, ChooseGradient, CombineRows, DotRows, PermuteRows, Route
from octavo_registry.contract.request import AnyRequest, ChooseRequest, MoveRequest

_MOVES: tuple[Move, ...] = ("permute_rows", "combine_rows", "dot_rows")


class RowFunctions(NamedTuple):
    """The functions that move rows; None: JAX's operations."""

    permute_rows: PermuteRows[Array] | None = None
    combine_rows: CombineRows[Array] | None = None
    dot_rows: DotRows[Array] | None = None


COMPOSED = RowFunctions()


class Choosers(NamedTuple):
    """The functions of a router, of one backend."""

    choose: ChooseExperts[Array]
    gradient: ChooseGradient[Array]


class DeviceAndBackends(NamedTuple):
    """The device of a call, and the backends that its caller allows: what decides who serves an operation."""

    device: DeviceKind
    backend: str | tuple[str, ...] | None

    @classmethod
    def of(cls, array: Array, backend: BackendNames) -> DeviceAndBackends:
        """Of a call with this array and this argument `backend`."""
        return cls(device_of(array), hashable(backend))

    def plan(self, op: Move | Choose, dtype: DType, groups: int | None = None, **fields: int) -> Plan | None:
        """The plan of the backend that serves the operation; None: JAX's operations do.

        dtype    of rows or logits; of choices, which are integers, any
        groups   of "route", or experts of a router
        fields   the other fields of a router's request, as `router_fields` gives them
        """
        if not holds_whole_arrays():
            return None
        key = self, op, dtype, groups, tuple(fields.items())
        return _plans.get(key, lambda: plan_if_served(self._request(op, dtype, groups, fields), backend=self.backend))

    def _request(self, op: Move | Choose, dtype: DType, groups: int | None, fields: dict[str, Any]) -> AnyRequest:
        common: dict[str, Any] = {
            "framework": "jax",
            "device": self.device.kind,
            "arch": self.device.arch,
            "in_dtype": dtype,
            "out_dtype": dtype,
            "groups": groups,
        }
        if op == "choose_experts" or op == "choose_gradient":
            return ChooseRequest(op=op, **common, **fields)
        return MoveRequest(op=op, **common)


_plans: Memo[Plan | None] = Memo()


def holds_whole_arrays() -> bool:
    """Whether one device holds what the caller's arrays have."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return all(kind == AxisType.Manual or mesh.shape[name] == 1 for name, kind in kinds)


def row_functions_for(dtype: Any, where: DeviceAndBackends) -> RowFunctions:
    """The functions for rows of this dtype."""
    name = DTYPES.get(dtype)
    if name is None:
        return COMPOSED
    plans = [where.plan(op, name) for op in _MOVES]
    return RowFunctions(*(None if plan is None else plan.run for plan in plans))


def route_for(groups: int, where: DeviceAndBackends) -> Route[Array] | None:
    """The function that sorts choices by group; None: JAX's operations."""
    plan = where.plan("route", "float32", groups)
    return None if plan is None else cast("Route[Array]", plan.run)


def choosers_for(logits: Array, rule: RouterRule, backend: BackendNames) -> Choosers | None:
    """The functions of a router; None: JAX's operations."""
    dtype, where, fields = (
        dtype_name(logits.dtype, "logits"),
        DeviceAndBackends.of(logits, backend),
        router_fields(rule),
    )
    choose = where.plan("choose_experts", dtype, int(logits.shape[1]), **fields)
    if choose is None:
        return None
    same_backend = where._replace(backend=choose.backend)
    gradient = same_backend.plan("choose_gradient", dtype, int(logits.shape[1]), **fields)
    return None if gradient is None else Choosers(choose.run, gradient.run)


def router_fields(rule: RouterRule) -> dict[str, int]:
    """The fields of a `ChooseRequest` that a rule decides."""
    return {"choices": rule.k, "expert_groups": rule.groups if rule.by_groups else 1}
