"""permute and unpermute: rows by expert and back, exact, stable, without a read back, in one compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from float64_sums import assert_sums
from torch import Tensor

from octavo_torch import Routing, permute, unpermute
from octavo_torch.compiler.host_reads import watch_host_reads

T, C, K, G = 23, 3, 20, 5


def choices(rng: np.random.Generator) -> Tensor:
    """Distinct experts a token; some choices, and one whole token, are routed nowhere, and expert 1 gets none."""
    index = np.stack([rng.permutation([0, 2, 3, 4])[:C] for _ in range(T)])
    index[rng.random(index.shape) < 0.2] = rng.choice([-1, G, 1000])
    index[4] = -1
    return torch.from_numpy(index)


def test_rows_stand_by_expert_in_the_order_of_choices(rng: np.random.Generator) -> None:
    """Every routed choice has one row, stable within its group; no other choice costs one (faults.md 18, 61)."""
    index, x = choices(rng), torch.randn(T, K)
    rows, sizes, routing = permute(x, index, G)
    flat = index.reshape(-1).tolist()
    expected = [choice for g in range(G) for choice, expert in enumerate(flat) if expert == g]
    assert routing.order[: len(expected)].tolist() == expected
    assert sizes.tolist() == [flat.count(g) for g in range(G)]
    assert sizes[1] == 0
    assert torch.equal(rows[: len(expected)], x[[choice // C for choice in expected]])
    assert torch.equal(rows[len(expected) :], torch.zeros(T * C - len(expected), K))
    assert torch.equal(routing.order[routing.position.reshape(-1)], torch.arange(T * C))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_and_gradients(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """y and all gradients are fp32 sums in the order of choices, rounded once; NaN past the sum, and as the weight of
    a choice that is routed nowhere, stays there."""
    index = choices(rng)
    x, w = torch.randn(T, K).to(dtype).requires_grad_(), torch.rand(T, C)
    w = torch.where((index >= 0) & (index < G), w, torch.nan).requires_grad_()
    rows, sizes, routing = permute(x, index, G)
    used = int(sizes.sum())
    inside = torch.arange(T * C)[:, None] < used
    y = unpermute(torch.where(inside, rows * 2, torch.nan), routing, w)
    dy = torch.randn(T, K).to(dtype)
    y.backward(dy)
    routed = (index >= 0) & (index < G)
    total, dx = torch.zeros(T, K), torch.zeros(T, K)
    for j in range(C):
        share = torch.where(routed[:, j], w[:, j].detach(), 0.0)[:, None]
        total += share * (x.detach() * 2).float()
        dx += 2 * (share * dy.float()).to(dtype).float()
    assert torch.equal(y, total.to(dtype))
    assert x.grad is not None
    assert w.grad is not None
    assert torch.equal(x.grad, dx.to(dtype))
    terms = 2 * x.detach().double() * dy.double()
    assert_sums(w.grad, torch.where(routed[:, :, None], terms[:, None], 0.0))
    assert torch.equal(y[4], torch.zeros(K, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inside_of_autocast_of_another_dtype(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Rows and gradients are those outside; torch's own cat refuses fp16 where autocast is on for bf16."""
    index, x, dy = choices(rng), torch.randn(T, K).to(dtype), torch.randn(T * C, K).to(dtype)
    found = []
    for enabled in (True, False):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            rows, _, routing = permute(leaf, index, G, backend="torch-reference")
            y = unpermute(rows, routing, torch.ones(T, C), backend="torch-reference")
            rows.backward(dy)
        found.append((rows.detach(), y.detach(), leaf.grad))
    for inside, outside in zip(*found, strict=True):
        assert inside.dtype is dtype
        assert torch.equal(inside, outside)


def test_weights_as_rows(rng: np.random.Generator) -> None:
    """Weights of choices as rows multiply like unpermute's own, and have its gradient."""
    index, w = choices(rng), torch.rand(T, C).requires_grad_()
    x, dy = torch.randn(T, K), torch.randn(T, K)
    rows, _, routing = permute(x, index, G)
    first = unpermute(rows * routing.to_rows(w)[:, None], routing)
    (dw,) = torch.autograd.grad(first, w, dy)
    second = unpermute(rows, routing, w)
    assert torch.equal(first, second)
    (again,) = torch.autograd.grad(second, w, dy)
    terms = torch.where(((index >= 0) & (index < G))[:, :, None], (x.double() * dy.double())[:, None], 0.0)
    assert_sums(dw, terms)
    assert_sums(again, terms)


def squared_and_back(index: Tensor) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """sum over the choices of w * x^2 by permute and unpermute, and without rows."""
    routed = ((index >= 0) & (index < G)).float()

    def moved(x: Tensor, w: Tensor) -> Tensor:
        rows, _, routing = permute(x, index, G)
        return unpermute(rows * rows, routing, w)

    def dense(x: Tensor, w: Tensor) -> Tensor:
        return ((w * routed)[..., None] * (x * x)[:, None]).sum(1)

    return moved, dense


def test_second_derivatives(rng: np.random.Generator) -> None:
    """Every move is linear in each operand, so derivatives of derivatives are exact where products of integers are."""
    index = choices(rng)
    drawn = [torch.from_numpy(rng.integers(-4, 5, shape)).float() for shape in ((T, K), (T, C), (T, K), (T, C))]
    x, w, dy, dw = (value.requires_grad_() for value in drawn)
    results = []
    for function in squared_and_back(index):
        dweights = torch.autograd.grad(function(x, w), w, dy, create_graph=True)[0]
        results.append(torch.autograd.grad(dweights, (x, dy), dw))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_derivatives_of_the_rows_gradient(rng: np.random.Generator) -> None:
    """The gradient of the rows is dy times the weights: its derivatives read the weights once more."""
    index = choices(rng)
    drawn = [torch.from_numpy(rng.integers(-4, 5, shape)).float() for shape in ((T, K), (T, C), (T, K), (T, K))]
    x, w, dy, v = (value.requires_grad_() for value in drawn)
    results = []
    for function in squared_and_back(index):
        dx = torch.autograd.grad(function(x, w), x, dy, create_graph=True)[0]
        results.append(torch.autograd.grad(dx, (x, w, dy), v))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_and_without_a_read(rng: np.random.Generator) -> None:
    """One full graph with the bits of eager; nothing waits for a value; the routing is a pytree."""

    def call(x: Tensor, index: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Routing]:
        rows, sizes, routing = permute(x, index, G)
        return unpermute(rows, routing, w), sizes, routing

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        inputs = torch.randn(T, K).requires_grad_(), choices(rng), torch.rand(T, C).requires_grad_()
        grads = []
        for function in (call, compiled):
            y, sizes, routing = function(*inputs)
            grads.append([y, sizes, routing.order, *torch.autograd.grad(y.sum(), (inputs[0], inputs[2]))])
        for ours, theirs in zip(*grads, strict=True):
            assert torch.equal(ours, theirs)
    with watch_host_reads() as reads:
        call(*inputs)[0].sum().backward()
    assert reads == []


def test_operators_pass_opcheck(rng: np.random.Generator) -> None:
    """Fake kernels against real metadata (faults.md 46)."""
    space, x, index = torch.ops.octavo_torch, torch.randn(T, K), choices(rng)
    rows, _, routing = permute(x, index, G)
    order, position, routed = routing.order, routing.position, routing.routed
    weights = torch.rand(T, C)
    for operator, arguments in (
        (space.route, (index, G)),
        (space.permute_rows, (x, order, position, routed, weights)),
        (space.combine_rows, (rows, position, routed, weights)),
        (space.dot_rows, (rows, x, position, routed)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    """No token at all is a size of zero everywhere."""
    x = torch.randn(tokens, K)
    rows, sizes, routing = permute(x, torch.zeros(tokens, 2, dtype=torch.int32), G)
    assert sizes.tolist() == [2 * tokens, 0, 0, 0, 0]
    assert torch.equal(unpermute(rows, routing), 2 * x)


def test_messages() -> None:
    """Errors name the argument, what was given, and what is needed."""
    x, index = torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int64)
    rows, _, routing = permute(x, index, 2)
    with pytest.raises(ValueError, match=r"x is int64 \[4, 2\]; give tokens \[T, K\]"):
        permute(index, index, 2)
    with pytest.raises(ValueError, match=r"expert_index is float32 \[4, 8\]; give integers"):
        permute(x, x, 2)
    with pytest.raises(ValueError, match=r"expert_index has shape \[3, 2\] and x \[4, 8\]"):
        permute(x, index[:3], 2)
    with pytest.raises(ValueError, match="num_groups is 0"):
        permute(x, index, 0)
    with pytest.raises(ValueError, match=r"rows is float32 \[7, 8\]; give \[8, N\]"):
        unpermute(rows[:7], routing)
    with pytest.raises(ValueError, match="routing is a Tensor; give what permute returned"):
        unpermute(rows, rows)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights is float32 \[4, 8\]; give \[4, 2\]"):
        unpermute(rows, routing, x)


def test_a_routing_of_other_tensors(rng: np.random.Generator) -> None:
    """Kernels read int64 and bool of one shape: positions in int32, as other libraries have them, gave other sums."""
    index = torch.from_numpy(rng.integers(0, G, (4, 2)))
    rows, _, routing = permute(torch.randn(4, 8), index, G)
    weights = torch.rand(4, 2)
    changes: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
        "position is int32": ("position", Tensor.int),
        "routed is int64": ("routed", Tensor.long),
        r"position is int64 \[2, 2\]": ("position", lambda given: given[:2]),
        r"routed is bool \[2, 2\]": ("routed", lambda given: given[:2]),
        "order is int32": ("order", Tensor.int),
        "position is int64 .* on meta": ("position", lambda given: given.to("meta")),
    }
    calls: list[Callable[[Routing], Tensor]] = [
        lambda given: unpermute(rows, given),
        lambda given: given.to_rows(weights),
    ]
    for said, (name, change) in changes.items():
        other = replace(routing, **{name: change(getattr(routing, name))})
        for call in calls:
            with pytest.raises(ValueError, match=f"routing's .*{said}.*; give what permute returned: int64"):
                call(other)
