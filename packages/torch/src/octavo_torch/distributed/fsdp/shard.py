"""WeightShard: a grouped layer's weight that FSDP2 gathers as codes; its values are an ordinary tensor inside.

FSDP2's extension is two methods of a parameter's local tensor: `fsdp_pre_all_gather` gives what is gathered, and
`fsdp_post_all_gather` makes the parameter of it, or refills the one that it made before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from octavo import GroupedTensorSpec
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.dispatch.layer import Layer
from octavo_torch.distributed.fsdp.codes import gather_scales, quantize_shard, reads_plain, whole_layer
from octavo_torch.distributed.fsdp.notes import Gathered, Given, Notes
from octavo_torch.distributed.fsdp.planes import beside, planes_of, refill, whole_of
from octavo_torch.distributed.fsdp.route import Route, route_of, shard_dim
from octavo_torch.linear.coded_weight import CodedWeight

_aten = torch.ops.aten
_KEPT = {
    _aten.new_zeros.default, _aten.slice.Tensor, _aten.view.default, _aten.as_strided.default, _aten._to_copy.default,
    _aten._pin_memory.default, _aten.split.Tensor, _aten.clone.default, _aten.detach.default, _aten.alias.default,
    _aten.empty_like.default,
}  # fmt: skip
"""What FSDP2 makes shards by, and modules move and copy them by; results of all else are ordinary tensors."""


class WeightShard(torch.Tensor):
    """A weight [G, N, K] or a shard of one. Optimizers, state dicts and collectives see its values alone."""

    held: Tensor
    notes: Notes

    @staticmethod
    def __new__(cls, values: Tensor, notes: Notes) -> WeightShard:
        """The shard of these values."""
        made: WeightShard = torch.Tensor._make_wrapper_subclass(
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
        made.held, made.notes = values, notes
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func` of the values; what it changes in place is the shard itself."""
        given = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        args_of, kwargs_of = pytree.tree_map_only(cls, lambda shard: shard.held, (args, dict(kwargs or {})))
        made = func(*args_of, **kwargs_of)
        if func is _aten.copy_.default:
            return given
        if func in _KEPT and isinstance(given, cls):
            return pytree.tree_map_only(Tensor, lambda values: cls(values, given.notes), made)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Notes]:
        return ["held"], self.notes

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], notes: Notes, size: Any, stride: Any) -> WeightShard:
        return cls(inner["held"], notes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the ordinary tensor: what is saved needs no class of ours to be loaded."""
        return self.held.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightShard({self.held!r})"

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Gathered | None]:
        """What this rank gives to the all-gather: codes and scales of its shard, or its values."""
        group = mesh.get_group()
        ranks = group.size()
        values = self.held
        if mp_policy.param_dtype is not None:
            values = values.to(mp_policy.param_dtype)
        recipe, backend = module.recipe, module.backend
        dim = shard_dim(tuple(self.shape), tuple(outer_size))
        route = route_of(recipe, tuple(outer_size), dim, ranks)
        layer = None
        if route.spec is not None and self.notes.number == 0 and getattr(module, "interleave", None) is not None:
            route = Route(dim, None, "gate and up take turns in the weight, and codes are of the two halves")
        if route.spec is not None:
            layer = whole_layer(recipe, values, outer_size, backend)
            route = _readable(route, layer)
        self.notes.route = route
        if route.spec is None or layer is None:
            return (_padded(values, outer_size, dim, ranks),), None
        state = module.delayed_states[self.notes.number] if recipe.stateful else None

        def make() -> Given:
            codes = quantize_shard(values, route, group, backend, state, module.training)
            return _given(codes, layer, tuple(outer_size), dim, group)

        return self.notes.codes(self.held, module, layer, make)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], about: Gathered | None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight, and the tensors beside the outputs that it is made of; nothing where `out` is refilled."""
        if about is None:
            return None if out is not None else (outputs[0], ())
        count = len(planes_of(about.spec.quantizer)[0])
        scales = outputs[count:]
        if about.scales:
            scales = tuple(_on_this_stream(scale) for scale in about.scales)
        codes = whole_of(about.spec, outputs[:count], scales)
        from_plain = about.layer.quantizers["w"].bound.from_plain
        if from_plain is not None and not reads_plain(about.layer):
            codes = from_plain(codes)
        more = beside(codes, outputs)
        if out is not None:
            whole: Any = out._local_tensor if isinstance(out, DTensor) else out
            return refill(whole.codes, more)
        own = {id(value): value for value in more.values()}
        return CodedWeight(codes, about.layer.recipe, param_dtype), tuple(own.values())


def _given(codes: GroupedTensor, layer: Layer, whole: tuple[int, ...], dim: int, group: dist.ProcessGroup) -> Given:
    """For a shard's codes: bytes of the payloads, with the scales where those are sharded alike."""
    payloads, scales = (
        [getattr(codes, name).contiguous() for name in names] for names in planes_of(codes.spec.quantizer)
    )
    given = tuple(payload.view(torch.uint8) for payload in payloads)
    spec = GroupedTensorSpec(**{**dict(codes.spec), "shape": whole, "groups": whole[0]})
    if dim == 0:
        return (*given, *scales), Gathered(spec, layer, [])
    # FSDP puts shards of other dims together as if each had the parameter's shape, which scales have not
    return given, Gathered(spec, layer, gather_scales(scales, dim, group))


def _readable(route: Route, layer: Layer) -> Route:
    """`route`, but with values where the backend that reads the codes makes its layouts of values alone."""
    plan = layer.quantizers["w"]
    if reads_plain(layer) or plan.bound.from_plain is not None:
        return route
    return Route(route.dim, None, f"{plan.backend} reads layouts {layer.w_layouts} and makes them of values alone")


def _on_this_stream(scale: Tensor) -> Tensor:
    """A copy in memory of the current stream; the original is of the stream in which FSDP prepares gathers."""
    if scale.is_cuda:
        scale.record_stream(torch.cuda.current_stream())
    return scale.clone()


def _padded(values: Tensor, whole: torch.Size, dim: int, ranks: int) -> Tensor:
    """The shard with zeros where FSDP has padding, which it asks of shards that are not equal."""
    missing = -(-whole[dim] // ranks) - values.shape[dim]
    if not missing:
        return values
    shape = [*values.shape]
    shape[dim] = missing
    return torch.cat([values, values.new_zeros(shape)], dim)
