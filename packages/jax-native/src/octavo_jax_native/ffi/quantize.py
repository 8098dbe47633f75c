"""The custom call of a quantizer, with what is computed before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import octavo_native
from octavo import QuantizerSpec
from octavo.quantizer import Operand
from octavo_jax_native.arrays.planes import Extent, layout_number, result_array
from octavo_jax_native.ffi import targets
from octavo_jax_native.ffi.custom_call import CPU_THREADS, Results, call, workspace_result


def _zeros(results: Results) -> dict[str, Array]:
    """Operands of zeros that float results start from while JAX looks for NaN or infinities; none at other times.

    The kernels do not write rows past the sum, and what that memory held before must not be taken for a result.
    """
    looking = jax.config.jax_debug_nans or jax.config.jax_debug_infs  # type: ignore[attr-defined]
    floats = {name: one for name, one in results.items() if looking and jnp.issubdtype(one.dtype, jnp.floating)}
    return {f"start_{name}": jnp.zeros(one.shape, one.dtype) for name, one in floats.items()}


@dataclass(frozen=True)
class Prologue:
    """What is computed before the quantizer: "none", "activation", "activation_grad" or "norm", and which one."""

    kind: str = "none"
    activation: str = "silu"
    norm: str = "rms"
    epsilon: float = 0.0

    def numbers(self) -> dict[str, int]:
        """The attributes by which the kernels know it."""
        return {
            "prologue": octavo_native.PROLOGUES[self.kind],
            "activation": octavo_native.ACTIVATIONS[self.activation],
            "norm": octavo_native.NORMS[self.norm],
        }


NO_PROLOGUE = Prologue()


@dataclass(frozen=True)
class QuantizeCall:
    """What is static of one call of a quantizer: everything but its arrays. Hashable, so that jaxprs compare by it.

    operands   names of the operands in their order, as in native/lib/bindings/ffi/quantize.cpp; x among them
    dtype      of x
    extent     of what is quantized, before the prologue: of x, or of the rows that its tokens' choices make
    results    name, shape and dtype of each result in its order
    layouts    of the rowwise and the columnwise plane; codes of one of values are these values, and it has no scales
    tokens     how many there are, if x is tokens with `choices` choices each, and the operand `order` has the choice of
               each row; else both are 0
    """

    spec: QuantizerSpec
    operand: Operand
    operands: tuple[str, ...]
    dtype: Any
    extent: Extent
    results: tuple[tuple[str, tuple[int, ...], Any], ...]
    layouts: tuple[str, str]
    prologue: Prologue = NO_PROLOGUE
    tokens: int = 0
    choices: int = 0

    def run(self, *operands: Array) -> list[Array]:
        """The results, in order."""
        results = {name: result_array(shape, dtype) for name, shape, dtype in self.results}
        results |= workspace_result(self._workspace_bytes())
        spec = self.spec
        arrays = dict(zip(self.operands, operands, strict=True)) | _zeros(results)
        attributes = {
            "operands": ",".join(arrays),
            "results": ",".join(results),
            "format": octavo_native.FORMATS[spec.format],
            "operand": octavo_native.OPERANDS[self.operand],
            "square": spec.square,
            "square_columns": spec.square_columns,
            "mxfp4": -1 if spec.mxfp4 is None else octavo_native.DIRECTIONS[spec.mxfp4],
            "stochastic": spec.stochastic,
            "hadamard": spec.hadamard,
            "power_of_two": spec.power_of_two,
            "amax_epsilon": np.float32(spec.amax_epsilon),
            "groups": self.extent.groups,
            "row_layout": layout_number(self.layouts[0]),
            "col_layout": layout_number(self.layouts[1]),
            "epsilon": np.float32(self.prologue.epsilon),
            "threads": CPU_THREADS,
            "each": self.choices,
            **self.prologue.numbers(),
        }
        starts = {name: at for at, name in enumerate(arrays)}
        aliases = {starts[f"start_{name}"]: at for at, name in enumerate(results) if f"start_{name}" in arrays}
        outputs = call(targets.QUANTIZE[spec.scaling], results, arrays, attributes, aliases)
        return outputs[: len(self.results)]

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
            mxfp4=None if spec.mxfp4 is None else octavo_native.DIRECTIONS[spec.mxfp4],
            square_columns=spec.square_columns,
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
            dequantized="dequantized" in names,
            dbias="dbias" in names,
            dprobs="dprobs" in names,
            count=self.tokens,
            **self.prologue.numbers(),
        )
