"""Product: everything about a GEMM that its tensors do not say, as a value that an operator can name; its launches."""

from __future__ import annotations

import atexit
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import octavo_native
from octavo import QuantizerSpec
from octavo.formats import DType, Format
from octavo.quantizer import Scaling
from octavo.recipe_base import Gemm
from octavo_native.gemms import OPERANDS_OF_GEMM, gemm_named, names_of
from octavo_registry.contract import GemmRequest
from octavo_torch.plugin_api import DTYPES
from octavo_torch_native.arrays.launch import address, aligned_rows, submit, workspace, writable_strides
from octavo_torch_native.quantizers.kernel import DTYPE_NUMBERS, Shape

_MOST_FRAMES = 1024


@dataclass(frozen=True)
class Product:
    """One kind of grouped GEMM: fprop x w^T, dgrad dy w, wgrad dy^T x, left operand first.

    dtype         of unquantized operands; `scaling` None says that these are
    scaling ...   of quantized ones: the formats of the left and the right one, square blocks of the weights, Hadamard
                  data, whose groups are padded to 16 rows
    accumulate    wgrad: added to what `out` holds
    """

    gemm: Gemm
    dtype: DType = "bfloat16"
    scaling: Scaling | None = None
    left_format: Format = "e4m3"
    right_format: Format = "e4m3"
    right_square: bool = False
    hadamard: bool = False
    out_dtype: DType = "bfloat16"
    accumulate: bool = False
    fast_accumulation: bool = False


def quantized_product(
    gemm: Gemm, left: QuantizerSpec, right: QuantizerSpec, out_dtype: DType, fast_accumulation: bool, accumulate: bool
) -> Product:
    """The product of operands that are quantized like this."""
    return Product(
        gemm=gemm,
        **names_of(gemm, left, right),
        out_dtype=out_dtype,
        accumulate=accumulate,
        # sums of blocks are promoted at each, whatever a recipe allows
        fast_accumulation=fast_accumulation and left.block_size is None,
    )


def product_of(request: GemmRequest) -> Product:
    """What the request of a GEMM asks for."""
    gemm, recipe = request.op, request.recipe
    left, right = (recipe.quantizer(operand) for operand in OPERANDS_OF_GEMM[gemm])
    if left is None or right is None or not recipe.quantizes(gemm):
        return Product(gemm=gemm, dtype=request.in_dtype, out_dtype=request.out_dtype)
    fast = gemm in getattr(recipe, "fast_accumulation", ())
    return quantized_product(gemm, left, right, request.out_dtype, fast, accumulate=False)


def product_text(product: Product) -> str:
    """The text by which operators name `product`."""
    return json.dumps(vars(product))


class Frame:
    """What a launch on operands of one shape takes: the result's shape, the arguments that stay, how much scratch."""

    __slots__ = ("arguments", "shape", "workspace")

    def __init__(self, shape: Shape, arguments: dict[str, Any], workspace: int) -> None:
        self.shape, self.arguments, self.workspace = shape, arguments, workspace


class Multiplier:
    """One Product's launches."""

    def __init__(self, product: Product) -> None:
        self.dtype = DTYPES[product.out_dtype]
        self.accumulate = product.accumulate
        self._gemm = product.gemm
        self.quantized = product.scaling is not None
        self._native = gemm_named(**vars(product))
        self._frames: dict[tuple[Any, ...], Frame] = {}

    def shape(self, rows: int, n: int, k: int, groups: int) -> Shape:
        """The result's: y [M, N], dx [M, K] or dw [G, N, K]."""
        if self._gemm == "wgrad":
            return (groups, n, k)
        return (rows, n if self._gemm == "fprop" else k)

    def frame(self, rows: int, n: int, k: int, groups: int, cuda: bool) -> Frame:
        """The frame of this shape; kept, because making one takes longer than launching."""
        key = (rows, n, k, groups, cuda)
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= _MOST_FRAMES:
                self._frames.clear()
            sides = {"rows": rows, "n": n, "k": k, "groups": groups}
            size = self._native.workspace_bytes(cuda=cuda, **sides)
            sides["workspace_bytes"] = size
            frame = self._frames[key] = Frame(self.shape(rows, n, k, groups), sides, size)
        return frame

    def run_into(self, frame: Frame, out: Tensor, left: Tensor, *rest: Any) -> None:
        """`run` for the caller's `out`, of any strides."""
        strides = writable_strides(out)
        if strides is not None:
            self.run(frame, out, strides, left, *rest)
            return
        # rows that cannot be written in place: the result is made beside them, from what they hold where that counts
        beside = out.contiguous() if self.accumulate else torch.empty(frame.shape, dtype=out.dtype, device=out.device)
        self.run(frame, beside, (0, 0), left, *rest)
        out.copy_(beside)

    def run(
        self,
        frame: Frame,
        out: Tensor,
        strides: tuple[int, int],
        left: Tensor,
        left_scales: Tensor | None,
        left_global: Tensor | None,
        right: Tensor,
        right_scales: Tensor | None,
        right_global: Tensor | None,
        plan: Tensor,
        bias: Tensor | None,
        bias_scales: Tensor | None,
    ) -> None:
        """Write `out`, of the frame's shape and this product's dtype; `strides` of rows and matrices 0: contiguous."""
        if not out.numel():
            return
        arguments = frame.arguments.copy()
        arguments["out"], arguments["plan"] = out.data_ptr(), plan.data_ptr()
        arguments["out_row_stride"], arguments["out_group_stride"] = strides
        if self.quantized:
            assert left_scales is not None
            assert right_scales is not None
            left, left_scales = left.contiguous(), left_scales.contiguous()
            right, right_scales = right.contiguous(), right_scales.contiguous()
            arguments["left_scales"], arguments["right_scales"] = address(left_scales), address(right_scales)
            arguments["left_global"], arguments["right_global"] = address(left_global), address(right_global)
        else:
            left, arguments["left_stride"] = aligned_rows(left)
            right, arguments["right_stride"] = aligned_rows(right)
        arguments["left"], arguments["right"] = address(left), address(right)
        if bias is not None:
            bias = bias.contiguous()
            arguments["bias"], arguments["bias_dtype"] = address(bias), DTYPE_NUMBERS[bias.dtype]
            if bias_scales is not None:
                bias_scales = bias_scales.to(torch.float32).contiguous()
                arguments["bias_scales"] = address(bias_scales)
        # held until the launch: torch reuses memory in stream order, so afterwards it may go
        memory, arguments["workspace"] = workspace(frame.workspace, out)
        submit(self._native.run, out, arguments)
        del memory

    def record(self, into: octavo_native.Sequence, frame: Frame, cuda: bool, **places: int) -> None:
        """Append the launch on contiguous arrays to `into`; `places` are theirs, by octavo_native's names."""
        self._native.run(cuda=cuda, into=into, **frame.arguments, **places)


@lru_cache(maxsize=1024)
def multiplier_of(text: str) -> Multiplier:
    """The launches of the Product of this text."""
    return Multiplier(Product(**json.loads(text)))


# torch keeps operators, and what they reach, past the end of the interpreter: nanobind would call it a leak
for _cache in (multiplier_of, gemm_named):
    atexit.register(_cache.cache_clear)
