"""What a MoE layer runs: an MLP, and the two halves of its quantizers, one for each pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jax.typing import DTypeLike

from octavo.recipe_base import Gemm
from octavo_jax.memo import Identities
from octavo_jax.mlp.plan import Mlp, mlp_of
from octavo_jax.moe.layer.forms import Form, WeightCodes

_FPROP: tuple[Gemm, ...] = ("fprop",)
_OF_X: tuple[Gemm, ...] = ("fprop", "wgrad")
_OF_KERNELS: tuple[Gemm, ...] = ("fprop", "dgrad")


@dataclass(frozen=True, eq=False)
class MoePlan:
    """What one MoE layer runs. Compared by identity, so it is a cheap static argument of `jax.jit`.

    mlp                  the experts', with every plane that a GEMM reads
    form, weight_codes   what is kept for the backward
    on_output            weights multiply the experts' results, not what goes into fc2
    out_dtype            of y
    """

    mlp: Mlp
    form: Form
    weight_codes: WeightCodes
    on_output: bool
    out_dtype: DTypeLike

    def trained(self) -> MoePlan:
        """The layer with its gradients planned, too."""
        return moe_plan_of(self.mlp.trained(), self.form, self.weight_codes, self.on_output, self.out_dtype)

    @property
    def forward(self) -> Mlp:
        """The MLP that quantizes what fprop reads, and what is kept."""
        x = _OF_X if self.form == "keep_all" else _FPROP
        return _quantizing(self.mlp, x, _OF_KERNELS if self.weight_codes == "keep" else _FPROP)

    @property
    def backward(self) -> Mlp:
        """The MLP that quantizes what the gradients read."""
        return _quantizing(self.mlp, ("wgrad",), ("dgrad",))


_plans: Identities[MoePlan] = Identities()


def moe_plan_of(mlp: Mlp, form: Form, weight_codes: WeightCodes, on_output: bool, out_dtype: DTypeLike) -> MoePlan:
    """The plan of these: the same object for the same MLP."""
    key = mlp, form, weight_codes, on_output, out_dtype
    return _plans.of(key, lambda: MoePlan(*key))


def _quantizing(mlp: Mlp, x: Collection[Gemm], w: Collection[Gemm]) -> Mlp:
    return mlp_of(mlp.fc1.quantizing(x, w), mlp.fc2.quantizing(x, w), mlp.activation, None)
