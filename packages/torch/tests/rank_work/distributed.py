"""What ranks do in the tests of several ranks beside FSDP2's: importable by name, because other processes run it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from octavo import PRESETS, BlockScaling, DelayedScaling
from octavo_torch import (
    DelayedState,
    ExpertExchange,
    GroupedColumnParallel,
    GroupedLinear,
    GroupedMLP,
    GroupedMLPParallel,
    GroupedRowParallel,
    MoE,
    explain_gather,
    group_amax,
    load_distributed,
    permute,
    quantize_before_gather,
    save_distributed,
    unpermute,
    update_scales,
)
from rank_work.fsdp import RECIPES, data, device, layer_of, mesh_of, sharded, sizes_of, whole

# ---- scales that all ranks have


def scales_with_an_empty_rank() -> tuple[bool, bool]:
    """Three steps of delayed scaling; rank 1 has no tokens. (scales equal one process's, scales equal on all ranks)"""
    rank, recipe = dist.get_rank(), DelayedScaling(history=3)
    torch.manual_seed(1)
    layer, plain = (GroupedLinear(3, 32, 48, recipe=recipe, device=device(), dtype=torch.bfloat16) for _ in "ab")
    plain.load_state_dict(layer.state_dict())
    for step in range(3):
        for of in range(dist.get_world_size()):
            sizes = sizes_of([0, 0, 0] if of == 1 else [4, 0, 1 + of])
            x, dy = (data(10 * step + of, 12, side) * 2**of for side in (32, 48))
            for module in (plain, layer) if of == rank else (plain,):
                module(x, sizes).backward(dy)
        update_scales(layer, dist.group.WORLD)
        update_scales(plain)
    every = [torch.empty_like(layer.encode_scale) for _ in range(dist.get_world_size())]
    dist.all_gather(every, layer.encode_scale)
    return torch.equal(layer.encode_scale, plain.encode_scale), all(torch.equal(every[0], other) for other in every)


# ---- tensor parallelism


def integers(seed: int, *shape: int) -> Tensor:
    """-1, 0 and 1: products and sums of a few hundred are exact in fp32, in any order."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


@torch.no_grad()
def fill(module: torch.nn.Module) -> None:
    for seed, parameter in enumerate(module.parameters()):
        parameter.copy_(integers(seed, *parameter.shape))


def gradients(*modules: torch.nn.Module) -> list[Tensor]:
    return [whole(p.grad) for module in modules for p in module.parameters() if p.grad is not None]


def column_and_row() -> list[bool]:
    """A column- and a row-parallel layer in a row, and one process."""
    mesh = mesh_of()
    sizes, results = sizes_of([11, 0, 17, 6]), []
    for parallel in (False, True):
        first, second = GroupedLinear(4, 64, 96, bias=True), GroupedLinear(4, 96, 64, bias=True)
        fill(first)
        fill(second)
        if parallel:
            parallelize_module(first, mesh, GroupedColumnParallel())
            parallelize_module(second, mesh, GroupedRowParallel())
        x, scales = integers(5, 40, 64).requires_grad_(), integers(6, 40).requires_grad_()
        y = second(torch.relu(first(x, sizes)), sizes, bias_scales=scales)
        y.backward(integers(7, 40, 64))
        results.append([y.detach(), x.grad, *gradients(first, second)])
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]  # type: ignore[arg-type]


def parallel_mlp() -> list[Any]:
    """Gates are so large that silu(gate) is the gate, so that sums are exact here, too."""
    mesh = mesh_of()
    results = []
    for parallel in (False, True):
        mlp = GroupedMLP(3, 64, 128, interleave=8, bias=True)
        fill(mlp)
        with torch.no_grad():
            assert mlp.bias1 is not None
            mlp.bias1.unflatten(1, (-1, 2, 8))[:, :, 0] += 100
        if parallel:
            parallelize_module(mlp, mesh, GroupedMLPParallel())
        x, probs = integers(5, 20, 64).requires_grad_(), integers(6, 20).requires_grad_()
        y = mlp(x, [8, 0, 9], probs)
        y.backward(integers(7, 20, 64))
        results.append([y.detach(), x.grad, probs.grad, *gradients(mlp)])
    found: list[Any] = [torch.equal(a, b) for a, b in zip(*results, strict=True)]  # type: ignore[arg-type]
    of_blocks = GroupedMLP(3, 64, 128, interleave=64)
    for bad in (GroupedMLP(3, 64, 128), GroupedMLP(3, 64, 126, activation="silu"), of_blocks, torch.nn.Linear(4, 4)):
        try:
            parallelize_module(bad, mesh, GroupedMLPParallel())
        except ValueError as error:
            found.append(str(error))
    return found


def distributed_rows() -> list[str]:
    """What is said of rows that are a DTensor, by layers that have seen such a tensor of the same shape and dtype."""
    x = distribute_tensor(integers(5, 20, 64), mesh_of(), [Replicate()])
    linear, mlp, moe = GroupedLinear(3, 64, 64), GroupedMLP(3, 64, 64), MoE(3, 64, 64, 1)
    calls: list[Any] = [
        lambda rows: linear(rows, [8, 0, 9]), lambda rows: mlp(rows, [8, 0, 9]), moe,
        lambda rows: permute(rows, torch.zeros(20, 1, dtype=torch.int64), 3), group_amax,
    ]  # fmt: skip
    said = []
    for call in calls:
        call(x.to_local())
        try:
            call(x)
        except ValueError as error:
            said.append(str(error))
    return said


def columns_and_shards() -> list[bool]:
    """Tensor parallel over two ranks, FSDP2 with codes over two: the bits of tensor parallelism alone."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    results = []
    for shards in (False, True):
        layer = layer_of(BlockScaling())
        parallelize_module(layer, mesh["tp"], GroupedColumnParallel())
        if shards:
            quantize_before_gather(layer)
            fully_shard(layer, mesh=mesh["dp"])
        x = data(0).requires_grad_()
        y = layer(x, sizes_of([11, 0, 17, 6]))
        y.backward(data(1, columns=y.shape[1]))
        results.append((y.detach(), x.grad, whole(layer.weight.grad)))  # type: ignore[arg-type]
        if shards:
            assert "quantized, then gathered" in explain_gather(layer), explain_gather(layer)
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]  # type: ignore[arg-type]


# ---- expert parallelism


def expert_parallel(recipe: str) -> list[bool]:
    """Eight experts on all ranks, the last without tokens, expert 5 without rows: each rank's tokens as if alone."""
    rank, world, experts, k = dist.get_rank(), dist.get_world_size(), 8, 64
    torch.manual_seed(4)
    everything = GroupedMLP(experts, k, 96, recipe=RECIPES[recipe], dtype=torch.bfloat16, seed=3).to(device())
    mine = GroupedMLP(experts // world, k, 96, recipe=RECIPES[recipe], dtype=torch.bfloat16, seed=3).to(device())
    own = slice(rank * (experts // world), (rank + 1) * (experts // world))
    with torch.no_grad():
        for local, full in zip(mine.parameters(), everything.parameters(), strict=True):
            local.copy_(full[own])
    draw = torch.Generator().manual_seed(rank)
    tokens = 0 if rank == world - 1 else 10 + rank
    x = torch.randn(tokens, k, dtype=torch.bfloat16, generator=draw).to(device())
    index = torch.randint(0, experts - 1, (tokens, 2), generator=draw)
    index = (index + (index >= 5)).to(device())
    weights = torch.rand(tokens, 2, generator=draw).to(device())
    results = []
    for spread in (False, True):
        leaf, factors = x.clone().requires_grad_(), weights.clone().requires_grad_()
        rows, sizes, routing = permute(leaf, index, experts)
        probs = routing.to_rows(factors)
        if spread:
            exchange = ExpertExchange(sizes, dist.group.WORLD)
            came = exchange.to_experts(probs[:, None])[:, 0]
            y = mine(exchange.to_experts(rows), exchange.group_sizes, came)
            y = exchange.from_experts(y, rows.shape[0])
        else:
            y = everything(rows, sizes, probs)
        out = unpermute(y, routing)
        out.float().square().sum().backward()
        results.append((out.detach(), leaf.grad, factors.grad))
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]  # type: ignore[arg-type]


# ---- checkpoints that are sharded


def save_and_reshard(folder: str, recipe: str) -> list[bool]:
    """Saved by four ranks along dim 1, loaded along dim 0, and loaded into one parameter per group."""
    layer = sharded(layer_of(PRESETS[recipe]), 1)
    layer(data(0), sizes_of([11, 0, 17, 6])).backward(data(1))
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    save_distributed(layer, folder)
    expected = [whole(value) for value in layer.state_dict().values()]
    other: Any = layer_of(PRESETS[recipe])
    torch.nn.init.zeros_(other.weight)
    other = sharded(other, 0)
    load_distributed(other, folder)
    found = [torch.equal(whole(value), want) for value, want in zip(other.state_dict().values(), expected, strict=True)]
    found.append(torch.equal(layer(data(2), sizes_of([11, 0, 17, 6])), other(data(2), sizes_of([11, 0, 17, 6]))))
    return found


def resume_with_the_optimizer(folder: str) -> list[bool]:
    """torch's own functions: model and optimizer along dim 1, resumed along dim 0, take the same step."""
    found: list[Any] = []
    before = sharded(layer_of(BlockScaling()), 1)
    after = sharded(layer_of(BlockScaling()), 0)
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in (before, after)]

    def step(index: int, seed: int) -> list[Tensor]:
        layer, optimizer = (before, after)[index], optimizers[index]
        layer(data(seed), sizes_of([11, 0, 17, 6])).backward(data(seed + 1))
        optimizer.step()
        optimizer.zero_grad()
        return [whole(parameter).detach() for parameter in layer.parameters()]

    step(0, 0)
    state = dict(zip(("model", "optimizer"), get_state_dict(before, optimizers[0]), strict=True))
    save(state, checkpoint_id=folder)
    into = dict(zip(("model", "optimizer"), get_state_dict(after, optimizers[1]), strict=True))
    load(into, checkpoint_id=folder)
    set_state_dict(after, optimizers[1], model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    found += [torch.equal(a, b) for a, b in zip(step(0, 5), step(1, 5), strict=True)]
    return found


def load_parts(folder: str) -> list[bool]:
    """What one process saved with one parameter per group, loaded into shards along each dim."""
    found = []
    torch.manual_seed(7)
    parts = GroupedLinear(4, 512, 512, bias=True, recipe=BlockScaling(), per_group_parameters=True)
    expected = [torch.stack([getattr(parts, f"{name}{g}") for g in range(4)]) for name in ("weight", "bias")]
    for dim in (0, 1, 2):
        layer: Any = sharded(GroupedLinear(4, 512, 512, bias=True, recipe=BlockScaling()), dim)
        load_distributed(layer, folder)
        found += [torch.equal(whole(layer.weight), expected[0]), torch.equal(whole(layer.bias), expected[1])]
    return found


def states() -> Tensor:
    """A DelayedState whose update is called by one rank alone: what the watchdog is for."""
    state = DelayedState.create(DelayedScaling(history=3), 2)
    if dist.get_rank():
        state.update(dist.group.WORLD)
    return state.scale
