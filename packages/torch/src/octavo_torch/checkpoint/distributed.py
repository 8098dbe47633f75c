"""Sharded checkpoints with torch.distributed.checkpoint: any number of ranks, either form of parameters, no pickle."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard

from octavo.errors import printable
from octavo_torch.arrays.checks import check_module, check_path
from octavo_torch.arrays.per_group import stacked_view
from octavo_torch.arrays.selection import name_in
from octavo_torch.checkpoint.codes import check_not_packed
from octavo_torch.checkpoint.expert_ranks import over_ranks, ranks_of
from octavo_torch.checkpoint.recipes import check_recipe_state, recipe_layers, recipe_state
from octavo_torch.distributed.fsdp.shard import WeightShard
from octavo_torch.linear.coded_weight import CodedWeight


def save_distributed(module: nn.Module, folder: str | Path) -> None:
    """Write the state dict of `module` and its recipes' fingerprints to safetensors files in `folder`.

    Every rank of the default process group calls it and writes its part; without a process group, this process writes
    everything. Experts of a MoE with `ep` are written as one array of all ranks' experts. Needs the package
    safetensors. Only values are written: raises ValueError for a module with CodedWeights, whose MasterWeights may be
    saved instead, or the codes by save_checkpoint. Give each checkpoint a folder of its own: files are replaced one by
    one, and a folder with files of more ranks is refused with a ValueError.
    """
    check_module(module)
    check_path("folder", folder)
    _check_values(module)
    state = {**_state(module), **recipe_state(module)}
    writer = _Writer(str(folder), save_distributed=True)
    with _without_process_group_warning():
        try:
            save(state, storage_writer=writer)
        except CheckpointException as error:
            for reason, _ in error.failures.values():
                if isinstance(reason, _OthersFiles):
                    raise ValueError(str(reason)) from None
            raise


@torch.no_grad()
def load_distributed(module: nn.Module, folder: str | Path) -> None:
    """Load what `save_distributed` wrote into `module`, which may be sharded differently, over more or fewer ranks.

    A module with one parameter per group loads what a module with one parameter for all groups has saved, and vice
    versa. Raises ValueError where recipes differ or arrays are missing.
    """
    check_module(module)
    check_path("folder", folder)
    _check_values(module)
    reader = HuggingFaceStorageReader(str(folder))
    with _without_process_group_warning():
        saved = reader.read_metadata().state_dict_metadata.keys()
        fingerprints = recipe_state(module)
        targets = _targets(module, saved)
        missing = sorted((targets.keys() | fingerprints.keys()) - saved)
        if missing:
            raise ValueError(f"the checkpoint in {printable(folder)} lacks {missing}; give one of a module like this")
        saved_fingerprints = {name: torch.zeros_like(value) for name, value in fingerprints.items()}
        load(saved_fingerprints, storage_reader=reader)
        check_recipe_state(module, saved_fingerprints)
        load(targets, storage_reader=reader)


class _OthersFiles(ValueError):
    """A folder has files that a save would leave beside its own, and that loading reads, too."""


class _Writer(HuggingFaceStorageWriter):
    """Looks at the folder on one rank, before any writes, and has all of them refuse it."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        own = tuple(f"shard-{number:05d}-" for number, plan in enumerate(plans, start=1) if plan.items)
        others = sorted(file.name for file in Path(self.path).glob("*.safetensors") if not file.name.startswith(own))
        if others:
            raise _OthersFiles(
                f"folder is {printable(Path(self.path))} and has {others[0]}, as of a checkpoint of more ranks, which "
                "would be read together with the new files; give each checkpoint a folder of its own"
            )
        planned: list[SavePlan] = super().prepare_global_plan(plans)
        return planned


def _check_values(module: nn.Module) -> None:
    check_not_packed(module)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, CodedWeight):
            raise ValueError(
                f"{name} is codes of recipe {parameter.recipe.kind} alone, and these checkpoints hold values; give the "
                "MasterWeights of the module, or use save_checkpoint(module, path, quantized=True) and load_checkpoint"
            )


def _state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict as files have it."""
    return over_ranks(module, {name: _values(value) for name, value in module.state_dict().items()})


def _targets(module: nn.Module, saved: Set[str]) -> dict[str, Tensor]:
    """Tensors to load into, by their names in the checkpoint: views of the module's own memory."""
    state = _state(module)
    for prefix, layer in recipe_layers(module).items():
        if ranks_of(layer) is not None:
            continue  # has one array for all experts, here and there
        for own in layer._shapes:
            whole = name_in(prefix, own)
            parts = [name_in(prefix, part) for part in layer.part_names(own)]
            if whole in state and whole not in saved and set(parts) <= saved:
                state.update(_parts(state.pop(whole), parts))
            elif whole not in state and whole in saved:
                view = stacked_view([state.pop(part) for part in parts])
                if view is None:
                    raise ValueError(
                        f"{whole} is one array in the checkpoint and {parts[0]} and its siblings are not in one block "
                        "of memory here; load it before they are sharded"
                    )
                state[whole] = view
    return state


def _parts(whole: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Views of those groups of `whole` that this rank has a part of."""
    if not isinstance(whole, DTensor):
        return dict(zip(names, whole.unbind(0), strict=True))
    local, mesh = whole.to_local(), whole.device_mesh
    if not any(placement.is_shard(0) for placement in whole.placements):
        within = [Shard(p.dim - 1) if isinstance(p, Shard) else p for p in whole.placements]
        shape, stride = whole.shape[1:], whole.stride()[1:]
        return {
            name: DTensor.from_local(part, mesh, within, run_check=False, shape=shape, stride=stride)
            for name, part in zip(names, local.unbind(0), strict=True)
        }
    if mesh.ndim > 1:
        raise ValueError(
            f"{names[0]} and its siblings are sharded by groups on a mesh of {mesh.ndim} axes; load them whole"
        )
    first = -(-whole.shape[0] // mesh.size()) * mesh.get_local_rank()
    return dict(zip(names[first:], local.unbind(0), strict=False))


def _values(value: Tensor) -> Tensor:
    """`value` without a WeightShard inside; it shares the memory."""
    if isinstance(value, DTensor) and isinstance(value._local_tensor, WeightShard):
        return DTensor.from_local(
            value._local_tensor.wrapped, value.device_mesh, value.placements, run_check=False,
            shape=value.shape, stride=value.stride(),
        )  # fmt: skip
    return value


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """Suppress the warning that torch.distributed is not initialized: one process may save and load, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
