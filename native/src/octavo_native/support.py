"""What the kernels serve, as a table, and the sentences in which they refuse the rest.

Pure data: nothing here loads the compiled module, so a plugin's card can be built from it. The kernels check their
arguments for themselves; what they need is said here a second time, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

from octavo_native.layouts import LAYOUTS_OF_DIRECTION

Device = Literal["cpu", "cuda"]
Accumulation = Literal["fp32", "hopper_bf16", "hopper_fp8"]
QuantizeOp = Literal["quantize", "dequantize", "act_quantize", "dact_quantize", "norm_quantize"]
GemmOp = Literal["fprop", "dgrad", "wgrad"]
MoveOp = Literal["route", "permute_rows", "combine_rows", "dot_rows"]
RouterOp = Literal["choose_experts", "choose_gradient"]
HalfDType = Literal["bfloat16", "float16"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu"]

QUANTIZE_OPS: Final[frozenset[QuantizeOp]] = frozenset(get_args(QuantizeOp))
GEMM_OPS: Final[frozenset[GemmOp]] = frozenset(get_args(GemmOp))
MOVE_OPS: Final[frozenset[MoveOp]] = frozenset(get_args(MoveOp))
ROUTER_OPS: Final[frozenset[RouterOp]] = frozenset(get_args(RouterOp))

ACTIVATIONS: Final[frozenset[Activation]] = frozenset(get_args(Activation))
"""What "act_quantize" and "dact_quantize" compute."""

FP8_RECIPES: Final = frozenset({"delayed", "current", "row", "block"})
EMULATED_RECIPES: Final = frozenset({"mxfp8", "nvfp4"})
"""Recipes whose formats Hopper has no tensor-core instructions for."""

QUANTIZED_RECIPES: Final = FP8_RECIPES | EMULATED_RECIPES
HIGH_PRECISION: Final = frozenset({"high_precision"})

HOPPER: Final = (9, 0)
"""The compute capability of the CUDA kernels: sm_90a code runs on no other."""

CUDA_MULTIPLE: Final = 16
"""K and N of a GEMM on CUDA are multiples of this."""

MOST_EXPERTS: Final = 1024
MOST_CHOICES: Final = 32
"""What the warp that works on a token holds of a router; `MOST_CHOICES` is that of groups of experts, too."""

MOST_COUNTED_GROUPS: Final = 1024
"""Groups up to which choices are sorted on CUDA by counting them once per group."""

CUDA_DTYPES: Final[tuple[HalfDType, ...]] = ("bfloat16", "float16")
"""What unquantized operands of a GEMM on CUDA may be."""

_COPIES = "bf16 products of exact dequantized copies"
EMULATED_ON_CUDA: Final[Mapping[str, str]] = MappingProxyType(
    {"mxfp8": f"{_COPIES}; products='folded' multiplies FP8", "nvfp4": _COPIES}
)
"""What computes the products of EMULATED_RECIPES. MXFP8 with folded products is no recipe of its own here: the rows
that serve "block" serve it."""

EMULATED_ON_CPU: Final = "fp32 products of dequantized operands"


@dataclass(frozen=True, slots=True)
class Support:
    """One row of the support table: any of these operations with any of these recipes.

    in_dtypes     of unquantized operands; None: bfloat16, float16 and float32
    accumulation  how a GEMM sums: octavo_registry.Capability has the names
    emulated      how a product is computed that the device has no instructions for; None: it is not emulated
    """

    ops: frozenset[QuantizeOp | GemmOp | MoveOp | RouterOp]
    recipes: frozenset[str]
    in_dtypes: frozenset[HalfDType] | None = None
    accumulation: Accumulation = "fp32"
    emulated: str | None = None

    @property
    def square_columns(self) -> bool:
        """Whether the columns of x may have square blocks: of every row that serves "block"."""
        return "block" in self.recipes

    @property
    def batch_invariant(self) -> bool:
        """Of a GEMM: a row of y or dx has the same bits whatever other rows there are, since every tile adds along K in
        the same order."""
        return self.ops == GEMM_OPS


SUPPORT: Final[Mapping[Device, tuple[Support, ...]]] = MappingProxyType(
    {
        "cpu": (
            Support(QUANTIZE_OPS, QUANTIZED_RECIPES),
            Support(GEMM_OPS, HIGH_PRECISION),
            Support(GEMM_OPS, QUANTIZED_RECIPES, emulated=EMULATED_ON_CPU),
            Support(MOVE_OPS, HIGH_PRECISION),
            Support(ROUTER_OPS, HIGH_PRECISION),
        ),
        "cuda": (
            Support(QUANTIZE_OPS, QUANTIZED_RECIPES),
            Support(GEMM_OPS, HIGH_PRECISION, frozenset(CUDA_DTYPES), "hopper_bf16"),
            Support(GEMM_OPS, FP8_RECIPES, accumulation="hopper_fp8"),
            *(
                Support(GEMM_OPS, frozenset({recipe}), accumulation="hopper_bf16", emulated=how)
                for recipe, how in EMULATED_ON_CUDA.items()
            ),
            Support(MOVE_OPS, HIGH_PRECISION),
            Support(ROUTER_OPS, HIGH_PRECISION),
        ),
    }
)
"""The support table by device."""

_OPERANDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}
)


def abi_refusal(found: int, caller: str, called: int) -> str | None:
    """Why `caller`, written for level `called`, cannot use a compiled module of level `found`, or None."""
    if found == called:
        return None
    return (
        f"octavo-native has ABI level {found} and {caller} calls level {called}; "
        "install releases of both that belong together"
    )


def build_refusal(cuda: bool, has_cuda: bool) -> str | None:
    """Why a build with or without CUDA kernels (octavo_native.HAS_CUDA) cannot serve the device, or None."""
    if not cuda or has_cuda:
        return None
    return (
        "this octavo-native was built without CUDA kernels; install a build with them, or build it where nvcc is found "
        "(octavo doctor shows what was built)"
    )


def router_refusal(experts: int | None, choices: int | None, expert_groups: int) -> str | None:
    """Why the kernels do not take a router of so many experts, choices of a token and groups of experts, or None.

    experts, choices  None: any
    """
    sides = (("experts", experts or 1, MOST_EXPERTS), ("choices of a token", choices or 1, MOST_CHOICES))
    for what, number, most in (*sides, ("groups of experts", expert_groups, MOST_CHOICES)):
        if number > most:
            return f"there are {number} {what}, and its kernels, which give each token a warp, hold {most}"
    return None


def route_refusal(groups: int | None, *, cuda: bool) -> str | None:
    """Why the kernels do not sort choices of so many groups, or None; groups None: any."""
    if not cuda or (groups or 1) <= MOST_COUNTED_GROUPS:
        return None
    return (
        f"groups is {groups}, and its cuda kernel, which counts the choices once per group, is slower than a sort past "
        f"{MOST_COUNTED_GROUPS}"
    )


def gives_forward(activation: str, dtype: str, wanted: Collection[str]) -> bool:
    """Whether one pass makes an activation's gradient and, beside it, the activation; sums of columns are made by other
    kernels.

    wanted  names of what the pass is to make
    """
    return activation in ("swiglu", "clamped_swiglu") and dtype == "bfloat16" and "dbias" not in wanted


def layout_refusal(directions: Collection[str], layouts: Sequence[str]) -> str | None:
    """Why a quantizer cannot produce these layouts, rowwise and columnwise, or None.

    directions  those that are produced; the layout of another one does not matter
    """
    for (direction, known), layout in zip(LAYOUTS_OF_DIRECTION.items(), layouts, strict=True):
        if direction in directions and layout not in known:
            return f"produces {direction} data in layouts {' or '.join(known)}; {layout} was requested"
    return None


def rounding_refusal(axis: str | None, dtype: str) -> str | None:
    """Why a quantizer of square blocks of E4M3 does not round to MXFP4's values first, or None.

    axis  "rowwise" or "columnwise": along which 32 elements share a scale; None: nothing is rounded
    """
    if axis and dtype == "float16":
        return "rounds to MXFP4 what is bfloat16 or float32; convert float16 before it quantizes"
    return None


def interleaving_refusal(block: int, dtype: str, scaling: str, *, cuda: bool, square: bool, mxfp4: bool) -> str | None:
    """Why a quantizer does not take weights whose gate and up rows take turns in blocks of `block`, or None.

    Halves of a multiple of 8, aligned to 16 bytes, which the GEMMs ask for, too.
    """
    if not cuda:
        return None
    if dtype != "bfloat16" or mxfp4 or not (scaling in ("delayed", "current") or (scaling == "block" and square)):
        return "takes turns apart in delayed and current scaling and square blocks of bfloat16; give the halves"
    if block != 1 and block % 8:
        return f"the rows of a block are {block}, and it takes apart blocks of 1 or of a multiple of 8; give the halves"
    return None


def joining_refusal(block: int, *, cuda: bool) -> str | None:
    """Why wgrad of quantized operands does not write gate and up rows in turns of `block`, or None."""
    if cuda and 32 % block:
        return f"the rows of a block are {block}, and its cuda wgrad writes turns of a divisor of 32; join the halves"
    return None


def step_refusal(code_format: str, columns: int | None, *, square: bool, mxfp4: bool) -> str | None:
    """Why the kernel of an optimizer's step does not write codes of this quantizer of blocks, or None.

    columns  the last axis; None: any
    """
    if code_format != "e4m3" or not square or mxfp4:
        return "its step writes codes of E4M3 in square blocks of the values as they are; quantize after the step"
    if columns is not None and columns % 4:
        return f"the last axis is {columns}, and its step writes four codes at once; quantize after the step"
    return None


def gemm_refusal(
    op: str,
    *,
    cuda: bool,
    k: int | None = None,
    n: int | None = None,
    dtypes: tuple[str | None, str | None] | None = None,
) -> str | None:
    """Why the kernels do not take a GEMM of these sides and operands, or None.

    k, n    in-features and out-features; None: any
    dtypes  of two unquantized operands, in the order of fprop's x and w, dgrad's dy and w, wgrad's x and dy; one that
            is None is not known. None: the operands are quantized
    """
    device, step = ("cuda", CUDA_MULTIPLE) if cuda else ("cpu", 1)
    uneven = [f"{name} is {side}" for name, side in (("k", k), ("n", n)) if side is not None and _uneven(side, step)]
    if uneven:
        needed = (
            "a side of 1 or more" if step == 1 else f"multiples of {step}; pad the weights, or choose another backend"
        )
        return f"{' and '.join(uneven)}, and its {device} GEMMs take {needed}"
    if not cuda or dtypes is None:
        return None
    first, second = dtypes
    if first is not None and second is not None and first != second:
        left, right = _OPERANDS[op]
        return f"{left} is {first} and {right} {second}; its cuda GEMMs multiply unquantized operands of one dtype"
    dtype = first or second
    if dtype is not None and dtype not in CUDA_DTYPES:
        return (
            f"the unquantized operands are {dtype}; its cuda GEMMs multiply {' or '.join(CUDA_DTYPES)}, so cast them "
            "or quantize them"
        )
    return None


def _uneven(side: int, step: int) -> bool:
    return side < 1 or side % step != 0
