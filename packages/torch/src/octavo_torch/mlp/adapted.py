"""A grouped MLP with adapters: its three operations one after the other, and what adapters add to each product."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.interleaving import check_interleave, to_halves
from octavo_torch.arrays.leading import LeadingAxes, has_other_rank
from octavo_torch.arrays.per_group import Weights, as_one, leaves_of
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.dispatch.room import Room
from octavo_torch.functions.activations import check_activation
from octavo_torch.linear import grouped
from octavo_torch.linear.arguments import check_adaptable
from octavo_torch.linear.call import Adapter, Call
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.parameters import local_parameters
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.mlp.activate_rows import activate_rows
from octavo_torch.mlp.call import MlpCall
from octavo_torch.mlp.mlp import OptionalOperands
from octavo_torch.mlp.packed_weight import PackedWeight, expanded
from octavo_torch.scaling.seeds import Seed, SeedCounter, second_stream

_is_compiling = torch.compiler.is_compiling

Adapters = tuple[Adapter | None, Adapter | None]
"""What is added to the products of fc1, in front of the activation, and of fc2."""


def run_adapted(
    x: grouped.InputRows,
    w1: Weights | QuantizedWeight,
    w2: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    optional: OptionalOperands,
    call: MlpCall,
    adapters: Adapters,
) -> Tensor:
    """y = fc2(a) + d2(a), of a = act(fc1(x) + d1(x)) times probs; without adapters it has `grouped_mlp`'s bits.

    The activation, which d2 reads, exists in x's dtype, so that no quantizer is fused with it, and autograd keeps it, x
    and fc1's sum where adapters or probs take a gradient. Raises as grouped_mlp does, and ValueError for codes as x,
    for buffers, and for interleaved codes that require a gradient.
    """
    if not isinstance(adapters, tuple | list) or len(adapters) != 2:
        raise ValueError(f"lora is {brief(adapters)}; give two GroupedLoRAs, or None for one of them")
    check_adaptable(x, call, adapters)
    assert isinstance(x, Tensor)  # no codes, as has been checked
    if has_other_rank(x):
        axes = LeadingAxes(x)
        flat = optional.flattened(axes)
        return axes.restored(run_adapted(axes.flat(x), w1, w2, group_sizes, flat, call, adapters))
    first, second = adapters
    first_weight, bias1, block = _halves(w1, optional.bias1, call)
    fc1, fc2 = _calls(call)
    fc1.interleave = w1.interleave if isinstance(w1, PackedWeight) else block
    h = _product(x, first_weight, group_sizes, bias1, None, fc1)
    if first is not None:
        h = first.added_to(h, x, group_sizes, block)
    a = activate_rows(h, check_activation(call.activation), optional.probs, group_sizes, call.backend)
    y = _product(a, w2, group_sizes, optional.bias2, optional.bias2_scales, fc2)
    return y if second is None else second.added_to(y, a, group_sizes)


def _product(
    x: Tensor,
    weight: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    bias: Weights | None,
    bias_scales: Tensor | None,
    call: Call,
) -> Tensor:
    run = grouped.traced if _is_compiling() else grouped.apply
    if isinstance(weight, PackedWeight):
        return expanded(weight, call.backend, lambda w: run(x, w, group_sizes, bias, bias_scales, call))
    return run(x, weight, group_sizes, bias, bias_scales, call)


def _halves(
    w1: Weights | QuantizedWeight, bias1: Weights | None, call: MlpCall
) -> tuple[Weights | QuantizedWeight, Weights | None, int]:
    """fc1's weight and bias with the gate half first, and the rows of a block in their own order."""
    if isinstance(w1, PackedWeight):  # in halves, whatever it stands for
        block = check_interleave(call.interleave, check_activation(call.activation), w1)
        return w1, to_halves(as_one("bias1", bias1), block) if block and bias1 is not None else bias1, block
    # below a compiler's trace a layer takes a CodedWeight apart itself
    source, bias = (w1, bias1) if _is_compiling() else local_parameters(w1, bias1)
    leaves = leaves_of(source.weight if isinstance(source, QuantizedWeight) else source)
    block = check_interleave(call.interleave, check_activation(call.activation), leaves[0])
    if not block:
        return w1, bias1, 0
    if isinstance(source, QuantizedWeight | CodedWeight):
        if any(leaf.requires_grad for leaf in leaves):
            raise ValueError(
                f"w1 is codes with interleave={call.interleave} and requires a gradient beside adapters; freeze it by "
                "requires_grad_(False), or give values"
            )
    else:
        if call.main_grad is not None or call.delayed_wgrad is not None:
            raise ValueError(
                f"interleave is {call.interleave} and w1 has adapters, so its gradient goes through autograd; create "
                "the module without main_grad and delay_wgrad"
            )
        source = to_halves(as_one("w1", source), block)
    return source, None if bias is None else to_halves(as_one("bias1", bias), block), block


def _calls(call: MlpCall) -> tuple[Call, Call]:
    """The layers' calls. fc1's result has x's dtype, whatever the recipe's output_dtype."""
    seeds = call.seed, _second_seed(call.seed)
    first, second = (
        Call(
            call.recipe, call.backend, call.group_offset, seed=seed, record=call.record, main_grad=call.main_grad,
            state=state, delayed_wgrad=store, room=None if call.room is None else Room(call.room.gemms),
        )
        for seed, state, store in zip(seeds, call.state_of_each, call.store_of_each, strict=True)
    )  # fmt: skip
    if call.recipe.output_dtype is not None:
        first.output_dtype = "x"
    if call.probes is not None:
        first.probe, second.probe = call.probes
    return first, second


def _second_seed(seed: Seed) -> Seed:
    """`second_stream`, also of a counter, whose base then has the other bit."""
    if isinstance(seed, SeedCounter):
        return SeedCounter(seed.base ^ -(1 << 63), seed.counter)
    return second_stream(seed)
