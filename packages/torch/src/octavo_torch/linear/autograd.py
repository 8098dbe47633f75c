"""The forward and backward of a grouped linear layer, composed from one Layer's bound functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import GroupedTensorSpec
from octavo.quantizer import Operand
from octavo_torch.arithmetic import operations
from octavo_torch.arrays.grouped_tensor import PLANES, GroupedTensor
from octavo_torch.arrays.strides import share_memory
from octavo_torch.compiler.second_derivative import once_differentiated
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.dispatch.layer import Layer, Run
from octavo_torch.linear.contexts import run_backward
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import Seed, SeedCounter
from octavo_torch.wgrad.target import WgradTarget

_COLUMN_PLANES = PLANES[3:]


class Call:
    """What backward needs of one call beside the saved tensors; `sizes` are int [G], or what layer.prepare made.

    target   where the weight's gradient goes; None: it is autograd's
    """

    __slots__ = ("grad_input", "group_offset", "layer", "record", "seed", "sizes", "state", "target")

    def __init__(
        self,
        layer: Layer,
        sizes: Any,
        seed: Seed,
        state: DelayedState | None,
        record: bool,
        group_offset: int,
        grad_input: Tensor | None,
        target: WgradTarget | None,
    ) -> None:
        self.layer, self.sizes, self.seed, self.state = layer, sizes, seed, state
        self.record, self.group_offset, self.grad_input, self.target = record, group_offset, grad_input, target


def quantize_operand(
    layer: Layer,
    run: Run,
    value: Tensor,
    operand: Operand,
    sizes: Any,
    seed: Any,
    state: DelayedState | None,
    record: bool,
    group_offset: int,
) -> Any:
    """`value` quantized; with delayed scaling its amax is recorded and its scale comes from the state."""
    if state is None:
        return run(value, sizes, seed=seed, operand=operand, group_offset=group_offset)
    scale = state.encode_scale(operand)
    with_amax = layer.with_amax.get(operand) if record else None
    if with_amax is not None:
        codes, amax = with_amax(value, sizes, seed=seed, operand=operand, group_offset=group_offset, scale=scale)
        state.record(operand, amax)
        return codes
    if record:
        state.record(operand, operations.group_amax_of(value, getattr(sizes, "group_sizes", sizes)))
    return run(value, sizes, seed=seed, operand=operand, group_offset=group_offset, scale=scale)


def run_forward(
    layer: Layer,
    sizes: Any,
    x: Tensor,
    w: Tensor,
    w_codes: GroupedTensor | None,
    bias: Tensor | None,
    bias_scales: Tensor | None,
    seed: Seed,
    state: DelayedState | None,
    record: bool,
    group_offset: int,
    out: Tensor | None,
    x_codes: GroupedTensor | None = None,
) -> tuple[Tensor, Any, Any]:
    """y, and x and w as backward saves them: quantized where a GEMM reads codes.

    x_codes   of an x that is quantized already; x itself is then read where the fprop slot is high precision alone
    """
    rows: Any = x if x_codes is None else x_codes
    matrices: Any = w
    drawn: Any = None
    if layer.stochastic_forward:
        drawn = seed.current() if isinstance(seed, SeedCounter) else seed
    if layer.quantize_x is not None and x_codes is None:
        rows = quantize_operand(layer, layer.quantize_x, x, "x", sizes, drawn, state, record, group_offset)
    if layer.quantize_w is not None:
        matrices = w_codes
        if w_codes is None:
            matrices = quantize_operand(layer, layer.quantize_w, w, "w", None, drawn, state, record, group_offset)
    if layer.quantized_fprop:
        y = layer.fprop(rows, matrices, sizes, bias=bias, bias_scales=bias_scales, out=out)
    else:
        y = layer.fprop(x, w, sizes, bias=bias, bias_scales=bias_scales, out=out)
    return y, rows, matrices


class Saved:
    """Where an operand's saved tensors stand in ctx.saved_tensors, and how to put it together again."""

    def __init__(self, value: Tensor | GroupedTensor, tensors: list[Tensor | None]) -> None:
        self.start = len(tensors)
        self.spec: GroupedTensorSpec | None = None
        if isinstance(value, GroupedTensor):
            self.spec = value.spec
            tensors.append(value.group_sizes)
            tensors.extend(getattr(value, name) for name in _COLUMN_PLANES)
        else:
            tensors.append(value)

    def load(self, tensors: tuple[Any, ...]) -> Tensor | GroupedTensor:
        """The operand: unquantized, or with its column planes alone."""
        if self.spec is None:
            value: Tensor = tensors[self.start]
            return value
        sizes, *planes = tensors[self.start : self.start + 1 + len(_COLUMN_PLANES)]
        return GroupedTensor(self.spec, sizes, **dict(zip(_COLUMN_PLANES, planes, strict=True)))


class GroupedLinearFunction(torch.autograd.Function):
    """grouped_linear with gradients of x, weight, bias and bias_scales; each is computed only where it is asked for.

    Saves x's and the weight's column codes (the unquantized tensor where the slot is high precision), bias and
    bias_scales where the other one's gradient needs them, and the sizes unless a backend prepared them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        w_codes: GroupedTensor | None,
        x_codes: GroupedTensor | None,
        out: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bias_scales: Tensor | None,
        anchor: Tensor | None,
    ) -> Tensor:
        """y [M, N], which is `out` where that is given; `anchor` is a DelayedWgrad's."""
        layer = call.layer
        y, rows, matrices = run_forward(
            layer, call.sizes, x, weight, w_codes, bias, bias_scales, call.seed, call.state, call.record,
            call.group_offset, out, x_codes,
        )  # fmt: skip
        # prepared sizes are the call's own: the caller's may change before backward, these do not
        tensors: list[Tensor | None] = [None if layer.prepare is not None else call.sizes, None, None]
        if bias_scales is not None:
            tensors[1:] = [bias, bias_scales]
        if layer.need_dw:
            ctx.x = Saved(rows if layer.quantized_wgrad else x, tensors)
        if layer.need_dx:
            ctx.w = Saved(matrices if layer.quantized_dgrad else weight, tensors)
        ctx.save_for_backward(*tensors)
        ctx.call = call
        ctx.dtypes = [None if value is None else value.dtype for value in (x, weight, bias, bias_scales, anchor)]
        if out is not None:
            ctx.mark_dirty(out)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        with torch.no_grad():
            grads = run_backward(_backward, ctx, dy)
        return (None, None, None, None, *once_differentiated(grads, dy))


def _backward(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    call: Call = ctx.call
    layer = call.layer
    tensors = ctx.saved_tensors
    sizes, bias, bias_scales = tensors[:3]
    bounded = None
    if layer.prepare is not None:
        sizes, bounded = call.sizes, call.sizes.group_sizes
    need_x, need_w, need_b, need_s, need_later = wanted_gradients(ctx, ctx.needs_input_grad[4:], dy)
    need_w = need_w or need_later
    dx = dw = db = ds = None
    if dy.dtype is not layer.row_dtype:
        dy = dy.to(layer.row_dtype)
    if need_b or need_s:
        if bounded is None:
            bounded = operations.bound_sizes(sizes, dy.shape[0], dy)
        sums = operations.bias_grads(dy, bounded, bias, bias_scales)
        db = sums[0] if need_b else None
        ds = sums[1] if need_s else None
    if need_x or need_w:
        codes = None
        if layer.quantize_dy is not None:
            seed = call.seed.take() if isinstance(call.seed, SeedCounter) else call.seed
            codes = quantize_operand(
                layer, layer.quantize_dy, dy, "dy", sizes, seed, call.state, call.record, call.group_offset
            )
        if need_x and layer.dgrad is not None:
            rows = codes if layer.quantized_dgrad else dy
            if call.grad_input is not None:
                check_grad_input(call.grad_input, dy)
            dx = layer.dgrad(rows, ctx.w.load(tensors), sizes, out=call.grad_input)
        if need_w and layer.wgrad is not None:
            rows = codes if layer.quantized_wgrad else dy
            dw = weight_gradient(layer.wgrad, ctx.x.load(tensors), rows, sizes, call.target, call)
    grads = [dx, dw, db, ds, None]
    return [
        grad if grad is None or dtype is None or grad.dtype is dtype else grad.to(dtype)
        for grad, dtype in zip(grads, ctx.dtypes, strict=True)
    ]


def check_grad_input(grad_input: Tensor, dy: Tensor) -> None:
    """ValueError where dx would be written over dy, which is being read; whoever has saved the buffer will know."""
    if share_memory(grad_input, dy):
        raise ValueError("grad_input shares memory with y's gradient, which backward reads; give a buffer of its own")
    if is_plain(grad_input):
        torch.autograd.graph.increment_version(grad_input)


def weight_gradient(
    wgrad: Run, x: Any, dy: Any, sizes: Any, target: WgradTarget | None, owner: object
) -> Tensor | None:
    """dw; or what stands for it where it goes to `target`, see WgradTarget.put."""
    if target is not None:
        return target.put(wgrad, x, dy, sizes, owner)
    dw: Tensor = wgrad(x, dy, sizes)
    return dw


def wanted_gradients(ctx: Any, needs: Sequence[bool], dy: Tensor) -> list[bool]:
    """`needs` of forward's last inputs, less those that this backward leaves out.

    needs_input_grad says what requires a gradient, and not that torch.autograd.grad asks for others alone.
    """
    # a backward that runs is wanted for something
    if not is_plain(dy) or sum(needs) == 1:
        return list(needs)
    # inputs that are no tensors have no edge
    tensors = [dtype for dtype in ctx.dtypes if dtype is not None]
    edges = iter(ctx.next_functions[-len(tensors) :])
    found = []
    for needed, dtype in zip(needs, ctx.dtypes, strict=True):
        node = None if dtype is None else next(edges)[0]
        found.append(needed and node is not None and _will_run(node))
    return found


def _will_run(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # says that torch.autograd.grad was asked for this very leaf
        return True


grouped_linear_function: Callable[..., Tensor] = GroupedLinearFunction.apply
