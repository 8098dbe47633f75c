"""What the GEMMs of a layer multiply: arrays, quantized operands, and rows that a GEMM gathers from tokens itself."""

from __future__ import annotations

from jax import Array

from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_registry.contract.moves import TokenRows

GemmOperand = GroupedTensor | Array
"""Rows or matrices, quantized or not."""

RowsOrTokens = Array | TokenRows[Array]
"""Rows that are not quantized, or the tokens from which a GEMM gathers its rows; the tokens may be codes."""

RowOperand = GroupedTensor | Array | TokenRows[Array]
"""x or dy as a GEMM reads it: rows, quantized or not, or the tokens from which it gathers them."""
