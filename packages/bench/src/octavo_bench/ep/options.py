"""What `octavo bench ep` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from octavo_bench.errors import InputError
from octavo_bench.harness.checks import names_of
from octavo_bench.harness.options import BackendOption, ExpertShapes, SomeKinds, TokenChoices
from octavo_bench.harness.shapes import EXPERTS, Shape

_WAYS = ("gather", "ragged")


@dataclass(frozen=True, kw_only=True)
class EpOptions(BackendOption):
    """See the command's help. Shapes are experts' (G, K, F, M).

    small   128 features per shard on four devices, a block of BlockScaling's
    """

    command: ClassVar[str] = "ep"
    framework_names: ClassVar[tuple[str, ...]] = ("jax",)
    small: ClassVar[tuple[Shape, ...]] = (Shape("small", 4, 512, 128, 256),)

    devices: Annotated[
        int | None, typer.Option(help="Devices that share the experts.", show_default="all that JAX sees")
    ] = None
    shape: ExpertShapes = None
    choices: TokenChoices = None
    kinds: SomeKinds = "bf16,block"
    ways: Annotated[
        str, typer.Option(help="gather, ragged, or both with a comma.", show_default="both (cpu gather)")
    ] = ""
    slack: Annotated[float, typer.Option(help="Rows of a device's experts, of an even share.")] = 1.25
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats.")] = False

    def check(self) -> None:
        """See `Options`."""
        super().check()
        names_of("--ways", self.ways, _WAYS)
        if self.slack < 1:
            raise InputError(f"--slack is {self.slack}; a device needs at least an even share of the rows, 1")

    @property
    def chosen_choices(self) -> int:
        """Experts per token."""
        return self.choices or (2 if self.chosen_device == "cpu" else 8)

    @property
    def chosen_ways(self) -> tuple[str, ...]:
        """Of the exchange."""
        return names_of("--ways", self.ways, _WAYS) if self.ways or self.chosen_device == "cuda" else _WAYS[:1]

    @property
    def published(self) -> tuple[Shape, ...]:
        """DeepSeek-V3's rank."""
        return EXPERTS[1:2]

    def devices_of(self, seen: int) -> int:
        """How many of `seen` devices share the experts; `InputError` where they or the shapes do not fit."""
        devices, choices = self.devices or seen, self.chosen_choices
        if not 1 <= devices <= seen:
            raise InputError(
                f"--devices is {devices} and JAX sees {seen} here; on a CPU "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={devices} makes that many"
            )
        for shape in self.chosen_shapes:
            if shape.groups % devices or shape.rows % (choices * devices) or choices > shape.groups:
                raise InputError(
                    f"{shape.label} with {choices} choices per token is not cut evenly among {devices} devices; give G "
                    "and M / choices that are multiples of them, and no more choices than G"
                )
        return devices
