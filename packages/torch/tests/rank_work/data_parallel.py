"""What ranks do in the tests of DistributedDataParallel: importable by name, because other processes run it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from octavo import MXFP8, DelayedScaling
from octavo_torch import GroupedLinear, GroupedMLP, MasterWeights, quantized_parameters
from rank_work.distributed import fill, integers
from rank_work.fsdp import device, sharded, sizes_of

G, K, N, M = 3, 64, 32, 12
SIZES = [4, 0, 6]


def rows(seed: int, columns: int) -> Tensor:
    """Another rank's are others. Their products' sums are exact in any order."""
    return integers(100 * seed + dist.get_rank(), M, columns).bfloat16().to(device())


def gradients(model: Any, layer: Any, microbatches: int) -> list[Tensor]:
    """Of one step, reduced in its last microbatch."""
    layer.zero_grad()
    for micro in range(microbatches):
        with nullcontext() if micro == microbatches - 1 else model.no_sync():
            y = model(rows(2 * micro, K).requires_grad_(), sizes_of(SIZES))
            y.backward(rows(2 * micro + 1, y.shape[1]))
            if layer.delayed_wgrad is not None:
                layer.backward_dw()
    return [parameter.grad.clone() for parameter in layer.parameters()]


def delayed_gradients() -> list[bool]:
    """Of layers with delay_wgrad, against the same at once."""
    found = []
    for options in ({}, {"gradient_as_bucket_view": True}):
        for parted in (False, True):
            made = []
            for delay in (False, True):
                given = {"recipe": MXFP8(), "dtype": torch.bfloat16, "device": device()}
                layer = GroupedLinear(G, K, N, bias=True, per_group_parameters=parted, delay_wgrad=delay, **given)
                fill(layer)
                model = DistributedDataParallel(layer, **options)
                made.append([gradients(model, layer, microbatches) for microbatches in (1, 2, 1)])
            found += [torch.equal(a, b) for step in zip(*made, strict=True) for a, b in zip(*step, strict=True)]
    return found


def refusals() -> list[str]:
    """What a wrapper that would miss a delayed gradient raises."""
    told = []
    wrappers: list[Any] = [
        lambda layer: DistributedDataParallel(layer, find_unused_parameters=True),
        lambda layer: DistributedDataParallel(layer, static_graph=True),
        fully_shard,
        lambda layer: sharded(layer, 0),
    ]
    for wrap in wrappers:
        layer = GroupedMLP(4, K, N, recipe=MXFP8(), dtype=torch.bfloat16, delay_wgrad=True).to(device())
        model = wrap(layer)
        try:
            model(rows(0, K), sizes_of([*SIZES, 0])).sum().backward()
            layer.backward_dw()
        except ValueError as error:
            told.append(str(error))
    return told


def main_grads() -> list[str | None]:
    """What DDP around a layer with main_grad raises: as it is, with weights that are codes, where activation
    checkpointing runs the layer without a gradient first; in no_sync(), in evaluation, and where it ignores the weight.
    """

    def made(coded: bool = False, ignore: bool = False) -> Any:
        how = {"dtype": torch.bfloat16, "device": device(), "main_grad": "accumulate", "bias": True}
        with quantized_parameters(MXFP8()) if coded else nullcontext():
            layer = GroupedLinear(G, K, N, recipe=MXFP8(), **how)
        if coded:
            layer.masters = MasterWeights(layer)
        else:
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        if ignore:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, ["weight"])
        return DistributedDataParallel(layer, init_sync=not coded)

    def told(model: Any, synced: bool = True, recomputed: bool = False) -> str | None:
        x = rows(0, K).requires_grad_()
        try:
            with nullcontext() if synced else model.no_sync():
                if recomputed:
                    plain = model.module.forward
                    model.module.forward = lambda *args: checkpoint(plain, *args, use_reentrant=True)
                model(x, sizes_of(SIZES)).sum().backward()
        except ValueError as error:
            return str(error)
        return None

    refused = [told(made()), told(made(coded=True)), told(made(), recomputed=True)]
    with torch.no_grad():
        made().eval()(rows(0, K), sizes_of(SIZES))
    return [*refused, told(made(), synced=False), told(made(ignore=True))]


def scales() -> list[bool]:
    """Of delayed scaling after steps of two microbatches, against one process with all ranks' rows."""
    recipe, world, found = DelayedScaling(history=3), dist.get_world_size(), []
    layer, plain = (GroupedLinear(G, K, N, recipe=recipe, dtype=torch.bfloat16, device=device()) for _ in "ab")
    for one in (layer, plain):
        fill(one)
    model = DistributedDataParallel(layer)
    for step in range(3):
        drawn = [integers(7 * step + micro, world * M, K + N).bfloat16().to(device()) for micro in range(2)]
        for micro, values in enumerate(drawn):
            values *= 2.0 ** torch.arange(world, device=device()).repeat_interleave(M)[:, None]
            every = values.view(world, M, K + N)
            with nullcontext() if micro else model.no_sync():
                model(every[dist.get_rank(), :, :K], sizes_of(SIZES)).backward(every[dist.get_rank(), :, K:])
            for mine in every:
                plain(mine[:, :K], sizes_of(SIZES)).backward(mine[:, K:])
        layer.update_scales(dist.group.WORLD)
        plain.update_scales()
        found.append(torch.equal(layer.encode_scale, plain.encode_scale))
    return [*found, torch.equal(layer.amax_history, plain.amax_history)]


def coded_steps() -> list[bool]:
    """Steps of weights that are codes, against fp32 masters of bf16 weights: every rank's masters are those."""
    made = []
    for coded in (True, False):
        how = {"dtype": torch.bfloat16, "device": device()}
        with quantized_parameters(MXFP8()) if coded else nullcontext():
            layer = GroupedLinear(G, K, N, recipe=MXFP8(), **how)
        values = {"weight": integers(7, G, N, K).float().to(device()) / 8}
        if coded:
            masters = MasterWeights(layer, values=values)
            optimizer = torch.optim.SGD(masters.all_parameters(), lr=0.5)
            masters.follow(optimizer)
            (master,) = masters.parameters()
        else:
            master = values["weight"].requires_grad_()
            optimizer = torch.optim.SGD([master], lr=0.5)
        # what DDP would broadcast at first are values, and all ranks have the same ones
        model = DistributedDataParallel(layer, init_sync=not coded)
        for step in range(2):
            if not coded:
                layer.weight.data.copy_(master.detach())
            y = model(rows(2 * step, K).requires_grad_(), sizes_of(SIZES))
            y.backward(rows(2 * step + 1, y.shape[1]))
            if not coded:
                master.grad = layer.weight.grad.float()
                layer.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        made.append(master.detach())
    ours, theirs = made
    return [torch.equal(ours, theirs), not torch.equal(ours, integers(7, G, N, K).float().to(device()) / 8)]
