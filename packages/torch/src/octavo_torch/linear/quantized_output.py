"""grouped_linear whose result is quantized: rows in codes for the next layer, without a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo_torch.arrays.checks import check_spec
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.leading import LeadingAxes
from octavo_torch.arrays.per_group import Weights
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.linear.functional import grouped_linear
from octavo_torch.linear.grouped import InputRows
from octavo_torch.linear.quantized_input import QuantizedInput
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.quantizers.functional import quantize
from octavo_torch.scaling.seeds import second_stream


@torch.no_grad()
def grouped_linear_quantized(
    x: InputRows,
    weight: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    quantizer: QuantizerSpec,
    *,
    scale: Tensor | None = None,
    **rest: Any,
) -> GroupedTensor:
    """What `grouped_linear` returns, quantized by `quantizer`: x of the next layer, as a GroupedTensor.

    quantizer   as the next layer's recipe has it: `recipe.quantizer("x")`
    scale       fp32 [G], of delayed scaling
    rest        grouped_linear's other arguments, `recipe` among them

    The result has rows [M, N], whatever leading axes x has, in plain layouts. y is rounded to its dtype before it is
    quantized; stochastic rounding takes seed XOR 2^63. Not differentiable: for training, give y to `quantize_input`.
    Raises as `grouped_linear` and `quantize` do.
    """
    check_spec("quantizer", quantizer)
    y = grouped_linear(x, weight, group_sizes, **rest)
    return quantize(
        y if y.dim() == 2 else LeadingAxes(y).flat(y),
        quantizer,
        x.group_sizes if isinstance(x, GroupedTensor | QuantizedInput) else group_sizes,
        seed=second_stream(rest.get("seed")) if quantizer.stochastic else None,
        group_offset=rest.get("group_offset", 0),
        scale=scale,
        backend=rest.get("backend"),
    )
