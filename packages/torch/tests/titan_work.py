"""What ranks do in the tests of torchtitan's adapter: importable by name, because other processes run it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from moe_layers import REFERENCE
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo_torch import ExchangeError

E, C, D, F, B, L = 8, 3, 64, 48, 2, 5
"""Experts of all ranks, choices, sides, and a rank's tokens."""
OVERRIDE = "octavo_torch.adapters.torchtitan.routed_experts"


def config_of(arguments: dict[str, Any], *, shared: bool = False, ep: bool = False, gpt_oss: bool = False) -> Any:
    """torchtitan's MoE with the override, and sharded as its models are."""
    import spmd_types as spmd
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.config_utils import (
        make_ffn_config,
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    start = partial(nn.init.normal_, std=0.3)
    names = ("w1_EFD", "w2_EDF", "w3_EFD")
    if gpt_oss:
        names = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
    made = dict.fromkeys(names, start)
    routed = make_routed_experts_config(
        dim=D, hidden_dim=F, num_experts=E, top_k=C, param_init=made, comm_backend="standard"
    )
    if gpt_oss:
        routed.inner_experts = GptOssGroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E, param_init=made)
    feed_forward = make_ffn_config(
        dim=D, hidden_dim=F, w1_param_init={"weight": start}, w2w3_param_init={"weight": start}
    )
    config = make_moe_config(
        num_experts=E, routed_experts=routed, shared_experts=feed_forward if shared else None, load_balance_coeff=None,
        router=make_router_config(dim=D, num_experts=E, top_k=C, gate_param_init={"weight": start}),
    )  # fmt: skip
    layout = dict.fromkeys(names, spmd.S(1))
    set_moe_sharding_config(config, enable_ep=ep, enable_sp=False, expert_param_layout=layout)
    apply_overrides(OverrideConfig(imports=[(OVERRIDE, {"backend": REFERENCE, **arguments})]), config)
    return config


def dims_of(ep: int, spmd_backend: str) -> Any:
    """torchtitan's meshes over all ranks, which are data parallel beside their experts."""
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.spmd_types import set_spmd_meshes
    from torchtitan.distributed.utils import set_spmd_backend

    world = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=ep, world_size=world, spmd_backend=spmd_backend
    )
    parallel_dims.device_type = "cpu"  # torchtitan takes a machine without an accelerator for one with CUDA
    dims.build_mesh()
    set_spmd_backend(spmd_backend)
    if spmd_backend == "spmd_types":
        set_spmd_meshes(dense_mesh=dims.spmd_dense_mesh(), sparse_mesh=dims.spmd_sparse_mesh())
    return dims


def exact(*sides: int) -> Tensor:
    """Multiples of an eighth, whose products fp32 sums without rounding: logits do not depend on how many tokens."""
    return torch.randint(-8, 9, sides) / 8


class Watched(nn.Module):
    """A MoE layer with what its routed experts get and give."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.seen = layer, {}
        layer.routed_experts.register_forward_pre_hook(self._given)
        layer.routed_experts.register_forward_hook(lambda module, args, y: self.seen.update(y=y.detach().clone()))

    def _given(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        copies = [value.clone() if value.requires_grad else value for value in args]
        for name, value in zip(("dx", "dscores"), copies, strict=False):
            value.register_hook(lambda grad, name=name: self.seen.update({name: grad.clone()}))
        return tuple(copies)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def started(config: Any, seed: int) -> Any:
    """The layer with the same values on every rank, all experts of it."""
    torch.manual_seed(seed)
    layer = config.build()
    layer.init_states(buffer_device=torch.device("cpu"))
    with torch.no_grad():
        layer.router.gate.weight.copy_(exact(E, D))
    return layer


def unlike(spread: Watched, alone: Watched, ep: int) -> Iterator[str]:
    """What is not one process's, after a backward of both: bit for bit but where ranks sum."""
    world, rank = dist.get_world_size(), dist.get_rank()
    own = slice(rank * B, (rank + 1) * B)
    for name in ("y", "dx", "dscores"):
        if not torch.equal(spread.seen[name], alone.seen[name][own]):
            yield name
    for name, parameter in spread.layer.named_parameters():
        theirs = alone.layer.get_parameter(name).grad
        assert parameter.grad is not None
        assert theirs is not None
        grad = parameter.grad
        if "routed_experts" in name:
            grad = grad.to_local() if isinstance(grad, DTensor) else grad
            first = (rank % ep) * E // ep
            if grad.shape[0] != E // ep:
                yield f"{name} is {list(grad.shape)}"
            # other groups of experts have other tokens; replicas sum
            if ep < world:
                total = grad.clone()
                dist.all_reduce(total)
                continue
            if not torch.equal(grad, theirs[first : first + E // ep]):
                yield name
        else:
            total = whole(grad).clone()
            dist.all_reduce(total)
            # fp32 sums in another order
            if not bool(torch.linalg.vector_norm(total - theirs) <= 2.0**-12 * torch.linalg.vector_norm(theirs)):
                yield name


def trains(seed: int, arguments: dict[str, Any], spmd_backend: str, kind: dict[str, bool]) -> list[str]:
    """Forward and backward of torchtitan's layer over all ranks: what differs from one process with all tokens."""
    world, rank = dist.get_world_size(), dist.get_rank()
    alone = Watched(started(config_of(arguments, **kind), seed))
    layer = started(config_of(arguments, ep=True, **kind), seed)
    layer.parallelize(dims_of(world, spmd_backend))
    spread = Watched(layer)
    torch.manual_seed(seed + 1)
    x, dy = exact(world * B, L, D), exact(world * B, L, D)
    own = slice(rank * B, (rank + 1) * B)
    for watched, tokens, gradients in ((spread, x[own], dy[own]), (alone, x, dy)):
        leaf = tokens.clone().requires_grad_()
        watched(leaf).backward(gradients)
    return [*unlike(spread, alone, world)]
