"""Experts in Megatron-LM's distributed checkpoints, written for megatron-core 0.16.1."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # type: ignore[import-not-found,unused-ignore]
from megatron.core.transformer.utils import (  # type: ignore[import-not-found,unused-ignore]
    make_sharded_tensors_for_checkpoint,
)
from torch import nn

from octavo_torch.adapters.megatron_types import Offsets, ProcessGroups


def sharded(
    layer: nn.Module,
    groups: ProcessGroups,
    split: int,
    prefix: str,
    offsets: Offsets,
    metadata: dict[str, object] | None,
) -> dict[str, object]:
    """The layer's local `weight{i}`, `bias{i}` and buffers as Megatron's ShardedTensors, by their names in the module.

    groups    a ProcessGroupCollection with ep, expt_tp and expt_dp
    split     side of the weights that tensor parallelism splits: 0 outputs (and the biases), or 1 inputs
    offsets   of the enclosing layers: (axis, index, count) each

    Parameters have the keys of SequentialMLP, so a checkpoint may be read with another number of ranks. Buffers of a
    recipe's state are sharded along the experts, their last axis; seeds are the same on every rank.
    """
    options = metadata or {}
    count: int = layer.num_groups  # type: ignore[assignment]
    first, axis = groups.ep.rank() * count, len(offsets)
    part = 0 if groups.expt_tp is None else groups.expt_tp.rank()
    single = bool(options.get("singleton_local_shards", False))
    tensors: dict[str, Any] = {}
    for name, parameter in layer.named_parameters():
        kind = name.rstrip("0123456789")
        number = first + int(name.removeprefix(kind))
        key = f"{number}.{prefix}{kind}" if single else f"{prefix}{kind}"
        where = offsets if single else (*offsets, (axis, number, groups.ep.size() * count))
        sides = {key: split} if kind == "weight" or split == 0 else {}
        tensors[f"{prefix}{name}"] = make_sharded_tensors_for_checkpoint(
            {key: parameter}, "", sides, where, tp_group=groups.expt_tp, dp_cp_group=options.get("dp_cp_group")
        )[key]
    for name, buffer in layer.named_buffers():
        place = [(axis + buffer.dim() - 1, groups.ep.rank(), groups.ep.size())] if buffer.dim() else []
        tensors[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
            f"{prefix}{name}", buffer, *offsets, *place, prepend_axis_num=axis, replica_id=(0, part, 0)
        )
    for tensor in tensors.values():
        tensor.replica_id = (*tensor.replica_id[:2], groups.expt_dp.rank())
    return tensors
