"""Quantizer and Dequantizer: the bound functions, as octavo_registry.contract has them. Sizes may be a RowIndex."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.quantizer import HADAMARD_SIZE, Direction
from octavo_torch.plugin_api import DTYPE_NAMES, GroupedTensor, quantizer_text, seed_tensor
from octavo_torch_triton.arrays.row_index import RowIndex, index_of
from octavo_torch_triton.quantizers import operators
from octavo_torch_triton.quantizers.planes import assembled, layout_for


class Quantizer:
    """One spec, in the plain layout."""

    def __init__(self, spec: QuantizerSpec) -> None:
        self._text = quantizer_text(spec)
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
        )
        return assembled(layout_for(self._text, x, groups), None if index is None else index.group_sizes, outputs)


class Dequantizer:
    """Values of `dtype` in the logical shape, zeros past the sum."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = DTYPE_NAMES[dtype]

    def __call__(self, q: GroupedTensor, direction: Direction = "rowwise") -> Tensor:
        """The values of one plane."""
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
