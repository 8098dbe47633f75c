"""What `octavo bench gemm` is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar

import typer

from octavo.recipe_base import Gemm
from octavo_bench.harness.checks import one_of
from octavo_bench.harness.options import FRAMEWORKS, BackendOption, Ops, SizesOption, gemms_of
from octavo_bench.harness.recipes import ACCUMULATED, FAST, GemmCase
from octavo_bench.harness.shapes import DEEPGEMM, MODELS, SMALL, Shape

_DEEPGEMM_KINDS = ("bf16", "block")


@dataclass(frozen=True, slots=True)
class Work:
    """A shape and what is measured of it. sizes: "even", "skewed"."""

    shape: Shape
    sizes: tuple[str, ...]
    cases: tuple[GemmCase, ...]

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """Those of its cases."""
        return tuple(dict.fromkeys(case.gemm for case in self.cases))


@dataclass(frozen=True, kw_only=True)
class GemmOptions(SizesOption, BackendOption):
    """See the command's help."""

    command: ClassVar[str] = "gemm"
    small: ClassVar[tuple[Shape, ...]] = SMALL
    default_repeats: ClassVar[Mapping[tuple[str, bool], int]] = MappingProxyType(
        {("cuda", False): 20, ("cuda", True): 8, ("cpu", False): 3, ("cpu", True): 1}
    )

    framework: Annotated[str, typer.Option(help="torch or jax.")] = "torch"
    sizes: Annotated[str, typer.Option(help="even, skewed (Dirichlet(0.5), one group empty), or both.")] = "even,skewed"
    ops: Ops = ""
    fast: Annotated[
        bool, typer.Option("--fast/--no-fast", help="Also FP8 without promotion, against peers without it.")
    ] = True
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, even groups, few repeats: seconds.")] = False

    def check(self) -> None:
        """See `Options`."""
        one_of("--framework", self.framework, tuple(FRAMEWORKS))
        super().check()
        gemms_of(self.ops)

    @property
    def chosen_frameworks(self) -> tuple[str, ...]:
        """The one framework."""
        return (self.framework,)

    @property
    def published(self) -> tuple[Shape, ...]:
        """One expert-parallel rank of each model."""
        return MODELS[1:3] if self.quick else MODELS

    @property
    def work(self) -> list[Work]:
        """Shapes in their order; on a GPU also those that DeepGEMM's figures are of, with even groups."""
        # JAX gets no buffers to add to, so an accumulator would be copied first
        accumulate = self.framework == "torch" and not self.quick
        cases = chosen_cases(
            self.chosen_kinds, gemms_of(self.ops), fast=self.fast and not self.quick, accumulate=accumulate
        )
        sizes = self.chosen_sizes[:1] if self.quick and not self.shape else self.chosen_sizes
        work = [Work(shape, sizes, tuple(cases)) for shape in self.chosen_shapes]
        if self.chosen_device == "cuda" and not self.quick and not self.shape:
            some = cases if self.kinds else [case for case in cases if case.kind in _DEEPGEMM_KINDS]
            models = {shape.key for shape in MODELS}
            work += [Work(shape, ("even",), tuple(some)) for shape in DEEPGEMM if shape.key not in models]
        return [one for one in work if one.cases]


def chosen_cases(kinds: tuple[str, ...], gemms: tuple[Gemm, ...], *, fast: bool, accumulate: bool) -> list[GemmCase]:
    """The rows of a table: every kind, its fast variant after it, and the accumulating wgrads last of each."""
    cases = []
    for kind in kinds:
        for quick in (False, True) if fast and kind in FAST else (False,):
            cases += [GemmCase(kind, gemm, quick) for gemm in gemms]
            if accumulate and "wgrad" in gemms and kind in ACCUMULATED and not quick:
                cases.append(GemmCase(kind, "wgrad", accumulate=True))
    return cases
