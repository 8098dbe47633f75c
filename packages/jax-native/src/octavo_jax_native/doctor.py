"""What `octavo doctor` says of this package (entry-point group `octavo.doctor`). Imports no JAX."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

ADVICE = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
"""XLA_FLAGS with which every launch of a jitted program, ours among them, is recorded and replayed."""

_KINDS = "xla_gpu_enable_command_buffer"
_LEAST = "xla_gpu_graph_min_graph_size"
_OURS = "CUSTOM_CALL"


def flags(text: str) -> dict[str, str]:
    """The values in `XLA_FLAGS` by name; a flag that stands twice has its last value, as in XLA."""
    return {name: value.strip("'\"") for name, value in re.findall(r"--(\w+)=('[^']*'|\"[^\"]*\"|\S*)", text)}


def lines(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Whether XLA_FLAGS puts Octavo's calls into XLA's command buffers (CUDA graphs), and how to get that."""
    given = flags(environment.get("XLA_FLAGS", ""))
    kinds = given.get(_KINDS)
    if kinds is None:
        return [
            "command buffers: XLA_FLAGS does not name them, so this XLA's own defaults hold",
            f'to record every launch of a program on a GPU: XLA_FLAGS="{ADVICE}"',
        ]
    named = [kind.strip() for kind in kinds.upper().split(",") if kind.strip()]
    if not named or named == ["INVALID"]:
        return [f"command buffers: XLA_FLAGS turns them off (--{_KINDS} names none), so each kernel is launched alone"]
    if _OURS not in (kind.removeprefix("+") for kind in named):
        return [
            f"command buffers: XLA_FLAGS names {', '.join(named)} without {_OURS}, so Octavo's calls stay outside and "
            f"divide what is recorded; add {_OURS} to --{_KINDS}"
        ]
    least = given.get(_LEAST)
    row = "of the least length that this XLA has by default" if least is None else f"of {least} or more"
    told = [f"command buffers: XLA_FLAGS records {', '.join(named)} in rows {row}; Octavo's calls are among them"]
    if least != "1":
        told.append(f"a shorter row is launched one by one; --{_LEAST}=1 records every one")
    return told
