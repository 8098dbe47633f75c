"""Second derivatives of grouped layers, which are refused with a sentence."""

from __future__ import annotations

from collections.abc import Sequence

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


def once_differentiated(grads: Sequence[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    """`grads`; NotImplementedError where backward was asked for a graph of them (create_graph=True).

    Refused at once rather than where that graph is differentiated: `torch.autograd.grad` and `backward(inputs=...)`
    run only the nodes that lead to the inputs that they are asked for, so a node here that refuses would be passed by
    and the term would be missing without a word. A backward has no handle on the inputs of its forward that it has
    not saved, and saving them would keep their memory.
    """
    if torch.is_grad_enabled() and is_plain(dy):
        raise refuse()
    return list(grads)
