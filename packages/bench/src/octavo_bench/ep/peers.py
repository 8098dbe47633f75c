"""A MoE layer over several processes as others compute it, in bf16: torch's own all_to_all_single, and LigerCute."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import silu

from octavo_bench.harness.timing import Call
from octavo_bench.peers.gradients import FARTHEST, distance
from octavo_bench.peers.grouped_mm import check_aligned, ends_of, grouped, inverse_of
from octavo_bench.peers.loading import loaded

TORCH, LIGER = "all_to_all_single", "LigerCute"


def peer_call(name: str, leaves: Sequence[Tensor], choices: Tensor, dy: Tensor, experts: int) -> Call:
    """A step that returns the gradients of `leaves`: x [T, K], w1 [G, 2 F, K], w2 [G, K, F] and weights [T, k].

    experts   of all ranks, G on each of them
    AbsentError where the library is not there.
    """
    x, w1, w2, weights = leaves
    if name == LIGER:
        liger = loaded(LIGER, "octavo_bench.peers.liger_cute")
        call: Call = liger.layer_call(x, choices, weights, w1, w2, dy, experts)
        return call
    return _own_call(leaves, choices, dy, experts)


def finish() -> None:
    """Ends what peers have begun, before the process group ends."""
    liger = sys.modules.get("octavo_bench.peers.liger_cute")
    if liger is not None:
        liger.finish()


def check_close(name: str, theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> None:
    """ValueError where a peer's gradients are not those of our layer."""
    far = distance(theirs, ours)
    if not far <= FARTHEST:
        raise ValueError(f"gradients of {name} differ from ours by {far:.1%}, so its time does not count")


def _own_call(leaves: Sequence[Tensor], choices: Tensor, dy: Tensor, experts: int) -> Call:
    """Rows by expert, of which the host is told how many go where, torch's grouped GEMMs, and the way back."""
    x, w1, w2, weights = leaves
    ranks, local = dist.get_world_size(), w1.shape[0]
    group = dist.group.WORLD
    assert group is not None  # of a process among several
    flat, top = choices.reshape(-1), choices.shape[1]
    arrived = torch.arange(local, device=x.device).repeat(ranks)

    def step() -> Sequence[Tensor]:
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        away, here = (each.view(ranks, local).sum(1).tolist() for each in (counts, theirs))
        of_experts = theirs.view(ranks, local).sum(0)
        check_aligned(of_experts.tolist())
        rows = all_to_all_single_autograd(x.index_select(0, order // top), here, away, group)
        by_expert = torch.argsort(arrived.repeat_interleave(theirs, output_size=sum(here)), stable=True)
        ends = ends_of(of_experts)
        gate, up = grouped(rows.index_select(0, by_expert), w1, ends).chunk(2, -1)
        y = grouped(silu(gate) * up, w2, ends)
        back = all_to_all_single_autograd(y.index_select(0, inverse_of(by_expert)), away, here, group)
        each = back.index_select(0, inverse_of(order)).view(*choices.shape, -1)
        combined = (each * weights[..., None].to(each.dtype)).sum(1)
        return torch.autograd.grad(combined, leaves, dy)

    return step
