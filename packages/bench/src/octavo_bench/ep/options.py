"""The options of `octavo bench ep`, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from octavo.errors import one_of
from octavo_bench.errors import InputError
from octavo_bench.harness.checks import check_counts, names_of
from octavo_bench.harness.options import BackendOption, ExpertShapes, SomeKinds, TokenChoices
from octavo_bench.harness.shapes import EXPERTS, Shape

_WAYS = {"jax": ("gather", "ragged"), "torch": ("rows", "sums")}
_ROUTES = ("collective", "peer")


@dataclass(frozen=True, kw_only=True)
class EpOptions(BackendOption):
    """See the command's help. Shapes are experts' (G, K, F, M).

    small   128 features per shard on four devices, a block of BlockScaling's
    """

    command: ClassVar[str] = "ep"
    framework_names: ClassVar[tuple[str, ...]] = ("jax",)
    small: ClassVar[tuple[Shape, ...]] = (Shape("small", 4, 512, 128, 256),)
    published: ClassVar[tuple[Shape, ...]] = EXPERTS[1:2]

    framework: Annotated[str, typer.Option(help="jax or torch.")] = "jax"
    devices: Annotated[
        int | None,
        typer.Option(
            help="Devices that share the experts; processes in torch.",
            show_default="all that the framework sees; torch on a cpu 2",
        ),
    ] = None
    shape: ExpertShapes = None
    choices: TokenChoices = None
    kinds: SomeKinds = "bf16,block"
    ways: Annotated[
        str,
        typer.Option(
            help="gather, ragged; in torch rows, sums; or both with a comma.", show_default="both (jax on a cpu gather)"
        ),
    ] = ""
    routes: Annotated[
        str,
        typer.Option(
            help="collective, peer (memory of all ranks), or both with a comma; torch.",
            show_default="both on cuda, collective on a cpu",
        ),
    ] = ""
    weak: Annotated[
        bool,
        typer.Option("--weak", help="M counts rows of each device, so each has as many tokens as one alone; torch."),
    ] = False
    eager: Annotated[bool, typer.Option("--eager", help="Run the step without a CUDA graph; torch on cuda.")] = False
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also torch's own all_to_all_single, and LigerCute; torch.")
    ] = True
    slack: Annotated[float, typer.Option(help="Room for rows of a device's experts, in even shares.")] = 1.25
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats.")] = False

    def check(self) -> None:
        """See `Options`."""
        super().check()
        one_of("--framework", self.framework, tuple(_WAYS), InputError)
        names_of("--ways", self.ways, _WAYS[self.framework])
        names_of("--routes", self.routes, _ROUTES)
        of_torch = {"--routes": self.routes, "--weak": self.weak, "--eager": self.eager}
        for name, given in of_torch.items():
            if given and self.framework != "torch":
                raise InputError(f"{name} is torch's; give --framework torch, or leave it out")
        check_counts(devices=self.devices, choices=self.choices)
        if not 1 <= self.slack < math.inf:
            raise InputError(f"--slack is {self.slack}; a device needs at least an even share of the rows, 1")

    @property
    def chosen_frameworks(self) -> tuple[str, ...]:
        """The one of `--framework`."""
        return (self.framework,)

    @property
    def chosen_choices(self) -> int:
        """Experts per token."""
        return self.choices or (2 if self.chosen_device == "cpu" else 8)

    @property
    def chosen_ways(self) -> tuple[str, ...]:
        """Of the exchange."""
        ways = _WAYS[self.framework]
        all_of_them = self.ways or self.chosen_device == "cuda" or self.framework == "torch"
        return names_of("--ways", self.ways, ways) if all_of_them else ways[:1]

    @property
    def chosen_routes(self) -> tuple[str, ...]:
        """By which rows travel in torch."""
        return names_of("--routes", self.routes, _ROUTES if self.chosen_device == "cuda" else _ROUTES[:1])

    def devices_of(self, seen: int) -> int:
        """How many of `seen` devices share the experts; `InputError` where they or the shapes do not fit."""
        processes = self.framework == "torch" and self.chosen_device == "cpu"
        devices, choices = self.devices or (2 if processes else seen), self.chosen_choices
        if self.framework == "torch" and not 1 <= devices <= seen:
            raise InputError(f"--devices is {devices} and torch has at most {seen} here; give 1 to {seen}")
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
