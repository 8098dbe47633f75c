"""The losses of a router: octavo_numerics.router_losses defines them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octavo_torch.arrays.checks import check_count
from octavo_torch.moe.arguments import check_choices
from octavo_torch.moe.router.checks import check_router
from octavo_torch.moe.router.counts import counts_by_expert
from octavo_torch.moe.router.scores import score_shares


class RouterLosses(NamedTuple):
    """A router's auxiliary losses, fp32 scalars without coefficients: octavo_numerics.router_losses defines them."""

    z: Tensor
    aux: Tensor
    sequence: Tensor


def router_losses(
    logits: Tensor,
    choices: Tensor,
    *,
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax",
    sequences: int = 1,
) -> RouterLosses:
    """The z loss, and those of balance over all tokens and within each of `sequences` runs of tokens of equal length.

    logits, choices   [T, E] and [T, k] of a router; without tokens each loss is 0

    Differentiable in the logits; raises ValueError as choose_experts does.
    """
    check_router(logits, 1, score)
    check_choices("choices", choices, logits)
    check_count("sequences", sequences)
    tokens, experts = logits.shape
    if tokens % sequences:
        raise ValueError(f"sequences is {sequences} and there are {tokens} tokens; give a divisor of that number")
    if not tokens:
        nothing = logits.float().sum()
        return RouterLosses(nothing, nothing, nothing)
    shares = score_shares(logits, score).view(sequences, -1, experts)
    runs = choices.reshape(sequences, -1)
    counts = torch.stack([counts_by_expert(run, experts) for run in runs.unbind(0)]).float()
    by_run = experts * (counts / runs.shape[1] * shares.mean(1)).sum(-1)
    over_all = experts * (counts.sum(0) / choices.numel() * shares.mean((0, 1))).sum()
    return RouterLosses(torch.logsumexp(logits.float(), -1).square().mean(), over_all, by_run.mean())


__all__ = ["RouterLosses", "router_losses"]
