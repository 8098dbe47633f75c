"""The status word of each device: errors in sizes that only the device has seen, and ranks that disagree.

Kernels add flags to the word of their device and write nothing out of bounds; `check_errors` reads all words.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from octavo import OctavoError
from octavo_torch.compiler.graphs import GraphUnsafeError, is_capturing

BAD_SIZES, LEFT_OUT = 1, 2

_words: dict[torch.device, Tensor] = {}
_disagreements: dict[torch.device, Tensor] = {}
"""int32 [1]: _MOST_RANKS minus the first rank that made another call; 0 where the ranks agree."""
_MOST_RANKS = 1 << 30


class DeviceSizesError(OctavoError, ValueError):
    """Group sizes on a device were negative or summed past the rows of their tensor."""


class RowsLeftOutError(OctavoError, RuntimeError):
    """Choices of a MoE layer over several ranks found no room in the static buffers of its Exchange."""


class ExchangeError(OctavoError, RuntimeError):
    """Ranks that share experts do not agree on a call, or one of them has ended or does not answer.

    The message names ranks by their numbers in the group, and where others among all ranks, by those, too. Where a
    collective has failed, the group is of no use any more.
    """


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


def flag_left_out(some: Tensor) -> None:
    """Set LEFT_OUT on `some`'s device where that bool scalar is true, without reading it."""
    status_word(some.device).bitwise_or_(some.to(torch.int32) * LEFT_OUT)


def flag_disagreement(differs: Tensor) -> None:
    """Note the first rank of `differs`, bool [ranks], that makes another call than this one, without reading it."""
    ranks = differs.shape[0]
    ahead = torch.arange(_MOST_RANKS, _MOST_RANKS - ranks, -1, dtype=torch.int32, device=differs.device)
    word = disagreement_word(differs.device)
    torch.maximum(word, (ahead * differs).amax(), out=word)


def disagreement_word(device: torch.device) -> Tensor:
    """The int32 [1] word of `device` for `flag_disagreement`, made outside of captures as the status word is."""
    if device not in _disagreements:
        _disagreements[device] = torch.zeros_like(status_word(device))
    return _disagreements[device]


def check_errors() -> None:
    """Raise what devices have noticed since the last call; waits for them.

    DeviceSizesError: a kernel met group sizes out of bounds. Rows of such a call past the tensor's end, and groups of
    negative size, were left out of the computation. ExchangeError: in a static exchange another rank made another call
    than this one. RowsLeftOutError: an Exchange's static buffers were too small. Where several happened, the first of
    these is raised.
    """
    flags = {str(device): int(word.item()) for device, word in _words.items()}
    wrong, too_small = ([name for name, word in flags.items() if word & flag] for flag in (BAD_SIZES, LEFT_OUT))
    differing = {str(device): int(word.item()) for device, word in _disagreements.items()}
    others = [f"rank {_MOST_RANKS - value} (on {name})" for name, value in differing.items() if value]
    for word in (*_words.values(), *_disagreements.values()):
        word.zero_()
    if wrong:
        raise DeviceSizesError(
            f"group_sizes on {', '.join(wrong)} were negative or summed past the rows of their tensor; the excess was "
            "cut off. Pass sizes of zero or more whose sum is at most the rows, or host sizes to learn which is wrong"
        )
    if others:
        raise ExchangeError(
            f"{', '.join(others)} made another call of a MoE layer with ep= than this rank, in a static exchange that "
            "all ranks had agreed on before; results since then are of no use. Make the same calls in the same order "
            "on every rank"
        )
    if too_small:
        raise RowsLeftOutError(
            f"on {', '.join(too_small)} choices of a MoE layer with ep= found no room and were left out of its result: "
            "more of one rank's at another than Exchange(pair_rows=), or more for a rank's experts than "
            "Exchange(rows=); give larger ones, repeat the step, or leave rows out, which reads sizes on the host. "
            "Exchange(left_out=) counts them"
        )
