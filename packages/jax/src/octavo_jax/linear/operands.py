"""Operands of a layer's GEMMs: how they are quantized and named, and what is kept of them for the backward pass.

In the forward pass `quantize_operand` computes both planes of x and of the kernel. `wgrad_x` and `dgrad_weight` keep,
of each, the one plane that the backward pass reads.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo.quantizer import Direction, Operand
from octavo_jax.arrays.gemm_operands import GemmOperand
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.layer import Layer
from octavo_jax.dispatch.quantizer import in_plain_layouts
from octavo_jax.dispatch.results import checked_codes
from octavo_jax.linear.two_forms import Quantized, kept_form, name_operand, one_plane, read_form
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.remat.never_recomputed import never_recomputed
from octavo_jax.scaling.delayed_state import ScalingHistory, amax_of, with_amax
from octavo_jax.scaling.quantizer_arguments import QuantizerArguments
from octavo_jax.sharding.placement import Placement
from octavo_jax.sharding.quantizers import CodesAndAmax, quantize_kernel, quantize_rows, rows_are_local
from octavo_registry import QuantizePlan
from octavo_registry.contract.weights import readers


class QuantizedOperand(NamedTuple):
    """An operand of a GEMM after `quantize_operand`.

    q         codes and scales, their planes named; None if no GEMM reads the operand quantized
    history   of delayed scaling, with the operand's amax recorded; else None
    """

    q: Quantized | None
    history: ScalingHistory | None


class Context(NamedTuple):
    """The arguments that have no gradient.

    group_sizes    [G], or [*B, G]
    seed           uint32 [2] words; None if nothing is rounded stochastically
    group_offset   the number of the first group
    """

    group_sizes: Array
    seed: Array | None
    group_offset: Array | np.uint32

    def quantizer_arguments(
        self, plan: QuantizePlan, operand: Operand, history: ScalingHistory | None
    ) -> QuantizerArguments:
        """The arguments of the quantizer that `plan` runs for `operand`; `history` is delayed scaling's, else None."""
        spec = plan.request.quantizer
        seed = self.seed if spec.stochastic else None
        return QuantizerArguments(seed, operand, self.group_offset, None if history is None else history.scale)


def has_local_rows(layer: Layer, operand: Operand) -> bool:
    """Whether every row of x, or of dy, is on one device with all of its features."""
    return layer.placement is None or rows_are_local(layer.placement, "i" if operand == "x" else "o")


def quantize_operand(
    layer: Layer, x: Array, operand: Operand, context: Context, history: ScalingHistory | None = None
) -> QuantizedOperand:
    """`x` as the layer quantizes this operand, with its planes named, and the history with x's amax recorded.

    x         [M, C] rows, [*B, M, C] where the layer has a placement; for "w" the stacked matrices as `stored_weight`
              gives them
    history   of delayed scaling, else None

    If no GEMM reads the operand quantized, the result has no codes, and the history as it was.
    """
    plan = layer.quantizer(operand)
    if plan is None:
        return QuantizedOperand(None, history)
    arguments = context.quantizer_arguments(plan, operand, history)
    x, sizes = undifferentiated(x), None if operand == "w" else context.group_sizes
    if layer.placement is not None:
        q, amax = _quantize_shards(plan, layer.placement, layer, x, sizes, arguments)
        return recorded_operand(layer, q, operand, history, amax)
    if history is None:
        run = layer.in_two_forms(plan).run
        return recorded_operand(layer, checked_codes(plan, run(x, sizes, **arguments.keywords())), operand, None, None)
    if plan.bound.with_amax is None:
        q, amax = checked_codes(plan, plan.run(x, sizes, **arguments.keywords())), amax_of(x, sizes)
    else:
        q, amax = plan.bound.with_amax(x, sizes, **arguments.keywords())
    return recorded_operand(layer, q, operand, history, amax)


def recorded_operand(
    layer: Layer, q: Quantized, operand: Operand, history: ScalingHistory | None, amax: Array | None
) -> QuantizedOperand:
    """`q` with its planes named, and the history, if there is one, with this amax recorded."""
    q = name_operand(layer, q, operand)
    if history is None:
        return QuantizedOperand(q, None)
    assert amax is not None  # quantizers measure it for a history
    return QuantizedOperand(q, with_amax(history, never_recomputed(amax)))


def _quantize_shards(
    plan: QuantizePlan,
    placement: Placement,
    layer: Layer,
    x: Array,
    sizes: Array | None,
    arguments: QuantizerArguments,
) -> CodesAndAmax:
    """Rows, or a kernel if `sizes` is None, quantized on a mesh: in the plain layout if the mesh cuts the operand."""
    if sizes is None:
        cut = placement.is_cut("g", "k", "n")
    else:
        cut = placement.is_cut("i" if arguments.operand == "x" else "o")
    plan = in_plain_layouts(plan, layer.options.backend) if cut else plan
    if sizes is None:
        return quantize_kernel(placement, plan, x, layer.plan.fprop.request.weight, arguments)
    return quantize_rows(placement, plan, x, sizes, arguments)


def gemm_operand(q: Quantized | None, array: Array, quantized: bool) -> GemmOperand:
    """What a GEMM of this pass multiplies: the quantized operand where its slot is `quantized`, else the array."""
    return read_form(q) if quantized and q is not None else array


def _kept_plane(q: Quantized | None, array: Array, quantized: bool, direction: Direction) -> GemmOperand:
    """What the backward pass keeps of an operand for a GEMM: codes in one plane, or the array."""
    operand = gemm_operand(kept_form(q), array, quantized)
    return one_plane(operand, direction) if isinstance(operand, GroupedTensor) else operand


def stored_weight(layer: Layer, kernel: Array) -> Array:
    """The kernel as the plan's operations take it: as it is, or with its last two axes swapped."""
    return jnp.swapaxes(kernel, 1, 2) if layer.plan.transposes else kernel


def wgrad_x(layer: Layer, x: Array, xq: Quantized | None) -> GemmOperand:
    """What wgrad reads of x, to be kept: one plane, or the array."""
    return _kept_plane(xq, x, layer.plan.recipe.quantizes("wgrad"), "columnwise")


def dgrad_weight(layer: Layer, kernel: Array, wq: Quantized | None) -> GemmOperand:
    """What dgrad reads of the kernel, to be kept: one plane, or the kernel itself with the caller's axes."""
    reads_rows = readers("w", layer.plan.fprop.request.weight)[0] == "dgrad"
    quantized = layer.plan.recipe.quantizes("dgrad")
    return _kept_plane(wq, kernel, quantized, "rowwise" if reads_rows else "columnwise")
