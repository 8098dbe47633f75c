"""One step of a group's parameters: scalars, moments, masters, and what is written from these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_registry.contract.optimizers import AdamWStepRule
from octavo_torch.optimizers.arithmetic import Scalars, advance_master, advance_moments, scalars_of, skipped_where
from octavo_torch.optimizers.backends import first_row_of, run_step, step_for
from octavo_torch.optimizers.block_state import decode, encode_into
from octavo_torch.optimizers.gradients import gradient_of, local_of
from octavo_torch.optimizers.group import Group, rule_of
from octavo_torch.optimizers.rounding import (
    FIRST_MOMENT,
    MASTER,
    SECOND_MOMENT,
    Draws,
    round_stochastic,
    rounding_bits,
)
from octavo_torch.optimizers.state import State, write_parameter
from octavo_torch.scaling.seeds import seed_tensor

States = Mapping[Tensor, State]


class Member(NamedTuple):
    """A parameter, its number in the optimizer, its name in messages, and its group."""

    number: int
    name: str
    parameter: Tensor
    group: Group


class GradScaling(NamedTuple):
    """What a GradScaler asks of a step; both are None without one.

    inverse_scale   fp32, the factor that unscales the gradients
    skip            bool, true where a gradient is not finite, so that the step changes nothing
    """

    inverse_scale: Tensor | None
    skip: Tensor | None


def step_on_host(members: list[Member], group: Group, scaling: GradScaling, states: States) -> None:
    """Step parameters whose step counts are on the CPU; those with the same count share the scalars."""
    rule, known = rule_of(group, torch.device("cpu")), dict[float, tuple[Tensor, Scalars]]()
    unscaling = scaling._replace(skip=None)  # a step that is skipped does not come here
    for member in members:
        count = states[member.parameter]["step"].add_(1)
        grad = _gradient(member)
        if _served(member, grad, states[member.parameter], unscaling):
            continue
        key = count.item()
        if key not in known:
            steps = count.to(torch.int64).view(1)
            known[key] = steps.view(()), scalars_of(rule, steps)[0]
        step, scalars = known[key]
        _advance(member, grad, states[member.parameter], StepInputs(scalars, step, unscaling))


def step_on_device(members: list[Member], group: Group, scaling: GradScaling, states: States) -> None:
    """Step parameters whose step counts are on their device. Nothing is read on the host: a skipped step has factors
    that change nothing."""
    for device in {member.parameter.device: None for member in members}:
        of_device = [member for member in members if member.parameter.device == device]
        counts = [states[member.parameter]["step"] for member in of_device]
        here = GradScaling(scaling.inverse_scale, None if scaling.skip is None else scaling.skip.to(device))
        for count in counts:
            count.add_(1 if here.skip is None else ~here.skip)
        grads = [_gradient(member) for member in of_device]
        composed = [
            (member, grad)
            for member, grad in zip(of_device, grads, strict=True)
            if not _served(member, grad, states[member.parameter], here)
        ]
        if not composed:
            continue
        steps = torch.stack([states[member.parameter]["step"] for member, _ in composed]).to(torch.int64).clamp_(min=1)
        scalars = scalars_of(rule_of(group, device), steps)
        for (member, grad), factors, step in zip(composed, scalars, steps.unbind(), strict=True):
            _advance(member, grad, states[member.parameter], StepInputs(factors, step, here))


def _gradient(member: Member) -> Tensor:
    gradient = gradient_of(member.name, member.parameter)
    assert gradient is not None  # members have one
    return gradient


def _served(member: Member, grad: Tensor, state: State, scaling: GradScaling) -> bool:
    """Step the parameter by a backend's function; False where no backend has one for it."""
    parameter, group = member.parameter, member.group
    step = step_for(parameter, state, grad.dtype)
    if step is None:
        return False
    lr, scale = group["lr"], scaling.inverse_scale
    if isinstance(lr, Tensor):
        lr = float(lr) if lr.is_cpu else lr.detach().reshape(()).to(torch.float32)
    rule = AdamWStepRule(
        lr,
        (float(group["betas"][0]), float(group["betas"][1])),
        float(group["eps"]),
        float(group["weight_decay"]),
        state["step"],
        seed=group["seed"],
        tensor=member.number,
        first_row=first_row_of(parameter) or 0,
        inverse_scale=None if scale is None else scale.to(grad.device),
        skip=scaling.skip,
    )
    run_step(step, parameter, state, grad.contiguous(), rule)
    return True


class StepInputs(NamedTuple):
    """What a composed step reads besides the arrays: its factors, its number (int64 []), and what a GradScaler asks."""

    scalars: Scalars
    step: Tensor
    scaling: GradScaling


def _advance(member: Member, gradient: Tensor, state: State, inputs: StepInputs) -> None:
    """Step one parameter's state and master by torch's operations; then write the parameter from the master."""
    parameter, (scalars, step, scaling) = member.parameter, inputs
    grad = gradient.to(torch.float32)
    if scaling.inverse_scale is not None:
        grad = grad * scaling.inverse_scale.to(grad.device)
    if scaling.skip is not None:
        grad, scalars = torch.where(scaling.skip, 0.0, grad), skipped_where(scaling.skip, scalars)
    master = local_of(state.get("master", parameter))
    coded = "exp_avg_tops" in state

    def bits(stream: int) -> Tensor:
        seed = seed_tensor(member.group["seed"], master.device)
        assert seed is not None
        draws = Draws(seed, step.to(master.device), member.number)
        return rounding_bits(parameter, draws, stream)

    first, second = (_moment(state, name, signed) for name, signed in (("exp_avg", True), ("exp_avg_sq", False)))
    advance_moments(first, second, grad, scalars)
    if master.dtype is torch.float32:
        advance_master(master, first, second, scalars)
    else:
        values = master.to(torch.float32)
        advance_master(values, first, second, scalars)
        master.copy_(round_stochastic(values, bits(MASTER)))
    if coded:
        for name, values, signed, stream in (
            ("exp_avg", first, True, FIRST_MOMENT),
            ("exp_avg_sq", second, False, SECOND_MOMENT),
        ):
            tops = local_of(state[f"{name}_tops"])
            encode_into(local_of(state[name]), tops, values, signed, bits(stream), scaling.skip)
    write_parameter(parameter, state)


def _moment(state: State, name: str, signed: bool) -> Tensor:
    """The fp32 moment: the state's own, which is stepped in place, or what its codes stand for."""
    tops = state.get(f"{name}_tops")
    return local_of(state[name]) if tops is None else decode(local_of(state[name]), local_of(tops), signed)
