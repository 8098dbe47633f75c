"""Process groups of experts, and how a layer leaves them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from experts_work.own import layer_of, said
from experts_work.problems import E, K, N, draw, group_of, run
from octavo_torch import Exchange, ExchangeError, load_checkpoint, save_checkpoint


def is_freed(route: Any) -> bool:
    """Whether a group that its owner has destroyed is gone with the last layer of it."""
    group = dist.new_group()
    layer = layer_of(group, exchange=Exchange(rows=80, route=route))
    layer(torch.randn(4, K)).sum().backward()
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del layer, group
    gc.collect()
    return alive() is None


def without_tokens(route: Any, seed: int) -> list[object]:
    """Sides of y, and the largest gradient, where no rank has a token."""
    group, _ = group_of(2)
    mine = draw(seed, [0, 0], "random").mine(group.rank(), 2)
    made = run(mine, "mxfp8", ep=group, exchange=Exchange(rows=4, route=route))  # type: ignore[arg-type]
    return [[*made.y.shape], max(float(grad.abs().sum()) for grad in made.grads.values()), mine.given["w1"].shape[0]]


def in_pairs() -> str:
    """What a rank is told where the last rank calls its layer otherwise, which it shares with one rank of two more."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    rank = dist.get_rank()
    layer = layer_of(pairs[rank % 2], recipe="fp8-block" if rank == 3 else "mxfp8")
    try:
        layer(torch.randn(3, K))
    except ExchangeError as error:
        return str(error)
    return ""


def of_others() -> list[str]:
    """What a rank is told for a group, and for a mesh, that it is not in; "" where it is."""
    group, mesh = dist.new_group([0, 1]), DeviceMesh("cpu", [0, 1])
    dist.barrier()
    return [said(lambda ep=ep: layer_of(ep)) for ep in (group, mesh)]  # type: ignore[misc]


def file_of_one_rank(folder: str) -> list[str]:
    """What a rank is told for the file of the first rank's experts, as values and as codes; "" where it is its own."""
    found = []
    for quantized in (False, True):
        layers = [layer_of(dist.group.WORLD, seed=seed, recipe="mxfp8", dtype=torch.bfloat16) for seed in (0, 9)]
        path = f"{folder}/{quantized}"
        if dist.get_rank() == 0:
            save_checkpoint(layers[0], path, quantized=quantized)
        dist.barrier()
        found.append(said(lambda path=path, layer=layers[1]: load_checkpoint(layer, path)))  # type: ignore[misc]
    return found


NOTHING: list[object] = [[0, N], 0.0, E // 2]
"""What `without_tokens` returns."""
