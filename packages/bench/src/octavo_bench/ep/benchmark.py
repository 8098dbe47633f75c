"""`octavo bench ep`: its tables and verdict. It imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from octavo_bench.ep.options import EpOptions
from octavo_bench.ep.rows import EpRow, Gathered
from octavo_bench.errors import RunError
from octavo_bench.harness.benchmark import Benchmark, rows_of
from octavo_bench.harness.results import Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import BACKENDS, GOAL, MS, Column, Table, number, share

_WORK = {"jax": "octavo_bench.ep.jax:ep_rows", "torch": "octavo_bench.ep.torch:ep_rows"}


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
