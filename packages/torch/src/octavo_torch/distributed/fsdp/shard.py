"""WeightShard: a grouped layer's weight that FSDP2 gathers as codes; it wraps an ordinary tensor of values.

FSDP2's extension point is two methods of a parameter's local tensor: `fsdp_pre_all_gather` returns the tensors to
gather, and `fsdp_post_all_gather` builds the parameter from them, or refills the one that it built before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from octavo import GroupedTensorSpec
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.per_group import concatenated
from octavo_torch.dispatch.layer import Layer
from octavo_torch.distributed.fsdp.codes import gather_scales, quantize_shard, reads_plain, whole_layer
from octavo_torch.distributed.fsdp.gather_state import Gathered, GatherInput, GatherState
from octavo_torch.distributed.fsdp.planes import from_gathered, plane_names, planes_outside, refill
from octavo_torch.distributed.fsdp.route import Route, route_of, shard_dim
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.scaling.recipe_module import RecipeModule

_aten = torch.ops.aten
_SHARD_OPERATIONS = {
    _aten.new_zeros.default, _aten.slice.Tensor, _aten.view.default, _aten.as_strided.default, _aten._to_copy.default,
    _aten._pin_memory.default, _aten.split.Tensor, _aten.clone.default, _aten.detach.default, _aten.alias.default,
    _aten.empty_like.default,
}  # fmt: skip
"""Operations by which FSDP2 shards, and modules move and copy; results of all others are ordinary tensors."""


class WeightShard(torch.Tensor):
    """A weight [G, N, K] or a shard of one. Optimizers, state dicts and collectives see its values alone."""

    wrapped: Tensor
    state: GatherState

    @staticmethod
    def __new__(cls, values: Tensor, state: GatherState) -> WeightShard:
        """The shard of these values."""
        shard: WeightShard = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=values.device,
            pin_memory=values.is_pinned(),
            requires_grad=values.requires_grad,
        )
        shard.wrapped, shard.state = values, state
        return shard

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func` of the values; in-place operations change the shard itself."""
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        values_args, values_kwargs = pytree.tree_map_only(cls, lambda shard: shard.wrapped, (args, dict(kwargs or {})))
        result = func(*values_args, **values_kwargs)
        if func is _aten.copy_.default:
            return first
        if func in _SHARD_OPERATIONS and isinstance(first, cls):
            return pytree.tree_map_only(Tensor, lambda values: cls(values, first.state), result)
        return result

    def __tensor_flatten__(self) -> tuple[list[str], GatherState]:
        return ["wrapped"], self.state

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, Tensor], state: GatherState, size: torch.Size, stride: Sequence[int]
    ) -> WeightShard:
        return cls(tensors["wrapped"], state)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """As the ordinary tensor, so that loading what was saved does not need this class."""
        return self.wrapped.__reduce_ex__(protocol)  # type: ignore[no-untyped-call, no-any-return]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"WeightShard({self.wrapped!r})"

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: RecipeModule,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Gathered | None]:
        """This rank's input of the all-gather: codes and scales of its shard, or its values."""
        group = mesh.get_group()
        ranks = group.size()
        values = self.wrapped
        if mp_policy.param_dtype is not None:
            values = values.to(mp_policy.param_dtype)
        recipe, backend = module.recipe, module.backend
        dim = shard_dim(tuple(self.shape), tuple(outer_size))
        route = route_of(recipe, tuple(outer_size), dim, ranks)
        layer, read = None, self.state.as_read(values)
        if route.spec is not None and self.state.number == 0 and getattr(module, "interleave", None) is not None:
            route = Route(dim, None, "gate and up rows are interleaved in the weight, and codes are of the two halves")
        if route.spec is not None:
            layer = whole_layer(recipe, read, outer_size, backend)
            route = _readable(route, layer)
        self.state.route = route
        if route.spec is None or layer is None:
            return (_padded(values, outer_size, dim, ranks),), None
        delayed = module.delayed_states[self.state.number] if recipe.stateful else None

        def quantize() -> GatherInput:
            codes = quantize_shard(read, route, group, backend, delayed, module.training)
            return _gather_input(codes, layer, tuple(outer_size), dim, group)

        return self.state.codes(self.wrapped, module, layer, quantize)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        about: Gathered | None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight, and its tensors outside of `outputs`; None where `out` is refilled."""
        if about is None:
            return None if out is not None else (outputs[0], ())
        count = len(plane_names(about.spec.quantizer)[0])
        scales = outputs[count:]
        if about.scales:
            scales = tuple(_on_this_stream(scale) for scale in about.scales)
        codes = from_gathered(about.spec, outputs[:count], scales)
        from_plain = about.layer.quantizers["w"].bound.from_plain
        if from_plain is not None and not reads_plain(about.layer):
            codes = from_plain(codes)
        other_planes = planes_outside(codes, outputs)
        if out is not None:
            whole = out._local_tensor if isinstance(out, DTensor) else out
            assert isinstance(whole, CodedWeight)  # built here before
            refill(whole.codes, other_planes)
            whole.recipe = about.layer.recipe  # `convert` may have given the module another one with the same codes
            return None
        own = {id(value): value for value in other_planes.values()}
        return CodedWeight(codes, about.layer.recipe, param_dtype), tuple(own.values())


def _gather_input(
    codes: GroupedTensor, layer: Layer, whole: tuple[int, ...], dim: int, group: dist.ProcessGroup
) -> GatherInput:
    """Payloads of a shard's codes as bytes, together with the scales where those are sharded in the same way."""
    payloads, scales = (
        [getattr(codes, name).contiguous() for name in names] for names in plane_names(codes.spec.quantizer)
    )
    as_bytes = tuple(payload.view(torch.uint8) for payload in payloads)
    spec = GroupedTensorSpec(**{**dict(codes.spec), "shape": whole, "groups": whole[0]})
    if dim == 0:
        return (*as_bytes, *scales), Gathered(spec, layer, [])
    # FSDP joins shards of other dims as if each had the parameter's shape, which scales do not have
    return as_bytes, Gathered(spec, layer, gather_scales(scales, dim, group))


def _readable(route: Route, layer: Layer) -> Route:
    """`route`; values are gathered where the backend can produce its layouts from values only."""
    plan = layer.quantizers["w"]
    if reads_plain(layer) or plan.bound.from_plain is not None:
        return route
    return Route(route.dim, None, f"{plan.backend} reads layouts {layer.w_layouts} and produces them from values only")


def _on_this_stream(scale: Tensor) -> Tensor:
    """A copy allocated on the current stream; the original belongs to the stream on which FSDP prepares gathers."""
    if scale.is_cuda:
        scale.record_stream(torch.cuda.current_stream())
    return scale.clone()


def _padded(values: Tensor, whole: torch.Size, dim: int, ranks: int) -> Tensor:
    """The shard, padded with zeros where FSDP expects shards of equal size."""
    missing = -(-whole[dim] // ranks) - values.shape[dim]
    if not missing:
        return values
    shape = [*values.shape]
    shape[dim] = missing
    return concatenated([values, values.new_zeros(shape)], dim)
