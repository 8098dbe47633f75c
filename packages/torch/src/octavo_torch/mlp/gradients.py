"""The gradients of a grouped MLP, wherever the operands that they read come from.

dy quantized -> fc2's wgrad and dgrad -> activation's gradient + bias gradient + quantize -> fc1's dgrad and wgrad
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from octavo_registry.contract.moves import TokenRows
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.interleaving import from_halves
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.dispatch.layer import Matrix, Rows
from octavo_torch.functions.activations import activate_gradient, probs_gradient
from octavo_torch.linear.autograd import check_grad_input, quantize_operand, weight_gradient
from octavo_torch.linear.call import Call
from octavo_torch.mlp.call import MlpCall
from octavo_torch.mlp.forward import DrawnSeed, run_fused, values_for
from octavo_torch.scaling.seeds import SeedCounter
from octavo_torch.wgrad.bias_gradients import bias_gradients


class Needs(NamedTuple):
    """Which gradients a backward computes; `later`: those of weights that are postponed."""

    x: bool
    w1: bool
    w2: bool
    probs: bool
    bias1: bool
    bias2: bool
    bias2_scales: bool
    later: bool


class BackwardOperands(Protocol):
    """What backward reads. Methods are called once at most, and just before the result is read.

    holds_dy    `dy` is the caller's own array, whose memory nobody gives back before the end
    awaits_dy   dy is on its way from other ranks until `dy` or `dy_codes` is called: what does not read it comes first

    dy       the gradient of y's rows, which the caller gives up
    dy_codes the same, quantized without rows, for a call that does not read `dy`; None where it takes rows
    dy_tokens the same where the tokens stand, for GEMMs alone; None where they take rows
    h        fc1's result
    x        the rows of x as fc1's wgrad reads them
    a        the activation as fc2's wgrad reads it, of h
    w1, w2   the weights as dgrad reads them

    of_x        x's gradient, of that of its rows; it may be on its way from other ranks until it is asked for
    done_with   nothing will read the operand of that name again: its memory may go
    """

    @property
    def sizes(self) -> Sizes: ...

    @property
    def probs(self) -> Tensor | None: ...

    @property
    def bias2(self) -> Tensor | None: ...

    @property
    def bias2_scales(self) -> Tensor | None: ...

    @property
    def holds_dy(self) -> bool: ...

    @property
    def awaits_dy(self) -> bool: ...

    @property
    def dy_codes(self) -> Callable[[DrawnSeed], GroupedTensor] | None: ...

    @property
    def dy_tokens(self) -> Callable[[], TokenRows[Tensor]] | None: ...

    def dy(self) -> Tensor: ...

    def h(self) -> Tensor: ...

    def x(self) -> Rows: ...

    def a(self, h: Tensor, seed: DrawnSeed, /) -> Matrix: ...

    def w1(self) -> Matrix: ...

    def w2(self) -> Matrix: ...

    def of_x(self, dx: Tensor, /) -> Callable[[], Tensor]: ...

    def done_with(self, name: Literal["h", "x", "a", "w1", "w2"], /) -> None: ...


class Gradients(NamedTuple):
    """The gradients of the operands of these names; None for those that are not needed."""

    x: Tensor | None = None
    w1: Tensor | None = None
    w2: Tensor | None = None
    probs: Tensor | None = None
    bias1: Tensor | None = None
    bias2: Tensor | None = None
    bias2_scales: Tensor | None = None


def check_whole(freed: bool) -> None:
    """RuntimeError where an earlier backward, which an error broke off, has given back what this one would read."""
    if freed:
        raise RuntimeError(
            "this backward of a grouped MLP was broken off by an error, and codes that it had read are gone; call "
            "forward again, or backward with retain_graph=True"
        )


def gradients(call: MlpCall, needs: Needs, operands: BackwardOperands) -> Gradients:
    """The gradients that are needed."""
    plan = call.plan
    fc1, fc2 = plan.fc1, plan.fc2
    sizes, probs = operands.sizes, operands.probs
    need_x, need_w1, need_w2, need_p, need_b1, need_b2, need_s2, need_later = needs
    need_w1, need_w2 = (
        need or (need_later and layer.target is not None and layer.target.store is not None)
        for need, layer in ((need_w1, call.fc1), (need_w2, call.fc2))
    )
    dw1 = dw2 = dp = db1 = db2 = ds2 = None
    dx: Callable[[], Tensor] | None = None
    seed1 = seed2 = None
    before_activation = need_x or need_w1 or need_p or need_b1
    rounds = need_w2 or before_activation
    reads_dy = (before_activation and not fc2.quantized_dgrad) or (need_w2 and not fc2.quantized_wgrad)
    needs_rows = not rounds or need_b2 or need_s2 or call.fc2.probe is not None
    if rounds and (fc1.needs_seed or fc2.needs_seed):
        seed1, seed2 = call.draw(SeedCounter.take)
    h: Tensor | None = None
    a: Matrix | None = None
    if rounds and operands.awaits_dy:
        h = operands.h()
        a = operands.a(h, seed2) if need_w2 else None
    dy_codes = None if needs_rows or reads_dy else operands.dy_codes
    dy_tokens = None if needs_rows or fc2.quantize_dy is not None else operands.dy_tokens
    dy = operands.dy() if dy_codes is None and dy_tokens is None else None
    if dy is not None and need_x and call.grad_input is not None:
        check_grad_input(call.grad_input, dy)
    if dy is not None and dy.dtype is not fc2.row_dtype:
        dy = dy.to(fc2.row_dtype)
    if dy is not None and (need_b2 or need_s2):
        bias2, scales2 = operands.bias2, operands.bias2_scales
        db2, ds2 = bias_gradients(fc2, dy, sizes, bias2, scales2, need_bias=need_b2, need_scales=need_s2)
    if not rounds:
        return Gradients(None, dw1, dw2, dp, db1, db2, ds2)
    # what is read no more is given up before the next array is made: the peak of a step is here
    codes: Rows
    values: Rows
    if dy is not None:
        codes = _as_read(call.fc2, dy, seed2)
        values = dy if reads_dy else codes
    elif dy_tokens is not None:
        values = codes = dy_tokens()
    else:
        assert dy_codes is not None  # the other half of the choice above
        values = codes = dy_codes(seed2)
    del dy
    h = operands.h() if h is None else h
    # the pass that makes h's gradient makes the activation again, beside it, where dy takes no room until then
    stays = dy_tokens is not None or operands.holds_dy
    makes_both = plan.dact.without_codes is not None and (need_x or need_w1 or need_b1)
    reads_values = need_w2 and a is None and not fc2.quantized_wgrad
    dy_of_w2 = values if reads_values and makes_both and stays else None
    if need_w2 and dy_of_w2 is None:
        a = operands.a(h, seed2) if a is None else a
        dw2 = _gradient_of_w2(call, operands, a, codes if fc2.quantized_wgrad else values)
        del a
    if before_activation:
        assert fc2.dgrad is not None  # a layer whose dx is needed
        da = fc2.dgrad(codes if fc2.quantized_dgrad else values, operands.w2(), sizes)
        operands.done_with("w2")
        values = codes = da
        if not (need_x or need_w1 or need_b1):
            dp = probs_gradient(da, h, plan.activation)
        else:
            grads = _gradient_of_h(call, da, h, probs, seed1, need_b1, need_p, need_forward=dy_of_w2 is not None)
            db1, dp = grads.bias, grads.probs
            del values, codes, da
            if dy_of_w2 is not None:
                a, grads = grads.forward, grads._replace(forward=None)
                a = operands.a(h, seed2) if a is None else a
            del h
            operands.done_with("h")
            if dy_of_w2 is not None:
                assert a is not None  # made above
                dw2 = _gradient_of_w2(call, operands, a, dy_of_w2)
                del a
            if need_x:
                assert fc1.dgrad is not None  # a layer whose dx is needed
                w1 = operands.w1()
                dh = grads.codes if fc1.quantized_dgrad else grads.h
                assert dh is not None  # a GEMM reads it
                dx = operands.of_x(fc1.dgrad(dh, w1, sizes, out=call.grad_input))
                del w1, dh
                operands.done_with("w1")
            if need_w1:
                assert fc1.wgrad is not None  # a layer whose dw is needed
                dh = grads.codes if fc1.quantized_wgrad else grads.h
                assert dh is not None  # a GEMM reads it
                dw1 = weight_gradient(call.fc1, fc1.wgrad, operands.x(), dh, sizes, call)
                if not is_postponed(call.fc1):
                    operands.done_with("x")
            if db1 is not None and call.block:
                db1 = from_halves(db1, call.block)
    return Gradients(None if dx is None else dx(), dw1, dw2, dp, db1, db2, ds2)


def _gradient_of_w2(call: MlpCall, operands: BackwardOperands, a: Matrix, dy: Rows) -> Tensor | None:
    assert call.plan.fc2.wgrad is not None  # a layer whose dw is needed
    made = weight_gradient(call.fc2, call.plan.fc2.wgrad, a, dy, operands.sizes, call)
    if not is_postponed(call.fc2):
        operands.done_with("a")
    return made


def _as_read(call: Call, dy: Tensor, seed: DrawnSeed) -> Matrix:
    """The rows dy as quantized GEMMs read them."""
    if call.probe is not None:
        call.probe.record("dy", dy, call.sizes, call.state)
    quantize = call.layer.quantize_dy
    return dy if quantize is None else quantize_operand(call, quantize, "dy", dy, seed)


def is_postponed(call: Call) -> bool:
    """True where a DelayedWgrad reads the operands of the weight's gradient after backward."""
    return call.target is not None and call.target.store is not None


class _BeforeActivation(NamedTuple):
    """The gradient of fc1's result as fc1's GEMMs read it, plain or quantized; those of its bias and of probs.

    forward   the activation times probs, made again in the same pass
    """

    h: Tensor | None
    codes: GroupedTensor | None
    bias: Tensor | None
    probs: Tensor | None
    forward: Tensor | None = None


def _gradient_of_h(
    call: MlpCall,
    da: Tensor,
    h: Tensor,
    probs: Tensor | None,
    seed: DrawnSeed,
    need_bias: bool,
    need_probs: bool,
    need_forward: bool,
) -> _BeforeActivation:
    plan, quantize = call.plan, call.plan.fc1.quantize_dy
    watched = call.fc1.probe
    if plan.dact.run is not None:
        names = (("dbias", need_bias), ("dprobs", need_probs), ("forward", need_forward))
        extras = (*values_for(watched), *[name for name, needed in names if needed])
        codes, computed = run_fused(call.fc1, plan.dact, "dy", (da, h), probs, seed, extras=extras)
        if watched is not None:
            assert computed.activated is not None  # asked for
            watched.record("dy", computed.activated, call.sizes, call.fc1.state)
        dp = computed.dprobs
        if need_probs and dp is None:
            dp = probs_gradient(da, h, plan.activation)
        values = computed.activated if plan.dact.array else None
        return _BeforeActivation(values, codes, computed.dbias, dp, computed.forward)
    dh = activate_gradient(da, h, probs, plan.activation)
    if watched is not None:
        watched.record("dy", dh, call.sizes, call.fc1.state)
    codes = None if quantize is None else quantize_operand(call.fc1, quantize, "dy", dh, seed)
    db = bias_gradients(plan.fc1, dh, call.sizes).bias if need_bias else None
    return _BeforeActivation(dh, codes, db, probs_gradient(da, h, plan.activation) if need_probs else None)
