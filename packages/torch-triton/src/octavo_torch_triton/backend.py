"""TritonBackend: refuses what this process or Triton cannot do, binds the rest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from octavo.grouped_tensor import PLAIN
from octavo_registry.contract import (
    AnyBound,
    AnyBoundGemm,
    AnyBoundMove,
    AnyRequest,
    Backend,
    BoundCombineRows,
    BoundDequantize,
    BoundDgrad,
    BoundDotRows,
    BoundFprop,
    BoundPermuteRows,
    BoundQuantize,
    BoundWgrad,
    DequantizeRequest,
    GemmRequest,
    MoveRequest,
    Op,
    QuantizeRequest,
    Refused,
    gemm_form,
)
from octavo_torch.plugin_api import DTYPES, status_word
from octavo_torch_triton.arrays.row_index import index_rows
from octavo_torch_triton.gemm.gemm import Dgrad, Fprop, Wgrad
from octavo_torch_triton.moves import operators as moves
from octavo_torch_triton.quantizers.quantizer import Dequantizer, Quantizer, converted
from octavo_triton.kernels.device import INTERPRETED
from octavo_triton.layouts import kernels_refusal
from octavo_triton.products.spec import chip_of, layouts_of

_MOVES: Mapping[Op, AnyBoundMove] = {
    "permute_rows": BoundPermuteRows(moves.permute_rows),
    "combine_rows": BoundCombineRows(moves.combine_rows),
    "dot_rows": BoundDotRows(moves.dot_rows),
}


class TritonBackend(Backend):
    """Serves what its card admits, on GPUs where Triton compiles and on CPUs where it interprets."""

    def __init__(self, name: str) -> None:
        self._name = name

    def refuses(self, request: AnyRequest) -> str | None:
        """Kernels that are interpreted where they shall be compiled, or vice versa; no device; flushing."""
        if request.device == "cpu" and not INTERPRETED:
            return (
                "device is cpu, and Triton compiles for GPUs alone in this process; its interpreter, for tests, is "
                "switched on by TRITON_INTERPRET=1 before Triton is imported"
            )
        if request.device == "cuda":
            if INTERPRETED:
                return "TRITON_INTERPRET is set, so that Triton would interpret kernels on the CPU; unset it"
            if not torch.cuda.is_available():
                return "device is cuda and this torch sees no CUDA device; install a CUDA build of torch or use the CPU"
        if request.device == "cpu" and float("5e-324") * 1.0 == 0.0:
            return "this process flushes subnormals (torch.set_flush_denormal), and codes need them kept"
        return self.refuses_everywhere(request)

    def refuses_everywhere(self, request: AnyRequest) -> str | None:
        """More groups than one program can sum; square blocks of columns of x; layouts that no quantizer here makes."""
        return kernels_refusal(request.groups, request.square_columns, request.quantizer, request.layouts)

    def bind(self, request: AnyRequest) -> AnyBound:
        """The function for `request.op`."""
        if request.device == "cuda":
            # made now: a word that is born while a graph is captured would be zeroed by every replay
            status_word(torch.device("cuda", torch.cuda.current_device()))
        if isinstance(request, GemmRequest):
            return _bind_gemm(request)
        if isinstance(request, QuantizeRequest):
            columnwise = request.layouts[1]
            return BoundQuantize(
                Quantizer(request.quantizer, columnwise),
                prepare=index_rows,
                from_plain=partial(converted, columnwise=columnwise),
                to_plain=partial(converted, columnwise=PLAIN),
            )
        if isinstance(request, DequantizeRequest):
            return BoundDequantize(Dequantizer(DTYPES[request.out_dtype]))
        if isinstance(request, MoveRequest) and request.op in _MOVES:
            return _MOVES[request.op]
        raise Refused(f"serves no {request.op}; its card does not name it")


def _bind_gemm(request: GemmRequest) -> AnyBoundGemm:
    chip, dtype = chip_of(request.arch if request.device == "cuda" else None), request.out_dtype
    weight = request.weight
    form = gemm_form(request.op, weight)
    layouts = form.renamed(layouts_of(form.kernel, chip, request.kind))
    if request.op == "fprop":
        return BoundFprop(Fprop(chip, dtype, weight), layouts=layouts, prepare=index_rows)
    if request.op == "dgrad":
        return BoundDgrad(Dgrad(chip, dtype, weight), layouts=layouts, prepare=index_rows)
    return BoundWgrad(Wgrad(chip, dtype, weight), layouts=layouts, prepare=index_rows)
