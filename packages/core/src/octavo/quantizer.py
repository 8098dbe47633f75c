"""QuantizerSpec: how one operand becomes codes and scales."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from octavo.formats import Format, ScaleFormat
from octavo.schema import Schema, not_a_truth_value

Scaling = Literal["delayed", "current", "row", "block", "mxfp8", "nvfp4"]
ROW_BY_ROW: tuple[Scaling, ...] = ("row", "block", "mxfp8")
"""The scalings whose scales along rows are each of one row alone."""
Orientation = Literal["rowwise", "columnwise", "both"]
Direction = Literal["rowwise", "columnwise"]
Operand = Literal["x", "w", "dy"]
Rounding = Literal["nearest", "stochastic"]

FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
"""The largest finite fp32 number."""


def _without_sign(epsilon: float) -> float:
    # pydantic parses the text signature of a builtin, such as abs, for each field: a tenth of the import of octavo
    return abs(epsilon)


AmaxEpsilon = Annotated[
    float, BeforeValidator(not_a_truth_value), Field(ge=0.0, le=FP32_MAX), AfterValidator(_without_sign)
]
"""A lower bound of amaxes, which are fp32; -0.0 is 0.0, so that values that are equal have one fingerprint."""

BLOCK_SIZE: dict[Scaling, int | None] = {
    "delayed": None,
    "current": None,
    "row": None,
    "block": 128,
    "mxfp8": 32,
    "nvfp4": 16,
}
"""Elements along the blocked axis that share one scale; None where a scale covers a whole row or group."""

HADAMARD_SIZE = 16
"""Rows that one Hadamard transform mixes; a group is zero-padded to a multiple of it."""

DEFAULT_CHECKPOINT_NAME = "quantization"
"""The name that MaxText's remat policies save."""


class QuantizerSpec(Schema):
    """How one operand is quantized. `docs/numerics` defines each combination bit for bit.

    format           payload format
    scaling          which elements share a scale and how the scale is computed; a recipe's kind
    orientation      rowwise: blocks along the last axis; columnwise: blocks along rows, restarting at each group
    role             the operand it is for; also the Philox operand number of stochastic rounding
    square           blocks span rows and columns alike (128x128, 32x32, 16x16); the column data is then the
                     transpose of the same codes
    rounding         stochastic rounding is defined for E2M1 and needs a seed
    power_of_two     fp32 scales are powers of two ("delayed" never; E8M0 always is)
    amax_epsilon     lower bound of amax before the scale is computed; at most fp32's largest number
    hadamard         NVFP4 column data go through a 16-point Hadamard transform along rows first
    mxfp4            weights are first rounded to MXFP4's values, E2M1 with an E8M0 scale for each 32 elements along K:
                     the last axis ("rowwise"), or rows ("columnwise") of a weight stored as [G, K, N]; None: they are
                     not
    square_columns   column data of x alone have blocks that span rows and columns alike, quantized again; row data have
                     1x128 as without it. For "block"
    checkpoint_name  the name that `jax.checkpoint` policies see; no part of a recipe's fingerprint
    """

    ADDED_FIELDS: ClassVar[frozenset[str]] = frozenset({"mxfp4", "square_columns"})
    """Fields that were added after the first release. At their defaults they are left out of the JSON form, which older
    releases can then read."""

    format: Format
    scaling: Scaling
    orientation: Orientation = "both"
    role: Operand = "x"
    square: bool = False
    rounding: Rounding = "nearest"
    power_of_two: bool = False
    amax_epsilon: AmaxEpsilon = 0.0
    hadamard: bool = False
    mxfp4: Direction | None = None
    square_columns: bool = False
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.format == "e2m1") != (self.scaling == "nvfp4"):
            raise ValueError(
                f"format={self.format!r} does not fit scaling={self.scaling!r}; e2m1 and nvfp4 need each other"
            )
        if self.square and self.block_size is None:
            raise ValueError(f"square=True needs blocks, but scaling={self.scaling!r} has none; leave it False")
        if self.rounding == "stochastic" and self.format != "e2m1":
            raise ValueError(
                f"rounding='stochastic' is defined for e2m1, but the format is {self.format!r}; use 'nearest'"
            )
        if self.hadamard and self.scaling != "nvfp4":
            raise ValueError(f"hadamard=True is defined for nvfp4, but the scaling is {self.scaling!r}; leave it False")
        if self.hadamard and self.square:
            raise ValueError(
                "hadamard=True transforms rows, but square blocks are shared by both directions; drop one of the two"
            )
        if self.hadamard and self.role == "w":
            raise ValueError(
                "hadamard=True is for x and dy, the operands of wgrad, but the role is 'w'; leave it False"
            )
        if self.power_of_two and self.scaling in ("delayed", "mxfp8", "nvfp4"):
            raise ValueError(f"power_of_two=True is an option of fp32 scales; scaling={self.scaling!r} fixes its own")
        if self.amax_epsilon and self.scaling in ("delayed", "mxfp8", "nvfp4"):
            raise ValueError(
                f"amax_epsilon={self.amax_epsilon!r} is an option of current, row and block; "
                f"scaling={self.scaling!r} takes 0"
            )
        if self.square_columns and (self.scaling != "block" or self.role != "x" or self.square):
            raise ValueError(
                f"square_columns=True is for x in blocks of 128 whose rows have scales of their own, and this one has "
                f"scaling={self.scaling!r}, role={self.role!r}, square={self.square}; leave it False"
            )
        held = {"format": "e4m3", "scaling": "block", "role": "w", "square": True, "power_of_two": True}
        misfit = next(
            (name for name, value in {**held, "amax_epsilon": 0.0}.items() if getattr(self, name) != value), None
        )
        if self.mxfp4 and misfit:
            raise ValueError(
                f"mxfp4={self.mxfp4!r} needs a quantizer that holds MXFP4's values of weights, and {misfit} is "
                f"{getattr(self, misfit)!r}; take MXFP4Weights().quantizer('w')"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_what_came_later(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = write(self)
        unsaid = {name for name in self.ADDED_FIELDS if getattr(self, name) == type(self).model_fields[name].default}
        return {name: value for name, value in content.items() if name not in unsaid}

    @property
    def held_by(self) -> QuantizerSpec:
        """The quantizer whose codes and scales hold the values: this one without the rounding to MXFP4 before it."""
        return self if self.mxfp4 is None else QuantizerSpec(**{**dict(self), "mxfp4": None})

    @property
    def block_size(self) -> int | None:
        """Elements along the blocked axis that share a scale, or None."""
        return BLOCK_SIZE[self.scaling]

    @property
    def scale_format(self) -> ScaleFormat:
        """What the decode scales are stored in."""
        return "e8m0" if self.scaling == "mxfp8" else "e4m3" if self.scaling == "nvfp4" else "fp32"

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions in which data are produced: rowwise first."""
        return ("rowwise", "columnwise") if self.orientation == "both" else (self.orientation,)

    @property
    def shares_codes(self) -> bool:
        """True where column data are the transpose of the row codes (per tensor, square blocks)."""
        return self.square or self.scaling in ("delayed", "current")

    def with_orientation(self, orientation: Orientation) -> QuantizerSpec:
        """The same quantizer, producing data in these directions."""
        return self.model_copy(update={"orientation": orientation})

    @property
    def independent_rows(self) -> bool:
        """True where a row's codes and scales depend on that row alone, and not on its place among other rows."""
        return self.scaling in ROW_BY_ROW and not (self.square or self.stochastic)

    def square_in(self, direction: Direction) -> bool:
        """True where a scale of the data of this direction covers a square block."""
        return self.square or (self.square_columns and direction == "columnwise")

    @property
    def stochastic(self) -> bool:
        """True where quantizing needs a seed."""
        return self.rounding == "stochastic"


KEPT_ROWS = QuantizerSpec(scaling="block", format="e4m3", orientation="rowwise", power_of_two=True)
"""How a layer keeps rows for its backward as codes: 1x128 blocks of E4M3, see octavo_numerics.keep_rows."""
