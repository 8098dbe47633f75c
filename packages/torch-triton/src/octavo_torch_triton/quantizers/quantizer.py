"""Quantizer and Dequantizer: the bound functions, as octavo_registry.contract has them. Sizes may be a RowIndex."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import HADAMARD_SIZE, Direction
from octavo_torch.plugin_api import DTYPE_NAMES, GroupedTensor, quantizer_text, seed_tensor
from octavo_torch_triton.arrays.row_index import RowIndex, index_of
from octavo_torch_triton.quantizers import operators
from octavo_torch_triton.quantizers.planes import assembled, layout_for
from octavo_triton.layouts import turned_layout


class Quantizer:
    """One spec, its row codes in the plain layout, its column codes in either."""

    def __init__(self, spec: QuantizerSpec, columnwise: str = PLAIN) -> None:
        self._text, self._columnwise = quantizer_text(spec), columnwise
        self._role, self._stochastic = spec.role, spec.stochastic

    def __call__(
        self,
        x: Tensor,
        group_sizes: Tensor | RowIndex | None = None,
        *,
        seed: Tensor | int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
    ) -> GroupedTensor:
        """`x` in the planes of the spec; `seed`, `operand` and `group_offset` tell where random bits come from."""
        index = index_of(group_sizes, x.shape[0], x) if x.dim() == 2 else None
        groups = x.shape[0] if index is None else index.groups
        outputs = operators.quantize(
            x,
            None if index is None else index.table,
            groups,
            self._text,
            seed_tensor(seed, x.device) if self._stochastic else None,
            operand or self._role,
            group_offset,
            scale,
            self._columnwise,
        )
        layout = layout_for(self._text, x, groups, self._columnwise)
        return assembled(layout, None if index is None else index.group_sizes, outputs)


class Dequantizer:
    """Values of `dtype` in the logical shape, zeros past the sum."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = DTYPE_NAMES[dtype]

    def __call__(self, q: GroupedTensor, direction: Direction = "rowwise") -> Tensor:
        """The values of one plane."""
        if direction == "columnwise":
            q = converted(q, PLAIN)
        codes, scale, factor = q.plane(direction)
        spec = q.spec
        sizes = q.group_sizes
        if sizes is not None and direction == "columnwise" and spec.quantizer.hadamard:
            # they stay in their domain, each group padded to whole runs, as the payload has them
            sizes = (sizes + (HADAMARD_SIZE - 1)) // HADAMARD_SIZE * HADAMARD_SIZE
        index = None if sizes is None else index_of(sizes, codes.shape[0], codes)
        table = None if index is None else index.table
        how: list[str] = [direction, self._dtype]
        text = quantizer_text(spec.quantizer)
        value: Tensor = operators.dequantize(codes, scale, factor, table, text, list(codes.shape), spec.groups, how)
        return value


def converted(q: GroupedTensor, columnwise: str) -> GroupedTensor:
    """`q` with its column codes in that layout, the same bits; what has not changed is shared with it."""
    spec = q.spec
    if spec.columnwise_layout == columnwise or "columnwise" not in spec.quantizer.directions:
        return q
    codes = q.columnwise
    assert codes is not None
    index = None if q.group_sizes is None else index_of(q.group_sizes, spec.shape[0], codes)
    table = None if index is None else index.table
    text = quantizer_text(spec.quantizer)
    turned = operators.turn(codes, table, text, list(spec.shape), spec.groups, columnwise)
    return replace(q, spec=turned_layout(spec, columnwise), columnwise=turned)
