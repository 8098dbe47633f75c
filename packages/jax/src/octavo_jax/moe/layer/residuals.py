"""What a MoE layer keeps from its forward pass to its backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import jax
from jax import Array

from octavo.quantizer import Direction
from octavo.recipe_base import Gemm
from octavo_jax.arrays.gemm_operands import GemmOperand
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.layer import Layer
from octavo_jax.linear.operands import Context
from octavo_jax.linear.two_forms import one_plane
from octavo_jax.mlp.autograd import States
from octavo_jax.mlp.plan import Mlp
from octavo_jax.moe.layer.plan import MoePlan
from octavo_registry.contract.weights import readers

Some = TypeVar("Some", bound=GemmOperand | None)


class RowOrder(NamedTuple):
    """Which choice each row is for, and where each choice's row is: `order` [R] and `position` [T, k] of a Routing."""

    order: Array
    position: Array


class KeptKernel(NamedTuple):
    """A kernel as the backward pass reads it.

    array   None unless a GEMM reads it, or codes are computed from it again
    codes   with the planes that are kept; None if none are
    """

    array: Array | None
    codes: GroupedTensor | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoeResiduals:
    """What the backward pass reads; None for what it computes again, because the form does not keep it.

    plan           with its gradients planned
    forward_mlp    the plan's MLPs, as they were in the forward pass: with the quantizers of what that pass reads, which
    backward_mlp   run again for what is computed again, and with the quantizers of what the gradients read
    x              [T, K]
    x1, x2         what the gradients of both kernels read, in "keep_all"; x2 is None if it would be an array
    h              fc1's result, or codes of it
    results        [R, N] of the experts, if the gradient of their weights reads them
    bi, bo         read for the dtypes of their gradients, and to compute h and the results again
    states         with the forward's amaxes
    """

    plan: MoePlan = field(metadata={"static": True})
    forward_mlp: Mlp = field(metadata={"static": True})
    backward_mlp: Mlp = field(metadata={"static": True})
    x: Array | None
    x1: GemmOperand | None
    x2: GemmOperand | None
    h: GemmOperand | None
    results: Array | None
    weights: Array
    row_order: RowOrder
    wi: KeptKernel
    wo: KeptKernel
    bi: Array | None
    bo: Array | None
    context: Context
    states: States | None


def kept_kernel(
    plan: MoePlan, layer: Layer, kernel: Array, codes: GroupedTensor | None, fprop_runs_again: bool
) -> KeptKernel:
    """The kernel as dgrad reads it, and as fprop does if the backward pass runs that again."""
    read: tuple[Gemm, ...] = ("fprop", "dgrad") if fprop_runs_again else ("dgrad",)
    quantized = [gemm for gemm in read if layer.plan.recipe.quantizes(gemm)]
    kept = codes if quantized and plan.weight_codes == "keep" else None
    if kept is not None and len(quantized) == 1 and kept.spec.orientation == "both":
        kept = kernel_plane(layer, kept, quantized[0])
    return KeptKernel(kernel if len(quantized) < len(read) or kept is None else None, kept)


def kernel_plane(layer: Layer, codes: GroupedTensor, gemm: Gemm) -> GroupedTensor:
    """A kernel's codes with only the plane that this GEMM reads."""
    reads_rows = readers("w", layer.plan.fprop.request.weight)[0] == gemm
    direction: Direction = "rowwise" if reads_rows else "columnwise"
    return one_plane(codes, direction)


def without_sizes(operand: Some) -> Some:
    """`operand`, whose codes no longer hold the group sizes: these are kept once, in the Context."""
    return replace(operand, group_sizes=None) if isinstance(operand, GroupedTensor) else operand
