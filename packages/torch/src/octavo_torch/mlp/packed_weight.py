"""PackedWeight: experts' weights that stay four bits per element, and are expanded for the product that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils import _pytree as pytree

from octavo import Recipe
from octavo.quantizer import Direction
from octavo_torch.arithmetic.casts import e2m1_table, e8m0_to_float
from octavo_torch.arrays.checks import brief, check_dtype, check_recipe
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.interleaving import check_stored_interleave, from_halves
from octavo_torch.arrays.valueless import Valueless
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.compiler.transforms import transforms_active
from octavo_torch.dispatch.layers import layer_for
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.quantize_weight import quantize_own_values

_BLOCK = 32
_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default, _aten.view.default}
_COPIES = {_aten.clone.default, _aten._to_copy.default}

_Facts = tuple[Recipe, torch.dtype, int]


class PackedWeight(Valueless):
    """Weights [G, N, K] as MXFP4 alone, with shape, dtype and device of the values that they stand for.

    A frozen parameter of GroupedMLP and MoE, as `load_experts(weights="packed")` makes it, or of experts of
    transformers. A product makes of it what its GEMM reads (codes of the recipe, or values where the recipe is
    high-precision), drops that, and makes it again for dgrad: so of all layers one weight at a time is expanded. Values
    are E2M1 times a power of two (OCP Microscaling Formats v1.0): the expanded weight has them where the recipe's codes
    do, which load_experts checks. Whatever else would need values raises ValueError; `dequantize` gives them.

    blocks      uint8 [G, N, K / 2], two E2M1 codes per byte, the first of them in the low nibble
    scales      uint8 [G, N, K / 32], E8M0: 2^(scale - 127)
    recipe      of the products
    interleave  rows of gate and up projection that take turns in the weight it stands for; `blocks` has the gate half
                first. 0: none do
    """

    _facts: ClassVar = ("recipe", "interleave")
    blocks: Tensor
    scales: Tensor
    recipe: Recipe
    interleave: int

    @staticmethod
    def __new__(
        cls, blocks: Tensor, scales: Tensor, recipe: Recipe, dtype: torch.dtype, interleave: int = 0
    ) -> PackedWeight:
        """The weight of these bytes; `dtype` is the values'. ValueError for tensors that are none."""
        for name, value in (("blocks", blocks), ("scales", scales)):
            if not isinstance(value, Tensor) or value.dim() != 3 or value.dtype is not torch.uint8:
                raise ValueError(f"{name} is {brief(value)}; give uint8 [G, N, ...]")
        needed = (*blocks.shape[:2], 2 * blocks.shape[2] // _BLOCK)
        if tuple(scales.shape) != needed or 2 * blocks.shape[2] % _BLOCK or scales.device != blocks.device:
            raise ValueError(
                f"blocks is {brief(blocks)} and scales {brief(scales)}; give scales {list(needed)} on its device, and "
                f"a multiple of {_BLOCK} codes per row"
            )
        check_recipe(recipe)
        check_dtype(dtype)
        if recipe.stateful or recipe.quantizes("fprop") is not recipe.quantizes("dgrad"):
            raise ValueError(
                f"recipe is {recipe.kind}, which takes scales from earlier steps, or reads codes in one of fprop and "
                "dgrad alone; give one whose codes depend on the values alone and are read by both, or None"
            )
        shape = torch.Size((*blocks.shape[:2], 2 * blocks.shape[2]))
        weight: PackedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=blocks.device)
        weight.blocks, weight.scales, weight.recipe = blocks, scales, recipe
        weight.interleave = check_stored_interleave(interleave, weight)
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Views and copies of the whole; ValueError for all else."""
        weight, options = args[0], dict(kwargs or {})
        if isinstance(weight, cls):
            facts = weight.recipe, options.get("dtype") or weight.dtype, weight.interleave
            if func in _SAME and (len(args) < 2 or tuple(args[1]) == tuple(weight.shape)):
                return cls(weight.blocks, weight.scales, *facts)
            if func in _COPIES:
                device = options.get("device") or weight.device
                return cls(weight.blocks.to(device, copy=True), weight.scales.to(device, copy=True), *facts)
            if func is _aten.copy_.default and isinstance(args[1], cls):
                weight._write(args[1])
                return weight
        own = next(value for value in pytree.tree_leaves((args, options)) if isinstance(value, cls))
        raise own._without_values(f"{func} was called on")

    def _without_values(self, what: str) -> ValueError:
        return ValueError(
            f"{what} a weight {list(self.shape)} that is MXFP4 alone; give it to a GroupedMLP or a MoE, "
            "or take values from weight.dequantize()"
        )

    def _write(self, other: PackedWeight) -> None:
        """Another weight's bytes into this one's, in place."""
        if other.shape != self.shape or other.interleave != self.interleave:
            raise ValueError(
                f"the weight to copy is {list(other.shape)} with interleave={other.interleave} and this one "
                f"{list(self.shape)} with {self.interleave}; give one that is alike"
            )
        self.blocks.copy_(other.blocks)
        self.scales.copy_(other.scales)

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """The values [G, N, K] in the weight's dtype, in its own order of rows: exact in bfloat16."""
        values = self._halves()
        return from_halves(values, self.interleave) if self.interleave else values

    def _halves(self) -> Tensor:
        bytes_ = torch.arange(256, device=self.device)
        codes = e2m1_table(self.device)
        pairs = torch.stack((codes[bytes_ & 15], codes[bytes_ >> 4]), 1).to(self.dtype)
        values = embedding(self.blocks.int(), pairs).view(*self.scales.shape, _BLOCK)
        return values.mul_(e8m0_to_float(self.scales).to(self.dtype)[..., None]).view(self.shape)

    @torch.no_grad()
    def expand_codes(
        self, backend: str | tuple[str, ...] | None = None, only: Direction | None = None
    ) -> CodedWeight | Tensor:
        """What a product reads: codes of the recipe in the layouts of its backend; values for a high-precision one.

        only   the plane that will be read; the other one's codes may be anything. None: both are read
        """
        if not self.recipe.quantizes("fprop"):
            return self._halves()
        codes = self._codes_of_bytes(backend, only)
        if codes is None:
            # of a weight that takes a gradient both planes are made: dgrad reads the second
            codes, _ = quantize_own_values(self._halves().requires_grad_(), self.recipe, backend=backend)
        return CodedWeight(codes, self.recipe, self.dtype, self.interleave)

    def _codes_of_bytes(self, backend: str | tuple[str, ...] | None, only: Direction | None) -> GroupedTensor | None:
        """Both planes, by a backend that reads MXFP4; None where it does not."""
        layer = layer_for(self.recipe, self, self, self.is_cpu, True, True, backend, wants_graph(self.blocks))
        plan = layer.quantizers.get("w")
        if plan is None or plan.request.quantizer.stochastic or plan.bound.of_mxfp4 is None:
            return None
        codes: GroupedTensor = plan.bound.of_mxfp4(self.blocks, self.scales, only)
        return codes

    def __tensor_flatten__(self) -> tuple[list[str], _Facts]:
        return ["blocks", "scales"], (self.recipe, self.dtype, self.interleave)

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], facts: _Facts, size: object, stride: object
    ) -> PackedWeight:
        return cls(parts["blocks"], parts["scales"], *facts)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Bytes and text, so that torch.load takes it with weights_only=True."""
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuilt, (self.blocks, self.scales, self.recipe.to_json(), self.dtype, self.interleave, is_parameter)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"PackedWeight(MXFP4, shape={tuple(self.shape)}, dtype={self.dtype}, recipe={self.recipe.kind})"


def _rebuilt(
    blocks: Tensor, scales: Tensor, recipe: str, dtype: torch.dtype, interleave: int, is_parameter: bool
) -> Tensor:
    """The inverse of PackedWeight.__reduce_ex__. Raises ValueError for text that describes none."""
    weight = PackedWeight(blocks, scales, Recipe.from_json(recipe), dtype, interleave)
    return torch.nn.Parameter(weight, requires_grad=False) if is_parameter else weight


torch.serialization.add_safe_globals([_rebuilt])


def expanded(
    weight: PackedWeight, backend: str | tuple[str, ...] | None, product: Callable[[CodedWeight | Tensor], Tensor]
) -> Tensor:
    """`product` of the expanded weight, of which autograd keeps nothing: backward expands it again."""
    if weight.requires_grad:
        raise ValueError("weight is MXFP4 alone and requires a gradient; freeze it by requires_grad_(False)")
    if torch.compiler.is_compiling():
        return product(weight.expand_codes(backend))
    again = _Again(weight, backend)
    # a transform may keep tensors of its own in the place of those that the hooks would see
    value = weight.expand_codes(backend, only=None if transforms_active() else "rowwise")
    with torch.autograd.graph.saved_tensors_hooks(again.keep_of(value), again.load):
        return product(value)


class _Again:
    """What autograd keeps of an expanded weight in the place of its tensors."""

    def __init__(self, weight: PackedWeight, backend: str | tuple[str, ...] | None) -> None:
        self.weight, self.backend = weight, backend
        self.kept = self.left = 0
        self.directions: set[Direction] = set()
        self.tensors: list[Tensor] = []

    def keep_of(self, value: CodedWeight | Tensor) -> Callable[[Tensor], Tensor | _View]:
        """A function of a tensor that autograd saves: the place in `value` that it is a view of, or itself."""
        places = {tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(_tensors(value))}
        names = value.__tensor_flatten__()[0] if isinstance(value, CodedWeight) else []

        def keep(saved: Tensor) -> Tensor | _View:
            # Wrapped and fake tensors have no address, nor has a tensor without elements.
            number = places.get(saved.untyped_storage().data_ptr()) if type(saved) is Tensor else None
            if number is None:
                return saved
            self.kept += 1
            if names:
                self.directions.add("columnwise" if names[number].startswith("columnwise") else "rowwise")
            return _View(number, saved)

        return keep

    def load(self, kept: Tensor | _View) -> Tensor:
        """The saved tensor; the weight is expanded once for all that a node has saved, in the plane that holds them."""
        if isinstance(kept, Tensor):
            return kept
        if not self.left:
            only = self.directions.copy().pop() if len(self.directions) == 1 else None
            self.tensors, self.left = _tensors(self.weight.expand_codes(self.backend, only)), self.kept
        tensor = kept.of(self.tensors[kept.number])
        self.left -= 1
        if not self.left:
            self.tensors = []
        return tensor


class _View:
    """A view of one of an expanded weight's tensors."""

    def __init__(self, number: int, saved: Tensor) -> None:
        self.number = number
        self.shape, self.strides, self.offset = saved.shape, saved.stride(), saved.storage_offset()

    def of(self, tensor: Tensor) -> Tensor:
        """The same view of the tensor that takes its place."""
        return tensor.as_strided(self.shape, self.strides, self.offset)


def _tensors(value: CodedWeight | Tensor) -> list[Tensor]:
    if not isinstance(value, CodedWeight):
        return [value]
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
