"""Which experts each token goes to, and what each choice counts, as octavo_numerics.choose_experts defines it.

One launch each way where a backend serves it, else composed of torch's operations in fp32, and differentiable by torch.
Nothing is read back from the device, and no sum depends on an order of threads. Where neither a bias nor groups decide,
experts are ordered by their logits: no rounding of a score then makes a tie, or breaks one, so choices are the same
either way, in every framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from octavo.router import RouterRule, Score
from octavo_torch.arrays.checks import HashableNames, backend_names, check_flag
from octavo_torch.autograd.saved_tensors import save, saved_tensors
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.recorders import check_not_recorded
from octavo_torch.compiler.refused_derivatives import wants_graph
from octavo_torch.compiler.tracing import one_call
from octavo_torch.compiler.transforms import Subject, is_batched, no_transform, transforms_active
from octavo_torch.moe.arguments import check_choices
from octavo_torch.moe.router.checks import check_groups, check_router
from octavo_torch.moe.router.counts import counts_by_expert
from octavo_torch.moe.router.scores import router_scores
from octavo_torch.moe.rows.moves import Choosers, choosers_for

_Rule = tuple[int, Score, int, int, bool, float]
"""The fields of a RouterRule in order: dynamo takes no object of ours as an argument."""

_CHOOSE_EXPERTS = Subject("choose_experts", "tokens are its own batch: give all of them in one call")


class Choice(NamedTuple):
    """What a router says of T tokens.

    choices   int64 [T, k], the largest first
    weights   fp32 [T, k], differentiable in the logits
    counts    int64 [E], the choices that each expert got
    """

    choices: Tensor
    weights: Tensor
    counts: Tensor


def choose_experts(
    logits: Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    replay: Tensor | None = None,
    backend: str | Sequence[str] | None = None,
) -> Choice:
    """The k experts of each token by score plus bias, from the largest down, ties to the lower index; never dropped.

    logits        [T, E], bf16, fp16 or fp32
    score         of each logit, in fp32: softmax over the experts, sigmoid, or the root of softplus
    bias          [E], added for choosing alone: weights are without it, and it has no gradient
    groups        the experts are so many runs of equal length, and a token's choices come from the `kept_groups` of
                  them with the largest sums of their two largest scores plus bias, ties to the lower index
    renormalize   divide a token's weights by their sum plus 1e-20
    scale         multiplies the weights
    replay        integers [T, k], choices that were made before: their weights are those of these logits; a number
                  outside 0 to E - 1 goes nowhere and weighs 0
    backend       which backends may do it, as in grouped_linear; torch's operations do where none can

    Without a bias and groups, experts are in the order of their logits. Raises ValueError for arguments that do not
    fit.
    """
    check_router(logits, k, score, bias, scale)
    check_groups(int(logits.shape[1]), k, groups, kept_groups)
    check_flag("renormalize", renormalize)
    if replay is not None:
        check_choices("replay", replay, logits)
        if replay.shape[1] != k:
            raise ValueError(f"replay has shape {list(replay.shape)} and k is {k}; give {[logits.shape[0], k]}")
    rule = k, score, groups, kept_groups, renormalize, float(scale)
    return Choice(*_choose(logits, rule, bias=bias, replay=replay, backend=backend_names(backend)))


@one_call
def _choose(
    logits: Tensor, rule: _Rule, bias: Tensor | None = None, replay: Tensor | None = None, backend: HashableNames = None
) -> tuple[Tensor, Tensor, Tensor]:
    known = RouterRule(*rule)
    integers = None if replay is None else replay.long()
    if transforms_active():
        _check_unbatched(logits, bias, integers)
    if transforms_active() or forward_ad._current_level >= 0:  # the kernels have no rule for either
        return _composed(logits, bias, integers, known)
    choosers = choosers_for(logits, known, backend)
    if choosers is None:
        return _composed(logits, bias, integers, known)
    check_not_recorded(logits)
    wide = None if bias is None else bias.detach().float()
    made: tuple[Tensor, Tensor, Tensor] = _Choose.apply(logits, wide, integers, known, choosers)  # type: ignore[no-untyped-call]
    return made


def _check_unbatched(logits: Tensor, bias: Tensor | None, replay: Tensor | None) -> None:
    """Raises NotImplementedError where choices, and so their counts, would be those of a vmap's batch."""
    deciding = (logits, bias) if replay is None else (replay,)
    if any(value is not None and is_batched(value) for value in deciding):
        raise no_transform("vmap", _CHOOSE_EXPERTS)


class _Context(AutogradContext, Protocol):
    rule: RouterRule
    choosers: Choosers


class _Choose(torch.autograd.Function):
    """Choices, weights and counts by a backend's functions."""

    @staticmethod
    def forward(
        ctx: _Context,
        logits: Tensor,
        bias: Tensor | None,
        replay: Tensor | None,
        rule: RouterRule,
        choosers: Choosers,
    ) -> tuple[Tensor, Tensor, Tensor]:
        choices, weights, counts = choosers.choose(logits, bias, replay, rule)
        save(ctx, logits, choices)
        ctx.rule, ctx.choosers = rule, choosers
        ctx.mark_non_differentiable(choices, counts)
        return choices, weights, counts

    @staticmethod
    def backward(ctx: _Context, _choices: Tensor, dweights: Tensor, _counts: Tensor) -> tuple[Tensor | None, ...]:
        logits, choices = saved_tensors(ctx)
        graph = wants_graph(dweights)
        if graph or is_batched(dweights):  # torch's operations: of a graph of the gradient, of many gradients
            with torch.enable_grad():
                own = logits if graph else logits.detach().requires_grad_()
                weights = _composed(own, None, choices, ctx.rule)[1]
            (gradient,) = torch.autograd.grad(weights, own, dweights, create_graph=graph)
        else:
            gradient = ctx.choosers.gradient(logits, choices, dweights, ctx.rule)
        return gradient, None, None, None, None


def _composed(
    logits: Tensor, bias: Tensor | None, replay: Tensor | None, rule: RouterRule
) -> tuple[Tensor, Tensor, Tensor]:
    scores, experts = router_scores(logits, rule.score), int(logits.shape[1])
    if replay is None:
        with torch.no_grad():
            choices = _largest(_chosen_by(logits, scores, bias, rule), rule.k)
        weights = scores.gather(1, choices)
    else:
        choices = replay
        there = (choices >= 0) & (choices < experts)
        weights = torch.where(there, scores.gather(1, torch.where(there, choices, 0)), 0.0)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return choices, weights * rule.scale, counts_by_expert(choices, experts)


def _chosen_by(logits: Tensor, scores: Tensor, bias: Tensor | None, rule: RouterRule) -> Tensor:
    if bias is None and not rule.by_groups:
        return logits
    return _in_groups(scores if bias is None else scores + bias.float(), rule.groups, rule.kept_groups)


def _largest(values: Tensor, k: int) -> Tensor:
    # topk leaves open which of two equal values comes first
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :k]


def _in_groups(values: Tensor, groups: int, kept: int) -> Tensor:
    if kept >= groups:
        return values
    tokens = values.shape[0]
    grouped = values.view(tokens, groups, values.shape[1] // groups)
    sums = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    inside = torch.zeros(tokens, groups, dtype=torch.bool, device=values.device)
    inside.scatter_(1, _largest(sums, kept), True)
    return grouped.masked_fill(~inside[..., None], -torch.inf).view(values.shape)


__all__ = ["Choice", "choose_experts"]
