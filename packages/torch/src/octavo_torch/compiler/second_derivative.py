"""Second derivatives of grouped layers, which are refused with a sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_torch.compiler.tracing import is_plain


def refuse() -> NotImplementedError:
    """The error."""
    return NotImplementedError(
        "a grouped layer has no second derivative: quantization is a step function, whose derivative is zero or "
        "undefined; call backward without create_graph=True, or compute this term with torch.nn.functional.linear "
        "per group instead"
    )


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
