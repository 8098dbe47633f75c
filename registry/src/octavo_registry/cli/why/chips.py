"""Chips by the names that people use, for questions about machines that are not here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from octavo_registry.cli.errors import BadInput

CHIPS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "v100": (7, 0),
        "t4": (7, 5),
        "a100": (8, 0),
        "a10": (8, 6),
        "a40": (8, 6),
        "rtx3090": (8, 6),
        "l4": (8, 9),
        "l40s": (8, 9),
        "rtx4090": (8, 9),
        "h100": (9, 0),
        "h200": (9, 0),
        "h20": (9, 0),
        "gh200": (9, 0),
        "b200": (10, 0),
        "gb200": (10, 0),
        "b300": (10, 3),
        "gb300": (10, 3),
        "rtx5090": (12, 0),
    }
)
"""Compute capabilities by name, from NVIDIA's list "CUDA GPU Compute Capability"."""

_CAPABILITY = re.compile(r"(?:sm_?)?(\d{1,2})\.?(\d)[a-z]?")


@dataclass(frozen=True, slots=True)
class Chip:
    """A device that need not be here: its kind, its compute capability where it is a CUDA device, and its name."""

    kind: str
    arch: tuple[int, int] | None
    name: str


def parse_arch(text: str) -> tuple[int, int]:
    """A compute capability written as 9.0, sm_90 or 90."""
    match = _CAPABILITY.fullmatch(text.strip().lower())
    if match is None:
        raise BadInput(f"--arch: got {text!r}; write a compute capability as 9.0 or sm_90")
    return int(match[1]), int(match[2])


def parse_chip(text: str) -> Chip:
    """The chip of `--hypothetical`: a name such as h100, a compute capability, or cpu."""
    name = re.sub(r"[\s_-]|nvidia|geforce", "", text.strip().lower())
    if name == "cpu":
        return Chip("cpu", None, "a CPU")
    if name in CHIPS:
        return Chip("cuda", CHIPS[name], name.upper())
    match = _CAPABILITY.fullmatch(name)
    if match is not None:
        return Chip("cuda", parse_arch(name), f"a device of compute capability {text.strip()}")
    close = difflib.get_close_matches(name, CHIPS, n=1, cutoff=0.7)  # or an mi300 is taken for a b300
    hint = f"did you mean {close[0]}? " if close else ""
    raise BadInput(
        f"--hypothetical: got {text!r}; {hint}it takes cpu, a compute capability such as 9.0, or one of "
        f"{', '.join(CHIPS)}"
    )
