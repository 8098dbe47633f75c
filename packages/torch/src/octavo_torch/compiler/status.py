"""The status word of each device: what was wrong with sizes that nobody read back.

Kernels add flags to the word of their device and write nothing out of bounds; `check_errors` reads all words.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from octavo import OctavoError
from octavo_torch.compiler.graphs import GraphUnsafeError, is_capturing

BAD_SIZES = 1

_words: dict[torch.device, Tensor] = {}


class DeviceSizesError(OctavoError, ValueError):
    """Group sizes on a device were negative or summed past the rows of their tensor."""


def status_word(device: torch.device) -> Tensor:
    """The int32 [1] status word of `device`: a fixed address, made at first use, to which backends add flags.

    Raises GraphUnsafeError where that first use is captured: each replay would make the word, and clear it, again.
    """
    word = _words.get(device)
    if word is None:
        if device.type == "cuda" and is_capturing():
            raise GraphUnsafeError(
                f"a CUDA graph is being captured and nothing of Octavo's has run on {device} before; run the function "
                "once before the capture, as octavo_torch_cudagraph.capture does"
            )
        # the first call may come from a compiler's trace, whose tensors have no memory
        with _disable_current_modes():
            word = _words[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return word


def flag_bad_sizes(bad: Tensor) -> None:
    """Set BAD_SIZES on `bad`'s device where the bool scalar `bad` is true, without reading it."""
    status_word(bad.device).bitwise_or_(bad.to(torch.int32) * BAD_SIZES)


def check_errors() -> None:
    """Raise DeviceSizesError if a kernel met group sizes out of bounds since the last call; waits for the devices.

    Rows of such a call past the tensor's end, and groups of negative size, were left out of the computation.
    """
    wrong = [str(device) for device, word in _words.items() if int(word.item()) & BAD_SIZES]
    for word in _words.values():
        word.zero_()
    if wrong:
        raise DeviceSizesError(
            f"group_sizes on {', '.join(wrong)} were negative or summed past the rows of their tensor; the excess was "
            "cut off. Pass sizes of zero or more whose sum is at most the rows, or host sizes to learn which is wrong"
        )
