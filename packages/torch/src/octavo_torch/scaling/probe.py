"""Probe: counts what the quantizers of one layer do to x, w and dy in its calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo import Recipe
from octavo.health import FIELDS
from octavo.quantizer import Operand
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.sizes import Sizes, group_sizes_of
from octavo_torch.scaling.delayed_state import OPERANDS, DelayedState

_AMAX = FIELDS.index("amax")


@dataclass(eq=False)
class Probe:
    """What one layer's calls of a step have counted.

    recipe   of the layer, whose quantizers are watched
    rows     of each group that are looked at, in a part of their columns, see tensor_stats; 0: all
    totals   float64 [3, 8, G], operands in the order x, w, dy: sums over the calls, and the largest amax. Changed in
             place, so that a captured graph and the host see one tensor
    """

    recipe: Recipe
    rows: int
    totals: Tensor

    @classmethod
    def create(cls, recipe: Recipe, groups: int, rows: int, device: torch.device) -> Probe:
        """A probe that has counted nothing."""
        return cls(recipe, rows, torch.zeros(len(OPERANDS), len(FIELDS), groups, dtype=torch.float64, device=device))

    def begin(self, recipe: Recipe) -> None:
        """Count what the quantizers of `recipe` do; start anew if those of another recipe were counted before."""
        if self.recipe != recipe:
            self.recipe = recipe
            self.totals.zero_()

    @torch.no_grad()
    def record(self, operand: Operand, value: Tensor, sizes: Sizes | None, state: DelayedState | None) -> None:
        """Count `value`, rows [M, K] with their `sizes` or matrices [G, N, K] with None; no value is read back.

        state   delayed scaling's: its scales quantize. Stochastic rounding is counted with the bits of seed 0
        """
        spec = self.recipe.quantizer(operand)
        direction, text, seed, scale = "rowwise", "", None, None
        if spec is not None:
            text = operators.quantizer_text(spec)
            direction = "rowwise" if spec.shares_codes else spec.directions[0]
            seed = torch.zeros((), dtype=torch.int64, device=value.device) if spec.stochastic else None
            scale = None if state is None else state.encode_scale(operand)
        own = None if sizes is None else group_sizes_of(sizes)
        counted = operators.stats_of(value.detach(), own, text, direction, seed, operand, scale, self.rows)
        totals = self.totals[OPERANDS.index(operand)]
        amax = torch.maximum(totals[_AMAX], counted[_AMAX])
        totals.add_(counted)
        totals[_AMAX].copy_(amax)


def _flatten(probe: Probe) -> tuple[list[Tensor], tuple[Recipe, int]]:
    return [probe.totals], (probe.recipe, probe.rows)


def _unflatten(tensors: Iterable[Tensor], context: tuple[Recipe, int]) -> Probe:
    (totals,) = tensors
    return Probe(*context, totals)


pytree.register_pytree_node(Probe, _flatten, _unflatten, serialized_type_name="octavo_torch.Probe")
