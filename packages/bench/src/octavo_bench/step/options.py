"""What `octavo bench step` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from octavo_bench.errors import InputError
from octavo_bench.harness.checks import names_of
from octavo_bench.harness.options import FRAMEWORKS, BackendOption, SizesOption
from octavo_bench.harness.shapes import MODELS, SMALL, Shape


@dataclass(frozen=True, kw_only=True)
class StepOptions(SizesOption, BackendOption):
    """See the command's help."""

    command: ClassVar[str] = "step"
    small: ClassVar[tuple[Shape, ...]] = SMALL

    framework: Annotated[str, typer.Option(help="torch, jax, or both with a comma.")] = "torch"
    sizes: Annotated[str, typer.Option(help="even, skewed (Dirichlet(0.5), one group empty), or both.")] = "even,skewed"
    reuse_weights: Annotated[
        bool, typer.Option("--reuse-weights", help="Also with weights quantized once, outside the step (torch).")
    ] = False
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also the framework's own grouped GEMM in bf16.")
    ] = True
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, even groups, few repeats: seconds.")] = False

    def check(self) -> None:
        """See `Options`; that options go together."""
        super().check()
        if self.backend is not None and len(self.chosen_frameworks) > 1:
            raise InputError(
                "--backend names backends of one framework and --framework two; leave it out, or run each alone"
            )
        if self.reuse_weights and "torch" not in self.chosen_frameworks:
            raise InputError("--reuse-weights is torch's; octavo_jax.grouped_dense quantizes its kernel in each call")

    @property
    def chosen_frameworks(self) -> tuple[str, ...]:
        """torch before JAX."""
        names = names_of("--framework", self.framework, tuple(FRAMEWORKS))
        return tuple(name for name in FRAMEWORKS if name in names)

    @property
    def chosen_sizes(self) -> tuple[str, ...]:
        """See `SizesOption`; in a quick run of published shapes the first."""
        chosen = super().chosen_sizes
        return chosen[:1] if self.quick and not self.shape else chosen

    @property
    def published(self) -> tuple[Shape, ...]:
        """One expert-parallel rank of each model."""
        return MODELS[1:3] if self.quick else MODELS
