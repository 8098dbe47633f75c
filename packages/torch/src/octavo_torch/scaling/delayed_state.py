"""Delayed scaling's state: amax histories and encode scales of one layer's operands, changed in place.

The rules are those of docs/numerics (after Micikevicius et al., arXiv 2209.05433, section 4): record during a step, as
often as there are microbatches, then `update` once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo import DelayedScaling
from octavo.formats import FORMAT_MAX
from octavo.quantizer import Operand
from octavo_torch.arithmetic.casts import FLT_MAX
from octavo_torch.arithmetic.scales import divide
from octavo_torch.arrays.checks import check_count, check_place, told
from octavo_torch.scaling.fused_update import update_of

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
    """History [H, G] and scale [G] at the end of a step; a group whose amax is 0 is left as it is.

    maximum        largest value of the payload format
    reduced_amax   [G], this step's amax over all ranks, where not 0 in place of slot 0
    """
    last = history[0]
    if reduced_amax is not None:
        last = torch.where((reduced_amax != 0) & ~reduced_amax.isnan(), reduced_amax, last)
    seen = last != 0
    amax = torch.maximum(last, history[1:].amax(0)) if algorithm == "max" else last
    rolled = torch.cat((torch.zeros_like(history[:1]), history[2:], last[None]))
    usable = seen & amax.isfinite() & (amax > 0)
    # ldexp rounds to fp32 once: margins near 64 leave no subnormal for the formats' maxima
    made = divide(math.ldexp(maximum, -margin), amax).clamp_(max=FLT_MAX)
    return torch.where(seen, rolled, history), torch.where(usable, made, scale)


class DelayedState:
    """Histories and scales of x, w and dy of one layer with DelayedScaling.

    history  [3, H, G] float32   per operand in the order x, w, dy: slot 0 collects this step's running amax
    scale    [3, G] float32      encode scales that the running step uses

    `grouped_linear(..., state=state)` records x's and w's amax in forward and dy's in backward. Recording keeps the
    maximum, so microbatches and activation recomputation may record as often as they like. `update()` ends the step.
    Both tensors may be buffers of a module: every change is in place.
    """

    __slots__ = ("history", "recipe", "scale")

    def __init__(self, recipe: DelayedScaling, history: Tensor, scale: Tensor) -> None:
        slots, groups = history.shape[1], history.shape[2]
        if slots != recipe.history or tuple(scale.shape) != (3, groups) or history.shape[0] != 3:
            raise ValueError(
                f"history has shape {list(history.shape)} and scale {list(scale.shape)}; "
                f"give [3, {recipe.history}, G] and [3, G]"
            )
        self.recipe, self.history, self.scale = recipe, history, scale

    @classmethod
    def create(cls, recipe: DelayedScaling, num_groups: int, device: torch.device | str | None = None) -> DelayedState:
        """The state before the first step: history 0, scale 1. ValueError for arguments that do not fit."""
        if not isinstance(recipe, DelayedScaling):
            raise ValueError(f"recipe is {told(recipe)}; give DelayedScaling, the one that keeps a state")
        check_count("num_groups", num_groups)
        check_place(device)
        history = torch.zeros(3, recipe.history, num_groups, dtype=torch.float32, device=device)
        return cls(recipe, history, torch.ones(3, num_groups, dtype=torch.float32, device=device))

    @property
    def groups(self) -> int:
        """Number of groups."""
        return int(self.scale.shape[1])

    def encode_scale(self, operand: Operand) -> Tensor:
        """The [G] encode scales of `operand`."""
        return self.scale[OPERANDS.index(operand)]

    @torch.no_grad()
    def record(self, operand: Operand, amax: Tensor) -> None:
        """Raise this step's running amax of `operand` to `amax` [G] fp32; NaN counts as not recorded."""
        slot = self.history[OPERANDS.index(operand), 0]
        # NaN loses against any number
        torch.fmax(slot, amax, out=slot)

    @torch.no_grad()
    def update(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        """End the step: make the next scales from what was recorded since the last update.

        process_group   reduce amax over its ranks first (MAX); every rank calls, ranks without tokens too
        """
        reduced = None
        if process_group is not None:
            reduced = self.history[:, 0].clone()
            torch.distributed.all_reduce(reduced, torch.distributed.ReduceOp.MAX, group=process_group)
        recipe = self.recipe
        at_once = update_of(recipe, self.history, self.scale)
        if at_once is not None:
            maxima = [math.ldexp(self._maximum(operand), -recipe.margin) for operand in OPERANDS]
            most_recent = recipe.algorithm == "most_recent"
            at_once(self.history, self.scale, maxima, most_recent=most_recent, reduced=reduced)
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


def _flatten(state: DelayedState) -> tuple[list[Tensor], DelayedScaling]:
    return [state.history, state.scale], state.recipe


def _unflatten(tensors: Iterable[Any], recipe: Any) -> DelayedState:
    state = object.__new__(DelayedState)  # tree_map may hold anything here, so no shape is checked
    state.recipe = recipe
    state.history, state.scale = tensors
    return state


pytree.register_pytree_node(DelayedState, _flatten, _unflatten, serialized_type_name="octavo_torch.DelayedState")
