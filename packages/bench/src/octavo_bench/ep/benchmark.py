"""`octavo bench ep`: its options, rows, tables and verdict. It imports neither numpy nor a framework."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from octavo_bench.errors import InputError, RunError
from octavo_bench.harness.benchmark import Benchmark, rows_of
from octavo_bench.harness.checks import check_counts, names_of, one_of
from octavo_bench.harness.goals import Goal
from octavo_bench.harness.options import BackendOption, ExpertShapes, SomeKinds, TokenChoices
from octavo_bench.harness.results import Results, goal_dicts, layer_dict
from octavo_bench.harness.run import Run
from octavo_bench.harness.shapes import EXPERTS, Shape
from octavo_bench.harness.table import BACKENDS, GOAL, MS, Column, Table, number, share
from octavo_bench.harness.timing import Times

_WORK = {"jax": "octavo_bench.ep.jax:ep_rows", "torch": "octavo_bench.ep.torch:ep_rows"}
_WAYS = {"jax": ("gather", "ragged"), "torch": ("rows", "sums")}
_ROUTES = ("collective", "peer")

PAYLOADS = ("row", "block", "mxfp8")
"""Kinds whose tokens may travel as codes."""


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
        one_of("--framework", self.framework, tuple(_WAYS))
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


@dataclass(frozen=True)
class EpRow:
    """Forward and backward of a MoE block of the experts (G, K, F, M).

    devices   how many share the experts
    way       how the exchange returns rows, or the name of a peer library; "" on one device
    route     what carries the exchange in torch, "collective" or "peer"; "" on one device and in JAX
    payload   whether tokens and gradients travel to the experts as codes
    received  bytes that one device receives from the others in a step; of whole buffers where the way is ragged; None
              for peer libraries
    nvlink    the bytes that it received by the GPUs' counters, those that are not rows included; None without counters
    dropped   choices for which the buffers had no row
    alone     times of the same layer on one device, measured in turns with this one; None where it was not
    """

    section: ClassVar[str] = "rows"

    shape: Shape
    kind: str
    devices: int
    way: str
    payload: bool
    backends: tuple[str, ...]
    received: int | None
    nvlink: int | None
    dropped: int
    times: Times
    route: str = ""
    alone: Times | None = None

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """Scaling: of this row, and as a goal of the faster way alone."""
        blocks = [row for row in rows if isinstance(row, EpRow) and (row.shape, row.kind) == (self.shape, self.kind)]
        alone = self.alone or next((row.times for row in blocks if row.devices == 1), None)
        if alone is None or self.devices == 1:
            return {}
        reached = {"over one": alone.ms / self.times.ms}
        alike = [row for row in blocks if row.backends and (row.devices, row.payload) == (self.devices, self.payload)]
        if self.backends and self.times.ms <= min(row.times.ms for row in alike):
            reached["one device"] = reached["over one"]
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return layer_dict(
            self,
            goals,
            devices=self.devices,
            way=self.way,
            route=self.route,
            payload=self.payload,
            received_bytes=self.received,
            nvlink_bytes=self.nvlink,
            dropped=self.dropped,
            alone_us=None if self.alone is None else self.alone.as_dict(),
        )


@dataclass(frozen=True)
class Gathered:
    """The gathers of a kernel [G, K, 2F] that FSDP shards, forward and backward.

    bytes    what one device holds after them, by the compiled program
    nvlink   bytes that it received from others, by the GPUs' counters; None without counters
    """

    section: ClassVar[str] = "gathered"
    backends: ClassVar[tuple[str, ...]] = ()

    shape: Shape
    kind: str
    devices: int
    bytes: int
    nvlink: int | None = None

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """Its bytes over those of the same kernel in bf16."""
        plain = next(
            (row for row in rows if isinstance(row, Gathered) and (row.shape, row.kind) == (self.shape, "bf16")), None
        )
        if plain is None:
            return {}
        reached = {"bf16's bytes": self.bytes / plain.bytes}
        if self.nvlink is not None and plain.nvlink:
            reached["bf16's bytes over NVLink"] = self.nvlink / plain.nvlink
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "devices": self.devices,
            "shape": list(self.shape.key),
            "gathered_bytes": self.bytes,
            "nvlink_bytes": self.nvlink,
            "goals": goal_dicts(goals),
        }


class Ep(Benchmark[EpOptions]):
    """A MoE block on one device and with its experts over several.

    Forward and backward, in JAX or PyTorch. Scaling is strong, with the same experts and tokens on all devices
    together, or with --weak there are as many tokens on each device. Tokens are sent as they are and, if the recipe
    scales row by row, as its codes. Also reported is what a device receives, and what it gathers of a kernel that
    FSDP shards; both are counted in the compiled programs and, on GPUs, by their NVLink counters, so nothing else
    may run on these GPUs. In PyTorch every device is a process of its own, static buffers hold what is exchanged
    and their bytes are counted. On GPUs a CUDA graph holds each step there, and a step over several GPUs is timed in
    turns with that of one. In bf16 so are torch's own all_to_all_single and LigerCute, where it is installed, each
    eagerly. Parameters and gradients are bf16, and weights are quantized in every step. The exit code
    is 1 if a row fails, drops choices, or nothing ran. A missed goal is reported and is not a failure.
    """

    name = EpOptions.command
    options = EpOptions
    work = _WORK["jax"]
    sections: ClassVar[tuple[str, ...]] = ("rows", "gathered")

    def rows(self, run: Run[EpOptions]) -> Iterable[Any]:
        """As every benchmark's, in the framework that was asked for."""
        return rows_of(_WORK[run.options.framework], run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """Blocks by shape, then what FSDP gathers."""

        def title(row: EpRow) -> str:
            name = {"jax": "JAX", "torch": "torch"}[results.parts["framework"]]
            what = f"{results.parts['choices']} choices per token: forward + backward in {name}"
            what += ", as many tokens on each device" if results.parts.get("weak") else ""
            return f"{row.shape.name} MoE block G,K,F,M {row.shape.key}, {what}"

        def kernel(row: Gathered) -> str:
            sides = [row.shape.groups, row.shape.k, 2 * row.shape.n]
            return f"{row.shape.name} kernel {sides} cut by FSDP: gathered per step"

        yield Table(EpRow, title, _BLOCKS)
        yield Table(Gathered, kernel, _GATHERED)

    def conclude(self, results: Results) -> None:
        """RunError also where choices were dropped."""
        super().conclude(results)
        for row in (row.row for row in results.of(EpRow) if row.row.dropped):
            slack = results.parts["slack"]
            raise RunError(f"{row.dropped} choices found no row with {row.way}; give more --slack than {slack}")


def _megabytes(count: int | None) -> str:
    return number(None if count is None else count / 1e6, ".1f")


_BLOCKS: tuple[Column[EpRow], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("devices", lambda row: str(row.row.devices)),
    Column("way", lambda row: row.row.way or "-"),
    Column("route", lambda row: row.row.route or "-", "torch's all_to_all_single, or memory of all ranks"),
    Column("tokens as", lambda row: "codes" if row.row.payload else "bf16"),
    MS,
    Column(
        "over one", lambda row: number(row.measures.get("over one"), ".2f"), "how many times as fast as on one device"
    ),
    Column(
        "MB received",
        lambda row: _megabytes(row.row.received),
        "by one device per step, in the compiled program; of its buffers in torch",
    ),
    Column("by NVLink", lambda row: _megabytes(row.row.nvlink), "the same, by the GPUs' counters"),
    Column("dropped", lambda row: str(row.row.dropped), "choices that found no row"),
    GOAL,
    BACKENDS,
)
_GATHERED: tuple[Column[Gathered], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("devices", lambda row: str(row.row.devices)),
    Column("MB gathered", lambda row: _megabytes(row.row.bytes)),
    share("of bf16's", "bf16's bytes"),
    Column("by NVLink", lambda row: _megabytes(row.row.nvlink)),
    share("of bf16's", "bf16's bytes over NVLink"),
    GOAL,
)
