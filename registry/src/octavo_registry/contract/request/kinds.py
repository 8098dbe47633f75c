"""A class of requests for each kind of operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias, get_args

from octavo import QuantizerSpec, Recipe
from octavo.errors import one_of
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.recipe_base import GEMMS, Gemm
from octavo_registry.contract.cards import (
    MOVES,
    OPTIMIZERS,
    ROUTERS,
    Activated,
    Activation,
    Choose,
    Move,
    Norm,
    Op,
    Optimize,
    Weight,
)
from octavo_registry.contract.request.base import CLASSES, Layouts, Request


def _check_layouts(layouts: object) -> None:
    """Raises ValueError for anything but a tuple of two names."""
    if not (isinstance(layouts, tuple) and len(layouts) == 2 and all(isinstance(name, str) for name in layouts)):
        raise ValueError(
            f"layouts is {layouts!r}; give the names of two, of the rowwise and the columnwise plane, such as "
            f"{(PLAIN, PLAIN)}"
        )


# A field needs `field()` here: without it the dataclass would take the property of that name in `Request` as default.


@dataclass(frozen=True, slots=True)
class GemmRequest(Request):
    """For "fprop", "dgrad" or "wgrad".

    recipe       `HighPrecision` where the recipe's slot for this GEMM is high precision
    other_dtype  dtype of w, or of wgrad's dy, if it is unquantized and differs from in_dtype; else None
    weight       how w and dw lie in memory. "nk": as [G, N, K]; fprop reads w's rowwise plane and dgrad its columnwise
                 one. "kn": as [G, K, N]; w is quantized in that order, so fprop reads its columnwise plane
    """

    ops: ClassVar[frozenset[Op]] = frozenset(GEMMS)

    op: Gemm
    recipe: Recipe = field(kw_only=True)
    other_dtype: DType | None = field(default=None, kw_only=True)
    weight: Weight = field(default="nk", kw_only=True)

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        if not isinstance(self.recipe, Recipe):
            raise ValueError(
                f"recipe is {self.recipe!r}; a {self.op} request names a Recipe, HighPrecision() where nothing is "
                "quantized"
            )
        one_of("weight", self.weight, get_args(Weight))

    @property
    def kind(self) -> str:
        """The kind of the recipe that GEMMs compute this one as."""
        return self.recipe.computed_as.kind

    @property
    def square_columns(self) -> bool:
        """Only wgrad reads columns of x."""
        return self.op == "wgrad" and bool(getattr(self.recipe.computed_as, "square_columns", False))


@dataclass(frozen=True, slots=True)
class PlanesRequest(Request):
    """What requests for operations on quantized operands have in common.

    quantizer  the scaling, format and planes
    layouts    of the (rowwise, columnwise) planes
    """

    quantizer: QuantizerSpec = field(kw_only=True)
    layouts: Layouts = field(default=(PLAIN, PLAIN), kw_only=True)

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        if not isinstance(self.quantizer, QuantizerSpec):
            raise ValueError(
                f"quantizer is {self.quantizer!r}; a {self.op} request names a QuantizerSpec, such as "
                "recipe.quantizer('x')"
            )
        _check_layouts(self.layouts)

    @property
    def kind(self) -> str:
        """The quantizer's scaling."""
        return self.quantizer.scaling

    @property
    def square_columns(self) -> bool:
        """Of planes along columns."""
        return self.quantizer.square_columns and "columnwise" in self.quantizer.directions


@dataclass(frozen=True, slots=True)
class QuantizeRequest(PlanesRequest):
    """For "quantize".

    stacked  of [G, N, K] matrices rather than ragged [M, K] rows
    """

    ops: ClassVar[frozenset[Op]] = frozenset({"quantize"})

    op: Literal["quantize"]
    stacked: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class DequantizeRequest(PlanesRequest):
    """For "dequantize": `out_dtype` is that of the values, and `in_dtype` is not looked at."""

    ops: ClassVar[frozenset[Op]] = frozenset({"dequantize"})

    op: Literal["dequantize"]


@dataclass(frozen=True, slots=True)
class ActivationRequest(PlanesRequest):
    """For "act_quantize" or "dact_quantize"; `k` is the columns of what is quantized.

    activation  the function whose result, or whose gradient, is quantized
    """

    ops: ClassVar[frozenset[Op]] = frozenset({"act_quantize", "dact_quantize"})

    op: Activated
    activation: Activation = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class NormRequest(PlanesRequest):
    """For "norm_quantize".

    norm  the normalization whose result is quantized
    """

    ops: ClassVar[frozenset[Op]] = frozenset({"norm_quantize"})

    op: Literal["norm_quantize"]
    norm: Norm = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class MoveRequest(Request):
    """For "route", "permute_rows", "combine_rows" or "dot_rows": high precision, whatever the recipe of the layer."""

    ops: ClassVar[frozenset[Op]] = MOVES

    op: Move


@dataclass(frozen=True, slots=True)
class ChooseRequest(Request):
    """For "choose_experts" or "choose_gradient", in fp32; `groups` is the number of experts.

    choices        those of each token; None: any
    expert_groups  runs of experts of which some are kept for a token; 1 where all are
    """

    ops: ClassVar[frozenset[Op]] = ROUTERS

    op: Choose
    choices: int | None = field(default=None, kw_only=True)
    expert_groups: int = field(default=1, kw_only=True)


@dataclass(frozen=True, slots=True)
class OptimizerRequest(Request):
    """For "adamw_step": `in_dtype` is the gradient's, `out_dtype` the master's, `k` the last axis.

    state_bits  of the moments, 32 or 8
    quantizer   of the codes that are written from the master; None: none are
    layouts     of their (rowwise, columnwise) planes
    """

    ops: ClassVar[frozenset[Op]] = OPTIMIZERS

    op: Optimize
    state_bits: int = field(default=32, kw_only=True)
    quantizer: QuantizerSpec | None = field(default=None, kw_only=True)
    layouts: Layouts = field(default=(PLAIN, PLAIN), kw_only=True)

    @property
    def kind(self) -> str:
        """The quantizer's scaling; "high_precision" where no codes are written."""
        return "high_precision" if self.quantizer is None else self.quantizer.scaling


FusedRequest: TypeAlias = ActivationRequest | NormRequest
AnyRequest: TypeAlias = (
    GemmRequest | QuantizeRequest | DequantizeRequest | FusedRequest | MoveRequest | ChooseRequest | OptimizerRequest
)

_KINDS: tuple[type[Request], ...] = (
    GemmRequest, QuantizeRequest, DequantizeRequest, ActivationRequest, NormRequest, MoveRequest, ChooseRequest,
    OptimizerRequest,
)  # fmt: skip

CLASSES.update({op: kind for op in get_args(Op) for kind in _KINDS if op in kind.ops})
REQUESTS: Mapping[Op, type[Request]] = MappingProxyType(CLASSES)
"""The class of each operation's requests."""
