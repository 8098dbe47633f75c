"""Layers that their backend runs whole: forward in one call, backward in another, and autograd around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from octavo_torch.arithmetic import operations
from octavo_torch.compiler.second_derivative import once_differentiated
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.linear.autograd import wanted_gradients
from octavo_torch.linear.contexts import run_backward
from octavo_torch.scaling.seeds import Seed, SeedCounter

if TYPE_CHECKING:
    from octavo_torch.dispatch.layer import Layer
    from octavo_torch.scaling.delayed_state import DelayedState

_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_stands_for_another: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


class WholeLayer(Protocol):
    """What `Bound.whole_layer` makes: a layer's two passes, bit for bit those of its plans one after the other.

    For calls on plain tensors that give nothing but x, a weight, sizes, a bias, a seed and a state; others are
    composed of the plans.

    keeps_x, keeps_w   whether backward reads the unquantized operand
    """

    keeps_x: bool
    keeps_w: bool

    def takes(self, x: Tensor, w: Tensor, bias: Tensor | None, state: DelayedState | None) -> bool:
        """Whether the arrays stand in memory as the passes read them; a call that does not is composed."""

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        sizes: Tensor,
        bias: Tensor | None,
        seed: Tensor | int | None,
        state: DelayedState | None,
        record: bool,
        group_offset: int,
    ) -> tuple[Tensor, Tensor | None, Any]:
        """y, the codes that backward reads, and what else it is given, which is the call's own and stays as it is.

        sizes   int [G], checked where they are in host memory; they may change before backward
        record  x's and w's amax goes into the state
        """

    def backward(
        self,
        dy: Tensor,
        x: Tensor | None,
        w: Tensor | None,
        kept: Tensor | None,
        rest: Any,
        wanted: tuple[bool, bool],
        seed: Tensor | int | None,
        state: DelayedState | None,
        record: bool,
        group_offset: int,
    ) -> tuple[Tensor | None, Tensor | None]:
        """dx and dw, each where it is wanted, of dy in y's dtype; x and w where they are kept."""

    def sizes(self, rest: Any) -> Tensor:
        """The call's sizes, int64 [G], cut to the rows."""


def runs_whole(
    layer: Layer, x: Tensor, w: Tensor, bias: Tensor | None, state: DelayedState | None
) -> WholeLayer | None:
    """The layer's passes where they take these tensors: neither a compiler's nor a transform's, in memory of theirs."""
    whole = layer.whole
    if (
        whole is not None
        and is_plain(x)
        and is_plain(w)
        and not (_stands_for_another(x) or _stands_for_another(w))
        and not (bias is not None and _stands_for_another(bias))
        and whole.takes(x, w, bias, state)
    ):
        return whole
    return None


class WholeCall:
    """What one call gives beside tensors."""

    __slots__ = ("group_offset", "layer", "record", "rest", "seed", "sizes", "state", "whole")

    def __init__(
        self,
        whole: WholeLayer,
        layer: Layer,
        sizes: Tensor,
        seed: Seed,
        state: DelayedState | None,
        record: bool,
        group_offset: int,
    ) -> None:
        self.whole, self.layer, self.sizes, self.seed, self.state = whole, layer, sizes, seed, state
        self.record, self.group_offset = record, group_offset
        self.rest: Any = None

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """y and the codes that backward reads."""
        seed, drawn = self.seed, None
        if self.layer.stochastic_forward:
            drawn = seed.current() if isinstance(seed, SeedCounter) else seed
        y, kept, self.rest = self.whole.forward(
            x, w, self.sizes, bias, drawn, self.state, self.record, self.group_offset
        )
        return y, kept

    def backward(
        self, dy: Tensor, x: Tensor | None, w: Tensor | None, kept: Tensor | None, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """dx and dw, each where it is wanted."""
        seed, drawn = self.seed, None
        if self.layer.quantize_dy is not None:
            drawn = seed.take() if isinstance(seed, SeedCounter) else seed
        return self.whole.backward(dy, x, w, kept, self.rest, wanted, drawn, self.state, self.record, self.group_offset)


# compiled autograd traces the backward of a forward that was eager
_beside_graph: Callable[..., tuple[Tensor | None, Tensor | None]] = torch.compiler.disable(WholeCall.backward)  # type: ignore[no-untyped-call]


class WholeLayerFunction(torch.autograd.Function):
    """A whole layer with gradients of x, weight and bias; each is computed only where it is asked for."""

    @staticmethod
    def forward(ctx: Any, call: WholeCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y [M, N]."""
        y, kept = call.forward(x, weight, bias)
        whole = call.whole
        ctx.save_for_backward(kept, x if whole.keeps_x else None, weight if whole.keeps_w else None)
        ctx.call = call
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        if not _grad_enabled():
            return (None, *run_backward(_backward, ctx, dy))
        with torch.no_grad():
            grads = run_backward(_backward, ctx, dy)
        return (None, *once_differentiated(grads, dy))


def _backward(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    call: WholeCall = ctx.call
    kept, x, w = ctx.saved_tensors
    need_x, need_w, need_b = wanted_gradients(ctx, ctx.needs_input_grad[1:], dy)
    dx = dw = db = None
    if dy.dtype is not call.layer.row_dtype:
        dy = dy.to(call.layer.row_dtype)
    if need_b:
        db = operations.bias_grads(dy, call.whole.sizes(call.rest), None, None)[0]
    if need_x or need_w:
        run = _beside_graph if _is_compiling() else WholeCall.backward
        dx, dw = run(call, dy, x, w, kept, (need_x, need_w))
    return [
        grad if grad is None or grad.dtype is dtype else grad.to(dtype)
        for grad, dtype in zip((dx, dw, db), ctx.dtypes, strict=True)
    ]


# not Function.apply itself, which first looks for functorch's tensors: runs_whole has
whole_layer_function: Callable[..., Tensor] = super(torch.autograd.Function, WholeLayerFunction).apply
