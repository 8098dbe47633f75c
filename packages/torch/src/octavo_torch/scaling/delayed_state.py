"""Delayed scaling's state: amax histories and encode scales of one layer's operands, changed in place.

The rules are those of docs/numerics (after Micikevicius et al., arXiv 2209.05433, section 4): record once or more per
step (per microbatch), then `update` once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from octavo import DelayedScaling
from octavo.formats import FORMAT_MAX
from octavo.quantizer import Operand
from octavo_torch.arithmetic.casts import FLT_MAX
from octavo_torch.arithmetic.scales import divide
from octavo_torch.arrays.checks import brief, check_count, check_device
from octavo_torch.compiler.tracing import is_plain, register_tree
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.scaling.state_keeper import state_keeper

OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")


def update_delayed(
    history: Tensor,
    scale: Tensor,
    maximum: float,
    *,
    algorithm: Literal["max", "most_recent"],
    margin: int,
    reduced_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """History [H, G] and scale [G] at the end of a step; those of a group whose amax is 0 do not change.

    maximum        largest value of the payload format
    reduced_amax   [G], this step's amax over all ranks; replaces slot 0 where it is not 0
    """
    last = history[0]
    if reduced_amax is not None:
        last = torch.where((reduced_amax != 0) & ~reduced_amax.isnan(), reduced_amax, last)
    seen = last != 0
    amax = torch.maximum(last, history[1:].amax(0)) if algorithm == "max" else last
    rolled = torch.cat((torch.zeros_like(history[:1]), history[2:], last[None]))
    usable = seen & amax.isfinite() & (amax > 0)
    # ldexp rounds to fp32 once: margins near 64 leave no subnormal for the formats' maxima
    new_scale = divide(math.ldexp(maximum, -margin), amax).clamp_(max=FLT_MAX)
    return torch.where(seen, rolled, history), torch.where(usable, new_scale, scale)


class DelayedState:
    """Histories and scales of x, w and dy of one layer with DelayedScaling.

    history  [3, H, G] float32   operands in the order x, w, dy; slot 0 holds the running amax of this step
    scale    [3, G] float32      encode scales of this step

    `grouped_linear(..., state=state)` records x's and w's amax in forward and dy's in backward. Recording keeps the
    maximum, so any number of microbatches and recomputations may record. `update()` ends the step. Both tensors may be
    buffers of a module: every change is in place.
    """

    __slots__ = ("history", "recipe", "scale")

    def __init__(self, recipe: DelayedScaling, history: Tensor, scale: Tensor) -> None:
        self.recipe, self.history, self.scale = recipe, history, scale
        self.check_tensors()

    @classmethod
    def create(
        cls, recipe: DelayedScaling | str, num_groups: int, device: torch.device | str | None = None
    ) -> DelayedState:
        """The state before the first step: history 0, scale 1. Raises ValueError for arguments that do not fit."""
        named = recipe_of(recipe) if isinstance(recipe, str) else recipe
        if not isinstance(named, DelayedScaling):
            raise ValueError(f"recipe is {brief(recipe)}; give DelayedScaling, the recipe that has a state")
        recipe = named
        check_count("num_groups", num_groups)
        check_device(device)
        history = torch.zeros(3, recipe.history, num_groups, dtype=torch.float32, device=device)
        return cls(recipe, history, torch.ones(3, num_groups, dtype=torch.float32, device=device))

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., DelayedState], tuple[str, Tensor, Tensor]]:
        # torch.load(weights_only=True), which torch.export.load calls, too, knows no class of a recipe
        return _rebuilt, (self.recipe.model_dump_json(), self.history, self.scale)

    @property
    def groups(self) -> int:
        """Number of groups."""
        return int(self.scale.shape[1])

    def check_tensors(self) -> None:
        """ValueError unless the two tensors, which a caller may have replaced, are fp32 of the shapes above and on one
        device: kernels get nothing but their addresses."""
        history, scale = self.history, self.scale
        if (
            history.dtype is scale.dtype is torch.float32
            and scale.dim() == 2
            and history.shape == (3, self.recipe.history, scale.shape[1])
            and scale.shape[0] == 3
            and history.device == scale.device
        ):
            return
        raise ValueError(
            f"history is {brief(history)} on {history.device} and scale {brief(scale)} on {scale.device}; give "
            f"[3, {self.recipe.history}, G] and [3, G], both in float32, whatever a model is cast to, and on one device"
        )

    def encode_scale(self, operand: Operand) -> Tensor:
        """The encode scales of `operand`, [G]."""
        return self.scale[OPERANDS.index(operand)]

    @torch.no_grad()
    def record(self, operand: Operand, amax: Tensor) -> None:
        """Raise this step's running amax of `operand` to `amax`, fp32 [G]; NaN is ignored."""
        history = self.history[OPERANDS.index(operand)]
        keeper = state_keeper(self.recipe, self.history, self.scale) if is_plain(amax) else None
        if keeper is None or keeper.record_amax is None:
            # fmax returns the number where one of the two is NaN
            torch.fmax(history[0], amax, out=history[0])
            return
        keeper.record_amax(amax, history)
        torch.autograd.graph.increment_version(self.history)  # a kernel writes through addresses, unseen by torch

    @torch.no_grad()
    def update(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        """End the step: compute the next scales from the amax recorded since the last update.

        process_group   reduce amax over its ranks first (MAX); every rank must call, including ranks without tokens
        """
        self.check_tensors()
        reduced = None
        if process_group is not None:
            reduced = self.history[:, 0].clone()
            torch.distributed.all_reduce(reduced, torch.distributed.ReduceOp.MAX, group=process_group)
        recipe = self.recipe
        keeper = state_keeper(recipe, self.history, self.scale)
        if keeper is not None and keeper.update_scales is not None:
            maxima = [math.ldexp(self._maximum(operand), -recipe.margin) for operand in OPERANDS]
            most_recent = recipe.algorithm == "most_recent"
            keeper.update_scales(self.history, self.scale, maxima, most_recent=most_recent, reduced=reduced)
            if is_plain(self.scale):  # a kernel writes through addresses, unseen by torch
                torch.autograd.graph.increment_version((self.history, self.scale))
            return
        for index, operand in enumerate(OPERANDS):
            history, scale = update_delayed(
                self.history[index],
                self.scale[index],
                self._maximum(operand),
                algorithm=recipe.algorithm,
                margin=recipe.margin,
                reduced_amax=None if reduced is None else reduced[index],
            )
            self.history[index].copy_(history)
            self.scale[index].copy_(scale)

    def _maximum(self, operand: Operand) -> float:
        recipe = self.recipe
        return FORMAT_MAX[recipe.gradient_format if operand == "dy" else recipe.forward_format]


def _rebuilt(recipe: str, history: Tensor, scale: Tensor) -> DelayedState:
    """The inverse of DelayedState.__reduce_ex__. Raises ValueError for text that describes none."""
    return DelayedState(DelayedScaling.model_validate_json(recipe), history, scale)


torch.serialization.add_safe_globals([_rebuilt])


def _flatten(state: DelayedState) -> tuple[list[Tensor], DelayedScaling]:
    return [state.history, state.scale], state.recipe


def _unflatten(tensors: Iterable[Tensor], recipe: DelayedScaling) -> DelayedState:
    state = object.__new__(DelayedState)  # shapes are not checked: tree_map may put anything in a tensor's place
    state.recipe = recipe
    state.history, state.scale = tensors
    return state


register_tree(
    DelayedState,
    _flatten,
    _unflatten,
    ("history", "scale"),
    (DelayedScaling.model_dump_json, DelayedScaling.model_validate_json),
)
