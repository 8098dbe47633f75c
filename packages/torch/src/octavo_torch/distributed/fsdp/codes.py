"""Quantizes the shards of a weight: each rank's codes are bit for bit a part of the whole weight's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from octavo import GroupedTensorSpec, Recipe
from octavo.grouped_tensor import PLAIN
from octavo_torch.arithmetic.casts import ABS_BITS
from octavo_torch.arrays.checks import HashableNames
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.per_group import concatenated
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layers import layer_for
from octavo_torch.distributed.fsdp.planes import from_planes
from octavo_torch.distributed.fsdp.route import Route
from octavo_torch.quantizers.functional import quantize
from octavo_torch.scaling.delayed_state import DelayedState


def whole_layer(recipe: Recipe, like: Tensor, shape: torch.Size, backend: HashableNames) -> Layer:
    """The layer of a whole weight of this shape, with the dtype and device of `like`."""
    weight = like.new_empty(()).expand(shape)
    return layer_for(recipe, weight, weight, like.is_cpu, True, True, backend, wants_graph(like))


def reads_plain(layer: Layer) -> bool:
    """True where the layer's GEMMs read a weight's planes in the plain layout."""
    return all(name in (None, PLAIN) for name in layer.w_layouts or ())


def quantize_shard(
    shard: Tensor,
    route: Route,
    group: dist.ProcessGroup,
    backend: HashableNames,
    state: DelayedState | None,
    record: bool,
) -> GroupedTensor:
    """Plain planes of this rank's shard: equal to that part of the whole weight's planes.

    state    of delayed scaling; where `record` is True, the whole weight's amax is recorded in it
    """
    spec = route.spec
    assert spec is not None
    groups = slice(None)
    if route.dim == 0:
        first = group.rank() * shard.shape[0]
        groups = slice(first, first + shard.shape[0])
    if state is not None:
        if record:
            amax = shard.new_zeros(state.groups, dtype=torch.float32)
            amax[groups] = _amax(shard)
            # a compiled backward saved the history; recording w does not change the row of dy, which it reads
            with _unsafe_preserve_version_counter(state.history):
                state.record("w", _max_over_ranks(amax, group))
        return quantize(shard, spec, scale=state.encode_scale("w")[groups], backend=backend)
    if not route.shares:
        return quantize(shard, spec, backend=backend)
    # an added row of blocks carries the amax of all shards: part of the groups, but of none of the shard's blocks
    rows = spec.block_size or 1
    padded = torch.nn.functional.pad(shard, (0, 0, 0, rows))
    padded[:, -rows, 0] = _max_over_ranks(_amax(shard), group).to(shard.dtype)
    return _without_last_rows(quantize(padded, spec, backend=backend), rows)


def _amax(x: Tensor) -> Tensor:
    """Largest magnitude of each group of x [G, N, K], fp32 [G]; NaN where a group contains one. Does not copy x."""
    least, most = x.flatten(1).aminmax(dim=1)
    return torch.maximum(most, -least).float()


def _max_over_ranks(amax: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The maximum over the group's ranks, NaN above all: reduced as integers, whose order is that of magnitudes."""
    bits = amax.view(torch.int32) & ABS_BITS
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


def _without_last_rows(q: GroupedTensor, rows: int) -> GroupedTensor:
    """`q`, quantized in square blocks or with one scale per group, without the last `rows` rows of each matrix."""
    groups, height, columns = q.spec.shape
    spec = GroupedTensorSpec(**{**dict(q.spec), "shape": (groups, height - rows, columns)})
    codes, scale, factor = q.plane("rowwise")
    if scale.dim() == 3:
        scale = scale[:, :-1]
    return from_planes(spec, {"rowwise": codes[:, :-rows], "rowwise_scale": scale, "rowwise_global": factor})


def gather_scales(scales: list[Tensor], dim: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Scales of the whole weight from those of shards along dim 1 or 2, in one collective.

    Scales of blocks [G, ., .] are concatenated along `dim`; scales of groups [G] are the same on every rank. All
    results have their own memory.
    """
    parts = [scale.contiguous().view(torch.uint8).reshape(-1) for scale in scales if scale.dim() == 3]
    if not parts:
        return [scale.clone() for scale in scales]
    local = torch.cat(parts)
    gathered = local.new_empty((group.size(), local.numel()))
    dist.all_gather([*gathered.unbind()], local, group=group)
    split = iter(torch.split(gathered, [part.numel() for part in parts], 1))
    return [
        concatenated([row.clone().view(scale.dtype).view(scale.shape) for row in next(split)], dim)
        if scale.dim() == 3
        else scale.clone()
        for scale in scales
    ]
