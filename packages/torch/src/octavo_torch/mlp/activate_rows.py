"""The activation of a product's rows, differentiable, by a backend's function that computes it in one pass."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo import HighPrecision
from octavo_registry.contract.cards import GATED, Activation
from octavo_torch.arrays.sizes import GroupSizes, Sizes, as_sizes
from octavo_torch.autograd.saved_tensors import save, saved_tensors
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.compiler.refused_derivatives import check_no_graph
from octavo_torch.compiler.transforms import transforms_active
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layers import layer_for
from octavo_torch.dispatch.prepared_sizes import PrepareFunction, shared_prepare
from octavo_torch.functions.activations import activate_gradient, probs_gradient
from octavo_torch.memo import Memo
from octavo_torch.mlp.activation_module import activate, check_probs
from octavo_torch.quantizers.fused import Fused, activation_quantizer, gradient_quantizer

_VALUES = HighPrecision()


class _BackendActivation(NamedTuple):
    """The functions of a backend for an activation and its gradient, not quantized; see Fused where it has none."""

    name: Activation
    act: Fused
    dact: Fused

    @property
    def prepare(self) -> PrepareFunction | None:
        """Prepares group sizes for both functions; None: they take the sizes as they are."""
        return shared_prepare(part.plan.prepare for part in (self.act, self.dact) if part.plan)


class _Context(AutogradContext, Protocol):
    activation: _BackendActivation
    sizes: Sizes


class _Activated(torch.autograd.Function):
    """act(h) times probabilities, and both gradients. Rows past the sum of the sizes hold arbitrary values."""

    @staticmethod
    def forward(ctx: _Context, h: Tensor, probs: Tensor | None, sizes: Sizes, activation: _BackendActivation) -> Tensor:
        save(ctx, h, probs)
        ctx.sizes, ctx.activation = sizes, activation
        run = activation.act.run
        assert run is not None  # else activate_rows has called `activate`
        activated = run(h, sizes, probs=probs, operand="x", wanted=("activated",))[1].activated
        assert activated is not None  # always there, see Extras
        return activated

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_no_graph(dy)
        (h, probs), (name, _, dact) = saved_tensors(ctx), ctx.activation
        need_h, need_probs = ctx.needs_input_grad[:2]
        assert h is not None
        with torch.no_grad():
            if dact.run is None:
                dh = activate_gradient(dy, h, probs, name) if need_h else None
                return dh, probs_gradient(dy, h, name) if need_probs else None, None, None
            wanted = ("activated", "dprobs") if need_probs else ("activated",)
            extras = dact.run(dy.contiguous(), h, ctx.sizes, probs=probs, operand="dy", wanted=wanted)[1]
            dprobs = extras.dprobs
            if need_probs and dprobs is None:
                dprobs = probs_gradient(dy, h, name)
        return extras.activated, dprobs, None, None


_known: Memo[_BackendActivation] = Memo()


def activate_rows(
    h: Tensor,
    name: Activation,
    probs: Tensor | None,
    group_sizes: GroupSizes | None,
    backend: str | tuple[str, ...] | None,
) -> Tensor:
    """`octavo_torch.activate` of the rows `h`: in one pass if the backend that has computed `h` has such a function.

    h            [M, C], a product's result
    probs        [M] fp32
    group_sizes  [G], which the product has checked

    Rows past the sum of the sizes hold arbitrary values.
    """
    if group_sizes is None or torch.compiler.is_compiling() or transforms_active():
        return activate(h, name, probs=probs)
    if probs is not None:
        check_probs(probs, h)
    sizes, at_host = as_sizes(group_sizes, h.shape[0], None, h)
    features = h.shape[1] // 2 if name in GATED else h.shape[1]
    weight = torch.empty((sizes.shape[0], h.shape[1], features), device="meta")
    layer = layer_for(_VALUES, h, weight, at_host, True, False, backend, wants_graph(h))
    activation = _known.get((id(layer), name), lambda: _resolved(layer, name), layer)
    if activation.act.run is None:
        return activate(h, name, probs=probs)
    prepare = activation.prepare
    y: Tensor = _Activated.apply(  # type: ignore[no-untyped-call]
        h, probs, sizes if prepare is None else prepare(sizes, h.shape[0], h), activation
    )
    return y


def _resolved(layer: Layer, name: Activation) -> _BackendActivation:
    return _BackendActivation(name, activation_quantizer(layer, name), gradient_quantizer(layer, name))
