"""Quantize ragged rows [M, K] or stacked matrices [G, N, K]: each group's matrix on its own.

The computation is a custom op, so that `torch.compile` takes it as one node and does not look at the loop over sizes,
which are data. A custom op takes and returns tensors and plain values; `Quantizer` makes the GroupedTensor of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.formats import Format
from octavo_torch.plugin_api import GroupedTensor
from torch import Tensor
from torch.library import custom_op

from acme_octavo.groups import host_sizes, spans
from acme_octavo.tiles import PAYLOAD, kind_of, one_scale_row_a_group, quantize_matrix, rows_of_tiles, tile_shape


class Quantizer:
    """Bound to one `spec`; called once for each operand of each step."""

    def __init__(self, spec: QuantizerSpec) -> None:
        self._spec = spec
        # Validating or hashing a schema in every call would cost more than a call may, so layouts are kept by shape.
        self._layouts: dict[tuple[int, ...], GroupedTensorSpec] = {}

    def __call__(
        self,
        x: Tensor,
        group_sizes: Tensor | None = None,
        *,
        seed: object = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
    ) -> GroupedTensor:
        """`x` in the directions of the spec; `seed`, `operand`, `group_offset` and `scale` are for other recipes."""
        spec = self._spec
        if x.dim() == 2 and group_sizes is None:
            group_sizes = torch.tensor([x.shape[0]])
        layout = self._layout(tuple(x.shape), x.shape[0] if group_sizes is None else group_sizes.shape[0])
        result = GroupedTensor(layout, None if group_sizes is None else group_sizes.to(torch.int64))
        planes: tuple[Tensor, Tensor] | None = None
        for direction in spec.directions:
            if planes is None or not spec.shares_codes:
                shape = layout.scale_shape(direction)
                planes = quantize_plane(
                    x, group_sizes, direction, kind_of(spec), spec.format, spec.power_of_two, spec.amax_epsilon, shape
                )
            setattr(result, direction, planes[0])
            setattr(result, f"{direction}_scale", planes[1])
        return result

    def _layout(self, shape: tuple[int, ...], groups: int) -> GroupedTensorSpec:
        key = (*shape, groups)
        if key not in self._layouts:
            self._layouts[key] = GroupedTensorSpec(
                shape=shape, groups=groups, quantizer=self._spec, ragged_axis=0 if len(shape) == 2 else None
            )
        return self._layouts[key]


@custom_op("acme::quantize_plane", mutates_args=())
def quantize_plane(
    x: Tensor,
    group_sizes: Tensor | None,
    direction: str,
    kind: str,
    fmt: str,
    power_of_two: bool,
    amax_epsilon: float,
    scale_shape: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Payload (x's shape) and decode scales of one direction; `group_sizes` None: x is [G, N, K]."""
    payload: Format = "e4m3" if fmt == "e4m3" else "e5m2"
    matrices = list(x) if group_sizes is None else [x[rows] for rows in spans(host_sizes(group_sizes, len(x)))]
    columns = x.shape[-1]
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    decode = torch.zeros(scale_shape, dtype=torch.float32, device=x.device)
    flat_codes = codes.view(-1, columns)
    by_group = one_scale_row_a_group(kind, direction)
    flat_decode = rows_of_tiles(decode, kind, direction)
    row = tile_row = 0
    for group, matrix in enumerate(matrices):
        # An empty group has a scale as well, where scales belong to groups: that of a matrix of zeros.
        given = matrix.new_zeros((1, columns)) if by_group and not len(matrix) else matrix
        tile = tile_shape(kind, direction, len(given), columns)
        found, scale = quantize_matrix(given.float(), tile, payload, power_of_two, amax_epsilon)
        flat_codes[row : row + len(matrix)] = found[: len(matrix)]
        first = group if by_group else tile_row
        flat_decode[first : first + len(scale)] = scale
        row += len(matrix)
        tile_row += len(scale)
    return codes.view(PAYLOAD[payload]), decode


@quantize_plane.register_fake
def _(
    x: Tensor,
    group_sizes: Tensor | None,
    direction: str,
    kind: str,
    fmt: str,
    power_of_two: bool,
    amax_epsilon: float,
    scale_shape: Sequence[int],
) -> tuple[Tensor, Tensor]:
    dtype = PAYLOAD["e4m3" if fmt == "e4m3" else "e5m2"]
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(scale_shape, dtype=torch.float32)
