"""What the CUDA tests share: when they are skipped, layers and their twins, steps, and how bits are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_native
from octavo import Recipe
from octavo_conformance.problems.inputs import draw_sizes
from octavo_torch import GroupedLinear

M, K, N, G = 400, 272, 208, 6


def _reason() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the kernels are for sm_90a and this device is another"
    return None if octavo_native.HAS_CUDA else "this octavo-native was built without CUDA kernels"


MARKS = [
    pytest.mark.skipif(_reason() is not None, reason=_reason() or ""),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def splits(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Sizes of G groups of at most M rows: drawn ones with an empty group; at first and now and then none at all, and
    after that all in one group."""
    made = [draw_sizes(rng, G, M).tolist() for _ in range(count)]
    for number in range(0, count, 25):
        made[number] = [0] * G
        made[number + 1 : number + 2] = [[M if group == number % G else 0 for group in range(G)]]
    return made[:count]


def inputs(split: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """x and dy with NaN past the sum, dy times a loss scale, and sizes."""
    x, dy = torch.randn(M, K, device="cuda"), torch.randn(M, N, device="cuda") * 2.0 ** float(torch.randint(9, ()))
    x[sum(split) :], dy[sum(split) :] = torch.nan, torch.nan
    return x.bfloat16(), dy.bfloat16(), torch.tensor(split, device="cuda", dtype=torch.int32)


def pair(recipe: Recipe, *, main_grad: bool = False) -> tuple[GroupedLinear, GroupedLinear]:
    """A layer for graphs, whose backend is chosen by the registry, and its twin for eager calls."""
    made = []
    for backend in (None, "torch-native"):
        layer = GroupedLinear(
            G, K, N, bias=True, recipe=recipe, device="cuda", dtype=torch.bfloat16, backend=backend, seed=1,
            main_grad="accumulate" if main_grad else None,
        )  # fmt: skip
        if main_grad:
            layer.weight.main_grad = torch.zeros(G, N, K, device="cuda")
        made.append(layer)
    follow(*made)
    return made[0], made[1]


@torch.no_grad()
def follow(first: GroupedLinear, second: GroupedLinear) -> None:
    """Give the second layer the first one's parameters, buffers and main_grad."""
    for ours, theirs in zip(state(first), state(second), strict=True):
        theirs.copy_(ours)


@torch.no_grad()
def stir(layer: GroupedLinear) -> None:
    """New parameters and another main_grad, in place."""
    layer.weight.normal_()
    layer.bias.normal_()
    if layer.main_grad is not None:
        layer.weight.main_grad.normal_()


def state(layer: GroupedLinear) -> list[Tensor]:
    """Everything that a step may change in place."""
    main_grad = [] if layer.main_grad is None else [layer.weight.main_grad]
    return [*layer.parameters(), *layer.buffers(), *main_grad]


def step_of(layer: GroupedLinear) -> Step:
    """y, dx, dw (or its dummy) and db from x, dy and sizes; delayed scaling ends with the next scales."""

    def step(x: Tensor, dy: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = layer(leaf, sizes)
        grads = torch.autograd.grad(y, (leaf, layer.weight, layer.bias), dy)
        layer.update_scales()
        return y, *grads

    return step


def train(layer: GroupedLinear, x: Tensor, dy: Tensor, sizes: Tensor) -> list[Tensor]:
    """y, dx and every gradient of a call with autograd as a training loop has it."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(leaf, sizes)
    y.backward(dy)
    layer.update_scales()
    return [value.clone() for value in (y, leaf.grad, layer.weight.grad, layer.bias.grad)]


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Differences:
    """Counts of different bytes, on the device: nothing is read before `none`."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Tensor]] = []

    def add(self, what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        """Compare tensors one by one."""
        assert len(ours) == len(theirs)
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            self._found.append((f"{what}: tensor {number}", (raw(a) != raw(b)).sum()))

    def none(self) -> None:
        """Fail with the first comparison that found one."""
        counts = torch.stack([count for _, count in self._found]).tolist()
        assert counts
        for (what, _), count in zip(self._found, counts, strict=True):
            assert not count, f"{what} differs in {count} bytes"
