"""Planes and Bias: what a GEMM is given, as its kernels take it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo_torch.plugin_api import DTYPE_NAMES
from octavo_torch_triton.arrays.launch import stored


class Planes(NamedTuple):
    """Codes, decode scales and second-level factor of an operand; an unquantized one has the first alone."""

    data: Tensor
    scale: Tensor | None = None
    factor: Tensor | None = None

    @property
    def scales(self) -> Tensor | None:
        """The scales as kernels take them."""
        return None if self.scale is None else stored(self.scale.contiguous())

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        """All three as kernels take them."""
        return stored(self.data), self.scales, None if self.factor is None else self.factor.contiguous()


class Bias(NamedTuple):
    """The bias of fprop, [G, N], and what scales it per row; None: there is none."""

    data: Tensor | None
    scales: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor | None, Tensor | None]:
        """Both as kernels take them."""
        return None if self.data is None else stored(self.data), self.scales

    @property
    def strides(self) -> tuple[int, ...]:
        """Of groups and columns, and of the scales."""
        of_data = (0, 0) if self.data is None else self.data.stride()
        return (*of_data, 0 if self.scales is None else self.scales.stride(0))

    @property
    def dtype(self) -> str | None:
        """Its name."""
        return None if self.data is None else DTYPE_NAMES[self.data.dtype]
