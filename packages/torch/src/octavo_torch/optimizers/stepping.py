"""One step of a group's parameters: scalars, moments, masters, and what is written from these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_torch.optimizers.arithmetic import Scalars, advance_master, advance_moments, scalars_of, unless
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


class Found(NamedTuple):
    """What GradScaler found: the factor of the gradients, and whether one of them is not finite; None without it."""

    inverse_scale: Tensor | None
    skip: Tensor | None


def step_on_host(members: list[Member], group: Group, found: Found, states: States) -> None:
    """Step counts are tensors on the CPU; parameters with the same count share the scalars."""
    rule, known = rule_of(group, torch.device("cpu")), dict[float, tuple[Tensor, Scalars]]()
    for member in members:
        count = states[member.parameter]["step"].add_(1)
        key = count.item()
        if key not in known:
            steps = count.to(torch.int64).view(1)
            known[key] = steps.view(()), scalars_of(rule, steps)[0]
        step, scalars = known[key]
        _advance(member, states[member.parameter], scalars, step, Found(found.inverse_scale, None))


def step_on_device(members: list[Member], group: Group, found: Found, states: States) -> None:
    """Nothing is read back: a skipped step has factors that change nothing."""
    for device in {member.parameter.device: None for member in members}:
        of_device = [member for member in members if member.parameter.device == device]
        counts = [states[member.parameter]["step"] for member in of_device]
        skip = None if found.skip is None else found.skip.to(device)
        for count in counts:
            count.add_(1 if skip is None else ~skip)
        steps = torch.stack(counts).to(torch.int64).clamp_(min=1)
        scalars = scalars_of(rule_of(group, device), steps)
        for member, factors, step in zip(of_device, scalars, steps.unbind(), strict=True):
            _advance(member, states[member.parameter], factors, step, Found(found.inverse_scale, skip))


def _advance(member: Member, state: State, scalars: Scalars, step: Tensor, found: Found) -> None:
    """One parameter, its state and its master; then what is written from the master."""
    parameter = member.parameter
    gradient = gradient_of(member.name, parameter)
    assert gradient is not None  # members have one
    grad = gradient.to(torch.float32)
    if found.inverse_scale is not None:
        grad = grad * found.inverse_scale.to(grad.device)
    if found.skip is not None:
        grad, scalars = torch.where(found.skip, 0.0, grad), unless(found.skip, scalars)
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
            encode_into(local_of(state[name]), tops, values, signed, bits(stream), found.skip)
    write_parameter(parameter, state)


def _moment(state: State, name: str, signed: bool) -> Tensor:
    """The fp32 moment: the state's own, which is stepped in place, or what its codes stand for."""
    tops = state.get(f"{name}_tops")
    return local_of(state[name]) if tops is None else decode(local_of(state[name]), local_of(tops), signed)
