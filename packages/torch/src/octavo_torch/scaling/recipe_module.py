"""RecipeModule: what modules with a recipe share, which is seeds and scales in buffers and a checked constructor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo import HighPrecision, Recipe
from octavo_torch.arrays.checks import backend_names, check_count, check_flag, check_module, check_recipe
from octavo_torch.arrays.group_parameters import GroupParameters
from octavo_torch.compiler.tracing import register_constants
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import SeedCounter
from octavo_torch.wgrad.main_grad import MainGrad, check_mode
from octavo_torch.wgrad.postponed import DelayedWgrad


class RecipeModule(GroupParameters):
    """Groups, a recipe and its state, in buffers that a state dict holds as plain tensors, only where there is some:

    seed_base, seed_counter   int64 scalars, for stochastic recipes. The counter moves in backward, when gradients are
                              rounded, so activation checkpointing changes no bit
    amax_history, encode_scale   float32, for delayed scaling: a DelayedState's tensors, stacked where a module has the
                              states of several layers. Training forwards and backwards record; `update_scales()` after
                              a step makes the next scales. Casting the module leaves them float32
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
        sides: dict[str, Any],
        recipe: Recipe | None,
        device: torch.device | str | None,
        backend: str | Sequence[str] | None,
        seed: int | None,
        main_grad: MainGrad | None,
        per_group_parameters: bool,
        delay_wgrad: bool,
        layers: tuple[int, ...] = (),
    ) -> None:
        """sides: numbers of at least 1 by name, num_groups among them; layers: leading axes of the scales' buffers."""
        super().__init__()
        for name, value in sides.items():
            check_count(name, value)
            setattr(self, name, value)
        if recipe is not None:
            check_recipe(recipe)
        if main_grad is not None:
            check_mode(main_grad)
        for name, flag in (("per_group_parameters", per_group_parameters), ("delay_wgrad", delay_wgrad)):
            check_flag(name, flag)
        self.per_group_parameters = per_group_parameters
        self.delayed_wgrad = DelayedWgrad() if delay_wgrad else None
        register_constants()
        self.main_grad = main_grad
        self.recipe = HighPrecision() if recipe is None else recipe
        # properties of a recipe are Python calls, and forward asks each time
        self._stochastic, self._stateful = self.recipe.stochastic, self.recipe.stateful
        self.backend = backend_names(backend)
        self._seed = seed
        if self._stochastic:
            self.register_buffer("seed_base", torch.empty((), dtype=torch.int64, device=device))
            self.register_buffer("seed_counter", torch.empty((), dtype=torch.int64, device=device))
        if self._stateful:
            state = DelayedState.create(self.recipe, sides["num_groups"], device)  # type: ignore[arg-type]
            for name, value in (("amax_history", state.history), ("encode_scale", state.scale)):
                self.register_buffer(name, value.expand(*layers, *value.shape).clone())

    def reset_buffers(self) -> None:
        """Buffers as before the first step."""
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
        """The module's buffers as states of delayed scaling, one a layer; none for other recipes."""
        if not self._stateful:
            return ()
        history, scale = self.amax_history, self.encode_scale
        pairs = [(history, scale)] if scale.dim() == 2 else [(history[i], scale[i]) for i in range(len(scale))]
        return tuple(DelayedState(self.recipe, h, s) for h, s in pairs)  # type: ignore[arg-type]

    def repr_of_options(self) -> str:
        """What `extra_repr` says of arguments that are seldom given."""
        return "".join(
            f", {name}=True"
            for name, given in (
                ("per_group_parameters", self.per_group_parameters),
                ("delay_wgrad", self.delayed_wgrad is not None),
            )
            if given
        )

    def backward_dw(self, count: int | None = None) -> None:
        """Make the weight gradients that the oldest `count` backward passes left out, None: all; see DelayedWgrad.

        Raises ValueError for a module without `delay_wgrad`, and for one that FSDP2 has sharded.
        """
        if self.delayed_wgrad is None:
            raise ValueError(
                "delay_wgrad is False and backward leaves no weight gradient out; make the module with True"
            )
        for name, parameter in self._parameters.items():
            if name.startswith("weight") and isinstance(parameter, DTensor):
                raise ValueError(
                    f"{name} is sharded and delay_wgrad is True: FSDP2 reduces gradients in backward, and this one "
                    "would stay on its rank; make the module without delay_wgrad"
                )
        self.delayed_wgrad.backward_dw(count)

    def update_scales(self, process_group: Any = None) -> None:
        """End a step of delayed scaling: make the next scales from the recorded amax; nothing for other recipes.

        process_group   reduce amax over its ranks first; every rank calls, ranks without tokens too
        """
        for state in self.delayed_states:
            state.update(process_group)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {name: self._buffers[name] for name in ("amax_history", "encode_scale") if name in self._buffers}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            # module.bfloat16() means the parameters: scales are fp32 by definition
            if before is not None and after is not None and after.dtype is not before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


def update_scales(module: nn.Module, process_group: Any = None) -> None:
    """`update_scales` of every GroupedLinear and GroupedMLP in `module`: call it after each optimizer step."""
    check_module(module)
    for layer in module.modules():
        if isinstance(layer, RecipeModule):
            layer.update_scales(process_group)
