"""What takes a rank's experts for copies of the other ranks': wrappers, scales, and files."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from moe_layers import REFERENCE
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from experts_work.problems import C, E, F, K
from octavo import BlockScaling, DelayedScaling
from octavo_torch import (
    Linear,
    MoE,
    add_lora,
    expert_tensors,
    export_experts,
    load_distributed,
    load_experts,
    save_distributed,
    update_scales,
)
from octavo_torch.adapters.megatron import builders


def layer_of(ep: Any, *, seed: int = 0, **more: Any) -> MoE:
    torch.manual_seed(seed)
    layer = MoE(E, K, F, C, recipe=more.pop("recipe", None), backend=REFERENCE, ep=ep, **more)
    rank = 0 if layer.ep is None else layer.ep.rank
    for name, parameter in layer.named_parameters():
        torch.manual_seed(seed if name == "router" else seed + 1 + rank)
        nn.init.normal_(parameter)
    return layer


def tokens() -> Tensor:
    return torch.randn(6, K, generator=torch.Generator().manual_seed(dist.get_rank()))


def said(function: Callable[[], object]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def wrapped() -> list[object]:
    """What is said over ranks that share the experts, and whether results over their replicas are the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everyone = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    found: list[object] = [said(lambda: fully_shard(layer_of(mesh["ep"]), mesh=everyone))]
    layer = layer_of(mesh["ep"])
    add_lora(layer, 16)
    found.append(said(lambda: fully_shard(layer, mesh=everyone, ignored_params={layer.weight1, layer.weight2})))
    for adapted in (False, True):
        layer = layer_of(mesh["ep"])
        if adapted:
            add_lora(layer, 16)
        wrapper = DistributedDataParallel(layer)
        found.append(said(lambda wrapper=wrapper: wrapper(tokens())))  # type: ignore[misc]
    for adapted in (False, True):
        layer = layer_of(mesh["ep"])
        if adapted:
            add_lora(layer, 16)
        flattened = FullyShardedDataParallel(nn.Sequential(layer), device_id=torch.device("cpu"), use_orig_params=True)
        found.append(said(lambda flattened=flattened: flattened(tokens())))  # type: ignore[misc]
    layer = layer_of(mesh["ep"])
    plain = layer(tokens())
    found.append(torch.equal(DistributedDataParallel(layer, process_group=mesh["dp"].get_group())(tokens()), plain))
    fully_shard(layer, mesh=mesh["dp"])
    found.append(torch.equal(layer(tokens()), plain))
    return found


def of_megatron(recipe: DelayedScaling, ep: Any) -> nn.Module:
    """One of the experts' two layers, whose tokens Megatron sends."""
    plain = dict.fromkeys(("fp8", "fp4"))
    off = dict.fromkeys(("init_model_with_meta_device", "gradient_accumulation_fusion", "delay_wgrad_compute"), False)
    config = SimpleNamespace(
        use_cpu_initialization=True, params_dtype=torch.bfloat16, perform_initialization=True,
        expert_model_parallel_size=2, **plain, **off,
    )  # fmt: skip
    fc1, _ = builders(recipe, backend=REFERENCE)
    groups: Any = SimpleNamespace(ep=ep, expt_tp=None)
    return fc1(
        2, K, F, config=config, init_method=nn.init.normal_, bias=False, skip_bias_add=False, pg_collection=groups
    )  # type: ignore[arg-type]


def reduced() -> list[object]:
    """Scales after a step: with the experts' ranks as the group those without one; what is said of half of them, in a
    model, too, and of a layer as Megatron-LM builds it; whether that leaves the model's other layers as they were; what
    is said of a layer without scales.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    recipe, scales = DelayedScaling(history=3), []
    for group in (None, mesh["ep"].get_group()):
        layer = layer_of(mesh["ep"], recipe=recipe, dtype=torch.bfloat16)
        layer(tokens().bfloat16()).float().square().sum().backward()
        update_scales(layer, group)
        scales.append(layer.encode_scale)
    dense = Linear(K, K, recipe=recipe)
    dense(tokens()).sum().backward()
    before = dense.amax_history.clone()
    model = nn.ModuleDict({"dense": dense, "experts": layer})
    found = [said(lambda each=each: update_scales(each, dist.group.WORLD)) for each in (layer, model)]  # type: ignore[misc]
    without = nn.ModuleDict({"dense": dense, "experts": layer_of(mesh["ep"])})
    unchanged = torch.equal(before, dense.amax_history)
    found.append(said(lambda: update_scales(of_megatron(recipe, mesh["ep"].get_group()), dist.group.WORLD)))
    return [torch.equal(*scales), *found, unchanged, said(lambda: update_scales(without, dist.group.WORLD))]


def stored(folder: str) -> list[str]:
    """What differs after a file of four ranks' experts was loaded on four ranks, and into one module of all; those with
    adapters are saved from a model with activation checkpointing."""
    found = []
    for name, more in {"scales": {"recipe": DelayedScaling(), "bias": True, "choice_bias": True}, "lora": {}}.items():
        modules = [
            layer_of(ep, seed=seed, **more) for seed, ep in ((0, dist.group.WORLD), (9, dist.group.WORLD), (9, None))
        ]
        for module in modules if name == "lora" else ():
            add_lora(module, 16)
        torch.manual_seed(dist.get_rank())
        for value in modules[0].state_dict().values():
            if value.shape[0] != E:  # of the experts
                value.copy_(torch.randn(value.shape))
        saved = checkpoint_wrapper(modules[0]) if name == "lora" else modules[0]
        save_distributed(nn.ModuleDict({"moe": saved}), f"{folder}/{name}")
        for module in modules[1:]:
            load_distributed(nn.ModuleDict({"moe": module}), f"{folder}/{name}")
        alike, whole = (module.state_dict() for module in modules[1:])
        own = slice(dist.get_rank() * E // dist.get_world_size(), (dist.get_rank() + 1) * E // dist.get_world_size())
        for key, value in modules[0].state_dict().items():
            part = whole[key]
            if part.shape != value.shape:
                part = part[..., own] if key in ("amax_history", "encode_scale") else part[own]
            found += [f"{key} here"] if not torch.equal(alike[key], value) else []
            found += [f"{key} of all"] if not torch.equal(part, value) else []
    return found


def exported(folder: str, seed: int) -> tuple[list[int], list[bool], list[str]]:
    """The numbers of the experts in an exported file of this rank; whether this rank's tensors are the file's after it
    has loaded one of all experts, and one of its own; and what is said of files of more experts, and of others."""
    torch.manual_seed(seed)
    rank = dist.get_rank()
    whole, more, mine = (
        nn.ModuleDict({"experts": MoE(experts, 128, 128, C, recipe=BlockScaling(), ep=ep, dtype=torch.bfloat16)})
        for experts, ep in ((E, None), (2 * E, None), (E, dist.group.WORLD))
    )
    export_experts(whole, f"{folder}/all {rank}", "hf-fp8")
    export_experts(more, f"{folder}/more {rank}", "hf-fp8")
    of_all, equal = dict(expert_tensors(whole, "hf-fp8")), []
    for file in ("all", "own"):
        load_experts(mine, f"{folder}/{file} {rank}")
        own = dict(expert_tensors(mine, "hf-fp8"))
        equal.append(all(torch.equal(value, of_all[name]) for name, value in own.items()))
        if file == "all":
            export_experts(mine, f"{folder}/own {rank}", "hf-fp8")
    dist.barrier()
    others = f"{folder}/own {(rank + 1) % dist.get_world_size()}"
    told = [said(lambda file=file: load_experts(mine, file)) for file in (f"{folder}/more {rank}", others)]  # type: ignore[misc]
    return sorted({int(name.split(".")[1]) for name in own}), equal, told
