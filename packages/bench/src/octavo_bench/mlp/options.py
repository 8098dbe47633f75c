"""What `octavo bench mlp` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from octavo_bench.harness.options import BackendOption, ExpertShapes, SizesOption
from octavo_bench.harness.shapes import EXPERTS, SMALL_BLOCK, Shape


@dataclass(frozen=True, kw_only=True)
class MlpOptions(SizesOption, BackendOption):
    """See the command's help. Shapes are experts' (G, K, F, M)."""

    command: ClassVar[str] = "mlp"
    small: ClassVar[tuple[Shape, ...]] = SMALL_BLOCK

    shape: ExpertShapes = None
    probs: Annotated[bool, typer.Option("--probs/--no-probs", help="Rows weighted, with the weights' gradient.")] = True
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also on torch's own grouped GEMM in bf16.")] = True

    @property
    def published(self) -> tuple[Shape, ...]:
        """One expert-parallel rank of each model."""
        return EXPERTS[1:3] if self.quick else EXPERTS
