"""Experts over ranks in a state dict: each rank has its own under the names that the others' have, too."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from octavo_torch.moe.module import MoE
from octavo_torch.moe.parallel.group import ExpertGroup

_SHARED = frozenset({"router", "choice_bias", "seed_base", "seed_counter"})
_LAST = frozenset({"amax_history", "encode_scale"})
"""Their last axis is that of the experts, and not their first."""


def ranks_of(layer: nn.Module) -> ExpertGroup | None:
    """The ranks over which a layer's experts are spread; None where one has them all."""
    group = layer.ep if isinstance(layer, MoE) else None
    return None if group is None or group.ranks == 1 else group


def over_ranks(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state`, of `module`, with DTensors over the ranks of a layer's experts in the place of a rank's own part; they
    share its memory. torch.distributed.checkpoint takes equal names for copies of one tensor, and writes one rank's.

    Raises ValueError for experts that are sharded a second time, or have one parameter each.
    """
    found = dict(state)
    for prefix, layer in module.named_modules():
        group = ranks_of(layer)
        if group is None:
            continue
        if layer.per_group_parameters:
            raise ValueError(
                f"{prefix or 'the module'} has experts over {group.ranks} ranks with one parameter each, whose "
                "names are the same on every rank; create it without per_group_parameters to save or load it"
            )
        start = f"{prefix}." if prefix else ""
        for name in [name for name in found if name.startswith(start) and name[len(start) :] not in _SHARED]:
            value = found[name]
            if isinstance(value, DTensor):
                raise ValueError(
                    f"{name} is sharded, and of {group.ranks} ranks that have different experts; save it by "
                    f"torch.distributed.checkpoint under a name of this rank's, such as ep{group.rank}.{name}"
                )
            mesh = DeviceMesh.from_group(group.group, value.device.type)
            axis = value.dim() - 1 if name[len(start) :] in _LAST else 0
            found[name] = DTensor.from_local(value, mesh, [Shard(axis)], run_check=False)
    return found
