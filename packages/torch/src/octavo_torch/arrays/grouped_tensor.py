"""GroupedTensor: codes and decode scales of one quantized operand, in the requested directions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo import GroupedTensorSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_registry.contract.moves import TokenRows
from octavo_torch.arrays.dtypes import PAYLOAD_DTYPE, SCALE_DTYPE
from octavo_torch.arrays.dtypes import name_of as dtype_text
from octavo_torch.arrays.pickled import Pickled, pickled, unpickled
from octavo_torch.compiler.tracing import is_plain, known_by, name_of, spec_of

PLANES = ("rowwise", "rowwise_scale", "rowwise_global", "columnwise", "columnwise_scale", "columnwise_global")

PLANES_OF: Mapping[Direction, tuple[str, ...]] = {"rowwise": PLANES[:3], "columnwise": PLANES[3:]}
"""The fields that belong to the planes of each direction: codes, scales, second level."""


@dataclass(eq=False)
class GroupedTensor:
    """A quantized operand; `spec` (GroupedTensorSpec) gives every shape and how the codes were computed.

    rowwise, columnwise                payload: float8_e4m3fn or float8_e5m2, or uint8 with one E2M1 code per byte
    rowwise_scale, columnwise_scale    decode scales: float32, uint8 (E8M0 exponents) or float8_e4m3fn (NVFP4)
    rowwise_global, columnwise_global  float32 [G], NVFP4's second-level decode factor
    group_sizes                        int64 [G]; None for stacked matrices

    Absent planes are None. Where both directions share their codes they are one tensor. A torch pytree: it goes
    through `torch.compile`, `tree_map`, `copy.deepcopy`, `pickle` and `torch.load` with weights_only=True; tensors in,
    tensors out, no autograd of its own.
    """

    spec: GroupedTensorSpec
    group_sizes: Tensor | None = None
    rowwise: Tensor | None = None
    rowwise_scale: Tensor | None = None
    rowwise_global: Tensor | None = None
    columnwise: Tensor | None = None
    columnwise_scale: Tensor | None = None
    columnwise_global: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The logical shape: [M, K], or [G, N, K] for stacked matrices."""
        return torch.Size(self.spec.shape)

    @property
    def device(self) -> torch.device:
        """The device of the planes."""
        return next(self._tensors()).device

    def plane(self, direction: Direction) -> tuple[Tensor, Tensor, Tensor | None]:
        """Payload, decode scales and second-level factor of one direction; raises ValueError where it is absent."""
        codes, scale = getattr(self, direction), getattr(self, f"{direction}_scale")
        if codes is None or scale is None:
            raise ValueError(
                f"direction={direction!r} and this tensor holds {self.spec.orientation} data only; "
                f"quantize with orientation={direction!r} or 'both'"
            )
        return codes, scale, getattr(self, f"{direction}_global")

    def copy_into(self, out: GroupedTensor) -> GroupedTensor:
        """Copy every plane into `out`, which must have the same spec, shared ones once; returns `out`."""
        if out.spec != self.spec:
            raise ValueError(f"out is {out!r} and the result {self!r}; give one of the same spec")
        pairs = ((getattr(out, name), getattr(self, name)) for name in _ARRAYS)
        for target, value in {id(target): (target, value) for target, value in pairs if value is not None}.values():
            target.copy_(value)
        return out

    def _tensors(self) -> Iterator[Tensor]:
        for name in PLANES:
            value = getattr(self, name)
            if value is not None:
                yield value

    def nbytes(self) -> int:
        """Bytes of all planes; shared planes are counted once."""
        unique = {id(value): value for value in self._tensors()}
        return sum(value.numel() * value.element_size() for value in unique.values())

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Planes and text: not FP8 tensors, which pickle does not take."""
        first = first_of_same(self)
        planes = {name: pickled(getattr(self, name)) for name in first.values()}
        return _unpickled_tensor, (planes, first, self.spec.model_dump_json(), self.group_sizes)

    def __copy__(self) -> GroupedTensor:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupedTensor:
        return GroupedTensor(self.spec, **{name: deepcopy(getattr(self, name), memo) for name in _ARRAYS})

    def __repr__(self) -> str:
        planes = ", ".join(name for name in PLANES if getattr(self, name) is not None)
        spec = self.spec.quantizer
        return f"GroupedTensor({spec.scaling}, {spec.format}, shape={tuple(self.shape)}, planes=[{planes}])"


Matrix = Tensor | GroupedTensor
"""An operand of a GEMM: a quantized one, or a plain tensor where its slot is high precision."""

Rows = Matrix | TokenRows[Tensor]
"""A ragged operand of a GEMM, which may be rows of tokens where `octavo_torch.moe.tokens.gathers` says so."""

_ARRAYS = tuple(field.name for field in fields(GroupedTensor) if field.name != "spec")


def first_of_same(tensor: GroupedTensor) -> dict[str, str]:
    """For each plane that is there, the name of the first plane that is the same tensor."""
    first: dict[int, str] = {}
    there = [name for name in PLANES if getattr(tensor, name) is not None]
    return {name: first.setdefault(id(getattr(tensor, name)), name) for name in there}


def with_planes(
    spec: GroupedTensorSpec, planes: dict[str, Tensor], first: dict[str, str], group_sizes: Tensor | None = None
) -> GroupedTensor:
    """The tensor of the planes that `first_of_same` names."""
    return GroupedTensor(spec, group_sizes, **{name: planes[of] for name, of in first.items()})


def on_device(tensor: GroupedTensor, device: torch.device, *, copy: bool = False) -> GroupedTensor:
    """The tensor on `device`. A tensor that is in two planes stays one, as quantizers that write such codes need it."""
    first = first_of_same(tensor)
    planes = {name: getattr(tensor, name).to(device, copy=copy) for name in dict.fromkeys(first.values())}
    sizes = tensor.group_sizes
    return with_planes(tensor.spec, planes, first, None if sizes is None else sizes.to(device, copy=copy))


def check_planes(name: str, tensor: GroupedTensor) -> None:
    """ValueError if a plain plane has another shape or dtype than the spec says; only backends know those of other
    layouts.

    For tensors that a caller has put together, or that come from a file, because kernels get bare addresses.
    """
    quantizer = tensor.spec.quantizer
    dtypes = PAYLOAD_DTYPE[quantizer.format], SCALE_DTYPE[quantizer.scale_format]
    for direction in quantizer.directions:
        codes, scale = getattr(tensor, direction), getattr(tensor, f"{direction}_scale")
        if getattr(tensor.spec, f"{direction}_layout") != PLAIN or codes is None or not is_plain(codes):
            continue
        shapes = tensor.spec.payload_shape(direction), tensor.spec.scale_shape(direction)
        given = tuple(codes.shape), None if scale is None else tuple(scale.shape)
        if given != shapes:
            raise ValueError(
                f"{name}'s {direction} codes and scales have shapes {given[0]} and {given[1]}, and its spec says "
                f"{shapes[0]} and {shapes[1]}; give the tensors that its quantizer made"
            )
        assert scale is not None  # it has a shape
        if (codes.dtype, scale.dtype) != dtypes:
            have, says = (" and ".join(map(dtype_text, pair)) for pair in ((codes.dtype, scale.dtype), dtypes))
            raise ValueError(
                f"{name}'s {direction} codes and scales are {have}, and its spec says {says}; view bytes as these, "
                "and cast nothing"
            )


def _unpickled_tensor(
    planes: dict[str, Pickled], first: dict[str, str], spec: str, group_sizes: Tensor | None
) -> GroupedTensor:
    """The inverse of GroupedTensor.__reduce_ex__. Raises ValueError for text that describes none."""
    values = {name: unpickled(value) for name, value in planes.items()}
    tensor = with_planes(GroupedTensorSpec.model_validate_json(spec), values, first, group_sizes)
    check_planes("the pickled tensor", tensor)
    return tensor


torch.serialization.add_safe_globals([_unpickled_tensor])


_LEAVES = sorted(_ARRAYS, key=len, reverse=True)
"""The arrays, each before those whose names its own begins with: torch.export replaces names in this order, as text."""

_Context = tuple[GroupedTensorSpec | str, tuple[str, ...]]
"""The spec, or its name where a compiler traces or has traced; and the names of the arrays that are present."""


def _flatten_with_keys(tensor: GroupedTensor) -> tuple[list[tuple[pytree.KeyEntry, Tensor]], _Context]:
    # absent planes are not leaves: torch.compile does not accept None there
    present = tuple(name for name in _LEAVES if getattr(tensor, name) is not None)
    spec = known_by(tensor.spec) if is_plain(getattr(tensor, present[0])) else name_of(tensor.spec)
    return [(pytree.GetAttrKey(name), getattr(tensor, name)) for name in present], (spec, present)


def _flatten(tensor: GroupedTensor) -> tuple[list[Tensor], _Context]:
    leaves, context = _flatten_with_keys(tensor)
    return [leaf for _, leaf in leaves], context


def _spec(spec: GroupedTensorSpec | str) -> GroupedTensorSpec:
    return spec_of(spec) if isinstance(spec, str) else spec


def _unflatten(arrays: Iterable[Tensor], context: _Context) -> GroupedTensor:
    spec, present = context
    return GroupedTensor(_spec(spec), **dict(zip(present, arrays, strict=True)))


pytree.register_pytree_node(
    GroupedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="octavo_torch.GroupedTensor",
    to_dumpable_context=lambda context: [_spec(context[0]).model_dump_json(), *context[1]],
    from_dumpable_context=lambda dumped: (name_of(GroupedTensorSpec.model_validate_json(dumped[0])), tuple(dumped[1:])),
    flatten_with_keys_fn=_flatten_with_keys,
)


Some = TypeVar("Some")


def codes_alone(operand: Some) -> Some:
    """A GroupedTensor without its planes of values, which have no scales, and which only the pass that has made them
    reads; anything else as it is."""
    if not isinstance(operand, GroupedTensor):
        return operand
    values = [
        direction
        for direction in PLANES_OF
        if getattr(operand, direction) is not None and getattr(operand, f"{direction}_scale") is None
    ]
    return _without(operand, values) if values else operand


def plane_alone(operand: Some, direction: Direction) -> Some:
    """A GroupedTensor with the plane of this direction, if it has it, and no other; anything else as it is."""
    if not isinstance(operand, GroupedTensor):
        return operand
    return _without(operand, [other for other in PLANES_OF if other != direction])


def _without(operand: Some, directions: Iterable[Direction]) -> Some:
    absent: dict[str, Any] = {part: None for direction in directions for part in PLANES_OF[direction]}
    return replace(operand, **absent)  # type: ignore[type-var]  # a GroupedTensor
