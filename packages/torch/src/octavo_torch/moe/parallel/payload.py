"""What travels in place of tokens: codes and scales of a recipe that scales row by row, decoded on arrival."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import GroupedTensorSpec, Recipe
from octavo.payload import payload_spec
from octavo.quantizer import Operand
from octavo_torch.arithmetic.casts import to_fp16
from octavo_torch.arrays.checks import BackendNames
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.quantizers.functional import dequantize, quantize


@dataclass(frozen=True)
class Encoded:
    """Tokens as they travel.

    planes   tensors with a row per token: the tokens, or their codes and scales
    spec     of the codes; None where tokens travel as they are
    dtype    of the tokens
    scales   the sides of the plane of scales but the first: there are none where a row has one scale
    """

    planes: tuple[Tensor, ...]
    spec: GroupedTensorSpec | None
    dtype: torch.dtype
    scales: tuple[int, ...] = ()

    def decode(self, planes: list[Tensor], backend: BackendNames) -> Tensor:
        """The tokens [S, K] that arrived as `planes`, each value rounded once to their dtype."""
        if self.spec is None:
            return planes[0]
        codes, scales = planes
        scales = scales.view(scales.shape[0], *self.scales)
        rows = codes.shape[0]
        spec = self.spec.model_copy(update={"shape": (rows, codes.shape[1])})
        sizes = torch.full((1,), rows, dtype=torch.int64, device=codes.device)
        arrived = GroupedTensor(spec, sizes, codes, scales)
        if self.dtype is torch.float16:
            return to_fp16(dequantize(arrived, backend=backend))
        return dequantize(arrived, dtype=self.dtype, backend=backend)


def encode(tokens: Tensor, payload: Recipe | None, operand: Operand, backend: BackendNames) -> Encoded:
    """`tokens` [T, K] as they travel with this payload."""
    if payload is None:
        return Encoded((tokens,), None, tokens.dtype)
    codes = quantize(tokens, payload_spec(payload, operand), operand=operand, backend=backend)
    values, scales, _ = codes.plane("rowwise")
    sides = tuple(scales.shape[1:])
    return Encoded((values, scales.reshape(scales.shape[0], math.prod(sides))), codes.spec, tokens.dtype, sides)
