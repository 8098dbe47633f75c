"""What ranks do in the tests of experts over ranks beside FSDP2: importable by name, as other processes run it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from moe_layers import RECIPES, REFERENCE
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from octavo_torch import Exchange, MoE, add_lora, explain_gather, quantize_before_gather

E, C, K, F, N = 8, 3, 64, 48, 80
"""Experts of all ranks, choices, and sides."""
REPLICAS, EP = 2, 2
COUNTS = [9, 4, 0, 7]
"""Tokens of each rank: those of one replica of the experts after those of the other."""


def layer_of(name: str, **how: Any) -> MoE:
    return MoE(E, K, F, C, N, bias=True, recipe=RECIPES[name], seed=1, backend=REFERENCE, **how)


def values_of(mine: MoE, whole: MoE, first: int) -> None:
    """The values of `whole`, of which `mine` has the experts from `first` on."""
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            of_all = whole.get_parameter(name)
            parameter.copy_(of_all if name == "router" else of_all[first : first + E // EP])


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def unlike(mine: MoE, wholes: list[MoE], first: int, ep: Any) -> Iterator[str]:
    """Gradients that are not the mean over the replicas of one process's: the router's but for fp32's order of sums."""
    for name, parameter in mine.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        ours = parameter.grad.full_tensor()
        parts = [whole.get_parameter(name).grad for whole in wholes]
        mean = sum(part for part in parts if part is not None) / REPLICAS
        assert isinstance(mean, Tensor)
        if name == "router":
            dist.all_reduce(ours, group=ep)
            if not bool(torch.linalg.vector_norm(ours - mean) <= 2.0**-12 * torch.linalg.vector_norm(mean)):
                yield name
        elif not torch.equal(ours, mean[first : first + E // EP]):
            yield name


def chosen_apart(seed: int) -> tuple[str, list[bool]]:
    """A MoE module that FSDP2 shards and whose `choose` is called by itself: what is said of that, and whether choices,
    y and gradients are those of one process once FSDP2 knows of `choose`."""
    torch.manual_seed(seed)
    whole = layer_of("bf16")
    mine, x = copy.deepcopy(whole), torch.randn(max(COUNTS), K)
    fully_shard(mine, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    told = ""
    try:
        mine.choose(x)
    except ValueError as error:
        told = str(error)
    register_fsdp_forward_method(mine, "choose")
    results = []
    for layer in (mine, whole):
        choice = layer.choose(x)
        y = layer(x, choice)
        (y.square().sum() + choice.weights.square().sum()).backward()
        results.append((choice.choices, y, [parameter.grad for parameter in layer.parameters()]))
    (ours, made, gradients), (theirs, expected, of_whole) = results
    pairs = [(ours, theirs), (made, expected)]
    pairs += [(one.full_tensor(), other) for one, other in zip(gradients, of_whole, strict=True)]  # type: ignore[union-attr]
    return told, [torch.equal(one, other) for one, other in pairs]


def sharded(seed: int, name: str, dim: int, codes: bool) -> tuple[list[str], str]:
    """A MoE module with ep=, of which FSDP2 shards what a rank has over the replicas: what differs from one process
    with a replica's tokens, forward and backward; and how its weights are gathered."""
    mesh = init_device_mesh("cpu", (REPLICAS, EP), mesh_dim_names=("dp", "ep"))
    replica, rank = mesh["dp"].get_local_rank(), mesh["ep"].get_local_rank()
    first, number = rank * E // EP, dist.get_rank()
    torch.manual_seed(seed)
    wholes = [layer_of(name)]
    wholes += [copy.deepcopy(wholes[0]) for _ in range(REPLICAS - 1)]
    mine = layer_of(name, ep=mesh["ep"])
    values_of(mine, wholes[0], first)
    if codes:
        quantize_before_gather(mine)
    place = {3: Shard(dim), 2: Shard(0)}
    fully_shard(mine, mesh=mesh["dp"], reshard_after_forward=True, shard_placement_fn=lambda p: place[p.dim()])
    x, dy = torch.randn(sum(COUNTS), K), torch.randn(sum(COUNTS), N)
    found = []
    here = leaf(x[sum(COUNTS[:number]) : sum(COUNTS[: number + 1])])
    y = mine(here)
    y.backward(dy[sum(COUNTS[:number]) : sum(COUNTS[: number + 1])])
    for each, whole in enumerate(wholes):
        start, end = sum(COUNTS[: each * EP]), sum(COUNTS[: (each + 1) * EP])
        there = leaf(x[start:end])
        all_y = whole(there)
        all_y.backward(dy[start:end])
        if each == replica:
            own = slice(sum(COUNTS[each * EP : number]), sum(COUNTS[each * EP : number + 1]))
            assert there.grad is not None
            assert here.grad is not None
            found += [] if torch.equal(y, all_y[own]) else ["y"]
            found += [] if torch.equal(here.grad, there.grad[own]) else ["dx"]
    found += unlike(mine, wholes, first, mesh["ep"].get_group())
    return found, explain_gather(mine) if codes else ""


def adapted(seed: int, name: str, form: Any, exchange: Exchange | None) -> list[str]:
    """Experts over four ranks with adapters, whose weights are frozen, in two steps, the second one of tokens that take
    no gradient: what differs from one process, in what is recorded and drawn for the next step, too."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(seed)
    options: dict[str, Any] = {"form": form, "dtype": torch.bfloat16}
    whole, mine = layer_of(name, **options), layer_of(name, ep=dist.group.WORLD, exchange=exchange, **options)
    for layer in (whole, mine):
        assert add_lora(layer, 4, alpha=8.0) == ("lora1", "lora2")
    experts = slice(rank * E // ranks, (rank + 1) * E // ranks)
    with torch.no_grad():
        for of_all in whole.parameters():
            of_all.normal_(std=0.2)
        for key, parameter in mine.named_parameters():
            parameter.copy_(whole.get_parameter(key) if key == "router" else whole.get_parameter(key)[experts])
    counts = COUNTS if exchange is None else [5] * ranks
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for trains_x in (True, False):
        mine.zero_grad()
        whole.zero_grad()
        x, dy = torch.randn(sum(counts), K).bfloat16(), torch.randn(sum(counts), N).bfloat16()
        here, there = x[own].clone().requires_grad_(trains_x), x.clone().requires_grad_(trains_x)
        y, all_y = mine(here), whole(there)
        y.backward(dy[own])
        all_y.backward(dy)
        step = {"y": (y, all_y[own]), "dx": (here.grad, None if there.grad is None else there.grad[own])}
        for key, parameter in mine.named_parameters():
            of_all, expected = whole.get_parameter(key), whole.get_parameter(key).grad
            assert parameter.requires_grad == of_all.requires_grad == ("lora" in key or key == "router")
            if key == "router":
                assert parameter.grad is not None
                assert expected is not None
                total, size = parameter.grad.float(), parameter.grad.float().abs()
                dist.all_reduce(total)
                dist.all_reduce(size)
                # each rank's is rounded to bf16 once, and so is that of all
                if not bool(((total - expected).abs() <= 1.001 * 2**-8 * (size + expected.abs())).all()):
                    step["router"] = total, expected
            elif expected is not None:
                step[key] = parameter.grad, expected[experts]
        pairs |= {f"{key}, x trains: {trains_x}": pair for key, pair in step.items() if pair != (None, None)}
    for key, buffer in mine.named_buffers():
        of_all = whole.get_buffer(key)
        pairs[key] = buffer, of_all[..., experts] if of_all.dim() else of_all
    return [key for key, (a, b) in pairs.items() if a is None or b is None or not torch.equal(a, b)]
