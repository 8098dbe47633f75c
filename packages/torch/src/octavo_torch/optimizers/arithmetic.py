"""AdamW's operations, each rounded to fp32 once and none contracted: the bits of octavo_numerics' `adamw_step`.

Every step is an operation of torch of its own, and none of those that multiply and add at once (lerp, addcmul,
addcdiv), which a GPU contracts. Tensors are not divided by scalars either, which CUDA replaces by a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_STEP_BITS = 24


class Rule(NamedTuple):
    """Hyperparameters of one parameter group; lr is fp32, of no dimension."""

    lr: Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Scalars(NamedTuple):
    """fp32 factors of a step, of no dimension where they are tensors: kept is for the old moment, added for the new."""

    decay: Tensor
    first_kept: float | Tensor
    first_added: float | Tensor
    second_kept: float | Tensor
    second_added: float | Tensor
    step_size: Tensor
    root_scale: Tensor
    eps: float


def bias_correction(beta: float, steps: Tensor) -> Tensor:
    """1 - beta^steps in fp32 alone, for int64 steps: octavo_numerics' `bias_correction`."""
    count = steps.clamp(max=(1 << _STEP_BITS) - 1)
    q, power = torch.zeros_like(steps, dtype=torch.float32), beta
    for bit in range(_STEP_BITS):
        grown = q + (1.0 - q) * (1.0 - power)
        q = torch.where((count >> bit) & 1 != 0, grown, q)
        power *= power
    return q


def scalars_of(rule: Rule, steps: Tensor) -> list[Scalars]:
    """The factors of each of the steps, int64 [P] and at least 1."""
    b1, b2 = rule.betas
    first, second = (bias_correction(beta, steps) for beta in rule.betas)
    decay = 1.0 - rule.lr * rule.weight_decay
    sizes = (rule.lr.expand_as(first) / first).unbind()
    roots = _root(second)
    scales = (torch.ones_like(roots) / roots).unbind()
    return [
        Scalars(decay, b1, 1.0 - b1, b2, 1.0 - b2, size, scale, rule.eps)
        for size, scale in zip(sizes, scales, strict=True)
    ]


def skipped_where(skip: Tensor, scalars: Scalars) -> Scalars:
    """The factors; where `skip` is true those of a step that changes nothing, if the gradient is 0 there."""

    def chosen(neutral: float, factor: float | Tensor) -> Tensor:
        return torch.where(skip, neutral, factor)

    return Scalars(
        chosen(1.0, scalars.decay),
        chosen(1.0, scalars.first_kept),
        chosen(0.0, scalars.first_added),
        chosen(1.0, scalars.second_kept),
        chosen(0.0, scalars.second_added),
        chosen(0.0, scalars.step_size),
        scalars.root_scale,
        scalars.eps,
    )


def advance_moments(first: Tensor, second: Tensor, grad: Tensor, scalars: Scalars) -> None:
    """Both fp32 moments after one more fp32 gradient, in place."""
    first.mul_(scalars.first_kept).add_(grad * scalars.first_added)
    second.mul_(scalars.second_kept).add_((grad * grad).mul_(scalars.second_added))


def advance_master(master: Tensor, first: Tensor, second: Tensor, scalars: Scalars) -> None:
    """The fp32 master after the step that these moments make, in place."""
    update = _root(second).mul_(scalars.root_scale).add_(scalars.eps)
    torch.div(first, update, out=update)
    master.mul_(scalars.decay).sub_(update.mul_(scalars.step_size))


def _root(values: Tensor) -> Tensor:
    """fl(sqrt(values)). On a CPU torch may call MKL's, which is off by an ulp; CUDA's is rounded as IEEE has it.

    A double's root, off by an ulp of it at most, rounds to the right float: the root of a float is either a float or
    further than that from the middle between two.
    """
    return values.to(torch.float64).sqrt_().to(torch.float32) if values.is_cpu else values.sqrt()
