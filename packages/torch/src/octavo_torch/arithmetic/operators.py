"""The reference computations as functions of tensors, and as custom operators `octavo_torch::*` for torch.compile."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from octavo import GroupedTensorSpec, QuantizerSpec, check_group_sizes
from octavo.health import FIELDS
from octavo.quantizer import Direction
from octavo_torch.arithmetic import bias, gemm, mxfp4
from octavo_torch.arithmetic.dequantize import dequantize_reference
from octavo_torch.arithmetic.groups import RowGroups, bounded_sizes
from octavo_torch.arithmetic.processor import check_subnormals
from octavo_torch.arithmetic.quantize import OPERAND_NUMBER, Noise, group_amax, quantize_reference
from octavo_torch.arithmetic.stats import operand_stats
from octavo_torch.arrays.dtypes import PAYLOAD_DTYPE, SCALE_DTYPE
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.compiler.graphs import check_not_captured
from octavo_torch.compiler.operators import Operators
from octavo_torch.compiler.status import flag_bad_sizes
from octavo_torch.memo import Memo

_operator = Operators("octavo_torch").define


# ---- sizes


def _bound_sizes(sizes: Tensor, rows: int, like: Tensor) -> Tensor:
    if sizes.is_cpu:
        check_group_sizes(sizes.tolist(), rows)
        check_not_captured("group_sizes", like)
        return torch.empty_like(sizes, dtype=torch.int64, device=like.device).copy_(sizes)
    bounded, changed = bounded_sizes(sizes, rows)
    flag_bad_sizes(changed)
    return bounded


bound_sizes = _operator(
    "bound_sizes(Tensor sizes, int rows, Tensor like) -> Tensor",
    _bound_sizes,
    lambda sizes, rows, like: like.new_empty(sizes.shape, dtype=torch.int64),
)
"""int64 sizes on `like`'s device that are safe to index `rows` rows with.

Sizes in host memory are checked and raise ValueError; others are cut to bounds and set the device's status word.
"""


# ---- quantize, dequantize


def _group_amax(x: Tensor, sizes: Tensor | None) -> Tensor:
    if x.dim() == 3:
        return group_amax(x.reshape(-1, x.shape[2]).float(), RowGroups.stacked(x.shape[0], x.shape[1], x.device))
    assert sizes is not None
    groups = RowGroups(_bound_sizes(sizes, x.shape[0], x), x.shape[0])
    return group_amax(torch.where(groups.valid[:, None], x.float(), 0.0), groups)


group_amax_of = _operator(
    "group_amax(Tensor x, Tensor? sizes) -> Tensor",
    _group_amax,
    lambda x, sizes: x.new_empty((x.shape[0] if sizes is None else sizes.shape[0],), dtype=torch.float32),
)
"""fp32 [G]: max |x| of each group of [M, K] rows or of each of [G, N, K] matrices; NaN where it holds one."""


@lru_cache(maxsize=256)
def quantizer_from(text: str) -> QuantizerSpec:
    """The spec that `model_dump_json` wrote."""
    return QuantizerSpec.model_validate_json(text)


@lru_cache(maxsize=1024)
def layout_from(quantizer: str, shape: tuple[int, ...], groups: int) -> GroupedTensorSpec:
    """The plain layout of a tensor of this shape; cached, because building one costs more than a small quantize."""
    spec = quantizer_from(quantizer)
    if len(shape) == 2:
        return GroupedTensorSpec(shape=shape, groups=groups, quantizer=spec)
    return GroupedTensorSpec(shape=shape, groups=groups, ragged_axis=None, quantizer=spec)


def layout_of(x: Tensor, sizes: Tensor | None, quantizer: str) -> GroupedTensorSpec:
    """The plain layout of `x` quantized."""
    shape = tuple([int(size) for size in x.shape])
    return layout_from(quantizer, shape, shape[0] if sizes is None else int(sizes.shape[0]))


def plane_names(quantizer: QuantizerSpec) -> list[str]:
    """Planes in the order in which the operator returns them; shared codes are returned once, as row data."""
    directions = ("rowwise",) if quantizer.shares_codes else quantizer.directions
    parts = ("", "_scale", "_global") if quantizer.scaling == "nvfp4" else ("", "_scale")
    return [direction + part for direction in directions for part in parts]


def assembled(layout: GroupedTensorSpec, sizes: Tensor | None, planes: list[Tensor]) -> GroupedTensor:
    """The GroupedTensor of an operator's planes."""
    spec = layout.quantizer
    named = dict(zip(plane_names(spec), planes, strict=True))
    if spec.shares_codes:
        if spec.orientation != "rowwise":
            named |= {name.replace("rowwise", "columnwise"): plane for name, plane in named.items()}
        if spec.orientation == "columnwise":
            named = {name: plane for name, plane in named.items() if name.startswith("columnwise")}
    return GroupedTensor(layout, sizes, **named)


def _quantize(
    x: Tensor,
    sizes: Tensor | None,
    quantizer: str,
    seed: Tensor | None,
    operand: str,
    group_offset: int,
    scale: Tensor | None,
) -> list[Tensor]:
    if x.is_cpu:
        check_subnormals()
    layout = layout_of(x, sizes, quantizer)
    q = quantize_reference(x, layout, sizes, seed=seed, operand=operand, group_offset=group_offset, scale=scale)
    spec = layout.quantizer
    lead = "columnwise" if spec.orientation == "columnwise" else "rowwise"
    return [getattr(q, name.replace("rowwise", lead) if spec.shares_codes else name) for name in plane_names(spec)]


def _quantize_fake(x: Tensor, sizes: Tensor | None, quantizer: str, *_: object) -> list[Tensor]:
    layout = layout_of(x, sizes, quantizer)
    spec = layout.quantizer
    payload, scale = PAYLOAD_DTYPE[spec.format], SCALE_DTYPE[spec.scale_format]
    planes = []
    for name in plane_names(spec):
        direction: Direction = "columnwise" if name.startswith("columnwise") else "rowwise"
        if name.endswith("_global"):
            planes.append(x.new_empty((layout.groups,), dtype=torch.float32))
        elif name.endswith("_scale"):
            planes.append(x.new_empty(layout.scale_shape(direction), dtype=scale))
        else:
            planes.append(x.new_empty(layout.payload_shape(direction), dtype=payload))
    return planes


quantize_planes = _operator(
    "quantize(Tensor x, Tensor? sizes, str quantizer, Tensor? seed, str operand, SymInt group_offset, Tensor? scale)"
    " -> Tensor[]",
    _quantize,
    _quantize_fake,
)
"""The planes of `x`, named by `plane_names`: see quantize_reference. `quantizer` is a QuantizerSpec as JSON."""


def _dequantize(
    codes: Tensor,
    scale: Tensor,
    factor: Tensor | None,
    sizes: Tensor | None,
    quantizer: str,
    shape: list[int],
    groups: int,
    direction: Direction,
) -> Tensor:
    if codes.is_cpu:
        check_subnormals()
    layout = layout_from(quantizer, tuple(shape), groups)
    q = GroupedTensor(layout, sizes)
    setattr(q, direction, codes)
    setattr(q, f"{direction}_scale", scale)
    setattr(q, f"{direction}_global", factor)
    return dequantize_reference(q, direction)


dequantize_plane = _operator(
    "dequantize(Tensor codes, Tensor scale, Tensor? factor, Tensor? sizes, str quantizer, SymInt[] shape, int groups,"
    " str direction) -> Tensor",
    _dequantize,
    lambda codes, *_: torch.empty_like(codes, dtype=torch.float32, memory_format=torch.contiguous_format),
)
"""fp32 values of one plane: see dequantize_reference."""


def _stats(
    x: Tensor,
    sizes: Tensor | None,
    quantizer: str,
    direction: str,
    seed: Tensor | None,
    operand: str,
    scale: Tensor | None,
    rows: int,
) -> Tensor:
    spec = quantizer_from(quantizer) if quantizer else None
    bounded = None if sizes is None else _bound_sizes(sizes, x.shape[0], x)
    noise = (
        Noise(seed, OPERAND_NUMBER[operand], 0) if seed is not None and spec is not None and spec.stochastic else None
    )
    produced: Direction = "columnwise" if direction == "columnwise" else "rowwise"
    return operand_stats(x, bounded, spec, produced, noise, scale, rows)


stats_of = _operator(
    "operand_stats(Tensor x, Tensor? sizes, str quantizer, str direction, Tensor? seed, str operand, Tensor? scale,"
    " int rows) -> Tensor",
    _stats,
    lambda x, sizes, *_: x.new_empty(
        (len(FIELDS), x.shape[0] if sizes is None else sizes.shape[0]), dtype=torch.float64
    ),
)
"""float64 [8, G]: see stats.operand_stats; `quantizer` "" is an operand that stays in high precision."""


mxfp4_values = _operator(
    "mxfp4_values(Tensor x, Tensor? sizes, str direction) -> Tensor",
    mxfp4.mxfp4_values,
    lambda x, *_: torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format),
)
"""See mxfp4.mxfp4_values."""


_texts: Memo[str] = Memo()


def quantizer_text(spec: QuantizerSpec) -> str:
    """The JSON by which operators name a spec. Found by identity: hashing a spec costs more than a small dequantize."""
    return _texts.get(id(spec), spec.model_dump_json, spec)


# ---- GEMMs


fprop = _operator(
    "fprop(Tensor x, Tensor w, Tensor sizes, Tensor? bias, Tensor? bias_scales, ScalarType dtype) -> Tensor",
    gemm.fprop,
    lambda x, w, sizes, bias, bias_scales, dtype: x.new_empty((x.shape[0], w.shape[1]), dtype=dtype),
)
"""See gemm.fprop."""

dgrad = _operator(
    "dgrad(Tensor dy, Tensor w, Tensor sizes, ScalarType dtype) -> Tensor",
    gemm.dgrad,
    lambda dy, w, sizes, dtype: dy.new_empty((dy.shape[0], w.shape[2]), dtype=dtype),
)
"""See gemm.dgrad."""

wgrad = _operator(
    "wgrad(Tensor x, Tensor dy, Tensor sizes, ScalarType dtype) -> Tensor",
    gemm.wgrad,
    lambda x, dy, sizes, dtype: x.new_empty((sizes.shape[0], dy.shape[1], x.shape[1]), dtype=dtype),
)
"""See gemm.wgrad."""


def _bias_grads(dy: Tensor, sizes: Tensor, bias_values: Tensor | None, bias_scales: Tensor | None) -> list[Tensor]:
    db, ds = bias.bias_grads(dy, sizes, bias_values, bias_scales)
    return [db] if ds is None else [db, ds]


def _bias_grads_fake(dy: Tensor, sizes: Tensor, bias_values: Tensor | None, bias_scales: Tensor | None) -> list[Tensor]:
    db = dy.new_empty((sizes.shape[0], dy.shape[1]), dtype=torch.float32)
    if bias_values is None or bias_scales is None:
        return [db]
    return [db, dy.new_empty((dy.shape[0],), dtype=torch.float32)]


bias_grads = _operator(
    "bias_grads(Tensor dy, Tensor sizes, Tensor? bias, Tensor? bias_scales) -> Tensor[]", _bias_grads, _bias_grads_fake
)
"""[db] or [db, ds] in fp32: see bias.bias_grads."""
