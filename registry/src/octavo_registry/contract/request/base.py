"""Request: what is said of any operation that is to run, and the fields that only some operations have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

from octavo import QuantizerSpec, Recipe
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo_registry.contract.cards import Activation, Norm, Op, Weight

Layouts: TypeAlias = tuple[str, str]
"""The layouts of a (rowwise, columnwise) plane."""

CLASSES: dict[Op, type[Request]] = {}
"""The class of each operation's requests, which the module that defines the classes puts here."""

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
        if op not in CLASSES:
            raise ValueError(f"op is {op!r}; known operations are {', '.join(CLASSES)}")
        kind = CLASSES[op]
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
        if self.arch is not None and not (isinstance(self.arch, tuple) and len(self.arch) == 2):
            raise ValueError(f"arch is {self.arch!r}; give a capability such as (9, 0), or None")

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
