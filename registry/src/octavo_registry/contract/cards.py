"""What a plugin says about itself without importing anything heavy."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, PositiveInt, field_validator, model_validator

from octavo import QuantizerSpec
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.schema import Schema

Op = Literal[
    "quantize", "dequantize", "fprop", "dgrad", "wgrad", "act_quantize", "dact_quantize", "norm_quantize",
    "route", "permute_rows", "combine_rows", "dot_rows", "choose_experts", "choose_gradient", "adamw_step",
]  # fmt: skip
Activated = Literal["act_quantize", "dact_quantize"]
Move = Literal["route", "permute_rows", "combine_rows", "dot_rows"]
Choose = Literal["choose_experts", "choose_gradient"]
Optimize = Literal["adamw_step"]
Arch = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
Accumulation = Literal["fp32", "hopper_bf16", "hopper_fp8_promoted", "hopper_fp8"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu"]
Norm = Literal["rms", "layer"]
Weight = Literal["nk", "kn"]

ALL_DTYPES: frozenset[DType] = frozenset({"bfloat16", "float16", "float32"})
ALL_ACTIVATIONS: frozenset[Activation] = frozenset(get_args(Activation))
ALL_NORMS: frozenset[Norm] = frozenset(get_args(Norm))

# A card that was written before an activation was defined does not compute it: what is added later is declared by name.
_UNLESS_SAID: frozenset[Activation] = ALL_ACTIVATIONS - {"clamped_swiglu"}

GATED: frozenset[Activation] = frozenset({"swiglu", "geglu", "geglu_tanh", "clamped_swiglu"})
"""Activations that take [M, 2 F], the gate first, and give [M, F]."""

QUANTIZERS: frozenset[Op] = frozenset({"quantize", "act_quantize", "dact_quantize", "norm_quantize"})
"""Operations whose result is a quantized operand: a request for one names a quantizer and layouts."""

MOVES: frozenset[Op] = frozenset(get_args(Move))
"""Operations that sort a router's choices by group and move rows of tokens, in high precision: no recipe is asked."""

ROUTERS: frozenset[Op] = frozenset(get_args(Choose))
"""Operations of a router itself, in fp32: no recipe is asked."""

OPTIMIZERS: frozenset[Op] = frozenset(get_args(Optimize))
"""Steps of optimizers, in fp32. A recipe is asked where codes are written, else none."""


class Capability(Schema):
    """One row of a backend's support table: any of these ops with any of these recipes, under these conditions.

    recipes       recipe kinds; a quantizer's scaling counts as the kind
    ops           operations that the row serves
    framework     the front end whose arrays it takes: "torch", "jax"
    device        "cpu", "cuda"
    in_dtypes     dtypes of unquantized operands
    out_dtypes    dtypes of results
    min_arch      lowest compute capability, inclusive; None: no bound
    max_arch      highest compute capability, inclusive; None: no bound
    sizes         where group sizes may live
    graph_safe    no host sync, no data-dependent allocation: may be captured into a CUDA graph
    orientations  planes that a quantizer produces
    layouts       layouts that a quantizer can produce; what a GEMM takes is in `Bound.layouts`
    weights       of GEMMs: how w and dw may lie in memory, "nk" as [G, N, K] and "kn" as [G, K, N]
    activations   of "act_quantize" and "dact_quantize"; "clamped_swiglu" has to be named, all others are the default
    norms         of "norm_quantize"
    square_columns    whether the columns of x that "block" reads and writes may have square blocks
                  (`octavo.BlockScaling.square_columns`); it has to be said
    accumulation  how a GEMM sums, which decides its error bound (docs/numerics)
    batch_invariant   of "fprop" and "dgrad": a row of the result has the same bits whatever other rows, group sizes and
                  tails the call has. This is about the order of sums; `octavo.Recipe.batch_invariant` is about scales
    emulated      how a recipe that the device has no instructions for is computed; None: it is not emulated
    untried       of devices on which nobody has run the row, what has been done instead, such as "compiled for sm_80";
                  `octavo why` and `octavo doctor` repeat it. None: the row has passed the conformance suite there
    """

    ops: frozenset[Op] = Field(min_length=1)
    recipes: frozenset[str] = Field(min_length=1)
    framework: str
    device: str
    in_dtypes: frozenset[DType] = ALL_DTYPES
    out_dtypes: frozenset[DType] = ALL_DTYPES
    min_arch: Arch | None = None
    max_arch: Arch | None = None
    sizes: frozenset[Literal["host", "device"]] = frozenset({"host", "device"})
    graph_safe: bool = False
    orientations: frozenset[Literal["rowwise", "columnwise"]] = frozenset({"rowwise", "columnwise"})
    layouts: frozenset[str] = frozenset({PLAIN})
    weights: frozenset[Weight] = frozenset({"nk"})
    activations: frozenset[Activation] = _UNLESS_SAID
    norms: frozenset[Norm] = ALL_NORMS
    square_columns: bool = False
    accumulation: Accumulation = "fp32"
    batch_invariant: bool = False
    emulated: str | None = None
    untried: str | None = None

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_arch and self.max_arch and self.min_arch > self.max_arch:
            raise ValueError(f"min_arch={self.min_arch} is above max_arch={self.max_arch}; swap them")
        return self


class BackendCard(Schema):
    """A backend's name, contract level, needs and support table.

    name       unique among installed backends
    api_level  the contract it was written against (`octavo_registry.API_LEVEL`)
    priority   reference -100, portable 0, tuned for one architecture +100
    needs      requirement strings, checked against installed metadata and never imported; "python>=3.12" is the
               interpreter's version
    summary    one sentence for `octavo doctor`
    """

    name: Name
    api_level: PositiveInt
    priority: int = 0
    needs: tuple[str, ...] = ()
    capabilities: tuple[Capability, ...] = Field(min_length=1)
    summary: str = ""

    @field_validator("capabilities", mode="before")
    @classmethod
    def _not_one_alone(cls, capabilities: object) -> object:
        if isinstance(capabilities, Capability):
            raise ValueError("got one Capability by itself; give a tuple of it, such as (CAPABILITY,)")
        return capabilities


class QuantizerCard(Schema):
    """A quantizer that a plugin names, so that config files and command lines can ask for it."""

    name: Name
    spec: QuantizerSpec
    summary: str = ""
