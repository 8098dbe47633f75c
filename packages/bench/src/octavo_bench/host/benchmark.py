"""`octavo bench host`: its options, rows and tables. It imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.goals import Goal
from octavo_bench.harness.options import BackendOption, Names, SizesOption
from octavo_bench.harness.results import Results, goal_dicts, rounded
from octavo_bench.harness.shapes import MODELS, SMALL, Shape
from octavo_bench.harness.table import BACKENDS, GOAL, SPREAD, Column, Table, number, share, spread
from octavo_bench.harness.timing import Times

_EXPERTS = {("cuda", False): (8, 32, 128, 512), ("cuda", True): (8, 512), ("cpu", False): (4, 32), ("cpu", True): (4,)}
_ROWS = {"cuda": 4096, "cpu": 256}

SIDE = 256
"""K and N of the layers whose host time is taken: their kernels are short."""

_BLOCKS = {"cuda": ("Qwen3-30B", 128, 2048, 768, 8), "cpu": ("small", 4, 32, 48, 2)}
_TOKENS = {("cuda", False): (512, 2048, 8192), ("cuda", True): (512,), ("cpu", False): (16, 64), ("cpu", True): (16,)}


@dataclass(frozen=True, kw_only=True)
class HostOptions(SizesOption, BackendOption):
    """See the command's help."""

    command: ClassVar[str] = "host"
    small: ClassVar[tuple[Shape, ...]] = SMALL
    published: ClassVar[tuple[Shape, ...]] = MODELS
    published_quick: ClassVar[tuple[Shape, ...]] = MODELS[1:3]

    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, fewer experts, few repeats: seconds.")] = False

    @property
    def host_shapes(self) -> tuple[Shape, ...]:
        """Layers of several numbers of experts, whose host time is taken."""
        rows = _ROWS[self.chosen_device]
        return tuple(Shape("host", groups, SIDE, SIDE, rows) for groups in _EXPERTS[self.chosen_device, self.quick])

    @property
    def block_shapes(self) -> tuple[tuple[Shape, int], ...]:
        """Experts of MoE layers whose host time is taken, (G, K, F, M) of M = T k rows, and k; few tokens first."""
        name, groups, k, f, choices = _BLOCKS[self.chosen_device]
        tokens = _TOKENS[self.chosen_device, self.quick]
        return tuple((Shape(name, groups, k, f, count * choices), choices) for count in tokens)

    @property
    def backend_in_graphs(self) -> Names:
        """Without a wish the registry chooses, which has plans for graphs and others."""
        return None if self.backend is None else self.chosen_backend


@dataclass(frozen=True)
class HostRow:
    """Host time of forward and backward of one layer; backends are empty for torch's own."""

    section: ClassVar[str] = "host"

    kind: str
    shape: Shape
    backends: tuple[str, ...]
    times: Times

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """Microseconds, of ours."""
        return {"us of the host": self.times.median} if self.backends else {}

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "groups": self.shape.groups,
            "backends": list(self.backends),
            "host_us": self.times.as_dict(),
            "goals": goal_dicts(goals),
        }


@dataclass(frozen=True)
class BlockRow:
    """Host time of forward and backward of a MoE layer from given choices; backends are empty for torch's own.

    one_thread   the same where autograd runs the backward in the caller's thread
    replay       of a CUDA graph of the same step: what the device needs; None without a GPU
    """

    section: ClassVar[str] = "blocks"

    kind: str
    shape: Shape
    choices: int
    backends: tuple[str, ...]
    times: Times
    one_thread: Times
    replay: Times | None

    @property
    def tokens(self) -> int:
        """T, each with `choices` rows."""
        return self.shape.rows // self.choices

    @property
    def over_device(self) -> float | None:
        """The host's time over the device's: above 1 the device waits for Python."""
        return None if self.replay is None else self.times.median / self.replay.median

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """No goal is set for it: a graph has none of this time."""
        return {}

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "choices": self.choices,
            "tokens": self.tokens,
            "backends": list(self.backends),
            "host_us": self.times.as_dict(),
            "host_one_thread_us": self.one_thread.as_dict(),
            "replay_us": None if self.replay is None else self.replay.as_dict(),
            "goals": goal_dicts(goals),
        }


@dataclass(frozen=True, slots=True)
class Graph:
    """A replay in turn with eager calls, others right after one another, and the sum of a replay's kernels in us."""

    replay: Times
    alone: Times
    kernels_us: float


@dataclass(frozen=True)
class ApiRow:
    """Forward and backward of one layer: through `grouped_linear`, as kernels alone, and as a graph (None: no GPU)."""

    section: ClassVar[str] = "layers"

    shape: Shape
    sizes: str
    kind: str
    backends: tuple[str, ...]
    api: Times
    raw: Times
    graph: Graph | None

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """The API over its kernels, a replay over the sum of its own."""
        reached = {"kernels": self.api.median / self.raw.median}
        if self.graph is not None:
            reached["a replay's kernels"] = self.graph.alone.median / self.graph.kernels_us
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        graph = self.graph
        return {
            "kind": self.kind,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "backends": list(self.backends),
            "api_us": self.api.as_dict(),
            "kernels_alone_us": self.raw.as_dict(),
            "replay_us": None if graph is None else graph.replay.as_dict(),
            "replay_alone_us": None if graph is None else graph.alone.as_dict(),
            "kernels_of_replay_us": rounded(None if graph is None else graph.kernels_us, 3),
            "goals": goal_dicts(goals),
        }


class Host(Benchmark[HostOptions]):
    """What calling a layer in PyTorch costs beyond its kernels.

    The time of Python, forward and backward, is taken at several numbers of experts, and of a MoE layer at several
    numbers of tokens, with a replay of its CUDA graph, which says whether the GPU waits. A whole step through
    `grouped_linear` is compared with its quantizers and GEMMs called one after the other, and a replay of its CUDA
    graph with the sum of its kernels as torch's profiler sees them. The exit code is 1 if a row fails or nothing
    ran. A missed goal is reported and is not a failure.
    """

    name = HostOptions.command
    options = HostOptions
    work = "octavo_bench.host.work:host_rows"
    sections: ClassVar[tuple[str, ...]] = ("host", "blocks", "layers")

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """The host's tables, and one per shape and vector of sizes."""
        host = f"Python's part of forward + backward of a GroupedLinear [G, {SIDE}, {SIDE}]"
        yield Table(HostRow, lambda row: host, _HOST)
        yield Table(
            BlockRow, lambda row: f"Python's part of forward + backward of a MoE layer, {row.shape.label}", _BLOCK
        )
        yield Table(
            ApiRow, lambda row: f"{row.shape.label}, {row.sizes}: forward + backward of a layer and its kernels", _API
        )


_HOST: tuple[Column[HostRow], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("experts", lambda row: str(row.row.shape.groups)),
    Column("host us (10-90 %)", lambda row: spread(row.row.times, milliseconds=False), f"{SPREAD} of the host's time"),
    GOAL,
    BACKENDS,
)
_BLOCK: tuple[Column[BlockRow], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("tokens", lambda row: str(row.row.tokens)),
    Column("host us (10-90 %)", lambda row: spread(row.row.times, milliseconds=False), f"{SPREAD} of the host's time"),
    Column(
        "in one thread us",
        lambda row: number(row.row.one_thread.median, ".1f"),
        "with torch.autograd.set_multithreading_enabled(False)",
    ),
    Column("replay us", lambda row: number(None if row.row.replay is None else row.row.replay.median, ".1f")),
    Column("host / replay", lambda row: number(row.row.over_device, ".2f"), "above 1 the GPU waits for Python"),
    BACKENDS,
)
_API: tuple[Column[ApiRow], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("API ms (10-90 %)", lambda row: spread(row.row.api), "a step through grouped_linear"),
    Column("kernels ms (10-90 %)", lambda row: spread(row.row.raw), "its quantizers and GEMMs called one by one"),
    share("API / kernels", "kernels", "the public API's time over its kernels'"),
    Column("replay ms", lambda row: number(None if row.row.graph is None else row.row.graph.alone.ms)),
    Column("its kernels ms", lambda row: number(None if row.row.graph is None else row.row.graph.kernels_us / 1e3)),
    share("replay / them", "a replay's kernels", "a CUDA graph's replay over the sum of its kernels"),
    GOAL,
)
