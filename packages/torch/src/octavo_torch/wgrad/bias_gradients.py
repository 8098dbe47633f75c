"""Gradients of a bias [G, N] and of its scales [M]: on a GPU as grouped products, which read the rows once each.

y has the term s[r] * bias[g], which is the product of s as a column [M, 1] and of bias as a weight [G, N, 1]. The
gradient of bias is therefore a wgrad, and that of s a product of dy's rows and bias [G, 1, N]. A factor in fp32 is the
sum of three in bf16 with 24 bits in all, so every product is exact, and sums are in fp32 and in the backend's order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo import HighPrecision
from octavo.recipe_base import Gemm
from octavo_registry import plan_if_served
from octavo_registry.contract.request import GemmRequest
from octavo_torch.arithmetic import operators
from octavo_torch.arithmetic.parts import bf16_parts
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.dispatch.device import CUDA_MULTIPLE, arch_of
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layer_functions import FpropFunction, WgradFunction
from octavo_torch.dispatch.prepared_sizes import PrepareFunction
from octavo_torch.memo import Memo

_VALUES = HighPrecision()


class BiasGradients(NamedTuple):
    """fp32 [G, N] and fp32 [M]; None for what was not asked for."""

    bias: Tensor | None
    scales: Tensor | None


class _Products(NamedTuple):
    """wgrad of x [M, 16] and dy [M, N], and fprop of x = dy and w [G, 16, N]; both of bf16, into fp32."""

    of_bias: WgradFunction
    of_scales: FpropFunction
    prepare: PrepareFunction | None


def bias_gradients(
    layer: Layer,
    dy: Tensor,
    sizes: Sizes,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    *,
    need_bias: bool = True,
    need_scales: bool = False,
) -> BiasGradients:
    """db[g] = sum of s[r] * dy[r] over the rows of g, and ds[r] = dy[r] . bias[g], 0 past the sum of the sizes.

    dy      [M, N]; rows past the sum of the sizes are not read
    bias    [G, N], read for ds alone
    scales  [M]; None: all are 1
    """
    products = _products_for(layer, dy)
    if products is None:
        bounded = operators.bound_sizes(sizes, dy.shape[0], dy) if isinstance(sizes, Tensor) else sizes.group_sizes
        db, *ds = operators.bias_grads(dy, bounded, bias if need_scales else None, scales)
        return BiasGradients(db if need_bias else None, ds[0] if ds else None)
    if not isinstance(sizes, Tensor) and products.prepare is not layer.prepare:
        sizes = sizes.group_sizes
    of_bias = of_scales = None
    if need_bias:
        factors = dy.new_ones(dy.shape[0], 1) if scales is None else _parts(scales)
        of_bias = products.of_bias(_padded(factors), dy, sizes)[..., : factors.shape[-1]].sum(-1)
    if need_scales:
        assert bias is not None  # scales without a bias are refused
        rows = _parts(bias)
        of_scales = products.of_scales(dy, _padded(rows).mT.contiguous(), sizes)[:, : rows.shape[-1]].sum(-1)
    return BiasGradients(of_bias, of_scales)


def _parts(values: Tensor) -> Tensor:
    """bf16 [..., n] whose sum over n is `values` [...]: n is 1 for bf16 values, and 3 for others."""
    return torch.stack(bf16_parts(values), -1)


def _padded(columns: Tensor) -> Tensor:
    """At most 16 columns, as the 16 that a GEMM's narrowest operand has."""
    return torch.nn.functional.pad(columns, (0, CUDA_MULTIPLE - columns.shape[-1]))


_products: Memo[_Products | None] = Memo()


def _products_for(layer: Layer, dy: Tensor) -> _Products | None:
    """The products of the layer's backend; None on a CPU, for other dtypes than bf16, and where it has not both."""
    if layer.on_cpu or dy.dtype is not torch.bfloat16:
        return None
    backend, columns = layer.plan.fprop.backend, int(dy.shape[1])
    key = (layer.device, layer.groups, columns, backend, layer.at_host, layer.graph_safe)

    def resolve() -> _Products | None:
        def request(op: Gemm, k: int, n: int) -> GemmRequest:
            return GemmRequest(
                op=op, framework="torch", device=layer.device.type, in_dtype="bfloat16", out_dtype="float32",
                recipe=_VALUES, arch=arch_of(layer.device), k=k, n=n, groups=layer.groups,
                sizes="host" if layer.at_host else "device", graph_safe=layer.graph_safe,
            )  # fmt: skip

        of_bias = plan_if_served(request("wgrad", CUDA_MULTIPLE, columns), backend=backend)
        of_scales = plan_if_served(request("fprop", columns, CUDA_MULTIPLE), backend=backend)
        if of_bias is None or of_scales is None:
            return None
        same = of_bias.prepare == of_scales.prepare
        return _Products(of_bias.run, of_scales.run, of_bias.prepare if same else None)

    return _products.get(key, resolve)
