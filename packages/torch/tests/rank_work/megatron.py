"""What ranks do in the tests of Megatron's MoE layer: importable by name, because other processes run it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from moe_layers import REFERENCE
from torch import Tensor, nn

import octavo
from octavo_torch import ExchangeError, add_lora, convert, update_scales
from octavo_torch.moe.parallel import group as parallel_group
from rank_work.values import exact

E, C, K, F, S, B = 8, 3, 64, 48, 5, 2
"""Experts of all ranks, choices, sides, a rank's sequence and batch."""


def config_of(ep: int, **changes: Any) -> Any:
    """A TransformerConfig; `later` is set when it has been checked: Megatron postpones gradients in schedules."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = {
        "num_layers": 1, "hidden_size": K, "num_attention_heads": 2, "num_moe_experts": E, "moe_ffn_hidden_size": F,
        "ffn_hidden_size": F, "add_bias_linear": False, "gated_linear_unit": True, "bias_activation_fusion": False,
        "activation_func": nn.functional.silu, "use_cpu_initialization": True, "params_dtype": torch.float32,
        "expert_model_parallel_size": ep, "moe_router_topk": C, "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32", "moe_aux_loss_coeff": 0.0,
    }  # fmt: skip
    later = changes.pop("later", {})
    config = TransformerConfig(**(plain | changes))
    for name, value in later.items():
        setattr(config, name, value)
    return config


def submodules_of() -> Any:
    """Megatron's own router and shared experts, and no experts."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    class Router(TopKRouter):  # type: ignore[misc]
        def gating(self, input: Tensor) -> Tensor:
            """Megatron's moves its weight to CUDA."""
            return nn.functional.linear(input, self.weight, self.bias)

    feed_forward = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return MoESubmodules(router=Router, shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=feed_forward))


def groups_of(ep: int, tp: int = 1) -> tuple[Any, Any]:
    """Megatron's process groups with so many ranks of experts, and the same ones for a process by itself."""
    import copy

    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1
    )
    spread = get_default_pg_collection()
    alone = copy.copy(spread)
    for name in ("ep", "tp", "tp_ep", "tp_cp", "expt_tp", "expt_dp"):
        setattr(alone, name, spread.cp)  # of one rank
    return spread, alone


def layer_of(config: Any, how: dict[str, Any], groups: Any = None) -> Any:
    """Megatron's layer, as a transformer layer builds it; groups None: Megatron's global ones."""
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    from octavo_torch.adapters.megatron_moe import moe_layer

    made = moe_layer(**{"backend": REFERENCE, "seed": 1, **how})
    params = {} if groups is None else {"pg_collection": groups}
    return build_module(ModuleSpec(module=made, params=params, submodules=submodules_of()), config=config)


class Watched(nn.Module):
    """A layer with what its routed experts get and give."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.seen = layer, {}
        layer.experts.register_forward_pre_hook(self._given)
        layer.experts.register_forward_hook(lambda module, args, y: self.seen.update(y=y[0].detach().clone()))

    def _given(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, choices, weights = args[0].clone(), args[1], args[2].clone()
        for name, value in (("dx", x), ("dweights", weights)):
            value.register_hook(lambda grad, name=name: self.seen.update({name: grad.clone()}))
        return x, choices, weights

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.layer(x)
        assert bias is None
        return y  # type: ignore[no-any-return]


def share(mine: Any, whole: Any, first: int) -> None:
    """The values of `whole`, of which `mine` has the experts from `first` on."""
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(exact(*parameter.shape) / 4)
        whole.router.weight.copy_(exact(E, K))
        for name, parameter in mine.named_parameters():
            parameter.copy_(whole.get_parameter(of_all(name, first)))


def of_all(name: str, first: int) -> str:
    """The name among all experts of a parameter of a layer that has those from `first` on."""
    kind = name.rstrip("0123456789")
    return name if kind == name else f"{kind}{int(name.removeprefix(kind)) + first}"


def trains(seed: int, ep: int, how: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    """Two steps of Megatron's layer over ranks: what differs from one process with all of their tokens."""
    groups, single = groups_of(ep, changes.get("tensor_model_parallel_size", 1))
    rank, first = groups.ep.rank(), groups.ep.rank() * E // ep
    torch.manual_seed(seed + dist.get_rank() // ep)
    of_tokens = {"tensor_model_parallel_size", "sequence_parallel"}
    alone = {key: value for key, value in changes.items() if key not in of_tokens}
    whole, mine = layer_of(config_of(1, **alone), how, single), layer_of(config_of(ep, **changes), how)
    called: list[nn.Module] = []
    mine.experts.linear_fc1.register_forward_pre_hook(lambda module, args: called.append(module))
    share(mine, whole, first)
    found: list[str] = []
    if mine.token_dispatcher.ep_size != ep or len([*mine.experts.linear_fc1.parameters()]) * ep % E:
        found.append("experts are not spread")
    watched, all_watched = Watched(mine), Watched(whole)
    for step in range(2):
        x, dy = exact(ep * S, B, K) * 4**step, exact(ep * S, B, K)
        own = slice(rank * S, (rank + 1) * S)
        for each, tokens, gradients in ((watched, x[own], dy[own]), (all_watched, x, dy)):
            each.zero_grad()
            each(tokens.clone().requires_grad_()).backward(gradients)
            each.layer.backward_dw()
            update_scales(each)
        rows = slice(rank * S * B, (rank + 1) * S * B)
        for name, value in watched.seen.items():
            if not torch.equal(value, all_watched.seen[name][rows]):
                found.append(f"{name} of step {step}")
    for name, parameter in mine.named_parameters():
        grad, expected = parameter.grad, whole.get_parameter(of_all(name, first)).grad
        assert grad is not None
        assert expected is not None
        if name.startswith("experts"):
            found += [] if torch.equal(grad, expected) and parameter.allreduce == (ep == 1) else [name]
            continue
        total = grad.clone()
        dist.all_reduce(total, group=groups.ep)
        # fp32 sums in another order
        if not bool(torch.linalg.vector_norm(total - expected) <= 2.0**-12 * torch.linalg.vector_norm(expected)):
            found.append(name)
    if len(called) != 2:  # Megatron gathers parameters in such hooks
        found.append("hooks")
    for name, buffer in mine.experts.named_buffers():
        of_every = whole.experts.get_buffer(name)
        if name.endswith("scale") and not torch.equal(buffer, of_every[..., first : first + E // ep]):
            found.append(name)
    return found


def kind(name: str) -> dict[str, Any]:
    """Of a configuration, by the name of its activation."""
    from megatron.core.activations import quick_gelu, squared_relu

    return {
        "swiglu": {"moe_shared_expert_intermediate_size": 32},
        "biases": {"add_bias_linear": True, "activation_func": nn.functional.gelu},
        "gpt-oss": {"activation_func": quick_gelu, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
        "relu2": {"gated_linear_unit": False, "activation_func": squared_relu},
    }[name]


def like_megatrons(seed: int, name: str) -> list[float]:
    """How far a layer of ours in fp32 is from Megatron's own on our products, each over its norm: y, gradients."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec

    from octavo_torch.adapters.megatron import builders

    _, groups = groups_of(1)
    changes = kind(name)
    torch.manual_seed(seed)
    fc1, fc2 = builders(None, backend=REFERENCE)
    parts = submodules_of()
    parts.experts = ModuleSpec(module=TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2))
    theirs = MoELayer(config_of(1, **changes), parts, pg_collection=groups)
    ours = layer_of(config_of(1, **changes), {"recipe": None}, groups)
    share(ours, theirs, 0)
    x, dy, results = exact(S, B, K), exact(S, B, K), []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        with torch.compiler.set_stance("force_eager"):  # Megatron compiles its activations
            y, bias = layer(leaf)
        assert bias is None
        results.append([y, *torch.autograd.grad(y, (leaf, *layer.parameters()), dy)])
    return [float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)) for a, b in zip(*results, strict=True)]


def otherwise() -> list[tuple[str, str, float]]:
    """Rank 1 has another layer than the others: (what, this rank's error, seconds)."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "recipe": ({"recipe": octavo.BlockScaling()}, {}),
        "choices": ({}, {"moe_router_topk": 2}),
        "hidden_features": ({}, {"moe_ffn_hidden_size": 32, "ffn_hidden_size": 32}),
        "dtype": ({}, {"params_dtype": torch.bfloat16}),
    }
    ep, found = dist.get_world_size(), []
    groups_of(ep)
    for what, (how, changes) in cases.items():
        if dist.get_rank() != 1:
            how, changes = {}, {}
        layer = layer_of(config_of(ep, **changes), {"recipe": octavo.MXFP8(), **how})
        start = time.monotonic()
        try:
            layer(exact(S, B, K).to(layer.config.params_dtype))
            found.append((what, "", 0.0))
        except ExchangeError as error:
            found.append((what, str(error), time.monotonic() - start))
    return found


def ends(grace: float) -> tuple[str, float]:
    """The last rank's process ends between forward and backward."""
    parallel_group.GRACE_SECONDS = grace
    ep = dist.get_world_size()
    groups_of(ep)
    y, _ = layer_of(config_of(ep), {"recipe": octavo.MXFP8()})(exact(S, B, K))
    if dist.get_rank() == ep - 1:
        os._exit(3)
    start = time.monotonic()
    try:
        y.sum().backward()
    except ExchangeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def refusals() -> tuple[str, str]:
    """What is said of layers of experts that differ, and of adapters in one of them."""
    _, groups = groups_of(1)
    told = []
    for change in (lambda fc1: convert(fc1, octavo.BlockScaling()), lambda fc1: add_lora(fc1, 2)):
        layer = layer_of(config_of(1), {"recipe": octavo.MXFP8()}, groups)
        change(layer.experts.linear_fc1)
        try:
            layer(exact(S, B, K))
            told.append("")
        except ValueError as error:
            told.append(str(error))
    return told[0], told[1]
