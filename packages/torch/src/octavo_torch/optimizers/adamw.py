"""AdamW: an optimizer that keeps master weights, and writes parameters, CodedWeights among them, from their masters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.dtypes import name_of
from octavo_torch.compiler.graphs import is_capturing
from octavo_torch.optimizers.gradients import check_gradient, clear, gradient_of, has_gradient, has_main_grad, local_of
from octavo_torch.optimizers.group import OPTIONS, Group, check_group, check_positive, check_rate_device
from octavo_torch.optimizers.saved import checked_state_dict
from octavo_torch.optimizers.state import (
    State,
    check_parameter,
    check_state,
    load_entry,
    new_state,
    write_unless_there,
)
from octavo_torch.optimizers.stepping import GradScaling, Member, step_on_device, step_on_host
from octavo_torch.optimizers.written import Versions, check_unchanged, note

_BETWEEN_GRAPHS = "AdamW.step runs between graphs: compile what is before it, or leave out fullgraph=True"


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over fp32 or bf16 master weights, with moments in fp32 or 8 bits.

    It steps ordinary parameters and CodedWeights. A CodedWeight's codes, both planes, are those of its master cast to
    the weight's dtype; a bf16 or fp16 parameter is its master rounded to nearest. A parameter of fp32, or of
    `master_dtype`, is its own master. The step is `octavo_numerics.adamw_step`, bit for bit on every device, and reads
    nothing from the host where `capturable` is True.

    Gradients are read from `main_grad` where a parameter has it, else from `.grad`, in fp32, bf16 or fp16. `zero_grad`
    zeroes `main_grad` in place; a frozen parameter is not stepped with such zeros. A gradient that is not finite makes
    its element NaN, as in torch.optim.AdamW; with moments in 8 bits, its block of 128 elements. States are created with
    the optimizer, and loaded in place; a frozen parameter gets one when it is thawed, or when one is loaded.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_dtype: torch.dtype = torch.float32,
        state_bits: int = 32,
        seed: int = 0,
        capturable: bool = False,
        masters: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """params: parameters, pairs of name and parameter, or groups of them, as torch.optim.Optimizer takes them.

        lr            a number, or a tensor of one element: with `capturable` on the parameters' device, else on the CPU
        master_dtype  torch.float32, or torch.bfloat16 with steps that are rounded stochastically
        state_bits    of the moments of parameters with two axes or more, 32 or 8; others have 32
        seed          of stochastic rounding, whose bits depend on nothing but the group's seed, the step, the
                      parameter's number and the position. Ranks that hold copies of a parameter need the same seed
        capturable    learning rates and step counts are read on the device, for CUDA graphs
        masters       values of masters by parameter, such as a checkpoint's: the parameters are written from them, too.
                      Others start from what the parameter holds

        All but `masters` may differ between groups. Raises ValueError for what does not fit.
        """
        try:
            listed = None if isinstance(params, Tensor) else list(params)
        except TypeError:  # an array without axes has __iter__, too
            listed = None
        if listed is None:
            raise ValueError(f"params is {brief(params)}; give an iterable of parameters or of groups of them")
        if not listed:
            raise ValueError("params is empty; give parameters, pairs of a name and a parameter, or groups of them")
        given = (lr, betas, eps, weight_decay, master_dtype, state_bits, seed, capturable)
        defaults = dict(zip(OPTIONS, given, strict=True))
        check_group(defaults)
        try:
            super().__init__(listed, defaults)
        except TypeError as error:
            raise ValueError(
                f"params holds what is not a parameter ({str(error).splitlines()[0]}); give parameters, pairs of a "
                "name and a parameter, or groups of them"
            ) from None
        self._set_masters({} if masters is None else masters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's; the states of new parameters that require a gradient are made at once."""
        if isinstance(param_group, Mapping):
            check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for member in self._members():
                if member.group is group:
                    check_parameter(member.name, member.parameter, group["master_dtype"], group["state_bits"])
                    check_rate_device(group, member.name, member.parameter)
        except ValueError:
            self.param_groups.pop()
            raise
        self._begin_trained()

    @torch.compiler.disable(reason=_BETWEEN_GRAPHS)  # type: ignore[no-untyped-call, untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, of the parameters that have a gradient; returns what `closure`, which is called first, returns.

        With torch.amp.GradScaler, call `scaler.step(optimizer)`: gradients in `.grad` are unscaled and steps with
        infinities skipped; without `capturable` this reads one number on the host. torch.compile runs a step as it is,
        between its graphs. Raises ValueError where there is a `main_grad`, which a GradScaler does not see, for
        gradients and options that do not fit, and for a parameter that was given values since it was written, and its
        master was not; nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = [member for member in self._members() if has_gradient(member.parameter)]
        for group in self.param_groups:
            check_group(group)
        for member in members:
            check_gradient(member.name, member.parameter)
            check_rate_device(member.group, member.name, member.parameter)
        self._begin(members)
        for member in members:
            state = self.state[member.parameter]
            check_state(member.name, member.parameter, state, member.group["master_dtype"])
            check_unchanged(member.name, member.parameter, state.get("master"), self._versions())
        scaling = self._grad_scaling(members)
        for group in self.param_groups:
            of_group = [member for member in members if member.group is group]
            if of_group and group["capturable"]:
                step_on_device(of_group, group, scaling, self.state)
            elif of_group and (scaling.skip is None or not bool(scaling.skip)):
                step_on_host(of_group, group, scaling, self.state)
        for member in members:
            self._note(member.parameter)
        return loss

    def gradients(self) -> list[Tensor]:
        """The gradients that the next step reads, to be reduced, clipped or inspected: each `main_grad`, or `.grad`."""
        members = [member for member in self._members() if has_gradient(member.parameter)]
        found = (gradient_of(member.name, member.parameter) for member in members)
        return [grad for grad in found if grad is not None]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """torch.nn.utils.clip_grad_norm_ over `gradients()`, with norms in fp32; returns the norm before.

        Nothing is read on the host. Raises ValueError for DTensors, where the norm is that of all ranks.
        """
        sharded = [member.name for member in self._members() if isinstance(member.parameter, DTensor)]
        if sharded:
            raise ValueError(
                f"{sharded[0]} is a DTensor, whose gradient's norm is that of all ranks; call "
                "torch.nn.utils.clip_grad_norm_(parameters, max_norm)"
            )
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            check_positive(name, value)
        max_norm, norm_type = float(max_norm), float(norm_type)
        gradients = [grad for grad in self.gradients() if grad.numel()]  # torch has no largest of nothing
        norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) for grad in gradients]
        if not norms:
            return torch.zeros((), dtype=torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]), norm_type)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in gradients:
            grad.mul_(factor.to(grad.device))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer's for `.grad`; each `main_grad` is zeroed in place."""
        super().zero_grad(set_to_none)
        with torch.no_grad():
            for member in self._members():
                clear(member.parameter)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer's, with `master_dtype` as its name: torch's tools that gather and send states accept
        no dtype. Of frozen parameters it has the states that there are."""
        self._begin_trained()
        saved: dict[str, Any] = super().state_dict()
        for group in saved["param_groups"]:
            group["master_dtype"] = name_of(group["master_dtype"])
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the `state_dict` of such an optimizer; or that of a torch.optim.AdamW, for parameters that are their own
        masters with `state_bits=32`.

        States are copied in place, and parameters with a master are written from it: a run goes on bit for bit.
        Options that the saved groups lack stay. Hooks that are registered for loading run before and after all of this.
        Raises ValueError, before anything is changed, for states that do not fit in number, name, shape or dtype.
        """
        if isinstance(state_dict, Mapping):
            state_dict = {**state_dict}  # as torch gives it to hooks
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = hook(self, state_dict)
                state_dict = state_dict if changed is None else changed
        self._begin_trained()
        present = {parameter: state for parameter, state in self.state.items() if state}

        def state_of(member: Member) -> State:
            found = present.get(member.parameter)
            return self._new_state(member.parameter, member.group) if found is None else found

        groups, states = checked_state_dict(state_dict, self.param_groups, self._members(), state_of)
        for group, saved in zip(self.param_groups, groups, strict=True):
            options = copy.deepcopy({key: value for key, value in saved.items() if key != "params"})
            group.update(options, lr=_rate(group["lr"], options["lr"]))
        for member, entry in zip(self._members(), states, strict=True):
            parameter = member.parameter
            if entry is not None and parameter not in present:
                self._begin([member])
            if self.state.get(parameter):
                load_entry(entry, parameter, self.state[parameter], self._new_state(parameter, member.group))
                self._note(parameter)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _members(self) -> Iterator[Member]:
        number = 0
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for place, parameter in enumerate(group["params"]):
                name = names[place] if names else f"params[{index}][{place}]"
                yield Member(number, name, parameter, group)
                number += 1

    def _begin_trained(self) -> None:
        """`_begin` of what requires a gradient now: a frozen parameter may have been thawed since."""
        self._begin(member for member in self._members() if member.parameter.requires_grad)

    @torch.no_grad()
    def _begin(self, members: Iterable[Member]) -> None:
        """Make the states that are missing. ValueError where a CUDA graph is captured, whose replays would make them
        again."""
        for member in members:
            parameter = member.parameter
            if self.state.get(parameter):
                continue
            if parameter.is_cuda and is_capturing():
                raise ValueError(
                    f"{member.name} was frozen when this optimizer was created, and has no state yet, which a captured "
                    "graph would make anew in each replay; call state_dict(), which makes it, or step() before the "
                    "capture"
                )
            self.state[parameter] = self._new_state(parameter, member.group)
            self._note(parameter)

    def _note(self, parameter: Tensor) -> None:
        note(parameter, self.state[parameter].get("master"), self._versions())

    def _versions(self) -> Versions:
        """The noted versions. A copy or a pickle starts without any, because its tensors have versions of their own."""
        versions: Versions = vars(self).setdefault("_written_at", {})
        return versions

    def _new_state(self, parameter: Tensor, group: Group) -> State:
        return new_state(parameter, group["master_dtype"], group["state_bits"], group["capturable"])

    def _set_masters(self, masters: object) -> None:
        if not isinstance(masters, Mapping):
            raise ValueError(f"masters is {brief(masters)}; give a mapping from parameters to values")
        self._begin(member for member in self._members() if member.parameter in masters)
        for parameter, values in masters.items():
            state = self.state.get(parameter) if isinstance(parameter, Tensor) else None
            if state is None:
                raise ValueError(f"masters has {brief(parameter)}, which is not one of params; give values of those")
            master = state.get("master")
            if master is None:
                raise ValueError(
                    f"masters has values of a parameter {brief(parameter)} that is its own master; copy them into it"
                )
            if not isinstance(values, Tensor) or values.shape != master.shape or not values.is_floating_point():
                raise ValueError(f"masters has {brief(values)} for a parameter {list(master.shape)}; give such values")
        with torch.no_grad():
            for parameter, values in masters.items():
                local_of(self.state[parameter]["master"]).copy_(local_of(values))
                write_unless_there(parameter, self.state[parameter])
                self._note(parameter)

    def _grad_scaling(self, members: list[Member]) -> GradScaling:
        """What a GradScaler asks of this step, by the attributes that it sets on an optimizer around `step`."""
        own = vars(self)
        skip, scale = cast("Tensor | None", own.get("found_inf")), cast("Tensor | None", own.get("grad_scale"))
        if skip is None:
            return GradScaling(None, None)
        unseen = [member.name for member in members if has_main_grad(member.parameter)]
        if unseen:
            raise ValueError(
                f"the gradient of {unseen[0]} is in main_grad, which a GradScaler neither unscales nor checks; train "
                "with bfloat16 and without a GradScaler, or without main_grad"
            )
        return GradScaling(None if scale is None else torch.ones_like(scale) / scale, skip != 0)


def _rate(present: object, saved: object) -> object:
    """The saved learning rate; the present one with its value where that is a tensor, which a captured graph reads."""
    if not isinstance(present, Tensor):
        return saved
    with torch.no_grad():
        return present.copy_(saved) if isinstance(saved, Tensor) else present.fill_(cast(float, saved))
