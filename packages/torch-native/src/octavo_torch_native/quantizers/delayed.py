"""Delayed scaling's state: the end of a step, and an amax of it, each in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import octavo_native
from octavo_torch_native.arrays.launch import address, submit


def update_scales(
    history: Tensor, scale: Tensor, maxima: Sequence[float], *, most_recent: bool, reduced: Tensor | None
) -> None:
    """See octavo_registry.contract.quantize.UpdateScales."""
    reduced = None if reduced is None else reduced.contiguous()
    arguments = {
        "history": address(history),
        "scale": address(scale),
        "maxima": maxima,
        "slots": history.shape[1],
        "groups": history.shape[2],
        "most_recent": most_recent,
        "reduced": address(reduced),
    }
    submit(octavo_native.update_scales, history, arguments, threaded=False, recordable=False)


def record_amax(amax: Tensor, history: Tensor) -> None:
    """See octavo_registry.contract.quantize.RecordAmax."""
    slots, groups = history.shape
    arguments = {
        "amax": address(amax),
        "history": address(history),
        "operands": 1,
        "slots": slots,
        "groups": groups,
    }
    submit(octavo_native.record_amax, history, arguments, threaded=False)
