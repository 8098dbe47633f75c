"""out= and grad_input=: the caller's memory is written where it lies, in any strides, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_registry
from octavo import MXFP8, BlockScaling, Recipe
from octavo_torch import Activation, GroupedLinear, GroupedMLP, Sequential, grouped_linear, grouped_mlp

SIZES = torch.tensor([20, 0, 40])
M, K, F, N, G = 70, 32, 24, 16, len(SIZES)
RECIPES: tuple[Recipe | None, ...] = (
    None,
    MXFP8(),
    BlockScaling(output_dtype="float32"),
    BlockScaling(output_dtype="float16"),
)


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    """Whatever else is installed: other backends have tests of their own."""
    with octavo_registry.prefer("torch-reference"):
        yield


def between_columns(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    memory = torch.full((rows + 2, columns + 9), 5.0, dtype=dtype)
    return memory, memory[1 : rows + 1, 8 : columns + 8]


def transposed(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    memory = torch.full((columns, rows), 5.0, dtype=dtype)
    return memory, memory.T


def every_other(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    memory = torch.full((rows, 2 * columns), 5.0, dtype=dtype)
    return memory, memory[:, ::2]


def linear(x: Tensor, w: Tensor, recipe: Recipe | None, **rest: Any) -> Tensor:
    return grouped_linear(x, w, SIZES, recipe=recipe, **rest)


def mlp(x: Tensor, w: Tensor, recipe: Recipe | None, **rest: Any) -> Tensor:
    return grouped_mlp(x, w, w[:, :, : N // 2].contiguous().detach(), SIZES, recipe=recipe, **rest)


@pytest.mark.parametrize("place", [between_columns, transposed, every_other])
@pytest.mark.parametrize("call", [linear, mlp])
def test_strided_buffers(call: Callable[..., Tensor], place: Any, rng: np.random.Generator) -> None:
    """The bits of a call without, nothing beside the buffer is touched, and it serves the next call (faults.md 58)."""
    for recipe in RECIPES:
        x, w = torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(G, N, K).bfloat16().requires_grad_()
        plain = call(x, w, recipe)
        dy = torch.randn_like(plain)
        expected = torch.autograd.grad(plain, (x, w), dy)
        memory, out = place(M, N, plain.dtype)
        behind, grad_input = place(M, K, x.dtype)
        for _ in range(2):
            out.fill_(torch.nan)
            grad_input.fill_(torch.nan)
            y = call(x, w, recipe, out=out, grad_input=grad_input)
            assert y.data_ptr() == out.data_ptr()
            assert not out.requires_grad
            grads = torch.autograd.grad(y, (x, w), dy)
            for ours, theirs in zip((out, y, grad_input, *grads), (plain, plain, expected[0], *expected), strict=True):
                assert torch.equal(ours, theirs)
        with torch.no_grad():
            out.fill_(torch.nan)
            before = out._version
            assert torch.equal(call(x, w, recipe, out=out), plain)
            assert out._version > before
        out.fill_(5.0)
        grad_input.fill_(5.0)
        assert bool((memory == 5.0).all())
        assert bool((behind == 5.0).all())


def test_modules_pass_buffers_on(rng: np.random.Generator) -> None:
    """GroupedLinear, GroupedMLP, and both ends of a row of operations, fused or not."""
    x = torch.randn(M, K).bfloat16().requires_grad_()
    first, last = GroupedLinear(G, K, 2 * F, dtype=torch.bfloat16), GroupedLinear(G, F, K, dtype=torch.bfloat16)
    for module in (
        GroupedLinear(G, K, K, dtype=torch.bfloat16),
        GroupedMLP(G, K, F, dtype=torch.bfloat16),
        Sequential(first, Activation(), last),
        Sequential(GroupedLinear(G, K, K, dtype=torch.bfloat16), torch.nn.Identity(), first, Activation(), last),
    ):
        out, grad_input = torch.empty(M, K).bfloat16(), torch.empty(M, K).bfloat16()
        y = module(x, SIZES, out=out, grad_input=grad_input)
        assert y.data_ptr() == out.data_ptr()
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, grad_input)
        assert torch.equal(y, module(x, SIZES))
    with pytest.raises(ValueError, match="out was given and the last operation is not a grouped layer"):
        Sequential(first, Activation())(x, SIZES, out=torch.empty(M, F))


def test_buffers_that_would_be_wrong_are_refused(rng: np.random.Generator) -> None:
    """Elements that share memory, memory that the call reads, shapes, dtypes, gradients, and y's own gradient."""
    memory = torch.randn(M, 2 * K).bfloat16()
    x, w = memory[:, :K], torch.randn(G, K, K).bfloat16()
    beside = memory[:, K:]
    wrong: list[tuple[Any, str]] = [
        (torch.empty(K).bfloat16().expand(M, K), r"strides \[0, 1\], where elements share memory"),
        (torch.empty(M + K).bfloat16().as_strided((M, K), (1, 1)), r"strides \[1, 1\], where elements share memory"),
        (x, "shares memory with x, which the call reads"),
        (memory.view(2 * M, K)[:M], "shares memory with x"),
        (w.view(-1)[: 3 * K * K].view(3 * K, K)[:M], "shares memory with weight"),
        (torch.empty(M, K + 1).bfloat16(), r"is bfloat16 \[70, 33\] on cpu; give bfloat16 \[70, 32\] on cpu"),
        (torch.empty(M, K), "is float32"),
        (torch.empty(M, K).bfloat16().requires_grad_(), "requires a gradient"),
        ([1.0], r"is a list; give bfloat16 \[70, 32\]"),
    ]
    for name in ("out", "grad_input"):
        for buffer, message in wrong:
            with pytest.raises(ValueError, match=f"{name} .*{message}"):
                grouped_linear(x, w, SIZES, recipe=None, **{name: buffer})
            with pytest.raises(ValueError, match=f"{name} .*{message.replace('weight', 'w1')}"):
                grouped_mlp(x, w, w[:, :, : K // 2], SIZES, recipe=None, **{name: buffer})
    # columns beside those that are read
    assert torch.equal(grouped_linear(x, w, SIZES, recipe=None, out=beside), grouped_linear(x, w, SIZES, recipe=None))
    grad_input = torch.empty(M, K).bfloat16()
    with pytest.raises(ValueError, match="grad_input shares memory with out"):
        grouped_linear(x, w, SIZES, recipe=None, out=grad_input, grad_input=grad_input)
    leaf = x.clone().requires_grad_()
    y = grouped_linear(leaf, w, SIZES, recipe=None, grad_input=grad_input)
    for dy in (grad_input, grad_input.view(-1).view(M, K)):  # itself, and another tensor of the same memory
        with pytest.raises(ValueError, match="grad_input shares memory with y's gradient"):
            y.backward(dy, retain_graph=True)
