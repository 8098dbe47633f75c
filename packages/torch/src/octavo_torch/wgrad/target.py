"""The destination of a weight gradient that autograd does not store: main_grad, or a DelayedWgrad for later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from octavo_torch.arrays.grouped_tensor import Rows
from octavo_torch.arrays.per_group import Weights, leaves_of
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.arrays.zero_gradient import parts_of
from octavo_torch.dispatch.layer_functions import WgradFunction
from octavo_torch.wgrad.main_grad import MainGrad, check_main_grad, check_mode, write_main_grad
from octavo_torch.wgrad.postponed import DelayedWgrad

OUTSIDE_GRAPH = (
    "main_grad or delayed_wgrad was given, and a traced backward can neither write into a parameter's attribute nor "
    "keep anything for later; leave it out under torch.compile(fullgraph=True), or compile with fullgraph=False, which "
    "runs this call outside the graph"
)
"""The reason that torch.compile reports for a call with such a target, which it leaves out of its graph."""


class WgradTarget:
    """The destination of one weight's gradient.

    leaves     the weight [G, N, K], or one tensor [N, K] per group: the tensors whose gradient it is
    main_grad  how it is written to the leaves' buffers; None: it goes to their .grad
    store      postpones it; None: it is computed in backward
    """

    __slots__ = ("_left_out", "leaves", "main_grad", "store")

    def __init__(self, weight: Weights, main_grad: MainGrad | None, store: DelayedWgrad | None) -> None:
        self.leaves, self.main_grad, self.store = leaves_of(weight), main_grad, store
        self._left_out = False
        _check_leaves(self.leaves, "main_grad" if store is None else "delayed_wgrad")
        if main_grad is not None:
            check_main_grad(self.leaves)

    def put(self, wgrad: WgradFunction, x: Rows, dy: Rows, sizes: Sizes, owner: object) -> Tensor | None:
        """Called by backward; returns what autograd receives: zeros that stand for the gradient, or None if postponed.

        owner   the forward call, see DelayedWgrad.postpone
        """
        if self.store is None:
            assert self.main_grad is not None
            return write_main_grad(wgrad, x, dy, sizes, self.leaves, self.main_grad)
        if self._left_out:
            self._left_out, self.store.left_out = False, max(0, self.store.left_out - 1)
        self.store.postpone(owner, self, lambda: self._compute(wgrad, x, dy, sizes), (x, dy, sizes))
        return None

    def leave_out(self) -> None:
        """Called by a backward that was asked for other gradients alone.

        Unless a later backward of the same graph computes this one, it is lost.
        """
        if self.store is not None and not self._left_out:
            self._left_out = True
            self.store.left_out += 1

    def _compute(self, wgrad: WgradFunction, x: Rows, dy: Rows, sizes: Sizes) -> tuple[Tensor, ...]:
        """Compute the gradient, and send it, or the zeros that stand for it, through autograd to the leaves.

        So hooks of every kind see it. Returns the leaves' gradients.
        """
        first = self.leaves[0]
        with torch.no_grad():
            if self.main_grad is None:
                grad = wgrad(x, dy, sizes)
                grad = grad if grad.dtype is first.dtype else grad.to(first.dtype)
            else:
                grad = write_main_grad(wgrad, x, dy, sizes, self.leaves, self.main_grad)
        with torch.enable_grad():
            # through a view, whose own gradient autograd may keep without a copy
            ends = [leaf.view_as(leaf) for leaf in self.leaves]
        grads = (grad,) if ends[0].dim() == 3 else parts_of(grad)
        torch.autograd.backward(ends, grads)
        return tuple(leaf.grad for leaf in self.leaves if leaf.grad is not None)


def target_for(
    weight: Weights, needs_grad: bool, main_grad: MainGrad | None, store: DelayedWgrad | None
) -> WgradTarget | None:
    """The target of the weight's gradient; None where autograd stores it or it is not needed.

    Raises ValueError for arguments that do not fit.
    """
    if main_grad is not None:
        check_mode(main_grad)
    if store is not None and not isinstance(store, DelayedWgrad):
        raise ValueError(f"delayed_wgrad is a {type(store).__name__}; give a DelayedWgrad, or None")
    wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    # in training, a weight without a gradient is in the first pass of activation checkpointing, whose second pass runs
    # outside of the wrapper
    if wrapper is not None and main_grad is not None and (needs_grad or wrapper.training):
        _check_reduced(wrapper, leaves_of(weight))
    if not needs_grad or (main_grad is None and store is None):
        return None
    if store is not None:
        _check_not_unused(wrapper)
    return WgradTarget(weight, main_grad, store)


def _check_reduced(wrapper: DistributedDataParallel, leaves: Sequence[Tensor]) -> None:
    """Raises ValueError where a DistributedDataParallel reduces the zeros that stand for a gradient in main_grad."""
    if not wrapper.require_backward_grad_sync:
        return
    if any(leaf is own and leaf.requires_grad for own in wrapper._module_parameters for leaf in leaves):
        raise ValueError(
            "main_grad was given inside DistributedDataParallel, which reduces .grad, where zeros stand for the "
            "weight's gradient: every rank would step with its own; leave main_grad out, or stay inside no_sync() and "
            "reduce all gradients yourself"
        )


def _check_not_unused(wrapper: DistributedDataParallel | None) -> None:
    """Raises ValueError inside a DistributedDataParallel that would treat the weight as unused."""
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(wrapper, option, False):
            raise ValueError(
                f"delayed_wgrad was given inside DistributedDataParallel({option}=True), which does not "
                "reduce gradients that come after backward; create it without that option"
            )


def _check_leaves(leaves: Sequence[Tensor], option: str) -> None:
    if not all(leaf.is_leaf for leaf in leaves):
        raise ValueError(
            f"{option} was given and weight is the result of an operation, whose own gradient would be lost; "
            f"give the parameter itself, or leave {option} out"
        )
    frozen = [group for group, leaf in enumerate(leaves) if not leaf.requires_grad]
    if frozen:
        raise ValueError(
            f"{option} was given and weight[{frozen[0]}] requires no gradient while others do; "
            "freeze all of them or none"
        )
