"""NativeBackend: refuses what this machine or this build of the kernels cannot do, binds the rest."""

from __future__ import annotations

import torch

import octavo_native
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_registry.request import Bound, Request
from octavo_torch.dtypes import DTYPES
from octavo_torch.status import status_word
from octavo_torch_native.plugin import PANELS, ROWS

ABI_LEVEL = 1
"""The level of octavo-native's calls that this package makes."""

LAYOUTS: dict[Direction, tuple[str, str]] = {"rowwise": (PLAIN, ROWS), "columnwise": (PLAIN, PANELS)}
"""The layouts that a plane may have."""


class NativeBackend:
    """Serves what its card admits, where octavo-native was built for the device."""

    def refuses(self, request: Request) -> str | None:
        """A mismatch of ABI levels, a build without CUDA, no device, a layout of the other direction."""
        if octavo_native.ABI_LEVEL != ABI_LEVEL:
            return (
                f"octavo-native has ABI level {octavo_native.ABI_LEVEL} and octavo-torch-native calls level "
                f"{ABI_LEVEL}; install releases of both that belong together"
            )
        if request.device == "cuda":
            if not octavo_native.HAS_CUDA:
                return (
                    "this octavo-native was built without CUDA kernels; install a build with them, or build it where "
                    "nvcc is found (octavo doctor shows what was built)"
                )
            if not torch.cuda.is_available():
                return "device is cuda and this torch sees no CUDA device; install a CUDA build of torch or use the CPU"
        if request.op == "quantize" and request.quantizer is not None:
            for (direction, known), layout in zip(LAYOUTS.items(), request.layouts, strict=True):
                if direction in request.quantizer.directions and layout not in known:
                    return f"makes {direction} data in layouts {' and '.join(known)}, {layout} was asked for"
        return None

    def bind(self, request: Request) -> Bound:
        """The function for `request.op`; see octavo_registry.Bound for the calls."""
        # here, because the modules below use names that another ABI level may not have
        from octavo_torch_native.dequantizer import Dequantizer
        from octavo_torch_native.quantizer import Quantizer

        assert request.quantizer is not None  # part of the contract of both operations
        if request.device == "cuda":
            # made now: a word that is born while a graph is captured would be zeroed by every replay
            status_word(torch.device("cuda", torch.cuda.current_device()))
        if request.op == "dequantize":
            return Bound(run=Dequantizer(DTYPES[request.out_dtype]))
        return Bound(run=Quantizer(request.quantizer, request.layouts))
