"""The custom calls themselves: from traced arrays to traced arrays, with everything else as static attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import octavo_native
from octavo import QuantizerSpec
from octavo.quantizer import Direction, Operand
from octavo_jax.arrays.varying import varying_alike, varying_axes, varying_over
from octavo_jax_native.arrays.planes import Extent, array, layout_number
from octavo_jax_native.ffi import targets

Results = Mapping[str, jax.ShapeDtypeStruct]

_WORKSPACE_ALIGNMENT = 256
CPU_THREADS = 1
"""XLA:CPU runs calls side by side on threads of its own."""


def call(
    target: str,
    results: Results,
    operands: Mapping[str, Array],
    attributes: Mapping[str, Any],
    aliases: Mapping[int, int] | None = None,
) -> list[Array]:
    """One custom call; `aliases` says by number which operand's memory a result takes over."""
    function = jax.ffi.ffi_call(
        target, list(results.values()), vmap_method="sequential", input_output_aliases=dict(aliases or {})
    )
    given = varying_alike(list(operands.values()))
    # ffi_call takes its results to be alike on all shards, whatever its operands are.
    made: list[Array] = varying_over(list(function(*given, **attributes)), varying_axes(given))
    return made


def workspace_result(needed: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The workspace as a result, so that XLA owns it: `needed` bytes from an aligned address on, or none."""
    # XLA aligns buffers to less than the kernels ask of a workspace.
    return {"workspace": array((needed + _WORKSPACE_ALIGNMENT,), jnp.uint8)} if needed else {}


def _starts(results: Results) -> dict[str, Array]:
    """Zeros that results of floats begin as while JAX looks for NaN or infinities in them; else none.

    Rows past the sum are not written, and whatever that memory held before is no finding.
    """
    looking = jax.config.jax_debug_nans or jax.config.jax_debug_infs  # type: ignore[attr-defined]
    floats = {name: one for name, one in results.items() if looking and jnp.issubdtype(one.dtype, jnp.floating)}
    return {f"start_{name}": jnp.zeros(one.shape, one.dtype) for name, one in floats.items()}


def make_plan(group_sizes: Array, rows: int) -> Array:
    """The plan of ragged rows: int32, two a word, because JAX has no int64 unless it is turned on.

    A call of its own, so that XLA makes one plan for all quantizers and GEMMs of the same sizes and rows.
    """
    if group_sizes.dtype not in (jnp.int32, jnp.int64):
        if group_sizes.dtype in (jnp.uint32, jnp.uint64):
            # Sizes past int32 would turn negative, and those past `rows` are cut there anyway.
            group_sizes = jnp.minimum(group_sizes, rows + 1)
        group_sizes = group_sizes.astype(jnp.int32)
    words = octavo_native.plan_words(rows, group_sizes.shape[0])
    result = {"plan": array((2 * words,), jnp.int32)}
    return call(targets.PLAN, result, {"sizes": group_sizes}, {"rows": rows})[0]


@dataclass(frozen=True)
class QuantizeCall:
    """One quantize call but for its arrays; hashable, so that jaxprs compare by it.

    operands   names of the operands in their order, as in native/lib/bindings/ffi/quantize.cpp; x among them
    dtype      of x
    extent     of x, before the prologue
    results    name, shape and dtype of each result in its order
    layouts    of the rowwise and the columnwise plane
    """

    spec: QuantizerSpec
    operand: Operand
    operands: tuple[str, ...]
    dtype: Any
    extent: Extent
    results: tuple[tuple[str, tuple[int, ...], Any], ...]
    layouts: tuple[str, str]
    prologue: str = "none"
    activation: str = "silu"
    norm: str = "rms"
    epsilon: float = 0.0

    def run(self, *operands: Array) -> list[Array]:
        """The results, in order."""
        asked = {name: array(shape, dtype) for name, shape, dtype in self.results}
        asked |= workspace_result(self._workspace_bytes())
        spec = self.spec
        given = dict(zip(self.operands, operands, strict=True)) | _starts(asked)
        attributes = {
            "operands": ",".join(given),
            "results": ",".join(asked),
            "format": octavo_native.FORMATS[spec.format],
            "operand": octavo_native.OPERANDS[self.operand],
            "square": spec.square,
            "stochastic": spec.stochastic,
            "hadamard": spec.hadamard,
            "power_of_two": spec.power_of_two,
            "amax_epsilon": np.float32(spec.amax_epsilon),
            "groups": self.extent.groups,
            "row_layout": layout_number(self.layouts[0]),
            "col_layout": layout_number(self.layouts[1]),
            "epsilon": np.float32(self.epsilon),
            "threads": CPU_THREADS,
            **self._prologue_numbers(),
        }
        names = list(asked)
        aliases = {list(given).index(f"start_{name}"): at for at, name in enumerate(names) if f"start_{name}" in given}
        made = call(targets.QUANTIZE[spec.scaling], asked, given, attributes, aliases)
        return made[: len(self.results)]

    def _prologue_numbers(self) -> dict[str, int]:
        return {
            "prologue": octavo_native.PROLOGUES[self.prologue],
            "activation": octavo_native.ACTIVATIONS[self.activation],
            "norm": octavo_native.NORMS[self.norm],
        }

    def _workspace_bytes(self) -> int:
        """Size of the workspace result: what the CUDA kernels need; the CPU's take memory of their own."""
        if not octavo_native.HAS_CUDA:
            return 0
        spec, extent = self.spec, self.extent
        quantizer = octavo_native.Quantizer(
            format=octavo_native.FORMATS[spec.format],
            scaling=octavo_native.SCALINGS[spec.scaling],
            operand=octavo_native.OPERANDS[self.operand],
            square=spec.square,
            stochastic=spec.stochastic,
            hadamard=spec.hadamard,
            power_of_two=spec.power_of_two,
            amax_epsilon=spec.amax_epsilon,
        )
        names = {name for name, _, _ in self.results}
        return quantizer.workspace_bytes(
            cuda=True,
            dtype=octavo_native.DTYPES[jnp.dtype(self.dtype).name],
            rows=extent.rows,
            cols=extent.cols,
            groups=extent.groups,
            matrix_rows=extent.matrix_rows,
            rowwise="row_codes" in names,
            columnwise="col_codes" in names,
            amax="amax" in names,
            dbias="dbias" in names,
            dprobs="dprobs" in names,
            **self._prologue_numbers(),
        )


def dequantize_call(
    spec: QuantizerSpec,
    operands: Mapping[str, Array],
    out: jax.ShapeDtypeStruct,
    *,
    direction: Direction,
    layout: str,
    extent: Extent,
) -> Array:
    """One dequantize call; operands by name as in native/lib/bindings/ffi/dequantize.cpp."""
    attributes = {
        "operands": ",".join(operands),
        "format": octavo_native.FORMATS[spec.format],
        "scaling": octavo_native.SCALINGS[spec.scaling],
        "square": spec.square,
        "hadamard": spec.hadamard,
        "direction": octavo_native.DIRECTIONS[direction],
        "layout": layout_number(layout),
        "out_layout": 0,
        "rows": extent.rows,
        "cols": extent.cols,
        "groups": extent.groups,
        "matrix_rows": extent.matrix_rows,
        "threads": CPU_THREADS,
    }
    return call(targets.DEQUANTIZE, {"out": out}, operands, attributes)[0]


def convert_call(
    spec: QuantizerSpec,
    operands: Mapping[str, Array],
    results: Results,
    *,
    direction: Direction,
    layout: str,
    extent: Extent,
) -> list[Array]:
    """Codes and scales of one plane in `layout`, from the other one, as in native/lib/bindings/ffi/convert.cpp."""
    attributes = {
        "operands": ",".join(operands),
        "results": ",".join(results),
        "format": octavo_native.FORMATS[spec.format],
        "scaling": octavo_native.SCALINGS[spec.scaling],
        "square": spec.square,
        "hadamard": spec.hadamard,
        "direction": octavo_native.DIRECTIONS[direction],
        "to": layout_number(layout),
        "rows": extent.rows,
        "cols": extent.cols,
        "groups": extent.groups,
        "matrix_rows": extent.matrix_rows,
        "threads": CPU_THREADS,
    }
    return call(targets.CONVERT, results, operands, attributes)
