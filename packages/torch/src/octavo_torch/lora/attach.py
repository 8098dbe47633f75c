"""add_lora and merge_lora: put adapters beside the weights of a model's grouped layers, and add them to the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo_torch.arrays.checks import brief, check_dtype, check_module
from octavo_torch.arrays.group_parameters import reshard
from octavo_torch.arrays.per_group import Weights, leaves_of, stacked
from octavo_torch.arrays.selection import Filter, check_filter, name_in, selects
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.module_base import LinearModule
from octavo_torch.lora.module import GroupedLoRA
from octavo_torch.mlp.experts import Experts
from octavo_torch.mlp.packed_weight import PackedWeight
from octavo_torch.moe.module import MoE

_CHILDREN = {"weight": "lora", "weight1": "lora1", "weight2": "lora2"}
"""The name of each weight's adapter in the layer."""

Layer = LinearModule | Experts


@dataclass(frozen=True)
class _Target:
    """A weight of a layer, beside which an adapter stands; `path` is the layer's name in the model."""

    path: str
    layer: Layer
    weight: str

    @property
    def name(self) -> str:
        """The weight's name in the model."""
        return name_in(self.path, self.weight)

    @property
    def child(self) -> str:
        """The adapter's name in the layer."""
        return _CHILDREN[self.weight]

    @property
    def adapter_name(self) -> str:
        """The adapter's name in the model."""
        return name_in(self.path, self.child)

    @property
    def value(self) -> Weights:
        """The weight, of all groups."""
        value = self.layer.of_all_groups(self.weight)
        assert value is not None  # a layer has each of its weights
        return value


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

    The layers' weights, whether values or codes alone, and biases are frozen, and have no gradient any more. Raises
    ValueError, before anything has changed, for arguments that do not fit, and where no layer is selected, one has
    adapters or is sharded already.
    """
    check_module(module)
    reshard(module)
    check_filter(filter)
    if dtype is not None:
        check_dtype(dtype)
    wanted = _checked(targets)
    adapters: dict[_Target, GroupedLoRA] = {}
    for path, layer in _layers(module):
        if not selects(filter, path, layer):
            continue
        for target in (_Target(path, layer, weight) for weight in wanted if weight in layer._shapes):
            _check_free(target)
            leaf = leaves_of(target.value)[0]
            groups, rows, columns = layer._shapes[target.weight]
            adapters[target] = GroupedLoRA(
                groups, columns, rows, rank, alpha=alpha, rank_stabilized=rank_stabilized, dropout=dropout,
                device=leaf.device, dtype=dtype or leaf.dtype, backend=layer.backend,
            )  # fmt: skip
    if not adapters:
        raise ValueError(
            f"no weight among {', '.join(wanted)} is selected; give a module with GroupedLinear, Linear, GroupedMLP or "
            "MoE, and targets and a filter that select some of them"
        )
    for target, adapter in adapters.items():
        if isinstance(target.layer, MoE):
            adapter.ep = target.layer.ep
        target.layer.add_module(target.child, adapter.train(target.layer.training))
        # a parametrization keeps a weight's parameters in a module of its own
        for name, parameter in target.layer.named_parameters():
            if name.removeprefix("parametrizations.").startswith(("weight", "bias")):
                parameter.requires_grad_(False).grad = None  # an optimizer would step it with one, zeros included
    return tuple(target.adapter_name for target in adapters)


def merge_lora(module: nn.Module) -> tuple[str, ...]:
    """Add each adapter's `delta_weight` to its weight, in place, and remove the adapters; returns their names.

    Weights are rounded once to their dtype, so this cannot be undone: keep the adapters' state dict if you may need it.
    Parameters that FSDP2 has gathered go back into shards first, and the shards are what is changed.
    Raises ValueError, before anything has changed, where there are no adapters, for weights that are computed, for
    weights that another module in `module` has, too, and for those that are codes alone, of which
    `GroupedLoRA.merged_weight` returns merged values.
    """
    check_module(module)
    reshard(module)
    adapters: dict[_Target, GroupedLoRA] = {}
    for path, layer in _layers(module):
        for weight, child in _CHILDREN.items():
            adapter = layer._modules.get(child)
            if isinstance(adapter, GroupedLoRA):
                adapters[_Target(path, layer, weight)] = adapter
    if not adapters:
        raise ValueError("module has no adapters; give one to which add_lora has added some")
    for target in adapters:
        if isinstance(target.layer._parameters.get(target.weight), CodedWeight | PackedWeight):
            raise ValueError(
                f"{target.name} is codes alone, which would round the sum; keep the adapter beside it, or take values "
                "from its merged_weight"
            )
        if not all(isinstance(leaf, nn.Parameter) for leaf in leaves_of(target.value)):
            raise ValueError(
                f"{target.name} is not a parameter of its module: a parametrization or pruning computes it, and would "
                "lose the sum; remove that first"
            )
    _check_not_tied(module, adapters)
    for target, adapter in adapters.items():
        whole = target.value
        with torch.no_grad():
            merged = adapter.merged_weight(whole if isinstance(whole, Tensor) else stacked(whole))
            for leaf, value in zip(leaves_of(whole), (merged,) if isinstance(whole, Tensor) else merged, strict=True):
                leaf.copy_(value)
        delattr(target.layer, target.child)
    return tuple(target.adapter_name for target in adapters)


def _check_not_tied(module: nn.Module, targets: Iterable[_Target]) -> None:
    """ValueError where a weight is tied to another one, to which its adapter would be added, too."""
    owners: dict[Tensor, list[str]] = {}
    for place, part in module.named_modules():
        for parameter_name, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append(name_in(place, parameter_name))
    for target in targets:
        for leaf in leaves_of(target.value):
            if len(owners[leaf]) > 1:
                raise ValueError(
                    f"{target.name} is tied: {' and '.join(owners[leaf])} are one parameter, and all of them would get "
                    "the sum; give the layer a parameter of its own first, or keep the adapter"
                )


def _layers(module: nn.Module) -> Iterator[tuple[str, Layer]]:
    for name, layer in module.named_modules():
        if isinstance(layer, LinearModule | Experts):
            yield name, layer


def _checked(targets: object) -> tuple[str, ...]:
    names = tuple(targets) if isinstance(targets, Sequence) and not isinstance(targets, str) else ()
    if not names or any(not isinstance(name, str) or name not in _CHILDREN for name in names):
        raise ValueError(f"targets is {brief(targets)}; give some of {', '.join(_CHILDREN)}")
    return names


def _check_free(target: _Target) -> None:
    """ValueError where no adapter can be added beside the weight."""
    if target.child in target.layer._modules:
        raise ValueError(f"{target.name} has an adapter already; end it by merge_lora, or select other layers")
    if isinstance(leaves_of(target.value)[0], DTensor):
        raise ValueError(f"{target.name} is sharded; add adapters before FSDP2 shards it")
