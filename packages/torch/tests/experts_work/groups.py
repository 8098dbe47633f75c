"""Process groups of experts, and how a layer leaves them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist

from experts_work.own import layer_of
from experts_work.problems import E, K, N, draw, group_of, run
from octavo_torch import Exchange


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


NOTHING: list[object] = [[0, N], 0.0, E // 2]
"""What `without_tokens` returns."""
