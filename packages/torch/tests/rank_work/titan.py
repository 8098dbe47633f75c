"""What ranks do in the tests of torchtitan's adapter: importable by name, because other processes run it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from moe_layers import REFERENCE
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from octavo_torch import ExchangeError
from octavo_torch.moe.parallel import group as parallel_group
from rank_work.values import exact

E, C, D, F, B, L = 8, 3, 64, 48, 2, 5
"""Experts of all ranks, choices, sides, and a rank's tokens."""
OVERRIDE = "octavo_torch.adapters.torchtitan.routed_experts"


def config_of(
    arguments: dict[str, Any] | None,
    *,
    shared: bool = False,
    ep: bool = False,
    sp: bool = False,
    gpt_oss: bool = False,
    top_k: int = C,
) -> Any:
    """torchtitan's MoE with the override, and sharded as its models are; `arguments` None: without the override."""
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
        dim=D, hidden_dim=F, num_experts=E, top_k=top_k, param_init=made, comm_backend="standard"
    )
    if gpt_oss:
        routed.inner_experts = GptOssGroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E, param_init=made)
    feed_forward = make_ffn_config(
        dim=D, hidden_dim=F, w1_param_init={"weight": start}, w2w3_param_init={"weight": start}
    )
    config = make_moe_config(
        num_experts=E, routed_experts=routed, shared_experts=feed_forward if shared else None, load_balance_coeff=None,
        router=make_router_config(dim=D, num_experts=E, top_k=top_k, gate_param_init={"weight": start}),
    )  # fmt: skip
    layout = dict.fromkeys(names, spmd.S(1))
    set_moe_sharding_config(config, enable_ep=ep, enable_sp=sp, expert_param_layout=layout)
    if arguments is not None:
        apply_overrides(OverrideConfig(imports=[(OVERRIDE, {"backend": REFERENCE, **arguments})]), config)
    return config


def dims_of(ep: int, spmd_backend: str, tp: int = 1) -> Any:
    """torchtitan's meshes over all ranks, which are data parallel beside their experts."""
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.spmd_types import set_spmd_meshes
    from torchtitan.distributed.utils import set_spmd_backend

    world = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=1, dp_shard=world // tp, cp=1, tp=tp, pp=1, ep=ep, world_size=world, spmd_backend=spmd_backend
    )
    parallel_dims.device_type = "cpu"  # torchtitan takes a machine without an accelerator for one with CUDA
    dims.build_mesh()
    set_spmd_backend(spmd_backend)
    if spmd_backend == "spmd_types":
        set_spmd_meshes(dense_mesh=dims.spmd_dense_mesh(), sparse_mesh=dims.spmd_sparse_mesh())
    return dims


class Watched(nn.Module):
    """A MoE layer with what its routed experts get and give."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.seen = layer, {}
        layer.routed_experts.register_forward_pre_hook(self._given)
        layer.routed_experts.register_forward_hook(
            lambda module, args, y: self.seen.update(y=own_part(y.detach()).clone())
        )

    def _given(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        copies = [value.clone() if value.requires_grad else value for value in args]
        for name, value in zip(("dx", "dscores"), copies, strict=False):
            value.register_hook(lambda grad, name=name: self.seen.update({name: own_part(grad).clone()}))
        return tuple(copies)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def own_part(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def started(config: Any, seed: int) -> Any:
    """The layer with the same values on every rank, all experts of it."""
    torch.manual_seed(seed)
    layer = config.build()
    layer.init_states(buffer_device=torch.device("cpu"))
    with torch.no_grad():
        layer.router.gate.weight.copy_(exact(E, D))
    return layer


def tokens_of_all(seed: int) -> tuple[Tensor, Tensor, slice]:
    """Tokens and gradients [world B, L, D] of all ranks, and which of them are this one's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(seed + 1)
    return exact(world * B, L, D), exact(world * B, L, D), slice(rank * B, (rank + 1) * B)


def same_tokens(spread: Watched, alone: Watched, own: slice) -> Iterator[str]:
    """What the routed experts give for this rank's tokens and is not one process's, bit for bit."""
    for name in ("y", "dx", "dscores"):
        if not torch.equal(spread.seen[name], alone.seen[name][own]):
            yield name


def close(left: Tensor, right: Tensor) -> bool:
    """fp32 sums in another order."""
    return bool(torch.linalg.vector_norm(left - right) <= 2.0**-12 * torch.linalg.vector_norm(right))


def grads_of(layer: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert all(grad is not None for grad in found.values()), found
    return found  # type: ignore[return-value]


def trains(seed: int, arguments: dict[str, Any], spmd_backend: str, kind: dict[str, bool], tp: int = 1) -> list[str]:
    """Forward and backward of torchtitan's layer over all ranks: what differs from one process with all tokens."""
    world, rank = dist.get_world_size(), dist.get_rank()
    alone = Watched(started(config_of(arguments, **kind), seed))
    layer = started(config_of(arguments, ep=True, sp=tp > 1, **kind), seed)
    layer.parallelize(dims_of(world, spmd_backend, tp))
    spread = Watched(layer)
    x, dy, own = tokens_of_all(seed)
    for watched, tokens, gradients in ((spread, x[own], dy[own]), (alone, x, dy)):
        own_part(watched(tokens.clone().requires_grad_())).backward(gradients)
    found = [*same_tokens(spread, alone, own)]
    experts = slice(rank * E // world, (rank + 1) * E // world)
    theirs = grads_of(alone.layer)
    for name, grad in grads_of(layer).items():
        if "routed_experts" in name:
            same = torch.equal(own_part(grad), theirs[name][experts])
        else:
            total = whole(grad).clone()
            dist.all_reduce(total)
            same = close(total / tp, theirs[name])
        found += [] if same else [name]
    return found


class Decoder(nn.Module):
    """As much of torchtitan's decoders as its FSDP asks for."""

    enable_weight_tying, tok_embeddings, norm, lm_head = False, None, None, None

    def __init__(self, layer: Any) -> None:
        super().__init__()
        block = nn.Module()
        block.moe, block.moe_enabled = layer, True
        block.forward = layer.forward
        self.layers = nn.ModuleDict({"0": block})


def trains_sharded(seed: int, arguments: dict[str, Any]) -> list[str]:
    """torchtitan's own FSDP2, over two replicas of experts on two ranks each: what differs from one process, which has
    the tokens of one replica after those of the other."""
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    world, ep = dist.get_world_size(), 2
    alone = Watched(started(config_of(arguments, shared=True), seed))
    layer = started(config_of(arguments, ep=True, shared=True), seed)
    dims = dims_of(ep, "partial_dtensor")
    layer.parallelize(dims)
    spread = Watched(layer)
    decoder = Decoder(layer)
    apply_fsdp_to_decoder(
        decoder, dims.get_mesh(["fsdp"]), param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False,
        ep_degree=ep, edp_mesh=dims.get_optional_mesh(["efsdp"]), reshard_after_forward_policy="always",
    )  # fmt: skip
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing on the way
    x, dy, own = tokens_of_all(seed)
    decoder.layers["0"](x[own].clone().requires_grad_()).backward(dy[own])
    seen: dict[str, list[Tensor]] = {}
    for replica in range(world // ep):
        part = slice(replica * ep * B, (replica + 1) * ep * B)
        alone(x[part].clone().requires_grad_()).backward(dy[part])
        for name, value in alone.seen.items():
            seen.setdefault(name, []).append(value)
    alone.seen = {name: torch.cat(values) for name, values in seen.items()}
    found = [*same_tokens(spread, alone, own)]
    theirs = grads_of(alone.layer)
    for name, grad in grads_of(layer).items():
        total, expected = whole(grad), theirs[name]
        routed = "routed_experts" in name
        if not (torch.equal(total, expected) if routed else close(total, expected)):
            found.append(name)
        if routed and own_part(grad).numel() * world != expected.numel():
            found.append(f"{name} has {own_part(grad).numel()} of {expected.numel()} elements here")
    return found


# ---- what fails


def spread_of(how: dict[str, Any], top_k: int = C) -> Any:
    layer = started(config_of(how, ep=True, top_k=top_k), 0)
    layer.parallelize(dims_of(dist.get_world_size(), "partial_dtensor"))
    return layer


def otherwise() -> list[tuple[str, str, float]]:
    """Rank 1 has another layer than the others: (what, this rank's error, seconds)."""
    cases: dict[str, dict[str, Any]] = {
        "recipe": {"how": {"recipe": "fp8-block"}}, "choices": {"top_k": 2},
        "returns": {"how": {"recipe": "mxfp8", "exchange": {"returns": "sums"}}},
    }  # fmt: skip
    found = []
    for what, difference in cases.items():
        layer = spread_of(**{"how": {"recipe": "mxfp8"}, **(difference if dist.get_rank() == 1 else {})})
        start = time.monotonic()
        try:
            layer(exact(B, L, D))
            found.append((what, "", 0.0))
        except ExchangeError as error:
            found.append((what, str(error), time.monotonic() - start))
    return found


def ends(grace: float) -> tuple[str, float]:
    """The last rank's process ends between forward and backward."""
    parallel_group.GRACE_SECONDS = grace
    y = spread_of({"recipe": "mxfp8"})(exact(B, L, D))
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)
    start = time.monotonic()
    try:
        y.sum().backward()
    except ExchangeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0
