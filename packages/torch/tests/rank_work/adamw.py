"""What ranks do in the tests of AdamW: importable by name, because other processes run it."""

from __future__ import annotations

from typing import Any

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from octavo_torch import AdamW, GroupedLinear, quantize_before_gather

SHAPES = [(6, 5, 260), (9, 130), (21,)]


def _drawn(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(ranks.device, dtype) for shape in SHAPES]


class Parameters(nn.Module):
    """Parameters of SHAPES: whole, or sharded along a dimension of each."""

    def __init__(self, seed: int, dtype: torch.dtype, dims: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.mesh = init_device_mesh(torch.device(ranks.device).type, (dist.get_world_size(),))
        self.dims = dims
        self.values = nn.ParameterList(self.placed(_drawn(seed, dtype)))

    def placed(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.dims is None:
            return tensors
        return [distribute_tensor(t, self.mesh, [Shard(dim)]) for t, dim in zip(tensors, self.dims, strict=True)]

    def take(self, seed: int) -> None:
        for parameter, grad in zip(self.values, self.placed(_drawn(seed, torch.float32)), strict=True):
            parameter.grad = grad.to(parameter.dtype)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _same(ours: Parameters, optimizer: AdamW, other: Parameters, theirs: AdamW) -> list[bool]:
    """Parameters, and of their states everything."""
    answers = []
    for own, reference in zip(ours.values, other.values, strict=True):
        answers.append(torch.equal(_whole(own), _whole(reference)))
        for name, value in optimizer.state[own].items():
            answers.append(torch.equal(_whole(value), _whole(theirs.state[reference][name])))
    return answers


def sharded_steps(seed: int, dtype: torch.dtype, state_bits: int) -> list[bool]:
    """Steps of shards along dims 0 and 1, whose sizes the ranks do not divide, against the whole's."""
    how: dict[str, Any] = {"lr": 0.05, "master_dtype": dtype, "state_bits": state_bits, "seed": seed}
    made = [Parameters(seed, dtype, dims) for dims in (None, (0, 0, 0), (1, 0, 0))]
    optimizers = [AdamW(each.named_parameters(), **how) for each in made]
    for step in range(2):
        for each, optimizer in zip(made, optimizers, strict=True):
            each.take(seed + 1 + step)
            optimizer.step()
    return [
        answer
        for each, optimizer in zip(made[1:], optimizers[1:], strict=True)
        for answer in _same(each, optimizer, made[0], optimizers[0])
    ]


def resharded(seed: int, folder: str) -> list[bool]:
    """torch.distributed.checkpoint saves the state of shards along dim 0 and loads it into shards along dim 1."""
    made = [Parameters(seed, torch.bfloat16, dims) for dims in ((0, 0, 0), (1, 0, 0))]
    optimizers = [AdamW(each.parameters(), state_bits=8, master_dtype=torch.float32) for each in made]
    made[0].take(seed + 1)
    optimizers[0].step()
    dcp.save(get_optimizer_state_dict(made[0], optimizers[0]), checkpoint_id=folder)
    target = get_optimizer_state_dict(made[1], optimizers[1])
    dcp.load(target, checkpoint_id=folder)
    set_optimizer_state_dict(made[1], optimizers[1], target)
    return _same(made[1], optimizers[1], made[0], optimizers[0])


def gathered_at_one_rank(seed: int) -> list[bool]:
    """A state dict of whole tensors on the first rank's host, which is sent from there to shards of another model."""
    made = [Parameters(seed + number, torch.bfloat16, (0, 0, 0)) for number in range(2)]
    optimizers = [AdamW(each.parameters(), state_bits=8, master_dtype=torch.float32) for each in made]
    made[0].take(seed + 1)
    optimizers[0].step()
    whole = get_optimizer_state_dict(
        made[0], optimizers[0], options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(made[1], optimizers[1], whole if dist.get_rank() == 0 else {}, options=sent)
    return _same(made[1], optimizers[1], made[0], optimizers[0])


def fsdp_steps(seed: int) -> list[bool]:
    """A grouped layer under FSDP2, gathered as codes: its shards step as the whole with the mean of the gradients."""

    def layer() -> GroupedLinear:
        torch.manual_seed(seed)
        made = GroupedLinear(4, 128, 256, recipe="mxfp8", dtype=torch.bfloat16, backend="torch-reference")
        return made.to(ranks.device)

    alone, sharded = layer(), layer()
    quantize_before_gather(sharded)
    fully_shard(sharded, mesh=init_device_mesh(torch.device(ranks.device).type, (dist.get_world_size(),)))
    optimizers = [AdamW(each.parameters(), lr=0.05, master_dtype=torch.bfloat16) for each in (alone, sharded)]
    answers = []
    for step in range(2):
        generator = torch.Generator().manual_seed(seed + step)  # the same rows on each rank, so the mean is theirs
        seen: list[Tensor] = []
        x = torch.randn(10, 128, generator=generator).bfloat16().to(ranks.device)
        for each, optimizer in zip((alone, sharded), optimizers, strict=True):
            y = each(x, [3, 0, 5, 2])
            y.sum().backward()
            seen.append(y)
            optimizer.step()
            optimizer.zero_grad()
        answers += [torch.equal(*seen), torch.equal(_values(sharded.weight), alone.weight)]
    return answers


def loaded_shards(seed: int) -> list[str]:
    """What a step says of values that a DTensor and a parameter of FSDP2 were given after the optimizer was created."""
    layer = GroupedLinear(4, 128, 256, recipe=None, dtype=torch.bfloat16, backend="torch-reference").to(ranks.device)
    fully_shard(layer, mesh=init_device_mesh(torch.device(ranks.device).type, (dist.get_world_size(),)))
    placed = Parameters(seed, torch.bfloat16, (0, 1, 0))
    said = []
    for module in (layer, placed):
        optimizer = AdamW(module.named_parameters())
        for step in range(2):
            if module is placed:
                placed.take(seed + 1 + step)
            else:
                layer(torch.randn(10, 128).bfloat16().to(ranks.device), [3, 0, 5, 2]).sum().backward()
            optimizer.step()
        values = {name: torch.randn(value.shape).to(value.dtype) for name, value in module.named_parameters()}
        set_model_state_dict(module, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        try:
            optimizer.step()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def _values(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    parts = [torch.empty_like(weight.to_local().wrapped) for _ in range(dist.get_world_size())]  # type: ignore[attr-defined]
    dist.all_gather(parts, weight.to_local().wrapped.contiguous())  # type: ignore[attr-defined]
    return torch.cat(parts)
