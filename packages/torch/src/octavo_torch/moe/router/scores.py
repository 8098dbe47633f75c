"""A router's scores in fp32, and the share of each in its token's."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.router import Score
from octavo_torch.arithmetic.elementwise import sigmoid, sqrt_softplus


def router_scores(logits: Tensor, score: Score) -> Tensor:
    """fp32 [T, E]."""
    wide = logits.float()
    if score == "softmax":
        return torch.softmax(wide, -1)
    return sigmoid(wide) if score == "sigmoid" else sqrt_softplus(wide)


def score_shares(logits: Tensor, score: Score) -> Tensor:
    """fp32 [T, E]: each score over the sum of its token's. Scores are multiplied by a factor for each token by which
    the largest does not underflow, however far below 0 its logit is."""
    if score == "softmax":
        return router_scores(logits, score)
    wide = logits.float()
    lift = wide.detach().amax(-1, keepdim=True).clamp_max(0)
    if score == "sigmoid":
        negative = wide < 0
        below = torch.where(negative, wide, lift)
        scores = torch.where(negative, torch.exp(below - lift) * torch.sigmoid(-below), torch.sigmoid(wide))
    else:  # below -15, softplus is an exponential in fp32
        small = wide < -15
        root = torch.sqrt(torch.nn.functional.softplus(torch.where(small, 0, wide)))
        powers = torch.exp(0.5 * (torch.where(small, wide, lift) - lift))
        scores = torch.where(small, powers, root * torch.exp(-0.5 * lift.clamp_min(-15)))
    return scores / scores.sum(-1, keepdim=True)
