"""The tiles of the CUDA kernels that a GEMM request could run in: what `octavo why --kernels` shows."""

from __future__ import annotations

from octavo import HighPrecision
from octavo.recipe_base import GEMMS
from octavo_jax_native.ffi.gemm import GemmCall, sums_fast
from octavo_native.gemms import gemm_choices
from octavo_registry.contract import GemmRequest, KernelChoice, gemm_form


def kernel_choices(request: GemmRequest, rows: int) -> tuple[KernelChoice, ...]:
    """Every tile for M = `rows` in equal groups, the chosen one first; () where K, N or the groups are not named."""
    if request.op not in GEMMS or request.n is None or request.k is None or request.groups is None:
        return ()
    recipe = request.recipe or HighPrecision()
    quantized = recipe.quantizes(request.op)
    form = gemm_form(request.op, request.weight)
    left, right = (recipe.quantizer(operand) if quantized else None for operand in form.operands)
    n, k = form.sides(request.n, request.k)
    call = GemmCall(
        form.kernel,
        rows=rows,
        n=n,
        k=k,
        groups=request.groups,
        out_dtype=request.out_dtype,
        dtype=request.in_dtype,
        left=left,
        right=right,
        fast_accumulation=sums_fast(recipe, request.op),
    )
    choices = gemm_choices(call.kernel(), rows=rows, n=call.n, k=call.k, groups=call.groups)
    return tuple(
        KernelChoice(
            name=one.name,
            tiles=one.tiles,
            waves=one.waves,
            filled=one.filled,
            microseconds=one.microseconds,
            chosen=one.chosen,
        )
        for one in choices
    )
