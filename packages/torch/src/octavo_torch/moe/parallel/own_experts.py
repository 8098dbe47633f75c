"""A rank's experts are its own: what takes them for copies of the other ranks' would mix them, and is refused."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from octavo_torch.moe.parallel.group import ExpertGroup, numbers


def check_sharded(group: ExpertGroup | None, name: str, value: object) -> None:
    """ValueError for a parameter of the experts that is sharded, or replicated, over ranks of `group`; a module whose
    attribute is set asks, because FSDP2 stores so what it has sharded."""
    if group is None or not isinstance(value, DTensor):
        return
    mesh = value.device_mesh
    for axis in range(mesh.ndim):
        shared = group.shared_with(mesh.get_group(axis))
        if len(shared) > 1:
            raise ValueError(
                f"{name} is to be distributed over {numbers(shared)}, which have different experts by ep=: gathering "
                "it would mix them; give fully_shard the axis of the replicas, or leave the experts and their "
                "adapters out by ignored_params"
            )


def check_wrapper(group: ExpertGroup, leaves: Iterable[Tensor]) -> None:
    """ValueError inside a wrapper that takes the experts of `group`'s ranks for copies of each other:
    DistributedDataParallel, which has given all of them one rank's, and FullyShardedDataParallel, which gathers other
    experts into a weight."""
    leaves = [*leaves]
    # what it has flattened does not tell over which ranks
    if group.ranks > 1 and any(isinstance(leaf._base, FlatParameter) for leaf in leaves):
        raise ValueError(
            f"the experts of {numbers(range(group.ranks))} of ep= differ, and FullyShardedDataParallel has flattened "
            "them, which may gather other ranks' experts into a weight; shard them by fully_shard over the replicas, "
            "or leave them out by ignored_states"
        )
    wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if wrapper is None:
        return
    shared = group.shared_with(wrapper.process_group)
    if len(shared) == 1:
        return
    # frozen ones, too: it gives all ranks the first rank's
    named = wrapper.module.named_parameters()
    copied = [own for name, own in named if name not in wrapper.parameters_to_ignore]
    if any(leaf is own for leaf in leaves for own in copied):
        raise ValueError(
            f"the experts of {numbers(shared)} differ by ep=, and DistributedDataParallel over these ranks has given "
            "all of them one rank's and would average their gradients; give it the replicas as process_group, or name "
            "the experts' parameters and buffers to DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
        )


def replicas(group: ExpertGroup, given: ProcessGroup) -> ProcessGroup | None:
    """The group over which amax of a rank's experts is reduced where `given` is asked for: their amax covers the tokens
    of all of `group`'s ranks already. None where no other rank of `given` has these experts.

    Raises ValueError where only some of the ranks in `given` share the experts.
    """
    shared = group.shared_with(given)
    if len(shared) == 1:
        return given
    if len(shared) == given.size():
        return None
    raise ValueError(
        f"process_group has {given.size()} ranks, of which {numbers(shared)} have different experts by ep=, "
        "and their amax would be mixed; call update_scales of this layer with the group of its replicas, which have "
        "the same experts"
    )
