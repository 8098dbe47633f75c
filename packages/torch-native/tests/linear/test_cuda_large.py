"""Layers on the GPU whose operands or results have more than 2^31 elements, or very many groups or panels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cuda_device import MARKS
from torch import Tensor

import octavo
from octavo_torch import check_errors, grouped_linear, moe_mlp

GB = 1 << 30
_MEMORY = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
pytestmark = [*MARKS, pytest.mark.skipif(_MEMORY < 70 * GB, reason="needs 70 GB of device memory")]

RECIPES = ["bf16", "fp8-current", "fp8-block", "mxfp8"]
LONG = (1 << 31) // 7168 + 2000
"""Rows of 7168 columns."""


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """To the other processes of the suite; and sizes that fit have set no flag."""
    yield
    check_errors()
    torch.cuda.empty_cache()


def _normal(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_()


def _step(x: Tensor, w: Tensor, sizes: Tensor, dy: Tensor, recipe: str) -> tuple[Tensor, ...]:
    """y, dx and dw."""
    x, w = (leaf.detach().requires_grad_() for leaf in (x, w))
    y = grouped_linear(x, w, sizes, recipe=recipe, backend="torch-native")
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


def _assert_the_last_group_is_alone(x: Tensor, w: Tensor, sizes: Tensor, recipe: str) -> None:
    """y, dx and dw of the last group are those of a call with that group alone."""
    dy = _normal(x.shape[0], w.shape[1])
    many = _step(x, w, sizes, dy, recipe)
    first, last = int(sizes[:-1].sum()), int(sizes[-1])
    rows = slice(first, first + last)
    alone = _step(x[rows], w[-1:], sizes[-1:], dy[rows], recipe)
    for value, expected in zip((many[0][rows], many[1][rows], many[2][-1:]), alone, strict=True):
        assert torch.equal(value.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("rows", "k", "n"), [(LONG, 7168, 128), (LONG, 128, 7168), (9_000_000, 128, 128)])
def test_many_rows(rows: int, k: int, n: int, recipe: str, rng: np.random.Generator) -> None:
    """x and dx, or y and dy, of more than 2^31 elements; more panels of rows than a grid's second axis has places."""
    sizes = torch.tensor([5, rows - 805, 0, 700], device="cuda")
    _assert_the_last_group_is_alone(_normal(rows, k), _normal(4, n, k), sizes, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_many_weights(recipe: str, rng: np.random.Generator) -> None:
    """w and dw of more than 2^31 elements."""
    sizes = torch.zeros(80, dtype=torch.int64, device="cuda")
    sizes[0], sizes[-1] = 300, 700
    _assert_the_last_group_is_alone(_normal(1000, 6656), _normal(80, 4096, 6656), sizes, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_many_groups(recipe: str, rng: np.random.Generator) -> None:
    """5000 groups of up to eight rows, many of them empty."""
    sizes = torch.randint(0, 9, (5000,), device="cuda")
    sizes[-1] = 7
    rows = int(sizes.sum())
    _assert_the_last_group_is_alone(_normal(rows, 128), _normal(5000, 256, 128), sizes, recipe)


@pytest.mark.parametrize("form", ["standard", "lean", "recompute", "keep_all"])
@pytest.mark.parametrize(("tokens", "k", "f"), [(40_000, 7168, 64), (20_000, 128, 7168)])
def test_a_moe_layer_with_many_rows(tokens: int, k: int, f: int, form: str, rng: np.random.Generator) -> None:
    """Choices' rows, or fc1's result, of more than 2^31 elements: y and dx of the last tokens are those of a call with
    these alone."""
    experts, choices_each, last = 8, 8, 1000
    w1, w2 = _normal(experts, 2 * f, k) / k**0.5, _normal(experts, k, f) / f**0.5
    x, dy = _normal(tokens, k), _normal(tokens, k)
    choices = torch.randint(0, experts, (tokens, choices_each), device="cuda")
    weights = torch.rand(tokens, choices_each, device="cuda")

    def step(rows: slice) -> tuple[Tensor, Tensor]:
        leaf = x[rows].detach().requires_grad_()
        recipe = octavo.BlockScaling()
        y = moe_mlp(leaf, choices[rows], weights[rows], w1, w2, recipe=recipe, form=form, backend="torch-native")
        (dx,) = torch.autograd.grad(y, leaf, dy[rows])
        return y.detach(), dx

    many, alone = step(slice(None)), step(slice(tokens - last, tokens))
    for value, expected in zip(many, alone, strict=True):
        assert torch.equal(value[-last:].view(torch.int16), expected.view(torch.int16))
