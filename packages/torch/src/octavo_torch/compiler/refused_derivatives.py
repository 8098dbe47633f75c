"""The derivatives that grouped layers do not have, second and forward-mode ones, and the errors that refuse them."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from octavo_torch.compiler.tracing import is_plain


def no_second_derivative() -> NotImplementedError:
    """The error of a gradient that is to be differentiated once more."""
    return NotImplementedError(
        "a grouped layer has no second derivative: quantization is a step function, whose derivative is zero or "
        "undefined, and the products of a recipe in high precision have a rule for the first one alone; call backward "
        "without create_graph=True, or compute this term with torch.nn.functional.linear per group instead"
    )


def no_forward_mode(name: str = "") -> NotImplementedError:
    """The error of a call whose input carries a tangent: of a layer, or of the function called `name`."""
    if name:
        return NotImplementedError(
            f"an input of {name} carries a tangent of forward-mode differentiation, for which it has no rule; take the "
            "gradient with backward or torch.func.grad"
        )
    return NotImplementedError(
        "an input of a grouped layer carries a tangent of forward-mode differentiation, for which the layer has no "
        "rule; take the gradient with backward or torch.func.grad, or compute this term with "
        "torch.nn.functional.linear per group instead"
    )


class FirstOrderFunction(torch.autograd.Function):
    """Base of the autograd functions of layers: forward-mode differentiation raises the error of `no_forward_mode`."""

    @staticmethod
    def jvp(*_: object) -> NoReturn:
        """Raises NotImplementedError."""
        raise no_forward_mode()


def check_no_tangent(*inputs: object, name: str = "") -> None:
    """Raises NotImplementedError where one of these tensors has a tangent, which operators without a rule would drop.

    name   the function whose inputs they are; "" for a layer
    """
    for value in inputs:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise no_forward_mode(name)


def wants_graph(dy: Tensor) -> bool:
    """Whether backward is asked for a graph of its gradients (create_graph=True)."""
    return torch.is_grad_enabled() and is_plain(dy)


def check_no_graph(dy: Tensor) -> None:
    """Raises NotImplementedError where backward is asked for a graph of its gradients (create_graph=True).

    A backward calls it first, before it writes, records or draws anything. It refuses at once, because a node that
    refused when that graph is differentiated might never run: `torch.autograd.grad` and `backward(inputs=...)` run only
    the nodes that lead to the inputs they are asked for, and the term would be missing in silence. To connect such a
    node with every input of the forward, all of these would have to be saved, which would keep their memory.
    """
    if wants_graph(dy):
        raise no_second_derivative()
