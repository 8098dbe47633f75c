"""What `octavo bench tiles` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from octavo.recipe_base import Gemm
from octavo_bench.harness.checks import check_installed
from octavo_bench.harness.options import Ops, Repeats, SizesOption, SomeKinds, gemms_of
from octavo_bench.harness.shapes import DEEPGEMM, MODELS, SMALL, Shape


@dataclass(frozen=True, kw_only=True)
class TilesOptions(SizesOption):
    """See the command's help."""

    command: ClassVar[str] = "tiles"
    small: ClassVar[tuple[Shape, ...]] = SMALL
    default_repeats: ClassVar[Repeats] = MappingProxyType(
        {("cuda", False): 10, ("cuda", True): 6, ("cpu", False): 2, ("cpu", True): 1}
    )

    ops: Ops = ""
    kinds: SomeKinds = "bf16,current,block"

    def check(self) -> None:
        """See `Options`; what is missing too."""
        super().check()
        gemms_of(self.ops)
        needed = ("torch", "octavo_torch", "octavo_native", "octavo_torch_native")
        check_installed(self.command, needed, "torch-native")

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """In the order of a training step."""
        return gemms_of(self.ops)

    @property
    def published(self) -> tuple[Shape, ...]:
        """One expert-parallel rank of each model, and the shapes that DeepGEMM's figures are of."""
        return MODELS[1:3] if self.quick else tuple({one.key: one for one in (*MODELS, *DEEPGEMM)}.values())
