"""What `octavo bench host` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from octavo_bench.harness.options import BackendOption, Names, SizesOption
from octavo_bench.harness.shapes import MODELS, SMALL, Shape

_EXPERTS = {("cuda", False): (8, 32, 128, 512), ("cuda", True): (8, 512), ("cpu", False): (4, 32), ("cpu", True): (4,)}
_ROWS = {"cuda": 4096, "cpu": 256}

SIDE = 256
"""K and N of the layers whose host time is taken: their kernels are short."""


@dataclass(frozen=True, kw_only=True)
class HostOptions(SizesOption, BackendOption):
    """See the command's help."""

    command: ClassVar[str] = "host"
    small: ClassVar[tuple[Shape, ...]] = SMALL

    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, fewer experts, few repeats: seconds.")] = False

    @property
    def published(self) -> tuple[Shape, ...]:
        """One expert-parallel rank of each model."""
        return MODELS[1:3] if self.quick else MODELS

    @property
    def host_shapes(self) -> tuple[Shape, ...]:
        """Layers of several numbers of experts, whose host time is taken."""
        rows = _ROWS[self.chosen_device]
        return tuple(Shape("host", groups, SIDE, SIDE, rows) for groups in _EXPERTS[self.chosen_device, self.quick])

    @property
    def backend_in_graphs(self) -> Names:
        """Without a wish the registry chooses, which has plans for graphs and others."""
        return None if self.backend is None else self.chosen_backend
