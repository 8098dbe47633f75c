"""The forward of a grouped MLP: x quantized, fc1, activation x probs + quantize, fc2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from octavo.quantizer import Operand
from octavo_torch.arithmetic import operations
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.interleaving import to_halves
from octavo_torch.functions.activations import activate
from octavo_torch.linear.autograd import quantize_operand, run_forward
from octavo_torch.mlp.plan import MlpPlan
from octavo_torch.quantizers.extras import Extras
from octavo_torch.quantizers.fused import Fused, Run
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import Seed, SeedCounter, second_stream
from octavo_torch.wgrad.target import WgradTarget

States = tuple[DelayedState, DelayedState]

_NO_STATES: tuple[None, None] = (None, None)


class MlpCall:
    """What both passes need of one call beside its tensors; `sizes` are int [G], or what plan.prepare made.

    seeds      of fc1 and fc2; None for the second: the first's second stream, other bits at the same positions
    codes      of quantized weights; None: the call quantizes its own
    x_codes    of an x that is quantized already
    targets    where the weights' gradients go; None: they are autograd's
    block      rows of gate and up projection that take turns in w1 and bias1; 0: the gate half comes first
    """

    __slots__ = (
        "block", "codes", "grad_input", "group_offset", "out", "plan", "record", "seeds", "sizes", "states", "targets",
        "x_codes",
    )  # fmt: skip

    def __init__(
        self,
        plan: MlpPlan,
        sizes: Any,
        seeds: tuple[Seed, Seed],
        states: States | None,
        record: bool,
        group_offset: int,
        codes: tuple[GroupedTensor | None, GroupedTensor | None],
        x_codes: GroupedTensor | None,
        targets: tuple[WgradTarget | None, WgradTarget | None],
        block: int,
        out: Tensor | None,
        grad_input: Tensor | None,
    ) -> None:
        self.plan, self.sizes, self.seeds, self.record = plan, sizes, seeds, record
        self.states: States | tuple[None, None] = _NO_STATES if states is None else states
        self.group_offset, self.codes, self.x_codes, self.targets = group_offset, codes, x_codes, targets
        self.block, self.out, self.grad_input = block, out, grad_input

    def drawn(self, take: Callable[[SeedCounter], Tensor]) -> tuple[Any, Any]:
        """Both layers' seeds, where a SeedCounter gives what `take` takes."""
        first, second = (take(seed) if isinstance(seed, SeedCounter) else seed for seed in self.seeds)
        return first, second_stream(first) if second is None else second


class Made(NamedTuple):
    """Forward's result and what backward may need of it: x's, w1's, the activation's and w2's operands, and h."""

    y: Tensor
    x: Any
    w1: Any
    h: Tensor
    a: Any
    w2: Any


def forward(
    call: MlpCall,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    probs: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    bias2_scales: Tensor | None,
) -> Made:
    """y [M, N] and its parts."""
    plan, sizes, record, group = call.plan, call.sizes, call.record, call.group_offset
    fc1, fc2 = plan.fc1, plan.fc2
    seed1 = seed2 = None
    if fc1.stochastic_forward or fc2.stochastic_forward:
        seed1, seed2 = call.drawn(SeedCounter.current)
    state1, state2 = call.states
    codes1, codes2 = call.codes
    if call.block:
        bias1 = None if bias1 is None else to_halves(bias1, call.block)
        # high-precision slots alone read the weight beside its codes
        w1 = to_halves(w1, call.block) if codes1 is None or not fc1.quantized_fprop else w1
    h, rows1, matrices1 = run_forward(
        fc1, sizes, x, w1, codes1, bias1, None, seed1, state1, record, group, None, call.x_codes
    )
    a, codes = _activation(call, h, probs, sizes, seed2)
    y, rows2, matrices2 = run_forward(
        fc2,
        sizes,
        h if a is None else a,
        w2,
        codes2,
        bias2,
        bias2_scales,
        seed2,
        state2,
        record,
        group,
        call.out,
        codes,
    )
    return Made(y, rows1, matrices1, h, rows2, matrices2)


def _activation(
    call: MlpCall, h: Tensor, probs: Tensor | None, sizes: Any, seed: Any
) -> tuple[Tensor | None, GroupedTensor | None]:
    """The activation as fc2's GEMMs read it: as it is, quantized, or both; None where none reads it so."""
    plan, layer, state = call.plan, call.plan.fc2, call.states[1]
    if plan.run_act is not None:
        codes, extras = run_fused(call, plan.act, plan.run_act, "x", (h,), probs, sizes, seed, state, call.record)
        return extras.activated if plan.act.array else None, codes
    a = activate(h, probs, plan.activation)
    if layer.quantize_x is None:
        return a, None
    return a, quantize_operand(layer, layer.quantize_x, a, "x", sizes, seed, state, call.record, call.group_offset)


def activation_again(call: MlpCall, h: Tensor, probs: Tensor | None, sizes: Any, seed: Any) -> Tensor:
    """What a high-precision wgrad slot reads: the bits that forward had."""
    plan = call.plan
    if plan.run_act is None:
        a: Tensor = activate(h, probs, plan.activation)
        return a
    act = replace(plan.act, array=True)
    made = run_fused(call, act, plan.run_act, "x", (h,), probs, sizes, seed, call.states[1], False)[1].activated
    assert made is not None
    return made


def run_fused(
    call: MlpCall,
    fused: Fused,
    run: Run,
    operand: Operand,
    arrays: tuple[Tensor, ...],
    probs: Tensor | None,
    sizes: Any,
    seed: Any,
    state: DelayedState | None,
    record: bool,
    wanted: tuple[str, ...] = (),
) -> tuple[GroupedTensor | None, Extras]:
    """A fused quantizer's result, codes where they are read; its scale comes from the state, its amax goes there.

    wanted   fields of Extras beside those that the layer needs
    """
    how: dict[str, Any] = {"seed": seed, "operand": operand, "group_offset": call.group_offset}
    if fused.array:
        wanted = ("activated", *wanted)
    if not fused.codes:
        return None, run(*arrays, sizes, probs=probs, wanted=wanted, **how)[1]
    if state is not None:
        how["scale"] = state.encode_scale(operand)
        if record:
            wanted = (*wanted, "amax")
    codes, extras = run(*arrays, sizes, probs=probs, wanted=wanted, **how)
    if state is not None and record:
        amax = extras.amax
        if amax is None:
            amax = operations.group_amax_of(extras.activated, getattr(sizes, "group_sizes", sizes))
        state.record(operand, amax)
    return codes, extras
