"""RecipeModule: the base of modules with a recipe; its seeds and scales are buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from octavo import HighPrecision, Recipe
from octavo_torch.arrays.checks import backend_names, check_count, check_flag, check_module, check_recipe
from octavo_torch.arrays.group_parameters import GroupParameters
from octavo_torch.compiler.tracing import register_constants
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import SeedCounter
from octavo_torch.wgrad.main_grad import MainGrad, check_mode
from octavo_torch.wgrad.postponed import DelayedWgrad


@dataclass(frozen=True, slots=True)
class ModuleOptions:
    """The arguments that all modules with a recipe share; GroupedLinear describes them."""

    recipe: Recipe | None
    backend: str | Sequence[str] | None
    seed: int | None
    main_grad: MainGrad | None
    per_group_parameters: bool
    delay_wgrad: bool

    def check(self) -> None:
        """Raises ValueError for options of a wrong kind; `backend_names` checks `backend`."""
        if self.recipe is not None:
            check_recipe(self.recipe)
        if self.main_grad is not None:
            check_mode(self.main_grad)
        check_flag("per_group_parameters", self.per_group_parameters)
        check_flag("delay_wgrad", self.delay_wgrad)


class RecipeModule(GroupParameters):
    """Groups, a recipe, and the recipe's state in buffers, which a state dict holds as plain tensors:

    seed_base, seed_counter   int64 scalars, present for stochastic recipes. The counter advances in backward, when
                              gradients are rounded, so activation checkpointing changes no bit
    amax_history, encode_scale   float32, present for delayed scaling: a DelayedState's tensors, stacked where a module
                              has the states of several layers. Forward and backward in training mode record;
                              `update_scales()` after a step computes the next scales. Casting the module leaves them
                              float32
    """

    recipe: Recipe
    seed_base: Tensor
    seed_counter: Tensor
    amax_history: Tensor
    encode_scale: Tensor
    main_grad: MainGrad | None = None
    delayed_wgrad: DelayedWgrad | None = None

    def __init__(
        self,
        sides: Mapping[str, int],
        options: ModuleOptions,
        device: torch.device | str | None,
        layers: tuple[int, ...] = (),
    ) -> None:
        """sides: integers of at least 1 by name, num_groups among them; layers: leading axes of the scales' buffers.

        Raises ValueError for sides and options that do not fit.
        """
        super().__init__()
        for name, value in sides.items():
            check_count(name, value)
            setattr(self, name, value)
        options.check()
        self.per_group_parameters = options.per_group_parameters
        self.delayed_wgrad = DelayedWgrad() if options.delay_wgrad else None
        register_constants()
        self.main_grad = options.main_grad
        self.recipe = HighPrecision() if options.recipe is None else options.recipe
        # a recipe's properties are Python calls, too slow for every forward
        self._stochastic, self._stateful = self.recipe.stochastic, self.recipe.stateful
        self.backend = backend_names(options.backend)
        self._seed = options.seed
        if self._stochastic:
            self.register_buffer("seed_base", torch.empty((), dtype=torch.int64, device=device))
            self.register_buffer("seed_counter", torch.empty((), dtype=torch.int64, device=device))
        if self._stateful:
            state = DelayedState.create(self.recipe, sides["num_groups"], device)  # type: ignore[arg-type]
            for name, buffer in (("amax_history", state.history), ("encode_scale", state.scale)):
                self.register_buffer(name, buffer.expand(*layers, *buffer.shape).clone())

    def reset_buffers(self) -> None:
        """Set the buffers to their values before the first step."""
        with torch.no_grad():
            if self._stochastic:
                if self._seed is None:
                    self.seed_base.random_()
                else:
                    self.seed_base.fill_((self._seed + (1 << 63)) % (1 << 64) - (1 << 63))
                self.seed_counter.zero_()
            if self._stateful:
                self.amax_history.zero_()
                self.encode_scale.fill_(1.0)

    @property
    def seed(self) -> SeedCounter | None:
        """The module's buffers as a seed; None for recipes that round to nearest."""
        return SeedCounter(self.seed_base, self.seed_counter) if self._stochastic else None

    @property
    def delayed_states(self) -> tuple[DelayedState, ...]:
        """The module's buffers as states of delayed scaling, one per layer; empty for other recipes."""
        if not self._stateful:
            return ()
        history, scale = self.amax_history, self.encode_scale
        pairs = [(history, scale)] if scale.dim() == 2 else [(history[i], scale[i]) for i in range(len(scale))]
        return tuple(DelayedState(self.recipe, h, s) for h, s in pairs)  # type: ignore[arg-type]

    def repr_of_options(self) -> str:
        """The part of `extra_repr` for rarely used options: only those that are on."""
        options = {
            "per_group_parameters": self.per_group_parameters,
            "delay_wgrad": self.delayed_wgrad is not None,
        }
        return "".join(f", {name}=True" for name, is_on in options.items() if is_on)

    def backward_dw(self, count: int | None = None) -> None:
        """Compute the weight gradients that the oldest `count` backward passes postponed (None: all); see DelayedWgrad.

        Raises ValueError for a module without `delay_wgrad`, and for one that FSDP2 has sharded.
        """
        if self.delayed_wgrad is None:
            raise ValueError(
                "delay_wgrad is False and backward postpones no weight gradient; create the module with True"
            )
        for name, parameter in self._parameters.items():
            if name.startswith("weight") and isinstance(parameter, DTensor):
                raise ValueError(
                    f"{name} is sharded and delay_wgrad is True: FSDP2 reduces gradients in backward, and this one "
                    "would stay on its rank; create the module without delay_wgrad"
                )
        self.delayed_wgrad.backward_dw(count)

    def update_scales(self, process_group: ProcessGroup | None = None) -> None:
        """End a step of delayed scaling: compute the next scales from the recorded amax; other recipes do nothing.

        process_group   reduce amax over its ranks first; every rank must call, including ranks without tokens
        """
        for state in self.delayed_states:
            state.update(process_group)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales = {name: self._buffers[name] for name in ("amax_history", "encode_scale") if name in self._buffers}
        super()._apply(fn, recurse)
        for name, before in scales.items():
            after = self._buffers[name]
            # module.bfloat16() is meant for the parameters: scales are fp32 by definition
            if before is not None and after is not None and after.dtype is not before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


def update_scales(module: nn.Module, process_group: ProcessGroup | None = None) -> None:
    """Call `update_scales` of every GroupedLinear and GroupedMLP in `module`; do this after each optimizer step."""
    check_module(module)
    for layer in module.modules():
        if isinstance(layer, RecipeModule):
            layer.update_scales(process_group)
