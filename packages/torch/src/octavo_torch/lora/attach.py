"""add_lora and merge_lora: adapters beside the weights of a model's grouped layers, and their end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo_torch.arrays.checks import brief, check_dtype, check_module
from octavo_torch.arrays.per_group import leaves_of
from octavo_torch.arrays.selection import Filter, check_filter, selects
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.module_base import LinearModule
from octavo_torch.lora.module import GroupedLoRA
from octavo_torch.mlp.experts import Experts
from octavo_torch.mlp.packed_weight import PackedWeight

_CHILDREN = {"weight": "lora", "weight1": "lora1", "weight2": "lora2"}
"""Of each weight, the name of its adapter in the layer."""

Layer = LinearModule | Experts


def add_lora(
    module: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    dropout: float = 0.0,
    targets: Sequence[str] = ("weight", "weight1", "weight2"),
    filter: Filter = None,
    dtype: torch.dtype | None = None,
) -> tuple[str, ...]:
    """Put a GroupedLoRA beside the weights of the grouped layers in `module`, in place; returns the adapters' names.

    rank, alpha, rank_stabilized, dropout   as GroupedLoRA has them
    targets   the weights: "weight" of GroupedLinear and Linear, whose adapter is the child `lora`; "weight1" and
              "weight2" of GroupedMLP and MoE, whose adapters are `lora1`, in front of the activation, and `lora2`
    filter    selects layers: a pattern of whole names such as "model.layers.*.experts", or a function of name and
              module; None: all
    dtype     of A and B; None: the weight's

    The layers' weights, whether values or codes alone, and biases are frozen. Raises ValueError, before anything has
    changed, for arguments that do not fit, and where no layer is selected, one has adapters or is sharded already.
    """
    check_module(module)
    check_filter(filter)
    if dtype is not None:
        check_dtype(dtype)
    wanted = _checked(targets)
    made: list[tuple[str, Layer, str, GroupedLoRA]] = []
    for name, layer in _layers(module):
        if not selects(filter, name, layer):
            continue
        for weight in (weight for weight in wanted if weight in layer._shapes):
            first = _first_leaf(layer, name, weight)
            groups, rows, columns = layer._shapes[weight]
            adapter = GroupedLoRA(
                groups, columns, rows, rank, alpha=alpha, rank_stabilized=rank_stabilized, dropout=dropout,
                device=first.device, dtype=dtype or first.dtype, backend=layer.backend,
            )  # fmt: skip
            made.append((_place(name, _CHILDREN[weight]), layer, _CHILDREN[weight], adapter))
    if not made:
        raise ValueError(
            f"no weight among {', '.join(wanted)} is selected; give a module with GroupedLinear, Linear, GroupedMLP or "
            "MoE, and targets and a filter that select some of them"
        )
    for _, layer, child, adapter in made:
        layer.add_module(child, adapter.train(layer.training))
        # a parametrization keeps a weight's parameters in a module of its own
        for name, parameter in layer.named_parameters():
            if name.removeprefix("parametrizations.").startswith(("weight", "bias")):
                parameter.requires_grad_(False)
    return tuple(name for name, *_ in made)


def merge_lora(module: nn.Module) -> tuple[str, ...]:
    """Add to each weight what its adapter stands for, in place, and remove the adapters; returns their names.

    Weights are rounded once to their dtype, so there is no way back: keep the adapters' state dict for that. Raises
    ValueError, before anything has changed, where there are no adapters, for weights that are computed, for those that
    another module in `module` has, too, and for those that are codes alone, of which `GroupedLoRA.merged_weight` makes
    values.
    """
    check_module(module)
    found = [
        (name, layer, weight, child)
        for name, layer in _layers(module)
        for weight, child in _CHILDREN.items()
        if isinstance(layer._modules.get(child), GroupedLoRA)
    ]
    if not found:
        raise ValueError("module has no adapters; give one to which add_lora has added some")
    for name, layer, weight, _ in found:
        if isinstance(layer._parameters.get(weight), CodedWeight | PackedWeight):
            raise ValueError(
                f"{_place(name, weight)} is codes alone, which would round the sum; keep the adapter beside it, or "
                "take values from its merged_weight"
            )
        whole = layer.of_all_groups(weight)
        if whole is None or not all(isinstance(leaf, nn.Parameter) for leaf in leaves_of(whole)):
            raise ValueError(
                f"{_place(name, weight)} is not a parameter of its module: a parametrization or pruning computes it, "
                "and would lose the sum; remove that first"
            )
    _check_apart(module, found)
    for _, layer, weight, child in found:
        adapter = layer._modules[child]
        assert isinstance(adapter, GroupedLoRA)  # as found
        whole = layer.of_all_groups(weight)
        assert whole is not None
        leaves = leaves_of(whole)
        with torch.no_grad():
            values = whole if isinstance(whole, Tensor) else torch.stack(tuple(whole))
            merged = adapter.merged_weight(values)
            for target, value in zip(leaves, (merged,) if isinstance(whole, Tensor) else merged, strict=True):
                target.copy_(value)
        delattr(layer, child)
    return tuple(_place(name, child) for name, _, _, child in found)


def _check_apart(module: nn.Module, found: Sequence[tuple[str, Layer, str, str]]) -> None:
    """ValueError where a weight is tied to another one, which would get the sum of an adapter that is not its own."""
    owners: dict[Tensor, list[str]] = {}
    for place, part in module.named_modules():
        for parameter_name, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append(_place(place, parameter_name))
    for name, layer, weight, _ in found:
        whole = layer.of_all_groups(weight)
        assert whole is not None
        for leaf in leaves_of(whole):
            if len(owners[leaf]) > 1:
                raise ValueError(
                    f"{_place(name, weight)} is tied: {' and '.join(owners[leaf])} are one parameter, and all of them "
                    "would get the sum; give the layer a parameter of its own first, or keep the adapter"
                )


def _layers(module: nn.Module) -> Iterator[tuple[str, Layer]]:
    for name, layer in module.named_modules():
        if isinstance(layer, LinearModule | Experts):
            yield name, layer


def _place(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _checked(targets: object) -> tuple[str, ...]:
    names = tuple(targets) if isinstance(targets, Sequence) and not isinstance(targets, str) else ()
    if not names or any(not isinstance(name, str) or name not in _CHILDREN for name in names):
        raise ValueError(f"targets is {brief(targets)}; give some of {', '.join(_CHILDREN)}")
    return names


def _first_leaf(layer: Layer, name: str, weight: str) -> Tensor:
    """A tensor of the weight, which says where an adapter has to be; ValueError where none can be added."""
    if _CHILDREN[weight] in layer._modules:
        raise ValueError(f"{_place(name, weight)} has an adapter already; end it by merge_lora, or select other layers")
    whole = layer.of_all_groups(weight)
    assert whole is not None
    first = leaves_of(whole)[0]
    if isinstance(first, DTensor):
        raise ValueError(f"{_place(name, weight)} is sharded; add adapters before FSDP2 shards it")
    return first
