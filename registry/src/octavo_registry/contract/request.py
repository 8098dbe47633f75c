"""What a front end asks for: a request for each kind of operation, over a base that matching reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from octavo import QuantizerSpec, Recipe
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
from octavo_registry.contract.weights import WEIGHT_SHAPES

Layouts: TypeAlias = tuple[str, str]
"""The layouts of a (rowwise, columnwise) plane."""

_NO_OPERATIONS: frozenset[Op] = frozenset()
_NARROWS_NOTHING: Mapping[str, Any] = MappingProxyType(
    {
        "recipe": None,
        "other_dtype": None,
        "weight": "nk",
        "quantizer": None,
        "layouts": (PLAIN, PLAIN),
        "stacked": False,
        "activation": None,
        "norm": None,
    }
)


class _RequestType(type):
    """The metaclass that makes `Request(op=...)` construct the class of the operation."""

    def __call__(cls, *values: Any, **fields: Any) -> Any:
        """The request. TypeError for a field that its class does not have, unless the value narrows nothing."""
        op = fields.get("op", values[0] if values else None)
        if cls is not Request or op is None:
            return super().__call__(*values, **fields)
        if op not in REQUESTS:
            raise ValueError(f"op is {op!r}; known operations are {', '.join(REQUESTS)}")
        kind = REQUESTS[op]
        said = {
            name: value
            for name, value in fields.items()
            if name in kind.__dataclass_fields__ or name not in _NARROWS_NOTHING or value != _NARROWS_NOTHING[name]
        }
        return type.__call__(kind, *values, **said)


@dataclass(frozen=True, slots=True)
class Request(metaclass=_RequestType):
    """One operation that is to run, with everything that a backend needs to know to accept or refuse it.

    `Request(op=...)` constructs the operation's own class, as `pathlib.Path` constructs a PosixPath. These classes add
    fields. Each such field is a property here, so that it can be read of any request: where a class lacks the field,
    its value is one that narrows nothing, which `Request(op=...)` accepts as well.

    op          the operation
    framework   the front end whose arrays it takes
    device      the kind of device that they are on: "cpu", "cuda"
    in_dtype    dtype of the unquantized operand
    out_dtype   of the result
    arch        compute capability of a CUDA device, (9, 0) for Hopper; None elsewhere
    k, n        in-features and out-features; a quantizer sees the columns of what it quantizes as k; None: any
    groups      number of groups; None: any
    sizes       where group sizes live: "host" or "device"
    graph_safe  no host sync, no data-dependent allocation, pointer-stable: may be captured
    training    gradients are wanted, too
    """

    ops: ClassVar[frozenset[Op]] = _NO_OPERATIONS

    op: Op
    framework: str
    device: str
    in_dtype: DType
    out_dtype: DType
    _: KW_ONLY
    arch: tuple[int, int] | None = None
    k: int | None = None
    n: int | None = None
    groups: int | None = None
    sizes: Literal["host", "device"] = "device"
    graph_safe: bool = False
    training: bool = True

    def __post_init__(self) -> None:
        if self.op not in self.ops:
            raise ValueError(f"op is {self.op!r}; a {type(self).__name__} is for {', '.join(sorted(self.ops))}")

    @property
    def kind(self) -> str:
        """The recipe kind that a capability row is matched with."""
        return "high_precision"

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of a GEMM; None for other operations."""
        value: Recipe | None = _NARROWS_NOTHING["recipe"]
        return value

    @property
    def weight(self) -> Weight:
        """How the w of a GEMM lies in memory; "nk" for other operations."""
        value: Weight = _NARROWS_NOTHING["weight"]
        return value

    @property
    def quantizer(self) -> QuantizerSpec | None:
        """The quantizer of an operation on quantized operands; None for other operations."""
        value: QuantizerSpec | None = _NARROWS_NOTHING["quantizer"]
        return value

    @property
    def layouts(self) -> Layouts:
        """The layouts of an operation on quantized operands; plain for other operations."""
        value: Layouts = _NARROWS_NOTHING["layouts"]
        return value

    @property
    def stacked(self) -> bool:
        """Whether "quantize" takes stacked matrices; False for rows, and for other operations."""
        value: bool = _NARROWS_NOTHING["stacked"]
        return value

    @property
    def square_columns(self) -> bool:
        """Whether the operation reads or writes columns of x whose scales are of square blocks, although its rows have
        a scale for each block of one row.
        """
        return False

    @property
    def activation(self) -> Activation | None:
        """The activation of "act_quantize" and "dact_quantize"; None for other operations."""
        value: Activation | None = _NARROWS_NOTHING["activation"]
        return value

    @property
    def norm(self) -> Norm | None:
        """The normalization of "norm_quantize"; None for other operations."""
        value: Norm | None = _NARROWS_NOTHING["norm"]
        return value


# A field needs `field()` here, or the dataclass would take the property of its name in `Request` for its default.


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

REQUESTS: Mapping[Op, type[Request]] = MappingProxyType(
    {op: kind for op in get_args(Op) for kind in _KINDS if op in kind.ops}
)
"""The class of each operation's requests."""


def sm(arch: tuple[int, int]) -> str:
    """CUDA's name of a compute capability: (9, 0) is sm_90."""
    return f"sm_{arch[0]}{arch[1]}"


def describe_request(request: Request) -> str:
    """`fprop in mxfp8 for torch on cuda (sm_90)`, followed by whatever else narrows the choice."""
    function = request.activation or request.norm
    op = f"{request.op} of {function}" if function else request.op
    words = f"{op} in {request.kind} for {request.framework} on {request.device}"
    if request.arch is not None:
        words += f" ({sm(request.arch)})"
    extras = []
    if request.op in GEMMS and request.weight != "nk":
        extras.append(f"w as {WEIGHT_SHAPES[request.weight]}")
    if request.quantizer is not None:
        extras.append(f"{request.quantizer.role} {request.quantizer.orientation}")
        if request.quantizer.mxfp4:
            extras.append("of MXFP4's values")
        if request.quantizer.square_columns:
            extras.append("columns in square blocks")
    if request.graph_safe:
        extras.append("graph-safe")
    return f"{words}, {', '.join(extras)}" if extras else words
