"""The gradients of a grouped MLP. A BackwardOperands supplies the operands: those of an MLP, or of a MoE layer.

dy quantized -> fc2's dgrad and wgrad -> activation's gradient + bias gradient + quantize -> fc1's dgrad and wgrad
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from octavo_torch.arrays.grouped_tensor import GroupedTensor, Matrix, Rows, plane_alone
from octavo_torch.arrays.interleaving import from_halves
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.autograd.saved import may_free
from octavo_torch.functions.activations import activate_gradient, probs_gradient
from octavo_torch.linear.autograd import check_grad_input, quantize_operand, weight_gradient
from octavo_torch.linear.call import Call
from octavo_torch.mlp.call import MlpCall
from octavo_torch.mlp.forward import run_fused, values_for
from octavo_torch.scaling.seeds import DrawnSeed, SeedCounter
from octavo_torch.wgrad.bias_gradients import bias_gradients


class Needs(NamedTuple):
    """Which gradients a backward computes; `postponed`: those of weights that a DelayedWgrad computes after it."""

    x: bool
    w1: bool
    w2: bool
    probs: bool
    bias1: bool
    bias2: bool
    bias2_scales: bool
    postponed: bool


Part = Literal["h", "x", "a", "w1", "w2"]
"""What a backward may free when it has been read."""


class BackwardOperands(Protocol):
    """The operands of a backward. Each method is called at most once, just before its result is read.

    holds_dy    whether `dy` is the caller's own array, whose memory stays in use until the backward ends
    makes_h     whether `h` computes fc1's result again: then it is called before dy is quantized, so that planes of dy
                do not wait beside the rows of x
    awaits_dy   whether dy is still on its way from other ranks, until `dy` or `dy_of_tokens` is called: then whatever
                does not read dy is computed first

    dy          the gradient of y's rows; the operands keep no reference to it
    dy_of_tokens  in place of `dy`: returns dy as dgrad and as wgrad read it, without writing the rows: quantized from
                tokens, or the tokens for a GEMM that gathers unquantized rows; None if the rows are needed
    h           fc1's result
    x           the rows of x as fc1's wgrad reads them
    a           the activation as fc2's wgrad reads it, computed from h
    w1, w2      the weights as dgrad reads them

    of_x        starts turning the gradient of x's rows into that of x, and returns a function that waits for the result
    done_with   says that nothing will read this operand again, so that its memory may be freed
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
    def makes_h(self) -> bool: ...

    @property
    def awaits_dy(self) -> bool: ...

    @property
    def dy_of_tokens(self) -> Callable[[DrawnSeed], tuple[Rows, Rows]] | None: ...

    def dy(self) -> Tensor: ...

    def h(self) -> Tensor: ...

    def x(self) -> Rows: ...

    def a(self, h: Tensor, seed: DrawnSeed, /) -> Matrix: ...

    def w1(self) -> Matrix: ...

    def w2(self) -> Matrix: ...

    def of_x(self, dx: Tensor, /) -> Callable[[], Tensor]: ...

    def done_with(self, name: Part, /) -> None: ...


class Gradients(NamedTuple):
    """The gradients of the operands of these names; None for those that are not needed."""

    x: Tensor | None = None
    w1: Tensor | None = None
    w2: Tensor | None = None
    probs: Tensor | None = None
    bias1: Tensor | None = None
    bias2: Tensor | None = None
    bias2_scales: Tensor | None = None


class Freed(Protocol):
    """A ctx: whether a backward that has not ended has freed what it has read."""

    freed: bool


def freeing(ctx: Freed, dy: Tensor, free: Callable[[str], None]) -> Callable[[str], None]:
    """BackwardOperands.done_with: it calls `free` with the operand's name, unless a later backward is to read it."""
    frees = may_free(dy)

    def done_with(name: str) -> None:
        if frees:
            ctx.freed = True
            free(name)

    return done_with


def check_not_freed(freed: bool) -> None:
    """RuntimeError if an earlier backward, which an error has ended early, has freed what this one would read."""
    if freed:
        raise RuntimeError(
            "this backward of a grouped MLP was broken off by an error, and codes that it had read are gone; call "
            "forward again, or backward with retain_graph=True"
        )


def gradients(call: MlpCall, needs: Needs, operands: BackwardOperands) -> Gradients:
    """The gradients that are needed."""
    backward = _Backward(call, needs, operands)
    backward.read_dy()
    if backward.runs_gemms:
        backward.second_layer()
    if backward.needs_da:
        backward.first_layer()
    dx = backward.dx
    return Gradients(None if dx is None else dx(), **backward.found)


def _as_read(call: Call, dy: Tensor, seed: DrawnSeed) -> Matrix:
    """The rows dy as quantized GEMMs read them: quantized, if the layer quantizes dy."""
    if call.probe is not None:
        call.probe.record("dy", dy, call.sizes, call.state)
    quantize = call.layer.quantize_dy
    return dy if quantize is None else quantize_operand(call, quantize, "dy", dy, seed)


def is_postponed(call: Call) -> bool:
    """True where a DelayedWgrad reads the operands of the weight's gradient after backward."""
    return call.target is not None and call.target.store is not None


class _GradientOfH(NamedTuple):
    """The gradient of fc1's result, and what the same pass computes; None for what is not needed.

    values, codes   in high precision and quantized, each if one of fc1's GEMMs reads it so
    bias            the gradient of fc1's bias
    probs           the gradient of probs
    forward         the activation times probs, computed again in the same pass
    """

    values: Tensor | None
    codes: GroupedTensor | None
    bias: Tensor | None
    probs: Tensor | None
    forward: Tensor | None = None


class _Backward:
    """One backward, in three steps: `read_dy`, `second_layer`, `first_layer`.

    An array that no later step reads is dropped before the next one is allocated, because a training step's memory
    peaks here.

    of_dgrad, of_wgrad   dy as fc2's dgrad and wgrad read it, and then fc1's
    dy_of_w2   dy, if fc2's wgrad waits until the activation has been computed again, beside its gradient; else None
    h, a       fc1's result, and the activation as fc2's wgrad reads it
    da         the gradient of the activation's result
    found      the gradients that are known, by their names in `Gradients`
    dx         waits for the gradient of x
    """

    of_dgrad: Rows | None
    of_wgrad: Rows | None
    da: Tensor
    dy_of_w2: Rows | None

    def __init__(self, call: MlpCall, needs: Needs, operands: BackwardOperands) -> None:
        self.call, self.operands = call, operands
        self.needs = needs = needs._replace(
            w1=needs.w1 or (needs.postponed and is_postponed(call.fc1)),
            w2=needs.w2 or (needs.postponed and is_postponed(call.fc2)),
        )
        self.needs_dh = needs.x or needs.w1 or needs.bias1
        self.needs_da = self.needs_dh or needs.probs
        self.runs_gemms = needs.w2 or self.needs_da
        self.h: Tensor | None = None
        self.a: Matrix | None = None
        self.dx: Callable[[], Tensor] | None = None
        self.found: dict[str, Tensor | None] = {}
        self.seed1: DrawnSeed = None
        self.seed2: DrawnSeed = None
        self.dy_stays = operands.holds_dy
        if self.runs_gemms and (call.plan.fc1.needs_seed or call.plan.fc2.needs_seed):
            self.seed1, self.seed2 = call.seeds(SeedCounter.take)

    def read_dy(self) -> None:
        """Sets `of_dgrad` and `of_wgrad`; where these are made of tokens, the rows of dy are never written."""
        fc2, operands, needs = self.call.plan.fc2, self.operands, self.needs
        if self.runs_gemms and (operands.awaits_dy or operands.makes_h):
            self.h = operands.h()
            self.a = operands.a(self.h, self.seed2) if operands.awaits_dy and needs.w2 else None
        of_bias = needs.bias2 or needs.bias2_scales
        of_tokens = operands.dy_of_tokens
        if of_tokens is not None and self.runs_gemms and not of_bias and self.call.fc2.probe is None:
            self._give_to_gemms(*of_tokens(self.seed2))
            self.dy_stays = not fc2.quantized_wgrad  # wgrad reads the tokens, and not what was made of them
            return
        dy = operands.dy()
        if needs.x and self.call.grad_input is not None:
            check_grad_input(self.call.grad_input, dy)
        if dy.dtype is not fc2.row_dtype:
            dy = dy.to(fc2.row_dtype)
        if of_bias:
            bias2, scales2 = operands.bias2, operands.bias2_scales
            self.found["bias2"], self.found["bias2_scales"] = bias_gradients(
                fc2, dy, operands.sizes, bias2, scales2, need_bias=needs.bias2, need_scales=needs.bias2_scales
            )
        if self.runs_gemms:
            codes = _as_read(self.call.fc2, dy, self.seed2)
            self._give_to_gemms(codes if fc2.quantized_dgrad else dy, codes if fc2.quantized_wgrad else dy)

    def _give_to_gemms(self, of_dgrad: Rows | None, of_wgrad: Rows | None) -> None:
        """Sets what the next dgrad and wgrad read: of codes the one plane that each reads, to be freed behind it."""
        self.of_dgrad, self.of_wgrad = plane_alone(of_dgrad, "rowwise"), plane_alone(of_wgrad, "columnwise")

    def second_layer(self) -> None:
        """fc2's dgrad, and then its wgrad, unless that waits for the activation."""
        fc2, needs, operands = self.call.plan.fc2, self.needs, self.operands
        self.h = operands.h() if self.h is None else self.h
        # the pass that computes h's gradient can compute the activation, too; to wait for it costs nothing if dy stays
        makes_both = self.call.plan.dact.without_codes is not None and self.needs_dh
        reads_values = needs.w2 and self.a is None and not fc2.quantized_wgrad
        self.dy_of_w2 = self.of_wgrad if reads_values and makes_both and self.dy_stays else None
        if self.needs_da:
            assert fc2.dgrad is not None  # a layer whose dx is needed
            assert self.of_dgrad is not None  # it reads dy
            self.da = fc2.dgrad(self.of_dgrad, operands.w2(), operands.sizes)
            operands.done_with("w2")
        del self.of_dgrad
        if needs.w2 and self.dy_of_w2 is None:
            self.a = operands.a(self.h, self.seed2) if self.a is None else self.a
            assert self.of_wgrad is not None  # it reads dy
            self._fc2_wgrad(self.of_wgrad)
        del self.of_wgrad

    def first_layer(self) -> None:
        """The activation's gradient, fc2's wgrad if it has waited, and fc1's dgrad and wgrad."""
        call, operands, fc1 = self.call, self.operands, self.call.plan.fc1
        assert self.h is not None  # read by the second layer
        if not self.needs_dh:
            self.found["probs"] = probs_gradient(self.da, self.h, call.plan.activation)
            return
        dh = self._gradient_of_h(self.h)
        del self.da
        self.found |= {"bias1": dh.bias, "probs": dh.probs}
        if self.dy_of_w2 is not None:
            self.a = operands.a(self.h, self.seed2) if dh.forward is None else dh.forward
            dh = dh._replace(forward=None)
        self.h = None
        operands.done_with("h")
        if self.dy_of_w2 is not None:
            self._fc2_wgrad(self.dy_of_w2)
        if dh.bias is not None and call.block:
            self.found["bias1"] = from_halves(dh.bias, call.block)
        self._give_to_gemms(
            dh.codes if fc1.quantized_dgrad else dh.values, dh.codes if fc1.quantized_wgrad else dh.values
        )
        del dh
        self._fc1_dgrad()
        self._fc1_wgrad()

    def _fc2_wgrad(self, dy: Rows) -> None:
        fc2 = self.call.plan.fc2
        assert fc2.wgrad is not None  # a layer whose dw is needed
        assert self.a is not None  # made just before
        self.found["w2"] = weight_gradient(self.call.fc2, fc2.wgrad, self.a, dy, self.operands.sizes, self.call)
        self.a = None
        if not is_postponed(self.call.fc2):
            self.operands.done_with("a")

    def _fc1_dgrad(self) -> None:
        call, operands, fc1 = self.call, self.operands, self.call.plan.fc1
        if self.needs.x:
            assert fc1.dgrad is not None  # a layer whose dx is needed
            assert self.of_dgrad is not None  # it reads dh
            dx = fc1.dgrad(self.of_dgrad, operands.w1(), operands.sizes, out=call.grad_input)
            del self.of_dgrad
            self.dx = operands.of_x(dx)
            operands.done_with("w1")

    def _fc1_wgrad(self) -> None:
        call, operands, fc1 = self.call, self.operands, self.call.plan.fc1
        if self.needs.w1:
            assert fc1.wgrad is not None  # a layer whose dw is needed
            assert self.of_wgrad is not None  # it reads dh
            self.found["w1"] = weight_gradient(call.fc1, fc1.wgrad, operands.x(), self.of_wgrad, operands.sizes, call)
            if not is_postponed(call.fc1):
                operands.done_with("x")

    def _gradient_of_h(self, h: Tensor) -> _GradientOfH:
        call, needs, plan, da = self.call, self.needs, self.call.plan, self.da
        quantize, watched, probs = plan.fc1.quantize_dy, call.fc1.probe, self.operands.probs
        if plan.dact.run is not None:
            names = (("dbias", needs.bias1), ("dprobs", needs.probs), ("forward", self.dy_of_w2 is not None))
            extras = (*values_for(watched), *[name for name, needed in names if needed])
            codes, computed = run_fused(call.fc1, plan.dact, "dy", (da, h), probs, self.seed1, extras=extras)
            if watched is not None:
                assert computed.activated is not None  # asked for
                watched.record("dy", computed.activated, call.sizes, call.fc1.state)
            dp = computed.dprobs
            if needs.probs and dp is None:
                dp = probs_gradient(da, h, plan.activation)
            values = computed.activated if plan.dact.high_precision else None
            return _GradientOfH(values, codes, computed.dbias, dp, computed.forward)
        dh = activate_gradient(da, h, probs, plan.activation)
        if watched is not None:
            watched.record("dy", dh, call.sizes, call.fc1.state)
        codes = None if quantize is None else quantize_operand(call.fc1, quantize, "dy", dh, self.seed1)
        db = bias_gradients(plan.fc1, dh, call.sizes).bias if needs.bias1 else None
        return _GradientOfH(dh, codes, db, probs_gradient(da, h, plan.activation) if needs.probs else None)
