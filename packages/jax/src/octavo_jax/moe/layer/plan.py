"""What a MoE layer runs: an MLP, and of it two with fewer quantizers, one for each pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace

from jax.typing import DTypeLike

from octavo.recipe_base import Gemm
from octavo_jax.memo import Interned
from octavo_jax.mlp.plan import Mlp, mlp_of
from octavo_jax.moe.layer.forms import Form, WeightCodes, WeightsOn
from octavo_jax.moe.row_functions import DeviceAndBackends, RowFunctions, row_functions_for

_FPROP: tuple[Gemm, ...] = ("fprop",)
_DGRAD: tuple[Gemm, ...] = ("dgrad",)
_WGRAD: tuple[Gemm, ...] = ("wgrad",)


@dataclass(frozen=True, eq=False)
class MoePlan:
    """What one MoE layer runs. Compared by identity, so it is a cheap static argument of `jax.jit`.

    mlp                  the experts', with every plane that a GEMM reads
    form, weight_codes   what is kept for the backward
    weights_on           what the choices' weights multiply: the experts' results, or what goes into fc2
    out_dtype            of y
    row_functions        sum rows by token, and move them
    """

    mlp: Mlp
    form: Form
    weight_codes: WeightCodes
    weights_on: WeightsOn
    out_dtype: DTypeLike
    row_functions: RowFunctions

    def for_training(self) -> MoePlan:
        """The layer with its gradients planned, too."""
        return replace(self, mlp=self.mlp.for_training()).interned()

    def interned(self) -> MoePlan:
        """The plan with these fields: the same object each time."""
        key = tuple(getattr(self, field.name) for field in fields(self))
        return _interned.of(key, lambda: self)

    @property
    def forward_mlp(self) -> Mlp:
        """The MLP that quantizes what fprop reads, and what is kept."""
        x = _FPROP + _WGRAD if self.form == "keep_all" else _FPROP
        return _quantizing(self.mlp, x, _FPROP + _DGRAD if self.weight_codes == "keep" else _FPROP)

    @property
    def backward_mlp(self) -> Mlp:
        """The MLP that quantizes what the gradients read."""
        return _quantizing(self.mlp, _WGRAD, _DGRAD)


_interned: Interned[MoePlan] = Interned()


def moe_plan_of(
    mlp: Mlp, form: Form, weight_codes: WeightCodes, weights_on: WeightsOn, out_dtype: DTypeLike
) -> MoePlan:
    """The plan with these fields, and with functions that move rows as the caller's mesh allows."""
    where = DeviceAndBackends(mlp.fc2.request.device, mlp.fc2.options.backend)
    functions = row_functions_for(mlp.fc2.y_dtype, where)
    return MoePlan(mlp, form, weight_codes, weights_on, out_dtype, functions).interned()


def _quantizing(mlp: Mlp, x: Collection[Gemm], w: Collection[Gemm]) -> Mlp:
    return mlp_of(mlp.fc1.quantizing(x, w), mlp.fc2.quantizing(x, w), mlp.activation, None)
