"""The custom call of a grouped GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
from jax import Array

import octavo_native
from octavo import QuantizerSpec, Recipe
from octavo.formats import DType
from octavo.recipe_base import Gemm
from octavo_jax_native.arrays.planes import result_array
from octavo_jax_native.ffi import targets
from octavo_jax_native.ffi.custom_call import CPU_THREADS, call, workspace_result
from octavo_native import support
from octavo_native.gemms import gemm_named, names_of

Side = Literal["left", "right"]

_SIDES: tuple[Side, ...] = get_args(Side)
_UNSCALED_SUMS = ("delayed", "current", "row")  # block scales are applied to promoted sums alone


def sums_fast(recipe: Recipe, gemm: Gemm) -> bool:
    """True where the recipe leaves the promotion of FP8 sums out, and its scales allow that."""
    return recipe.kind in _UNSCALED_SUMS and gemm in getattr(recipe, "fast_accumulation", ())


class Gathered(NamedTuple):
    """An operand of a GEMM that gathers its rows from tokens.

    side      "left" or "right"
    tokens    how many there are
    choices   of each token; every choice is a row
    """

    side: Side
    tokens: int
    choices: int


@dataclass(frozen=True)
class GemmCall:
    """What is static of one call of a GEMM: everything but its arrays.

    rows, n, k    M, and N and K of the weight [G, N, K] that the kernels see, whichever GEMM it is
    left, right   how the operands were quantized; None: they are arrays of `dtype`
    *_values      whether a quantized operand comes as values instead of codes (octavo_native.layouts)
    accumulate    wgrad: the operand `out` is added to, in its own memory
    gathered      None: all operands are rows, or weights
    ctas          most CTAs of the CUDA kernel, each of which has a multiprocessor to itself; 0: one for each
    """

    gemm: Gemm
    rows: int
    n: int
    k: int
    groups: int
    out_dtype: DType
    dtype: DType = "bfloat16"
    left: QuantizerSpec | None = None
    right: QuantizerSpec | None = None
    left_values: bool = False
    right_values: bool = False
    accumulate: bool = False
    fast_accumulation: bool = False
    ctas: int = 0
    gathered: Gathered | None = None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """y [M, N], dx [M, K] or dw [G, N, K]."""
        if self.gemm == "wgrad":
            return self.groups, self.n, self.k
        return self.rows, self.n if self.gemm == "fprop" else self.k

    @property
    def bias_shape(self) -> tuple[int, int]:
        """The shape of the bias: one value for each group and column of the result."""
        return self.groups, self.out_shape[1]

    def kernel(self) -> octavo_native.Gemm:
        """The kernels' own object for this GEMM, which knows workspaces and tiles."""
        quantized = {}
        if self.left is not None and self.right is not None:
            quantized = names_of(self.gemm, self.left, self.right)
        return gemm_named(
            gemm=self.gemm,
            dtype=self.dtype,
            out_dtype=self.out_dtype,
            accumulate=self.accumulate,
            fast_accumulation=self.fast_accumulation,
            left_values=self.left_values,
            right_values=self.right_values,
            **quantized,
        )

    def run(self, operands: Mapping[str, Array]) -> Array:
        """The product; operands by name as in native/lib/bindings/ffi/gemm.cpp."""
        results: dict[str, jax.ShapeDtypeStruct] = {"out": result_array(self.out_shape, self.out_dtype)}
        results |= workspace_result(self._workspace_bytes())
        left, right, gathered = self.left, self.right, self.gathered
        names = {} if left is None or right is None else names_of(self.gemm, left, right)
        attributes = {
            "operands": ",".join(operands),
            "results": ",".join(results),
            "gemm": octavo_native.GEMMS[self.gemm],
            "quantized": left is not None,
            "scaling": 0 if left is None else octavo_native.SCALINGS[left.scaling],
            "left_format": 0 if left is None else octavo_native.FORMATS[left.format],
            "right_format": 0 if right is None else octavo_native.FORMATS[right.format],
            "left_square": names.get("left_square", False),
            "right_square": names.get("right_square", False),
            "hadamard": names.get("hadamard", False),
            "accumulate": self.accumulate,
            "fast_accumulation": self.fast_accumulation,
            "rows": self.rows,
            "n": self.n,
            "k": self.k,
            "groups": self.groups,
            "gathered": 0 if gathered is None else 1 + _SIDES.index(gathered.side),
            "tokens": 0 if gathered is None else gathered.tokens,
            "each": 1 if gathered is None else gathered.choices,
            "ctas": self.ctas,
            "threads": CPU_THREADS,
        }
        aliases = {list(operands).index("out"): 0} if self.accumulate else {}
        return call(targets.GEMM, results, operands, attributes, aliases)[0]

    def _workspace_bytes(self) -> int:
        """Size of the workspace result: what the CUDA kernels need; the CPU's take memory of their own."""
        dtypes = None if self.left is not None else (self.dtype, None)
        if not octavo_native.HAS_CUDA or support.gemm_refusal(self.gemm, cuda=True, k=self.k, n=self.n, dtypes=dtypes):
            return 0
        return self.kernel().workspace_bytes(cuda=True, rows=self.rows, n=self.n, k=self.k, groups=self.groups)
