"""CodedWeight: a weight of which codes exist and high-precision values do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo import GroupedTensorSpec, Recipe
from octavo_torch.arrays.checks import brief, check_dtype, check_recipe
from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of
from octavo_torch.arrays.grouped_tensor import (
    GroupedTensor,
    check_planes,
    first_of_same,
    on_device,
    with_planes,
)
from octavo_torch.arrays.interleaving import check_stored_interleave, from_halves, to_halves
from octavo_torch.arrays.operands import check_layout, check_not_nested
from octavo_torch.arrays.pickled import Pickled, pickled, unpickled
from octavo_torch.arrays.valueless import Valueless
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.quantizers.functional import dequantize, quantize

_aten = torch.ops.aten
_SAME = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.view.default,
}  # as a parameter is created, or seen through a sharding wrapper: another tensor over the same codes
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_FILLS = {_aten.uniform_.default, _aten.normal_.default, _aten.fill_.Scalar, _aten.zero_.default}
"""What torch.nn.init does to a parameter: the values are drawn, and quantized into it."""
_NEW = {_aten.zeros_like.default, _aten.new_zeros.default, _aten.empty_like.default, _aten.new_empty.default}


_Facts = tuple[GroupedTensorSpec, Recipe, torch.dtype, int, tuple[tuple[str, str], ...]]
"""What compilers keep of a CodedWeight in addition to its planes."""


class CodedWeight(Valueless):
    """Weights [G, N, K] as codes alone, with shape, dtype and device of the values that they stand for.

    It may be a parameter: `grouped_linear`, `grouped_mlp` and their modules take it in the weight's place, and a
    gradient that it receives is an ordinary tensor. FSDP2 gathers one where `quantize_before_gather` is on, and a
    checkpoint of quantized weights is loaded as one; `quantized_parameters` makes a model of them. `copy_` quantizes
    new values into the codes, in place. Whatever else would need values raises ValueError: nothing is dequantized in
    silence, `octavo_torch.dequantize(weight.codes)` does it. torch.compile sees its planes.

    codes     both planes, in the layouts that the backend reads
    recipe    the recipe that they belong to
    layouts   of the two planes
    interleave  as QuantizedWeight has it
    """

    _facts: ClassVar = ("codes", "recipe", "layouts", "interleave", "_first")
    codes: GroupedTensor
    recipe: Recipe
    layouts: tuple[str, str]
    interleave: int
    _first: dict[str, str]

    @staticmethod
    def __new__(cls, codes: GroupedTensor, recipe: Recipe, dtype: torch.dtype, interleave: int = 0) -> CodedWeight:
        """The weight of `codes`, whose shape it has; `dtype` is the values'. ValueError for anything but codes."""
        if not isinstance(codes, GroupedTensor) or codes.spec.ragged_axis is not None:
            raise ValueError(f"codes is {brief(codes)}; give the GroupedTensor of stacked matrices [G, N, K]")
        check_recipe(recipe)
        check_dtype(dtype)
        weight: CodedWeight = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        weight.codes, weight.recipe = codes, recipe
        weight.interleave = check_stored_interleave(interleave, weight)
        weight.layouts = codes.spec.rowwise_layout, codes.spec.columnwise_layout
        weight._first = first_of_same(codes)
        for name in weight._first.values():
            setattr(weight, name, getattr(codes, name))
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Views and copies of the whole, new tensors of its shape, values copied into it; ValueError for all else."""
        weight = args[0]
        options = dict(kwargs or {})
        if func in _SAME and isinstance(weight, cls):
            shape = args[1] if func in (_aten.as_strided.default, _aten.view.default) else weight.shape
            if tuple(shape) == tuple(weight.shape):
                # torch gives a view of a tensor that counts its changes the same count, inference mode or not
                with torch.inference_mode(weight.is_inference()):
                    return cls(weight.codes, weight.recipe, weight.dtype, weight.interleave)
        if func in _COPIES and isinstance(weight, cls):
            device = options.get("device") or weight.device
            codes = on_device(weight.codes, device, copy=True)
            return cls(codes, weight.recipe, options.get("dtype") or weight.dtype, weight.interleave)
        if func in _NEW:
            like = torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
            return func(like, *args[1:], **options)
        if func is _aten.copy_.default and isinstance(weight, cls):
            weight._write(args[1])
            return weight
        if func in _FILLS and isinstance(weight, cls):
            values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            weight._write(func(values, *args[1:], **options))
            return weight
        own = next(value for value in pytree.tree_leaves((args, options)) if isinstance(value, cls))
        raise own._without_values(f"{func} was called on")

    def _without_values(self, what: str) -> ValueError:
        """The error of what would need values."""
        return ValueError(
            f"{what} a weight that is codes of recipe {self.recipe.kind} alone; give it to a grouped "
            "layer, take values from octavo_torch.dequantize(weight.codes), give it new ones by weight.copy_(values) "
            "under torch.no_grad(), or have an optimizer step the values of octavo_torch.MasterWeights"
        )

    @torch.no_grad()
    def _write(self, values: object) -> None:
        """Quantizes `values` [G, N, K], cast to this weight's dtype, into the planes; or copies another weight's."""
        if isinstance(values, Tensor):
            check_not_nested("values", values)
        if not isinstance(values, Tensor) or tuple(values.shape) != tuple(self.shape):
            given = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"values has shape {given} and the weight is {list(self.shape)}; give that shape")
        if isinstance(values, CodedWeight):
            self._write_codes(values)
            return
        if values.dtype not in DTYPE_NAMES:
            raise ValueError(f"values has dtype {name_of(values.dtype)}; give bfloat16, float16 or float32")
        check_layout("values", values)
        if values.is_meta is not self.is_meta:
            raise ValueError(
                f"values is on {values.device} and the weight on {self.device}; give values that are there"
            )
        if self.recipe.stateful:
            raise ValueError(
                f"values cannot be copied into codes of recipe {self.recipe.kind}, whose scales come from earlier "
                "steps; keep a weight of values, or take a recipe whose codes depend on the values alone"
            )
        values = values.to(self.device, self.dtype)
        halves = to_halves(values, self.interleave) if self.interleave else values
        # The codes were made for a backend's layouts, and whoever has these layouts writes the same bits.
        quantize(halves, self.codes.spec.quantizer, layouts=self.layouts, operand="w", out=self.codes)
        self.was_written()

    def was_written(self) -> None:
        """Tells autograd of a kernel's writes to the planes, which it would else read in a backward of the old ones."""
        torch.autograd.graph.increment_version([getattr(self.codes, name) for name in self._first.values()])

    def _write_codes(self, other: CodedWeight) -> None:
        same = other.codes.spec == self.codes.spec and other.interleave == self.interleave
        if not same or other.recipe.fingerprint != self.recipe.fingerprint:
            raise ValueError(
                f"values is codes of recipe {other.recipe.kind} ({other.recipe.fingerprint}) in layouts "
                f"{other.layouts} and the weight of {self.recipe.kind} ({self.recipe.fingerprint}) in {self.layouts}; "
                "give values, such as those of octavo_torch.dequantize"
            )
        other.codes.copy_into(self.codes)

    def __tensor_flatten__(self) -> tuple[list[str], _Facts]:
        facts = self.codes.spec, self.recipe, self.dtype, self.interleave, tuple(self._first.items())
        return [*dict.fromkeys(self._first.values())], facts

    @classmethod
    def __tensor_unflatten__(
        cls, planes: dict[str, Tensor], facts: _Facts, size: object, stride: object
    ) -> CodedWeight:
        spec, recipe, dtype, interleave, first = facts
        return cls(with_planes(spec, planes, dict(first)), recipe, dtype, interleave)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Planes and text, so that torch.load takes it with weights_only=True."""
        facts = (self.codes.spec.model_dump_json(), self.recipe.to_json(), self.dtype, self.interleave)
        planes = {name: pickled(getattr(self, name)) for name in self._first.values()}
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuilt, (planes, dict(self._first), *facts, self.requires_grad, is_parameter)

    def quantized(self) -> QuantizedWeight:
        """The codes as a call takes them; the gradient goes to this tensor."""
        return QuantizedWeight(self, self.codes, self.recipe, self.layouts, 0, None, self.interleave)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"CodedWeight({self.codes!r}, dtype={self.dtype})"


def values_of(weight: CodedWeight) -> Tensor:
    """The fp32 values that a weight's codes stand for, its rows in the order of the weight's values."""
    values = dequantize(weight.codes)
    return from_halves(values, weight.interleave) if weight.interleave else values


def _rebuilt(
    planes: dict[str, Pickled],
    first: dict[str, str],
    spec: str,
    recipe: str,
    dtype: torch.dtype,
    interleave: int,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """The inverse of CodedWeight.__reduce_ex__. Raises ValueError for text that describes none."""
    values = {name: unpickled(value) for name, value in planes.items()}
    codes = with_planes(GroupedTensorSpec.model_validate_json(spec), values, first)
    check_planes("the pickled weight", codes)
    weight = CodedWeight(codes, Recipe.from_json(recipe), dtype, interleave)
    return torch.nn.Parameter(weight, requires_grad) if is_parameter else weight.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuilt])
