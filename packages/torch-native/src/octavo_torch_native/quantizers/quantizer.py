"""Quantizer: the bound function of a "quantize" request, and the functions that go with it."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction, Operand
from octavo_torch.plugin_api import OPERANDS, GroupedTensor, seed_tensor
from octavo_torch_native.arrays.group_index import GroupIndex, group_index_of
from octavo_torch_native.quantizers import operators
from octavo_torch_native.quantizers.buffers import planes_of, write_sizes
from octavo_torch_native.quantizers.dequantizer import converted
from octavo_torch_native.quantizers.launches import QuantizeLaunch, launch_of
from octavo_torch_native.quantizers.shapes import QuantizeShapes
from octavo_torch_native.quantizers.spec import LaunchSpec, spec_text


class Rounding(TypedDict, total=False):
    """How codes are rounded: keywords of octavo_registry.contract.quantize.QuantizeInto."""

    seed: Tensor | int | None
    operand: Operand | None
    group_offset: int
    scale: Tensor | None


class Interleaving(TypedDict, total=False):
    """Columns or rows of matrices that stay together where two halves of them take turns; one of the two."""

    interleaved_cols: int
    interleaved_rows: int


Inputs = tuple[Tensor, Tensor | None, int, str, Tensor | None, int, Tensor | None]
"""The first arguments of the operators that quantize: x, plan, groups, spec, seed, group_offset, scale."""


class Quantizer:
    """One spec, in the layouts of its request, as octavo_registry.contract.quantize has it.

    Sizes may also be a GroupIndex. With `interleaved` it takes weights whose gate and up rows take turns: the columns,
    or the rows, of their matrices that stay together.
    """

    def __init__(
        self,
        spec: QuantizerSpec,
        layouts: tuple[str, str] = (PLAIN, PLAIN),
        dtype: torch.dtype = torch.bfloat16,
        **interleaved: Unpack[Interleaving],
    ) -> None:
        self._dtype = dtype
        self._stochastic = spec.stochastic
        # bf16 holds MXFP4's values, and the kernel for square blocks of E4M3 reads their bytes
        self._reads_mxfp4 = (
            dtype is torch.bfloat16 and spec.scaling == "block" and spec.square and spec.format == "e4m3"
        )
        self._layouts = layouts
        self._by_operand: dict[str | None, QuantizeLaunch] = {}
        self._with_amax: dict[str | None, QuantizeLaunch] = {}
        for operand in OPERANDS:
            text = spec_text(LaunchSpec(spec, operand, layouts, **interleaved))
            self._by_operand[operand] = launch_of(text)
            text = spec_text(LaunchSpec(spec, operand, layouts, amax=True, **interleaved))
            self._with_amax[operand] = launch_of(text)
        self._by_operand[None] = self._by_operand[spec.role]
        self._with_amax[None] = self._with_amax[spec.role]

    def __call__(
        self,
        x: Tensor,
        group_sizes: Tensor | GroupIndex | None = None,
        *,
        seed: Tensor | int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
    ) -> GroupedTensor:
        """`x` in the planes of the spec; random bits depend on `seed`, `operand` and `group_offset`."""
        launch = self._by_operand[operand]
        inputs, shapes, sizes = self._inputs(launch, x, group_sizes, seed, group_offset, scale)
        return launch.tensor(shapes, sizes, operators.quantize(*inputs, None, None, None, None))

    def with_amax(
        self,
        x: Tensor,
        group_sizes: Tensor | GroupIndex | None = None,
        *,
        seed: Tensor | int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
    ) -> tuple[GroupedTensor, Tensor]:
        """The same in one launch with x's amax by group, fp32 [G]."""
        launch = self._with_amax[operand]
        inputs, shapes, sizes = self._inputs(launch, x, group_sizes, seed, group_offset, scale)
        outputs = operators.quantize(*inputs, None, None, None, None)
        return launch.tensor(shapes, sizes, outputs), outputs[-1]

    def of_tokens(
        self,
        x: Tensor,
        group_sizes: Tensor | GroupIndex,
        order: Tensor,
        position: Tensor,
        routed: Tensor,
        *,
        amax: bool = False,
        **rounding: Unpack[Rounding],
    ) -> tuple[GroupedTensor, Tensor | None]:
        """The rows that permute_rows would write from tokens `x`, quantized without being written; with `amax` also the
        rows' amax by group."""
        launch = (self._with_amax if amax else self._by_operand)[rounding.get("operand")]
        seed, offset, scale = rounding.get("seed"), rounding.get("group_offset", 0), rounding.get("scale")
        inputs, shapes, sizes = self._inputs(launch, x, group_sizes, seed, offset, scale, order.numel())
        outputs = operators.quantize_tokens(*inputs, order, position.shape[1])
        return launch.tensor(shapes, sizes, outputs), outputs[-1] if amax else None

    def into(
        self,
        x: Tensor,
        group_sizes: Tensor | GroupIndex | None = None,
        *,
        out: GroupedTensor,
        amax: Tensor | None = None,
        unchanged: Tensor | None = None,
        **rounding: Unpack[Rounding],
    ) -> None:
        """Quantize into the planes of `out`, and write x's amax into `amax`; nothing where `unchanged` is not 0."""
        launch = (self._by_operand if amax is None else self._with_amax)[rounding.get("operand")]
        seed, offset, scale = rounding.get("seed"), rounding.get("group_offset", 0), rounding.get("scale")
        inputs, shapes, sizes = self._inputs(launch, x, group_sizes, seed, offset, scale)
        planes = planes_of(out, launch, shapes, x.device)
        operators.quantize_into(*inputs, unchanged, planes if amax is None else [*planes, amax])
        write_sizes(out, sizes)

    def of_mxfp4(self, blocks: Tensor, scales: Tensor, only: Direction | None = None) -> GroupedTensor:
        """Weights that MXFP4 bytes stand for, quantized from their values in the request's dtype."""
        if not (self._reads_mxfp4 and blocks.is_cuda and blocks.numel()):
            return self(operators.mxfp4_values(blocks, scales, self._dtype))
        launch = self._by_operand[None]
        groups, rows, half = blocks.shape
        shapes = launch.shapes_of((groups, rows, 2 * half), groups, self._dtype, cuda=True)
        return launch.tensor(shapes, None, operators.quantize_mxfp4(blocks, scales, launch.text, only))

    def from_plain(self, q: GroupedTensor) -> GroupedTensor:
        """Plain planes, of whatever backend, in the layouts of the request. A plane whose bytes are the same in both
        layouts is shared."""
        return converted(q, self._layouts)

    def to_plain(self, q: GroupedTensor) -> GroupedTensor:
        """The inverse of `from_plain`: plain planes with the same codes and scales."""
        return converted(q, (PLAIN, PLAIN))

    def _inputs(
        self,
        launch: QuantizeLaunch,
        x: Tensor,
        group_sizes: Tensor | GroupIndex | None,
        seed: Tensor | int | None,
        group_offset: int,
        scale: Tensor | None,
        choices: int | None = None,
    ) -> tuple[Inputs, QuantizeShapes, Tensor | None]:
        """The operator's first arguments, the shapes, and int64 sizes.

        choices   how many rows are gathered from tokens x; None: x has the rows themselves
        """
        index = group_index_of(x.shape if choices is None else (choices, x.shape[1]), group_sizes, x)
        if index is None:
            groups, words, sizes = x.shape[0], None, None
        else:
            groups, words, sizes = index.groups, index.words, index.group_sizes
        key = seed_tensor(seed, x.device) if self._stochastic else None
        inputs = (x, words, groups, launch.text, key, group_offset, scale)
        return inputs, launch.shapes(x, groups, choices), sizes
