"""What `octavo bench remat` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from octavo_bench.harness.checks import check_counts
from octavo_bench.harness.options import BackendOption, ExpertShapes, SizesOption, SomeKinds
from octavo_bench.harness.shapes import EXPERTS, SMALL_BLOCK, Shape


@dataclass(frozen=True, kw_only=True)
class RematOptions(SizesOption, BackendOption):
    """See the command's help. Shapes are experts' (G, K, F, M)."""

    command: ClassVar[str] = "remat"
    framework_names: ClassVar[tuple[str, ...]] = ("jax",)
    small: ClassVar[tuple[Shape, ...]] = SMALL_BLOCK

    shape: ExpertShapes = None
    kinds: SomeKinds = "current,block,mxfp8"
    layers: Annotated[int, typer.Option(help="Layers of the block.")] = 5
    unroll: Annotated[bool, typer.Option("--unroll", help="Layers one after another instead of a lax.scan.")] = False
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also the block on jax.lax.ragged_dot in bf16.")] = (
        True
    )
    quick: Annotated[bool, typer.Option("--quick", help="One recipe, no peers, few repeats: seconds.")] = False

    def check(self) -> None:
        """See `Options`."""
        super().check()
        check_counts(layers=self.layers)

    @property
    def chosen_kinds(self) -> tuple[str, ...]:
        """See `LayerOptions`; the first in a quick run."""
        chosen = super().chosen_kinds
        return chosen[:1] if self.quick else chosen

    @property
    def published(self) -> tuple[Shape, ...]:
        """Qwen3-235B's rank."""
        return EXPERTS[2:3]
