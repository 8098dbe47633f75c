"""The end of delayed scaling's step, in one launch."""

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
    submit(octavo_native.update_scales, history, arguments, threaded=False)
