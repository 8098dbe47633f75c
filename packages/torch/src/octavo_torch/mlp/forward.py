"""The forward of a grouped MLP: x quantized, fc1, activation x probs + quantize, fc2."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, NamedTuple

from torch import Tensor

from octavo.quantizer import Operand
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.grouped_tensor import GroupedTensor, Matrix
from octavo_torch.arrays.interleaving import to_halves
from octavo_torch.arrays.sizes import group_sizes_of
from octavo_torch.functions.activations import activate
from octavo_torch.linear.autograd import AnyRows, quantize_operand, run_forward
from octavo_torch.linear.call import Call
from octavo_torch.mlp.call import MlpCall, Operands
from octavo_torch.mlp.concurrent_quantizer import ConcurrentQuantizer
from octavo_torch.quantizers.extras import Extras
from octavo_torch.quantizers.fused import Fused
from octavo_torch.scaling.probe import Probe
from octavo_torch.scaling.seeds import DrawnSeed, SeedCounter


class MlpForward(NamedTuple):
    """y, h (fc1's result in front of the activation), and each layer's operands as its GEMMs read them."""

    y: Tensor
    h: Tensor
    x: Matrix
    w1: Matrix
    a: Matrix
    w2: Matrix


class FirstLayer(NamedTuple, Generic[AnyRows]):
    """fc1's result, and its operands as its GEMMs read them."""

    h: Tensor
    x: AnyRows | GroupedTensor
    w1: Matrix


class SecondLayer(NamedTuple):
    """fc2's result, and its operands as its GEMMs read them."""

    y: Tensor
    a: Matrix
    w2: Matrix


def forward(call: MlpCall, operands: Operands) -> MlpForward:
    """y [M, N], and what backward may need of what was computed on the way to it."""
    x, w1, w2, probs, bias1, bias2, bias2_scales = operands
    seed1, seed2 = forward_seeds(call)
    w2_quantizer = ConcurrentQuantizer.of(call, w2, seed2)
    first = first_layer(call, seed1, x, w1, bias1, w2_quantizer)
    second = second_layer(call, seed2, first.h, probs, w2, bias2, bias2_scales, w2_quantizer)
    return MlpForward(second.y, first.h, first.x, first.w1, second.a, second.w2)


def forward_seeds(call: MlpCall) -> tuple[DrawnSeed, DrawnSeed]:
    """The seeds with which the forward of fc1 and of fc2 rounds; None if neither rounds anything stochastically."""
    if call.fc1.layer.stochastic_forward or call.fc2.layer.stochastic_forward:
        return call.seeds(SeedCounter.current)
    return None, None


def first_layer(
    call: MlpCall,
    seed: DrawnSeed,
    x: AnyRows,
    w1: Tensor,
    bias1: Tensor | None,
    w2_quantizer: ConcurrentQuantizer | None = None,
) -> FirstLayer[AnyRows]:
    """fc1's product of the rows x. With `w2_quantizer`, w2 is quantized at the same time."""
    fc1 = call.fc1
    if call.block and bias1 is not None:
        bias1 = to_halves(bias1, call.block)
    if w2_quantizer is not None:
        return FirstLayer(*w2_quantizer.run_first_layer(seed, x, w1, bias1))
    return FirstLayer(*run_forward(fc1, seed, x, w1, bias1, None))


def second_layer(
    call: MlpCall,
    seed: DrawnSeed,
    h: Tensor,
    probs: Tensor | None,
    w2: Tensor,
    bias2: Tensor | None,
    bias2_scales: Tensor | None,
    w2_quantizer: ConcurrentQuantizer | None,
) -> SecondLayer:
    """fc2's product of h's activation and w2, whose codes are those of `w2_quantizer` if it was given to fc1."""
    fc2 = call.fc2
    a, fc2.x_codes = activation_of(call, h, probs, seed)
    rows = h if a is None else a
    if w2_quantizer is not None:
        fc2.w_made = w2_quantizer.w2_codes()
    second = SecondLayer(*run_forward(fc2, seed, rows, w2, bias2, bias2_scales))
    fc2.x_codes = None  # may hold values, which backward does not read
    return second


def activation_of(
    call: MlpCall, h: Tensor, probs: Tensor | None, seed: DrawnSeed
) -> tuple[Tensor | None, GroupedTensor | None]:
    """The activation as fc2's GEMMs read it, in high precision and quantized; None for what none of them reads."""
    plan, quantize = call.plan, call.plan.fc2.quantize_x
    if plan.act.run is not None:
        watched = call.fc2.probe if plan.act.codes else None
        codes, extras = run_fused(call.fc2, plan.act, "x", (h,), probs, seed, extras=values_for(watched))
        if watched is not None:
            assert extras.activated is not None  # asked for
            watched.record("x", extras.activated, call.sizes, call.fc2.state)
        return extras.activated if plan.act.high_precision else None, codes
    a = activate(h, probs, plan.activation)
    if call.fc2.probe is not None and quantize is not None:
        call.fc2.probe.record("x", a, call.sizes, call.fc2.state)
    return a, None if quantize is None else quantize_operand(call.fc2, quantize, "x", a, seed)


def activation_again(call: MlpCall, h: Tensor, probs: Tensor | None, seed: DrawnSeed) -> Tensor:
    """The activation, computed again with forward's bits, for a wgrad that reads it in high precision."""
    plan = call.plan
    if plan.act.run is None:
        a: Tensor = activate(h, probs, plan.activation)
        return a
    act = replace(plan.act, high_precision=True, codes=plan.act.codes and plan.act.values is None)
    activated = run_fused(call.fc2, act, "x", (h,), probs, seed, record=False)[1].activated
    assert activated is not None  # because of `high_precision`
    return activated


def values_for(probe: Probe | None) -> tuple[str, ...]:
    """The extras by which a fused quantizer also writes what it quantizes, which a probe reads."""
    return () if probe is None else ("activated",)


def run_fused(
    call: Call,
    fused: Fused,
    operand: Operand,
    arrays: tuple[Tensor, ...],
    probs: Tensor | None,
    seed: DrawnSeed,
    record: bool = True,
    extras: tuple[str, ...] = (),
) -> tuple[GroupedTensor | None, Extras]:
    """What a fused quantizer computes for the layer of `call`: codes, if a GEMM reads any, and extras.

    record   whether delayed scaling records the amax; it never does if the call records none
    extras   fields of Extras to compute in addition to those that the layer needs
    """
    run, state = fused.run, call.state
    assert run is not None  # the caller composes it then
    if fused.high_precision and "activated" not in extras:
        extras = ("activated", *extras)
    if fused.without_codes is not None:
        return None, fused.without_codes(*arrays, call.sizes, probs=probs, wanted=extras)
    if not fused.codes:
        state = None  # of the codes that `run` makes all the same, and nothing reads
    record = record and call.record
    scale = None
    if state is not None:
        scale = state.encode_scale(operand)
        if record:
            extras = (*extras, "amax")
    codes, computed = run(
        *arrays, call.sizes, probs=probs, wanted=extras, seed=seed, operand=operand, group_offset=call.group_offset,
        scale=scale,
    )  # fmt: skip
    if state is not None and record:
        amax = computed.amax
        if amax is None:
            assert computed.activated is not None  # always there, see Extras
            amax = operators.group_amax_of(computed.activated, group_sizes_of(call.sizes))
        state.record(operand, amax)
    return codes if fused.codes else None, computed
