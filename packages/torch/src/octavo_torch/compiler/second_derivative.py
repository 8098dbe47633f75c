"""Derivatives that grouped layers do not have, second ones and forward-mode ones: refused with a sentence each."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from octavo_torch.compiler.tracing import is_plain


def refuse() -> NotImplementedError:
    """The error."""
    return NotImplementedError(
        "a grouped layer has no second derivative: quantization is a step function, whose derivative is zero or "
        "undefined; call backward without create_graph=True, or compute this term with torch.nn.functional.linear "
        "per group instead"
    )


def refuse_forward_mode(name: str = "") -> NotImplementedError:
    """The error of a call with a tangent: of a layer, or of the function of that name."""
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
    """A function that forward-mode differentiation is refused for, with a sentence."""

    @staticmethod
    def jvp(*_: object) -> NoReturn:
        """Raises NotImplementedError."""
        raise refuse_forward_mode()


def check_no_tangent(*inputs: object, name: str = "") -> None:
    """Raises NotImplementedError where one of these tensors has a tangent: operators without a rule would drop it.

    name   of the function whose inputs they are; "" for a layer
    """
    for value in inputs:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise refuse_forward_mode(name)


def check_no_graph(dy: Tensor) -> None:
    """Raises NotImplementedError where backward is asked for a graph of its gradients (create_graph=True).

    A backward calls it first, before it writes, records or draws anything. It refuses at once rather than where that
    graph is differentiated: `torch.autograd.grad` and `backward(inputs=...)` run only nodes that lead to the inputs
    that they are asked for, so a node here that refuses would be passed by, and the term would be missing in silence.
    A backward has no handle on the inputs of its forward that it has not saved, and saving them would keep their
    memory.
    """
    if torch.is_grad_enabled() and is_plain(dy):
        raise refuse()
