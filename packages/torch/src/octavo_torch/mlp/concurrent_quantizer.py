"""Quantizes w2 on a stream of its own while fc1's product runs on the caller's: `Room.w2`."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_torch.arrays.grouped_tensor import PLANES, GroupedTensor, Matrix, codes_alone
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.linear.autograd import AnyRows, product, quantize_operand, read_operands
from octavo_torch.memo import Bounded
from octavo_torch.mlp.call import MlpCall
from octavo_torch.scaling.seeds import DrawnSeed


class ConcurrentQuantizer:
    """Quantizes one call's w2: `run_first_layer` starts it, and `w2_codes` has the caller's stream wait for its end.

    The streams wait for each other by events alone, so a CUDA graph can capture both, and no bit depends on which is
    faster. If the call raises in between, the caller's stream waits all the same, so that the memory which the
    quantizer reads is not given away before it has been read.
    """

    def __init__(self, call: MlpCall, w2: Tensor, seed: DrawnSeed, left_free: int) -> None:
        """left_free: multiprocessors that fc1's product does not use, for the quantizer."""
        self._call, self._w2, self._seed, self._left_free = call, w2, seed, left_free
        self._main, self._side = streams(w2.device)
        self._codes: GroupedTensor | None = None

    @staticmethod
    def of(call: MlpCall, w2: Tensor, seed: DrawnSeed) -> ConcurrentQuantizer | None:
        """The call's, if its Room asks for one; None if w2 is quantized after fc1's product, or not at all."""
        room, fc2 = call.room, call.fc2
        if room is None or room.w2 is None or fc2.layer.quantize_w is None:
            return None
        if not has_streams(w2) or fc2.probe is not None or (fc2.w_codes or fc2.w_made) is not None:
            return None
        return ConcurrentQuantizer(call, w2, seed, max(room.w2, room.gemms))

    def run_first_layer(
        self, seed: DrawnSeed, x: AnyRows, w1: Tensor, bias1: Tensor | None
    ) -> tuple[Tensor, AnyRows | GroupedTensor, Matrix]:
        """`run_forward` of fc1, with w2's quantizer running beside its product."""
        fc1, fc2 = self._call.fc1, self._call.fc2
        read = read_operands(fc1, seed, x, w1)
        before = self._main.record_event()
        # launched first, so that its CTAs have their multiprocessors before the quantizer's many take what is left
        h = product(fc1, fc1.layer.leaving(self._left_free).fprop, (x, w1), read, bias1, None)
        quantize = fc2.layer.quantize_w
        assert quantize is not None  # see `of`
        self._side.wait_event(before)
        try:
            with torch.cuda.stream(self._side):
                self._codes = quantize_operand(fc2, quantize, "w", self._w2, self._seed)
        finally:
            self._done = self._side.record_event()
        rows, matrices = read
        return h, codes_alone(rows), codes_alone(matrices)

    def w2_codes(self) -> GroupedTensor:
        """w2's codes, which the caller's stream may read from now on."""
        codes, self._codes = self._codes, None
        assert codes is not None  # `run_first_layer` has run
        self._wait()
        for name in PLANES:
            plane: Tensor | None = getattr(codes, name)
            if plane is not None:
                # made in the other stream's memory, which the allocator would give away in that stream's order
                plane.record_stream(self._main)
        return codes

    def _wait(self) -> None:
        self._main.wait_event(self._done)
        del self._done

    def __del__(self) -> None:
        if hasattr(self, "_done"):
            self._wait()


def has_streams(tensor: Tensor) -> bool:
    """Whether work on `tensor` is put on CUDA streams here and now, and not traced."""
    return tensor.is_cuda and is_plain(tensor)


_side_streams: Bounded[tuple[int, int], torch.cuda.Stream] = Bounded()


def streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The caller's stream on the device, and the stream that runs beside it in every call."""
    main = torch.cuda.current_stream(device)
    key = main.device_index, main.cuda_stream
    side = _side_streams.get(key)
    if side is None:
        side = _side_streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return main, side
