"""Modules over ranks: with delayed scaling, beside each other in peer memory, with a shared expert."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from moe_layers import REFERENCE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from experts_work.problems import C, E, F, K, N, group_of
from octavo import DelayedScaling
from octavo_torch import Exchange, GroupedMLP, MoE, explain_exchange, update_scales
from octavo_torch.moe.parallel.transports import peer


def trains(ranks: int) -> list[str]:
    """Two steps of a MoE module with delayed scaling and one of its own over ranks: what differs."""
    group, _ = group_of(ranks)
    me, found, recipe = group.rank(), [], DelayedScaling(history=3)
    torch.manual_seed(5)
    whole = MoE(E, K, F, C, N, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=1, backend=REFERENCE)
    mesh = DeviceMesh.from_group(group, "cpu")
    mine = copy.deepcopy(
        MoE(E, K, F, C, N, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=1, backend=REFERENCE, ep=mesh)
    )
    experts = slice(me * E // ranks, (me + 1) * E // ranks)
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            of_all = whole.get_parameter(name)
            parameter.copy_(of_all if name == "router" else of_all[experts])
    if f"rank={me} of {ranks}" not in repr(mine):
        found.append(repr(mine))
    counts = [7, 0, 5, 4][:ranks]
    first, tokens = sum(counts[:me]), counts[me]
    for step in range(2):
        x = torch.randn(sum(counts), K, generator=torch.Generator().manual_seed(step)).bfloat16() * 4**step
        mine.zero_grad()
        whole.zero_grad()
        y, all_y = mine(x[first : first + tokens]), whole(x)
        y.float().square().sum().backward()
        all_y.float().square().sum().backward()
        if not torch.equal(y, all_y[first : first + tokens]):
            found.append(f"y of step {step}")
        update_scales(mine)
        update_scales(whole)
    named = ("weight1", "weight2", "bias1", "bias2")
    grads = {name: (mine.get_parameter(name).grad, whole.get_parameter(name).grad[experts]) for name in named}
    found += [name for name, (ours, theirs) in grads.items() if not torch.equal(ours, theirs)]
    if not torch.equal(mine.encode_scale, whole.encode_scale[..., experts]):
        found.append("encode_scale")
    return [*found, *_not_summed("router", mine.router, whole.router, group)]


def trains_in_autocast(ranks: int, seed: int) -> list[str]:
    """Two microbatches of a MoE module of fp32 parameters inside of autocast, with codes that were made once and
    gradients in main_grad, and of one of its own over ranks: what differs."""
    group, _ = group_of(ranks)
    me, found = group.rank(), []
    experts = slice(me * E // ranks, (me + 1) * E // ranks)
    how: dict[str, Any] = {"recipe": "mxfp8", "backend": REFERENCE, "main_grad": "accumulate"}
    torch.manual_seed(seed)
    whole = MoE(E, K, F, C, N, **how)
    mine = MoE(E, K, F, C, N, ep=DeviceMesh.from_group(group, "cpu"), **how)
    for name in ("weight1", "weight2"):
        of_all, own = whole.get_parameter(name), mine.get_parameter(name)
        own.data.copy_(of_all[experts])
        for one in (of_all, own):
            one.main_grad = torch.zeros_like(one)  # type: ignore[attr-defined]
    mine.router.data.copy_(whole.router)
    counts = [7, 0, 5, 4][:ranks]
    here = slice(sum(counts[:me]), sum(counts[: me + 1]))
    with torch.autocast("cpu", torch.bfloat16):
        codes = mine.quantize_weights(), whole.quantize_weights()
        for number in range(2):
            x = torch.randn(sum(counts), K)
            y, all_y = mine(x[here], weights=codes[0]), whole(x, weights=codes[1])
            y.float().square().sum().backward()
            all_y.float().square().sum().backward()
            if y.dtype is not torch.bfloat16 or not torch.equal(y, all_y[here]):
                found.append(f"y of microbatch {number}")
    for name in ("weight1", "weight2"):
        ours, theirs = mine.get_parameter(name).main_grad, whole.get_parameter(name).main_grad[experts]
        if not ours.any() or not torch.equal(ours, theirs):
            found.append(name)
    return found


def layers_share_memory(seed: int, recipes: tuple[str, str], postpones: bool) -> list[str]:
    """Two layers of other sides, of which the second needs more peer memory, one after the other, in two microbatches
    whose backwards come last to first; and a forward without gradients in between: what differs from collectives.

    With `postpones`, weight gradients come after all backwards.
    """
    group, found = dist.group.WORLD, []
    assert group is not None
    results: dict[str, list[Tensor]] = {}
    peer._GRANULE = 1 << 12  # these layers are small
    for route in ("collective", "peer"):
        torch.manual_seed(seed)
        exchange = Exchange(rows=6 * C * group.size(), route=route)  # type: ignore[arg-type]
        if explain_exchange("mxfp8", group, exchange).route != route:
            found.append(f"explained as another route than {route}")
        how: dict[str, Any] = {"dtype": torch.bfloat16, "backend": REFERENCE, "ep": group, "exchange": exchange}
        how["delay_wgrad"] = postpones
        layers = MoE(E, K, F, C, N, recipe=recipes[0], **how), MoE(E, N, 3 * F, C, K, recipe=recipes[1], **how)
        batches = [torch.randn(6, K).bfloat16().requires_grad_() for _ in range(2)]
        values: list[Tensor] = []
        for x in batches:
            values.append(layers[1](layers[0](x)))
            with torch.no_grad():
                values.append(layers[1](layers[0](x)))
        for y in values[-2::-2]:
            y.float().square().sum().backward()
        for layer in layers:
            if postpones:
                layer.backward_dw()
        values += [x.grad for x in batches if x.grad is not None]
        values += [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
        results[route] = values
    for number, (ours, theirs) in enumerate(zip(results["peer"], results["collective"], strict=True)):
        if not torch.equal(ours, theirs):
            found.append(f"value {number}")
    return found if len(results["peer"]) == 4 + 2 + 6 else [*found, f"{len(results['peer'])} values"]


def _not_summed(name: str, mine: nn.Parameter, whole: nn.Parameter, group: dist.ProcessGroup) -> Iterator[str]:
    """`name`, where gradients of a parameter that ranks share do not add up to that of one process."""
    assert mine.grad is not None
    assert whole.grad is not None
    total, of_all = mine.grad.float(), whole.grad.float()
    magnitude = total.abs()
    dist.all_reduce(total, group=group)
    dist.all_reduce(magnitude, group=group)
    # each rank's is rounded to bf16 once, and so is that of all; fp32's own roundings are 2^-16 of that
    if not bool(((total - of_all).abs() <= 1.001 * 2**-8 * (magnitude + of_all.abs())).all()):
        yield f"the gradients of {name}"


class WithSharedExpert(nn.Module):
    """Routed experts, over ranks where `ep` is given, and one that every token passes where it is.

    The shared one computes in small integers, whose sums are exact in any order and so do not depend on how many tokens
    a rank has.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.routed = MoE(E, K, F, C, recipe="mxfp8", dtype=torch.bfloat16, backend=REFERENCE, **how)
        self.shared = GroupedMLP(1, K, F, activation="relu2", recipe=None, dtype=torch.bfloat16, backend=REFERENCE)
        with torch.no_grad():
            for weight in self.shared.parameters():
                weight.copy_(small_integers(*weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.routed(x) + self.shared(x, torch.full((1,), x.shape[0], dtype=torch.int64))


def small_integers(*sides: int) -> Tensor:
    """-1, 0 and 1."""
    return torch.randint(-1, 2, sides).bfloat16()


def shares_an_expert(ranks: int, seed: int) -> list[str]:
    """A shared expert beside experts over ranks, with sizes that are read and static buffers: what differs from one
    process."""
    group, number = group_of(ranks)
    me, found = group.rank(), []
    experts = slice(me * E // ranks, (me + 1) * E // ranks)
    for exchange, counts in ((Exchange(), [7, 0, 5, 4][:ranks]), (Exchange(rows=6 * C * ranks), [6] * ranks)):
        torch.manual_seed(seed + number)
        whole, mine = WithSharedExpert(), WithSharedExpert(ep=group, exchange=exchange)
        with torch.no_grad():
            for name, parameter in mine.named_parameters():
                of_all = whole.get_parameter(name)
                parameter.copy_(of_all if parameter.shape == of_all.shape else of_all[experts])
        own = slice(sum(counts[:me]), sum(counts[: me + 1]))
        x, dy = small_integers(sum(counts), K), small_integers(sum(counts), K)
        here, there = x[own].clone().requires_grad_(), x.clone().requires_grad_()
        y, all_y = mine(here), whole(there)
        y.backward(dy[own])
        all_y.backward(dy)
        pairs = {"y": (y, all_y[own]), "dx": (here.grad, there.grad[own])}  # type: ignore[index]
        for name in ("weight1", "weight2"):
            routed = mine.routed.get_parameter(name).grad, whole.routed.get_parameter(name).grad[experts]
            pairs[f"the routed experts' {name}"] = routed
            found += _not_summed(f"shared {name}", *(each.shared.get_parameter(name) for each in (mine, whole)), group)
        found += [name for name, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)]
    return found
