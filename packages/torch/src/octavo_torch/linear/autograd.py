"""The forward and backward of a grouped linear layer, composed of its bound functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from octavo.quantizer import Operand
from octavo_registry.contract.moves import TokenRows
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.grouped_tensor import GroupedTensor, Matrix, Rows, codes_alone
from octavo_torch.arrays.sizes import Sizes, group_sizes_of
from octavo_torch.arrays.strides import share_memory
from octavo_torch.autograd.gradients import Context, cast_gradients, dtypes_of, needed_gradients
from octavo_torch.autograd.saved import Saved, caller_sizes
from octavo_torch.autograd.saved_tensors import save, saved_tensors
from octavo_torch.compiler.refused_derivatives import FirstOrderFunction, check_no_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.dispatch.layer_functions import FpropFunction, QuantizeFunction, WgradFunction
from octavo_torch.linear.arguments import check_state
from octavo_torch.linear.call import Call
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.contexts import run_backward
from octavo_torch.scaling.probe import Probe
from octavo_torch.scaling.seeds import DrawnSeed, SeedCounter
from octavo_torch.wgrad.bias_gradients import bias_gradients

RowValues = Tensor | TokenRows[Tensor]
"""Rows in high precision, or tokens from which a GEMM gathers its rows, or the codes of its rows."""

AnyRows = TypeVar("AnyRows", bound=RowValues)


def forward_seed(call: Call) -> DrawnSeed:
    """The seed with which the forward rounds; None if it rounds nothing stochastically."""
    if not call.layer.stochastic_forward:
        return None
    return call.seed.current() if isinstance(call.seed, SeedCounter) else call.seed


def backward_seed(call: Call) -> DrawnSeed:
    """The seed with which the backward rounds gradients. A SeedCounter advances: call this once per backward."""
    return call.seed.take() if isinstance(call.seed, SeedCounter) else call.seed


def quantize_operand(
    call: Call, run: QuantizeFunction, operand: Operand, value: Tensor, seed: DrawnSeed
) -> GroupedTensor:
    """`value` quantized by `run`. With delayed scaling, its scale is the state's, and its amax is recorded there."""
    sizes, state, offset = None if operand == "w" else call.sizes, call.state, call.group_offset
    if state is None:
        return run(value, sizes, seed=seed, operand=operand, group_offset=offset)
    scale = state.encode_scale(operand)
    with_amax = call.layer.with_amax.get(operand) if call.record else None
    if with_amax is not None:
        codes, amax = with_amax(value, sizes, seed=seed, operand=operand, group_offset=offset, scale=scale)
        state.record(operand, amax)
        return codes
    if call.record:
        state.record(operand, operators.group_amax_of(value, None if sizes is None else group_sizes_of(sizes)))
    return run(value, sizes, seed=seed, operand=operand, group_offset=offset, scale=scale)


def run_forward(
    call: Call, seed: DrawnSeed, x: AnyRows, w: Tensor, bias: Tensor | None, bias_scales: Tensor | None
) -> tuple[Tensor, AnyRows | GroupedTensor, Matrix]:
    """The layer's product of x [M, K] and w [G, N, K], each of which is quantized first unless the call has its codes.

    Returns y [M, N], and then x and w as the backward saves them: quantized if a GEMM reads codes, without planes of
    values.

    If the call has codes of x, the values of x are read only by a high-precision fprop. TokenRows are for a layer that
    gathers them (octavo_torch.moe.tokens), and are returned as they are.
    """
    read = read_operands(call, seed, x, w)
    y = product(call, call.layer.fprop, (x, w), read, bias, bias_scales)
    rows, matrices = read
    return y, codes_alone(rows), codes_alone(matrices)


def read_operands(call: Call, seed: DrawnSeed, x: AnyRows, w: Tensor) -> tuple[AnyRows | GroupedTensor, Matrix]:
    """x and w, quantized where a GEMM reads codes: see `run_forward`."""
    layer = call.layer
    if call.probe is not None and isinstance(x, Tensor):
        _count_operands(call, call.probe, x, w)
    rows: AnyRows | GroupedTensor = x if call.x_codes is None else call.x_codes
    matrices: Matrix = w if call.w_codes is None else call.w_codes
    if layer.quantize_x is not None and call.x_codes is None and isinstance(x, Tensor):
        rows = quantize_operand(call, layer.quantize_x, "x", x, seed)
    if layer.quantize_w is not None and call.w_codes is None:
        matrices, call.w_made = call.w_made or quantize_operand(call, layer.quantize_w, "w", w, seed), None
    return rows, matrices


def product(
    call: Call,
    fprop: FpropFunction,
    values: tuple[RowValues, Tensor],
    read: tuple[Rows, Matrix],
    bias: Tensor | None,
    bias_scales: Tensor | None,
) -> Tensor:
    """y [M, N] by `fprop`, which multiplies either `values` or `read`, depending on the recipe's fprop slot.

    values   x and w in high precision
    read     the same as `read_operands` returned them
    """
    left, right = read if call.layer.quantized_fprop else values
    return fprop(left, right, call.sizes, bias=bias, bias_scales=bias_scales, out=call.out)


def _count_operands(call: Call, probe: Probe, x: Tensor, w: Tensor) -> None:
    """Count the operands that the forward has values of. An x or a weight that is codes alone has none."""
    if call.x_codes is None:
        probe.record("x", x, call.sizes, call.state)
    if type(w) is not CodedWeight:
        probe.record("w", call.layer.w_halves(w), None, call.state)


class LinearContext(Context, Protocol):
    """`x` and `w` are set only if the backward reads them."""

    call: Call
    x: Saved
    w: Saved


class GroupedLinearFunction(FirstOrderFunction):
    """grouped_linear with gradients of x, weight, bias and bias_scales, of which only those asked for are computed.

    Saved are the operands that wgrad and dgrad read (codes of x and of the weight, or the tensor itself for a
    high-precision slot); bias and bias_scales, if there are both, since the gradient of each needs the other; and the
    sizes, unless a backend has prepared them.
    """

    @staticmethod
    def forward(
        ctx: LinearContext,
        call: Call,
        out: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bias_scales: Tensor | None,
        anchor: Tensor | None,
    ) -> Tensor:
        """y [M, N], written into `out` if it is given. `anchor`: see parameters.anchor_of."""
        layer = call.layer
        values = call.values_of(weight)
        y, rows, matrices = run_forward(call, forward_seed(call), x, values, bias, bias_scales)
        call.release()
        tensors = [caller_sizes(call.sizes), None, None]
        if bias_scales is not None:
            tensors[1:] = [bias, bias_scales]
        if layer.need_dw:
            ctx.x = Saved(rows if layer.quantized_wgrad else x, tensors)
        if layer.need_dx:
            ctx.w = Saved(matrices if layer.quantized_dgrad else values, tensors, planes=layer.w_planes.dgrad)
        save(ctx, *tensors)
        ctx.call = call
        ctx.dtypes = dtypes_of(x, weight, bias, bias_scales, anchor)
        if out is not None:
            ctx.mark_dirty(out)
        return y

    @staticmethod
    def backward(ctx: LinearContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        check_no_graph(dy)
        with torch.no_grad():
            return (None, None, *run_backward(_backward, ctx, dy))


def _backward(ctx: LinearContext, dy: Tensor) -> list[Tensor | None]:
    call, tensors = ctx.call, saved_tensors(ctx)
    layer = call.layer
    if call.state is not None:
        check_state(layer.recipe, call.state, dy, layer.groups)  # a caller may have replaced its tensors since
    saved_sizes, bias, bias_scales = tensors[:3]
    sizes = saved_sizes if isinstance(call.sizes, Tensor) else call.sizes
    need_x, need_w, need_b, need_s, need_postponed = needed_gradients(ctx, ctx.needs_input_grad[2:], dy)
    note_left_out(ctx, need_postponed, call)
    need_w = need_w or need_postponed
    dx = dw = db = ds = None
    if dy.dtype is not layer.row_dtype:
        dy = dy.to(layer.row_dtype)
    if need_b or need_s:
        db, ds = bias_gradients(layer, dy, sizes, bias, bias_scales, need_bias=need_b, need_scales=need_s)
    if need_x or need_w:
        codes: Matrix = dy
        if call.probe is not None:
            call.probe.record("dy", dy, sizes, call.state)
        if layer.quantize_dy is not None:
            codes = quantize_operand(call, layer.quantize_dy, "dy", dy, backward_seed(call))
        if need_x and layer.dgrad is not None:
            rows = codes if layer.quantized_dgrad else dy
            if call.grad_input is not None:
                check_grad_input(call.grad_input, dy)
            dx = layer.dgrad(rows, ctx.w.load(tensors), sizes, out=call.grad_input)
        if need_w and layer.wgrad is not None:
            rows = codes if layer.quantized_wgrad else dy
            dw = weight_gradient(call, layer.wgrad, ctx.x.load(tensors), rows, sizes)
    return cast_gradients([dx, dw, db, ds, None], ctx.dtypes)


def check_grad_input(grad_input: Tensor, dy: Tensor) -> None:
    """ValueError if dx would overwrite dy, which the GEMM reads.

    Also bumps grad_input's version, so that autograd detects a backward that still needs its old values.
    """
    if share_memory(grad_input, dy):
        raise ValueError("grad_input shares memory with y's gradient, which backward reads; give a buffer of its own")
    if is_plain(grad_input):
        torch.autograd.graph.increment_version(grad_input)


def weight_gradient(
    call: Call, wgrad: WgradFunction, x: Rows, dy: Rows, sizes: Sizes, owner: object = None
) -> Tensor | None:
    """dw; or, if the call has a target, what autograd gets in its place: see WgradTarget.put.

    owner   see DelayedWgrad.postpone; None: the call
    """
    if call.target is not None:
        return call.target.put(wgrad, x, dy, sizes, call if owner is None else owner)
    return wgrad(x, dy, sizes)


def note_left_out(ctx: Context, postponed: bool, *calls: Call) -> None:
    """Tells those who postpone gradients of the calls' weights that this backward leaves them out.

    postponed   whether it was asked for them: for the anchor, the last of forward's inputs
    """
    if postponed or not ctx.needs_input_grad[-1]:
        return
    for call in calls:
        if call.target is not None:
            call.target.leave_out()


grouped_linear_function: Callable[..., Tensor] = GroupedLinearFunction.apply
