"""State dicts of modules whose experts are spread over ranks: every rank has other experts under the same names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from octavo.errors import printable
from octavo_torch.arrays.selection import saved_modules
from octavo_torch.mlp.experts import Experts
from octavo_torch.moe.module import MoE
from octavo_torch.moe.parallel.group import ExpertGroup

_SHARED = frozenset({"router", "choice_bias", "seed_base", "seed_counter"})
"""Arrays of a layer that are the same on every rank."""
_LAST = frozenset({"amax_history", "encode_scale"})
"""Buffers whose last axis is that of the experts; in all other arrays it is the first."""


def ranks_of(layer: nn.Module) -> ExpertGroup | None:
    """The ranks over which a layer's experts are spread; None where one has them all."""
    group = layer.ep if isinstance(layer, MoE) else None
    return None if group is None or group.ranks == 1 else group


def numbers_of(layer: Experts) -> range:
    """The numbers of the experts that `layer` has here, among those of all ranks."""
    group = ranks_of(layer)
    first = 0 if group is None else group.rank * layer.num_groups
    return range(first, first + layer.num_groups)


def _spread(module: nn.Module) -> Iterator[tuple[str, MoE, ExpertGroup]]:
    """The layers in `module` whose experts are spread over ranks, by their names in its state dict, and the ranks."""
    for name, layer in saved_modules(module):
        group = ranks_of(layer)
        if isinstance(layer, MoE) and group is not None:
            yield name, layer, group


def own_experts(module: nn.Module) -> dict[str, list[int]]:
    """Of each layer in `module` whose experts are spread over ranks, the number of this rank's first one and how many
    all ranks have."""
    return {name: [numbers_of(layer).start, group.ranks * layer.num_groups] for name, layer, group in _spread(module)}


def check_own_experts(module: nn.Module, saved: object) -> None:
    """ValueError where `saved`, a file's `own_experts`, are others than this rank's: their names are the same."""
    here = own_experts(module)
    for name, numbers in saved.items() if isinstance(saved, Mapping) else ():
        if name in here and here[name] != numbers:
            raise ValueError(
                f"the first expert of {name or 'the module'}, and of how many, is {printable(numbers)} in the "
                f"checkpoint and {here[name]} here; give each rank the file that it has saved, or save the experts of "
                "all ranks with save_distributed"
            )


def over_ranks(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state`, the state dict of `module`, with a DTensor over all ranks' experts in place of each array of this rank's
    experts; it shares the array's memory. Without that torch.distributed.checkpoint would take arrays of one name for
    copies of each other, and write those of one rank.

    Raises ValueError for experts that are sharded a second time, or have one parameter each.
    """
    found = dict(state)
    for prefix, layer, group in _spread(module):
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
