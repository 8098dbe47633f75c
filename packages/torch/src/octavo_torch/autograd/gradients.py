"""Which gradients a backward computes, and their dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from octavo_torch.arrays.zero_gradient import cast_gradient
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.tracing import is_plain


class Context(AutogradContext, Protocol):
    """autograd's ctx of a grouped layer.

    dtypes   the dtype of each input of forward that may take a gradient, which are its last ones; None for an input
             that is absent
    """

    dtypes: Sequence[torch.dtype | None]
    next_functions: tuple[tuple[Node | None, int], ...]


def dtypes_of(*inputs: Tensor | None) -> list[torch.dtype | None]:
    """Each input's dtype, to which its gradient is cast."""
    return [None if value is None else value.dtype for value in inputs]


def cast_gradients(grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """Each gradient in the dtype of its input."""
    return [
        grad if grad is None or dtype is None else cast_gradient(grad, dtype)
        for grad, dtype in zip(grads, dtypes, strict=True)
    ]


def needed_gradients(ctx: Context, needs: Sequence[bool], dy: Tensor) -> list[bool]:
    """Which of forward's last inputs this backward computes a gradient for.

    `needs`, from ctx.needs_input_grad, says which of them require one; torch.autograd.grad may ask for fewer.
    """
    # a node runs only if something of it is needed
    if not is_plain(dy) or sum(needs) == 1:
        return list(needs)
    # only tensors have an edge
    tensors = [dtype for dtype in ctx.dtypes if dtype is not None]
    edges = iter(ctx.next_functions[-len(tensors) :])
    needed = []
    for required, dtype in zip(needs, ctx.dtypes, strict=True):
        node = None if dtype is None else next(edges)[0]
        needed.append(required and node is not None and _will_run(node))
    return needed


def _will_run(node: Node) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the node is a leaf that torch.autograd.grad was asked for
        return True
