"""What `octavo bench moe` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from octavo_bench.errors import InputError
from octavo_bench.harness.options import BackendOption, ExpertShapes, TokenChoices
from octavo_bench.harness.shapes import EXPERTS, SMALL_BLOCK, Shape


@dataclass(frozen=True, kw_only=True)
class MoeOptions(BackendOption):
    """See the command's help. Shapes are experts' (G, K, F, M)."""

    command: ClassVar[str] = "moe"
    small: ClassVar[tuple[Shape, ...]] = SMALL_BLOCK

    shape: ExpertShapes = None
    choices: TokenChoices = None
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also on torch's own grouped GEMM in bf16.")] = True
    quick: Annotated[bool, typer.Option("--quick", help="DeepSeek-V3's alone, few repeats: seconds.")] = False

    @property
    def chosen_choices(self) -> int:
        """Experts per token; `InputError` where a shape cannot be dealt out evenly."""
        choices = self.choices
        if choices is None:
            choices = 2 if self.chosen_device == "cpu" else 8
        for shape in self.chosen_shapes:
            if not 1 <= choices <= shape.groups or shape.rows % choices or shape.rows % shape.groups:
                raise InputError(
                    f"--choices is {choices} and the experts are {shape.key}; give 1 to {shape.groups}, and M a "
                    "multiple of it and of G"
                )
        return choices

    @property
    def published(self) -> tuple[Shape, ...]:
        """One expert-parallel rank of each model."""
        return EXPERTS[1:2] if self.quick else EXPERTS
