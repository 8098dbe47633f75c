"""Rows of a grouped linear layer and tokens of a MoE layer in random batches: each keeps the bits that it has at home.

Batches differ in their number of rows, which decides the kernels' tiles, in group sizes, tails and choices, and in what
the other rows are, outliers among them.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch
from torch import Tensor

import octavo
import octavo_torch

RECIPES = ("bf16", "fp8-row", "fp8-block", "mxfp8", "mxfp8-folded")
GROUPS, CHOICES = 6, 3
SIDES = {"cpu": ((144, 272, 96), (80, 128, 64)), "cuda": ((1024, 768, 512), (272, 144, 96), (2048, 4096, 256))}
"""K, N and the hidden features of the MoE layer's experts."""
MOST = {"cpu": 300, "cuda": 6000}
HOME = 64
"""Rows, or tokens, that are looked for in every batch."""


class Rows:
    """A layer and the batch in which its rows are at home."""

    def __init__(self, recipe: octavo.Recipe, device: str, sides: tuple[int, int, int]) -> None:
        k, n, _ = sides
        self.recipe, self.device = recipe, device
        self.x = _drawn(device, HOME, k)
        self.group = torch.randint(GROUPS, (HOME,), device=device)
        self.w = _drawn(device, GROUPS, n, k) * k**-0.5
        self.expected = self._y(self.x, self.group)

    def _y(self, x: Tensor, group: Tensor, tail: int = 0) -> Tensor:
        """y in the order of `x`, whose rows are sorted by group and followed by a tail."""
        order = torch.argsort(group + torch.rand(len(group), device=self.device), stable=True)
        sizes = torch.bincount(group, minlength=GROUPS)
        rows = torch.cat((x[order], _drawn(self.device, tail, x.shape[1])))
        y = octavo_torch.grouped_linear(rows, self.w, sizes, recipe=self.recipe, backend="torch-native")
        return torch.empty_like(y[: len(order)]).index_copy_(0, order, y[: len(order)])

    def differs(self, rows: int) -> bool:
        """Whether a row of y has other bits among `rows` others."""
        x = torch.cat((self.x, _drawn(self.device, rows, self.x.shape[1])))
        chosen = torch.randint(GROUPS, (rows,), device=self.device) // (1 + torch.randint(3, (), device=self.device))
        y = self._y(x, torch.cat((self.group, chosen)), tail=int(torch.randint(50, ())))
        return _other_bits(y[:HOME], self.expected)


class Tokens:
    """A MoE layer and the batch in which its tokens are at home."""

    def __init__(self, recipe: octavo.Recipe, device: str, sides: tuple[int, int, int]) -> None:
        k, _, hidden = sides
        self.recipe, self.device = recipe, device
        self.x, (self.choices, self.weights) = _drawn(device, HOME, k), _routed(HOME, device)
        self.w1 = _drawn(device, GROUPS, 2 * hidden, k) * k**-0.5
        self.w2 = _drawn(device, GROUPS, k, hidden) * hidden**-0.5
        self.expected = self._y(self.x, self.choices, self.weights)

    def _y(self, x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        return octavo_torch.moe_mlp(x, choices, weights, self.w1, self.w2, recipe=self.recipe, backend="torch-native")

    def differs(self, rows: int) -> bool:
        """Whether a token of y has other bits among `rows` others."""
        order = torch.randperm(HOME + rows, device=self.device)
        choices, weights = _routed(rows, self.device)
        x = torch.cat((self.x, _drawn(self.device, rows, self.x.shape[1])))
        y = self._y(x[order], torch.cat((self.choices, choices))[order], torch.cat((self.weights, weights))[order])
        return _other_bits(torch.empty_like(y).index_copy_(0, order, y)[:HOME], self.expected)


def _drawn(device: str, *shape: int) -> Tensor:
    """bf16 values, some of them far out."""
    values = torch.randn(shape, device=device)
    return torch.where(torch.rand(shape, device=device) < 0.01, 100 * values, values).bfloat16()


def _routed(tokens: int, device: str) -> tuple[Tensor, Tensor]:
    weights, choices = torch.randn(tokens, GROUPS, device=device).softmax(-1).topk(CHOICES, -1)
    return choices, weights


def _other_bits(ours: Tensor, theirs: Tensor) -> bool:
    return not torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@torch.no_grad()
def measure(count: int | None, device: str = "cpu") -> dict[str, Any]:
    """Batches with other bits, of `count` (None: 1 000) for each recipe and layer."""
    batches, seed = count or 1000, secrets.randbits(31)
    torch.manual_seed(seed)
    rows = []
    for name in RECIPES:
        for kind in (Rows, Tokens):
            found = []
            for sides in SIDES[device]:
                layer = kind(octavo.recipe(name), device, sides)
                found += [
                    layer.differs(int(MOST[device] ** float(torch.rand(()))))
                    for _ in range(-(-batches // len(SIDES[device])))
                ]
            rows.append({"layer": kind.__name__, "recipe": name, "batches": len(found), "different": sum(found)})
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seed": seed,
        "sides": [list(sides) for sides in SIDES[device]],
        "most_rows": MOST[device],
        "batches": batches,
        "layers": len(rows),
        "rows": rows,
        "faults": sum(row["different"] for row in rows),
    }
