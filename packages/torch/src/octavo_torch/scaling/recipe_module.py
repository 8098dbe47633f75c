"""RecipeModule: the base of modules with a recipe; its seeds and scales are buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from octavo import Recipe
from octavo.unsaid import UNSAID, Unsaid, warn_without_recipe
from octavo_torch.arrays.checks import brief, check_count, check_flag, check_module, known_backends
from octavo_torch.arrays.group_parameters import GroupParameters, PerGroup, kinds_per_group
from octavo_torch.arrays.per_group import Weights
from octavo_torch.compiler.tracing import register_constants
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.dispatch.room import Room, check_room
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.probe import Probe
from octavo_torch.scaling.quantized_parameters import recipe_of_parameters
from octavo_torch.scaling.saved_state import explain_keys
from octavo_torch.scaling.seeds import SeedCounter, check_base_seed, seed_tensor
from octavo_torch.scaling.unused_amax import UnusedAmax
from octavo_torch.wgrad.main_grad import MainGrad, check_mode
from octavo_torch.wgrad.postponed import DelayedWgrad


@dataclass(frozen=True, slots=True)
class ModuleOptions:
    """The arguments that all modules with a recipe share; GroupedLinear describes them."""

    recipe: Recipe | str | Unsaid | None
    backend: str | Sequence[str] | None
    seed: int | None
    main_grad: MainGrad | None
    per_group_parameters: PerGroup
    delay_wgrad: bool
    room: Room | None = None

    def check(self) -> None:
        """Raises ValueError for options of a wrong kind; `known_backends` checks `backend`."""
        check_base_seed(self.seed)
        if self.main_grad is not None:
            check_mode(self.main_grad)
        kinds_per_group(self.per_group_parameters)
        check_flag("delay_wgrad", self.delay_wgrad)
        check_room(self.room)


class RecipeModule(GroupParameters):
    """Groups, a recipe, and the recipe's state in buffers, which a state dict holds as plain tensors:

    seed_base, seed_counter   int64 scalars, present for stochastic recipes. The counter advances in backward, when
                              gradients are rounded, so activation checkpointing changes no bit
    amax_history, encode_scale   float32, present for delayed scaling: a DelayedState's tensors, stacked where a module
                              has the states of several layers. Forward and backward in training mode record;
                              `update_scales()` after a step computes the next scales. Casting the module leaves them
                              float32, and they are after loading a state dict of any dtype

    `to_empty` of a module on the meta device gives them their values from before the first step.
    """

    recipe: Recipe
    seed_base: Tensor
    seed_counter: Tensor
    amax_history: Tensor
    encode_scale: Tensor
    main_grad: MainGrad | None = None
    delayed_wgrad: DelayedWgrad | None = None
    room: Room | None = None
    _fp32_buffers: ClassVar[tuple[str, ...]] = ("amax_history", "encode_scale")
    """The buffers that stay float32, bit for bit, when the module is cast."""
    probes: tuple[Probe, ...] = ()
    """One per layer while an observer counts; otherwise empty."""
    _unused_amax: UnusedAmax | None = None
    weights_as_codes: bool = False
    """True for a module created inside of `quantized_parameters`: weights become codes once they are initialized."""

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
        # not super(): for a class that also derives from one of torch's, as Linear does, that is torch's constructor
        nn.Module.__init__(self)
        for name, value in sides.items():
            check_count(name, value)
            setattr(self, name, value)
        options.check()
        self.per_group_parameters = kinds_per_group(options.per_group_parameters)
        self.delayed_wgrad = DelayedWgrad() if options.delay_wgrad else None
        register_constants()
        self.main_grad, self.room = options.main_grad, options.room
        recipe_of_codes = recipe_of_parameters()
        if options.recipe is UNSAID and recipe_of_codes is None:
            warn_without_recipe(self)
        self.recipe = recipe_of(recipe_of_codes if isinstance(options.recipe, Unsaid) else options.recipe)
        self.weights_as_codes = recipe_of_codes is not None and self.recipe == recipe_of_codes
        # a recipe's properties are Python calls, too slow for every forward
        self._stochastic, self._stateful = self.recipe.stochastic, self.recipe.stateful
        self.backend = known_backends(options.backend)
        self._seed = options.seed
        if self._stochastic:
            self.register_buffer("seed_base", torch.empty((), dtype=torch.int64, device=device))
            self.register_buffer("seed_counter", torch.empty((), dtype=torch.int64, device=device))
        if self._stateful:
            state = DelayedState.create(self.recipe, sides["num_groups"], device)  # type: ignore[arg-type]
            for name, buffer in (("amax_history", state.history), ("encode_scale", state.scale)):
                self.register_buffer(name, buffer.expand(*layers, *buffer.shape).clone())
            self._unused_amax = UnusedAmax()

    def reset_buffers(self) -> None:
        """Set the buffers to their values before the first step."""
        with torch.no_grad():
            if self._stochastic:
                base = seed_tensor(self._seed, self.seed_base.device)
                if base is None:
                    self.seed_base.random_()
                else:
                    self.seed_base.copy_(base)
                self.seed_counter.zero_()
            if self._stateful:
                self.amax_history.zero_()
                self.encode_scale.fill_(1.0)

    def start_buffers(self) -> None:
        """Give every buffer its first value after `to_empty`, which leaves memory uninitialized: a checkpoint that
        holds parameters alone would not write the scales."""
        self.reset_buffers()

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
        """The part of `extra_repr` for rarely used options: those that are on."""
        kinds = sorted(self.per_group_parameters)
        parted = f", per_group_parameters={True if len(kinds) == 2 else set(kinds)}" if kinds else ""
        parted += ", delay_wgrad=True" if self.delayed_wgrad is not None else ""
        return parted + ("" if self.room is None else f", room={self.room}")

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
        group = self.amax_group(process_group)
        for state in self.delayed_states:
            state.update(group)

    def amax_group(self, process_group: ProcessGroup | None) -> ProcessGroup | None:
        """The group over which `update_scales(process_group)` reduces amax. Raises ValueError for one that it refuses,
        which it does before anything is changed; where there are no scales, it refuses none."""
        return process_group if process_group is None or not self.recipe.stateful else self._replicas(process_group)

    def _replicas(self, process_group: ProcessGroup) -> ProcessGroup | None:
        """`amax_group` of a layer with scales. One whose experts are spread over ranks looks at who has the same."""
        return process_group

    def notice_unused_amax(self, weight: Weights) -> None:
        """Called by a forward that records: warns where step after step records and no scale is ever computed."""
        if self._unused_amax is not None:
            self._unused_amax.recorded(self, weight if isinstance(weight, Tensor) else weight[0])

    def __setattr__(self, name: str, value: object) -> None:
        if name == "recipe" and "recipe" in self.__dict__ and value != self.recipe:
            raise AttributeError(
                f"recipe is {self.recipe.kind} and cannot be set to {brief(value)}: the module's buffers belong to it; "
                "octavo_torch.convert(module, recipe) gives the module another one"
            )
        super().__setattr__(name, value)  # type: ignore[arg-type]  # torch's stub knows of no plain attributes

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        for name in self._fp32_buffers:
            loaded = self._buffers.get(name)
            # with assign=True this is the checkpoint's own tensor, in whatever dtype it was saved
            if loaded is not None and loaded.dtype is not torch.float32:
                self._buffers[name] = loaded.to(torch.float32)
        explain_keys(self._buffers, self.recipe, state_dict, prefix, *rest[2:4])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        wide = {name: self._buffers[name] for name in self._fp32_buffers if name in self._buffers}
        meta = [name for name, buffer in self._buffers.items() if buffer is not None and buffer.is_meta]
        super()._apply(fn, recurse)
        if meta and not any(cast(Tensor, self._buffers[name]).is_meta for name in meta):
            self.start_buffers()
        for name, before in wide.items():
            after = self._buffers[name]
            # module.bfloat16() is meant for the parameters: these buffers are fp32 by definition
            if before is not None and after is not None and after.dtype is not before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


def update_scales(module: nn.Module, process_group: ProcessGroup | None = None) -> None:
    """Call `update_scales` of every module with a recipe in `module`; do this after each optimizer step.

    Nothing is changed where one of them refuses `process_group`.
    """
    check_module(module)
    layers = [layer for layer in module.modules() if isinstance(layer, RecipeModule)]
    for layer in layers:
        layer.amax_group(process_group)
    for layer in layers:
        layer.update_scales(process_group)
