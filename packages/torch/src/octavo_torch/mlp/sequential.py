"""Sequential: grouped layers and activations in a row, of which adjacent ones run fused where a fused plan exists."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from octavo_registry.contract.cards import GATED
from octavo_torch.arrays.per_group import Weights
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.dense.module import Linear
from octavo_torch.linear.grouped import InputRows
from octavo_torch.linear.module import GroupedLinear
from octavo_torch.linear.module_base import LinearModule
from octavo_torch.linear.weights import QuantizedWeight, check_own
from octavo_torch.mlp import mlp
from octavo_torch.mlp.activation_module import Activation
from octavo_torch.mlp.bias_scales import BiasScales, scales_by_operation
from octavo_torch.mlp.call import MlpCall
from octavo_torch.mlp.experts import QuantizedWeights
from octavo_torch.mlp.module import GroupedMLP
from octavo_torch.scaling.recipe_module import RecipeModule

Quantized = dict[int, QuantizedWeight | QuantizedWeights]
"""Quantized weights by the number of their operation: a QuantizedWeight, or the two of a GroupedMLP."""


@dataclass(frozen=True)
class Step:
    """What runs as one: operations `first` to `last`, and why no more than these are fused ("" where they are)."""

    first: int
    last: int
    why: str = ""


class Sequential(nn.Module):
    """Operations in a row on rows sorted by group: GroupedLinear, GroupedMLP, Activation, Linear, others of one tensor.

    A GroupedLinear, an Activation and a GroupedLinear run as one `grouped_mlp`, with the quantizers between them fused
    where a backend can, if both layers have one recipe, groups, backend and main_grad and their features fit. Each has
    its own parameters, seeds and scales; results are those of the operations one after the other, up to the last bit of
    an activation's fp32 value. `explain` says what is fused and what is not. Hooks of a layer inside a fused run are
    not called, so layers that have some are not fused, nor are subclasses, and modules whose forward was replaced.
    """

    def __init__(self, *operations: nn.Module) -> None:
        super().__init__()
        for index, operation in enumerate(operations):
            if not isinstance(operation, nn.Module):
                raise ValueError(f"operation {index} is a {type(operation).__name__}; give modules")
            self.add_module(str(index), operation)

    @property
    def operations(self) -> tuple[nn.Module, ...]:
        """The operations in order."""
        return tuple(self._modules.values())  # type: ignore[arg-type]

    def steps(self, scaled: Collection[int] = ()) -> Iterator[Step]:
        """What runs as one, in order. Asked at each call: recipes and hooks of the parts may change.

        scaled   numbers of the operations whose bias is scaled
        """
        operations = self.operations
        index = 0
        while index < len(operations):
            why = _why_not_fused(operations[index : index + 3])
            if why == "" and index in scaled:
                why = f"scales multiply the bias of operation {index}, and of two layers in one run only the second's"
            length = 3 if why == "" else 1
            yield Step(index, index + length - 1, why or "")
            index += length

    def forward(
        self,
        x: InputRows,
        group_sizes: GroupSizes | None,
        probs: Tensor | None = None,
        *,
        weights: Quantized | None = None,
        bias_scales: BiasScales | None = None,
        bias2_scales: Tensor | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """The last operation's result.

        x                 [M, K], or [..., K], whose leading axes all else then has in M's place; quantized already
                          where the first operation takes that
        group_sizes       [G], for every grouped layer
        probs             fp32 [M], multiplies the one activation: an Activation's or a GroupedMLP's
        bias_scales       [M], multiplies the bias of the one GroupedLinear that has a bias row by row; of several:
                          {number of the operation: [M]}, where a GroupedMLP's is for its second bias
        bias2_scales      [M], multiplies the bias behind the activation, of the one GroupedMLP, or GroupedLinear after
                          an Activation, that has one
        weights           what `quantize_weights` returned this step
        out, grad_input   buffers of the last operation's result and of the first one's dx, of grouped layers alone

        Raises ValueError for probs without just one activation, for scales that fit no bias or several, and as the
        operations do.
        """
        operations = self.operations
        if probs is not None:
            activations = sum(isinstance(operation, Activation | GroupedMLP) for operation in operations)
            if activations != 1:
                raise ValueError(f"probs was given and there are {activations} activations; give it with one")
        scales, quantized = scales_by_operation(operations, bias_scales, bias2_scales), weights or {}
        steps = tuple(self.steps(scales))
        _check_ends(operations, steps, out, grad_input)
        for step in steps:
            operation = operations[step.first]
            buffers = {
                "out": out if step is steps[-1] else None,
                "grad_input": grad_input if step is steps[0] else None,
            }
            if step.last > step.first:
                codes = quantized.get(step.first), quantized.get(step.last)
                parts = operations[step.first : step.last + 1]
                x = _fused(parts, x, group_sizes, (probs, scales.get(step.last)), codes, buffers)
            elif isinstance(operation, GroupedMLP):
                codes2, scales2 = quantized.get(step.first), scales.get(step.first)
                x = operation(x, group_sizes, probs, weights=codes2, bias2_scales=scales2, **buffers)
            elif isinstance(operation, GroupedLinear):
                codes1, scales1 = quantized.get(step.first), scales.get(step.first)
                x = operation(x, group_sizes, weight=codes1, bias_scales=scales1, **buffers)
            elif isinstance(operation, Linear):
                x = operation(x, weight=quantized.get(step.first), **buffers)
            elif isinstance(operation, Activation):
                x = operation(x, probs)
            else:
                x = operation(x)
        return cast(Tensor, x)

    def quantize_weights(self, *, out: Quantized | None = None, unchanged: Tensor | None = None) -> Quantized:
        """Every grouped layer's weights quantized once, by the operation's number: for each forward until they change.

        out, unchanged   as GroupedLinear.quantize_weight has them
        """
        quantized: Quantized = {}
        for number, operation in enumerate(self.operations):
            if isinstance(operation, GroupedMLP):
                pair = None if out is None else cast(QuantizedWeights, out[number])
                quantized[number] = operation.quantize_weights(out=pair, unchanged=unchanged)
            elif isinstance(operation, LinearModule):
                one = None if out is None else cast(QuantizedWeight, out[number])
                quantized[number] = operation.quantize_weight(out=one, unchanged=unchanged)
        return quantized

    def backward_dw(self, count: int | None = None) -> None:
        """`backward_dw` of every layer with `delay_wgrad`, the last one's first; ValueError where none has it."""
        layers = [part for part in self.operations if isinstance(part, RecipeModule) and part.delayed_wgrad is not None]
        if not layers:
            raise ValueError("no operation has delay_wgrad=True, so backward leaves no weight gradient out")
        for layer in reversed(layers):
            layer.backward_dw(count)

    def explain(self, x: Tensor, group_sizes: GroupSizes) -> str:
        """A line or more for each step, from the rows `x` of the first operation on: what is fused, or why not."""
        operations, lines = self.operations, []
        for step in self.steps():
            names = " + ".join(f"{at} {_name(operations[at])}" for at in range(step.first, step.last + 1))
            if step.last == step.first:
                lines.append(names + (f": not fused, {step.why}" if step.why else ""))
                continue
            first, activation, second = _triple(operations[step.first : step.last + 1])
            rows = x.new_empty((*x.shape[:-1], first.in_features)).requires_grad_()
            plan = mlp.explain_mlp(
                rows, first.weights, second.weights, group_sizes,
                activation=activation.activation, recipe=first.recipe, backend=first.backend,
            )  # fmt: skip
            lines.append(f"{names}: one grouped_mlp")
            lines += [f"  {what} and quantize: {part}" for what, part in plan.fused.items()]
        return "\n".join(lines)


def _name(operation: nn.Module) -> str:
    return operation.activation if isinstance(operation, Activation) else type(operation).__name__


def _triple(operations: Sequence[nn.Module]) -> tuple[GroupedLinear, Activation, GroupedLinear]:
    return cast(tuple[GroupedLinear, Activation, GroupedLinear], tuple(operations))


def _why_not_fused(operations: tuple[nn.Module, ...]) -> str | None:
    """ "" where these three run as one; a reason where they nearly do; None where nothing suggests it."""
    # a subclass may compute something else
    if len(operations) < 2 or type(operations[0]) is not GroupedLinear or type(operations[1]) is not Activation:
        return None
    if len(operations) < 3 or type(operations[2]) is not GroupedLinear:
        return f"no GroupedLinear follows {_name(operations[1])}"
    first, activation, second = _triple(operations)
    if first.recipe is not second.recipe and first.recipe != second.recipe:
        return f"the recipes are {first.recipe.kind} ({first.recipe.fingerprint}) and {second.recipe.kind} " + (
            f"({second.recipe.fingerprint})"
        )
    if first.recipe.output_dtype is not None:
        return f"the recipe's output_dtype is {first.recipe.output_dtype}, and between the layers it would be x's"
    for what in ("num_groups", "backend", "main_grad", "training", "room"):
        ours, theirs = getattr(first, what), getattr(second, what)
        if ours != theirs:
            return f"{what} is {ours!r} and {theirs!r}"
    width = second.in_features * (2 if activation.activation in GATED else 1)
    if first.out_features != width:
        return f"{activation.activation} reads {width} features and the layer before it makes {first.out_features}"
    if any(layer._modules for layer in (first, second)):
        return "a layer has adapters, which add to its result"
    if bool(first.probes) is not bool(second.probes):
        return "one of the layers is observed, and a fused run counts in both or in none"
    if any(_is_watched(operation) for operation in operations):
        return "a module has hooks, or a forward of its own, which a fused run would not call"
    return ""


def _is_watched(module: nn.Module) -> bool:
    # accelerate, among others, puts a function in the place of one module's forward
    return "forward" in module.__dict__ or bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()  # type: ignore[no-untyped-call]  # of all modules, as FlopCounterMode has
    )


def _check_ends(
    operations: tuple[nn.Module, ...], steps: tuple[Step, ...], out: Tensor | None, grad_input: Tensor | None
) -> None:
    for name, buffer, at in (("out", out, -1), ("grad_input", grad_input, 0)):
        if buffer is not None and not (steps and isinstance(operations[steps[at].first], RecipeModule)):
            which = "last" if at else "first"
            raise ValueError(f"{name} was given and the {which} operation is not a grouped layer; leave it out")


def _fused(
    operations: Sequence[nn.Module],
    x: InputRows,
    group_sizes: GroupSizes | None,
    of_rows: tuple[Tensor | None, Tensor | None],
    weights: tuple[object, object],
    buffers: Mapping[str, Tensor | None],
) -> Tensor:
    """Three operations as one `grouped_mlp`; `of_rows` are probs and the scales of the second bias."""
    first, activation, second = _triple(operations)
    probs, bias2_scales = of_rows
    w1, w2 = (_weight_for(layer, codes) for layer, codes in zip((first, second), weights, strict=True))
    state1, state2 = first.delayed_state, second.delayed_state
    if first.training and not torch.compiler.is_compiling():
        first.notice_unused_amax(first.weights)
        second.notice_unused_amax(second.weights)
    stores = (first.delayed_wgrad, second.delayed_wgrad)
    call = MlpCall(
        recipe=first.recipe,
        backend=first.backend,
        seed=first.seed,
        record=first.training,
        out=buffers["out"],
        grad_input=buffers["grad_input"],
        main_grad=first.main_grad,
        room=first.room,
        activation=activation.activation,
        second_seed=second.seed,
        states=None if state1 is None or state2 is None else (state1, state2),
        delayed_wgrad=None if stores == (None, None) else stores,
        probes=(first.probes[0], second.probes[0]) if first.probes and second.probes else None,
    )
    optional = mlp.OptionalOperands(probs, first.biases, second.biases, bias2_scales)
    return mlp.run(x, w1, w2, group_sizes, optional, call)


def _weight_for(layer: GroupedLinear, codes: object) -> Weights | QuantizedWeight:
    """`codes`, which have to be this layer's, or the layer's own weight where there are none."""
    if codes is None:
        return layer.weights
    check_own("weights", codes, layer.weights)
    return cast(QuantizedWeight, codes)
