"""ZeroGradient: zeros without memory, that are ordinary zeros to whoever reads or writes them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from octavo_torch.arrays.zero_gradient import ZeroGradient, zeros_for

G, N, K = 3, 16, 32


class LargestResult(TorchDispatchMode):
    """The bytes of the largest tensor that an operator returns inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and not value.is_meta:
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return result


class Nothing(torch.autograd.Function):
    """A gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.detach().flatten()[:1].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ZeroGradient:
        return zeros_for(ctx.saved_tensors)


def weight(**like: Any) -> nn.Parameter:
    return nn.Parameter(torch.randn(G, N, K, **like))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_backward_makes_nothing_of_the_weights_size(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """autograd keeps the zeros as .grad, hooks see it, later passes add nothing, two in one backward neither; a weight
    whose elements leave gaps gets an ordinary gradient."""
    w = weight(dtype=dtype)
    seen: list[Tensor] = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))  # type: ignore[arg-type]
    losses = [Nothing.apply(w), Nothing.apply(w), Nothing.apply(w) + Nothing.apply(w), Nothing.apply(w).sum()]
    with LargestResult() as largest:
        for loss in losses:
            loss.backward()
    assert largest.bytes <= 64 < w.numel() * w.element_size()
    assert len(seen) == 4
    grad = w.grad
    assert isinstance(grad, ZeroGradient)
    assert (grad.shape, grad.stride(), grad.dtype) == (w.shape, w.stride(), dtype)
    assert grad.untyped_storage().nbytes() == w.element_size()
    assert not grad.any()
    gaps = nn.Parameter(torch.randn(G, N, 2 * K)[..., :K])
    Nothing.apply(gaps).backward()
    assert gaps.grad is not None
    assert torch.equal(gaps.grad, torch.zeros(G, N, K))


def test_a_gradient_that_is_there_stays(rng: np.random.Generator) -> None:
    """Zeros before and after a gradient of values, in one backward or in two: the values, bit for bit."""
    values = torch.randn(G, N, K)
    values[0, 0, 0] = -0.0
    for order in ("after", "before", "at once"):
        w = weight()
        if order == "after":
            w.grad = values.clone()
            Nothing.apply(w).backward()
        elif order == "before":
            Nothing.apply(w).backward()
            (w * values).sum().backward()
        else:
            (Nothing.apply(w).sum() + (w * values).sum()).backward()
        assert w.grad is not None
        exact = w.grad.view(torch.int32) == values.view(torch.int32)
        assert bool(exact.all()) if order == "after" else torch.equal(w.grad, values)


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda p: p.grad.add_(p, alpha=0.1),  # type: ignore[union-attr]
    "scaled by NaN": lambda p: p.grad.mul_(torch.nan),  # type: ignore[union-attr]
    "data": lambda p: p.grad.data.copy_(p),  # type: ignore[union-attr]
    "detached": lambda p: p.grad.detach().fill_(3),  # type: ignore[union-attr]
    "part": lambda p: p.grad[1].fill_(3),  # type: ignore[union-attr, index]
    "flat": lambda p: p.grad.view(-1)[5:9].fill_(3),  # type: ignore[union-attr]
    "index": lambda p: p.grad.__setitem__((0, 1), 2.0),  # type: ignore[union-attr]
    "foreach": lambda p: torch._foreach_add_([p.grad], [p.detach()]),
    "out": lambda p: torch.mul(p.detach(), 2, out=p.grad),
    "numpy": lambda p: p.grad.numpy().fill(3),  # type: ignore[union-attr]
    "dlpack": lambda p: torch.from_dlpack(p.grad).fill_(3),
    "clipped": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "clipped by value": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "zeroed": lambda p: torch.optim.SGD([p]).zero_grad(set_to_none=False),
    "sgd": lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.1).step(),
    "adam": lambda p: torch.optim.Adam([p], lr=0.1, weight_decay=0.1).step(),
    "fused adam": lambda p: torch.optim.AdamW([p], lr=0.1, fused=True).step(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_is_done_to_it_is_done_to_zeros(name: str, rng: np.random.Generator) -> None:
    """Reads, writes in place, through views and aliases, clipping and optimizers: as with an ordinary .grad; another
    weight's zeros stay zero."""
    plain = weight()
    ours, other = copy.deepcopy(plain), weight()
    plain.grad = torch.zeros_like(plain)
    for w in (ours, other):
        Nothing.apply(w).backward()
    assert isinstance(ours.grad, ZeroGradient)
    for w in (plain, ours):
        CHANGES[name](w)
    assert torch.equal(ours, plain)
    assert ours.grad is not None
    assert torch.equal(ours.grad.nan_to_num(9.0), plain.grad.nan_to_num(9.0))
    assert other.grad is not None
    assert not other.grad.any()
    # what comes later is added to what was written
    for w in (plain, ours):
        (w * 2).sum().backward()
    assert torch.equal(ours.grad.nan_to_num(9.0), plain.grad.nan_to_num(9.0))


def test_copies_are_ordinary_tensors(rng: np.random.Generator) -> None:
    """deepcopy, pickle, torch.save, numpy, lists, other dtypes."""
    w = weight()
    Nothing.apply(w).backward()
    grad = w.grad
    assert isinstance(grad, ZeroGradient)
    zeros, file = torch.zeros(G, N, K), io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    for made in (
        copy.deepcopy(grad), pickle.loads(pickle.dumps(grad)), torch.load(file), grad.clone(), grad.double().float(),
        torch.tensor(grad.tolist()), torch.stack([grad, grad])[0], grad * 1,
    ):  # fmt: skip
        assert type(made) is Tensor
        assert made.is_contiguous()
        assert torch.equal(made, zeros)
    assert "ZeroGradient(shape=[3, 16, 32]" in repr(grad)
    assert not grad.is_written
    assert torch.equal(torch.from_numpy(grad.numpy()), zeros)
    assert grad.is_written
    assert repr(grad) == repr(zeros)
