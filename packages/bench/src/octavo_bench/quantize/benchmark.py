"""`octavo bench quantize`: its options, tables and verdict. It imports neither numpy nor a framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import typer

from octavo.errors import one_of
from octavo.formats import DType
from octavo_bench.errors import InputError, RunError
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.checks import check_counts, check_installed
from octavo_bench.harness.options import Options, Repeats, device_of_all
from octavo_bench.harness.results import Judged, Results
from octavo_bench.harness.table import SPREAD, Column, Table, number, spread
from octavo_bench.harness.timing import Times
from octavo_bench.quantize.case import Case, chosen_cases
from octavo_bench.quantize.row import DIFFERS, EQUAL, QuantizeRow

_DTYPES: dict[str, DType] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHAPES = {
    ("cuda", False): "32768x7168,65536x4096",
    ("cuda", True): "32768x7168",
    ("cpu", False): "2048x2048",
    ("cpu", True): "1024x1024",
}
_NEEDED = ("torch", "octavo_torch", "octavo_native", "octavo_torch_native")


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(Options):
    """See the command's help."""

    command: ClassVar[str] = "quantize"
    default_repeats: ClassVar[Repeats] = MappingProxyType(
        {("cuda", False): 50, ("cuda", True): 15, ("cpu", False): 5, ("cpu", True): 3}
    )

    shapes: Annotated[
        str | None,
        typer.Option(
            "--shape",
            "--shapes",
            metavar="ROWSxCOLUMNS",
            help="Shapes of the input, with commas.",
            show_default=_SHAPES["cuda", False],
        ),
    ] = None
    groups: Annotated[int, typer.Option(help="Groups of (nearly) equal size.")] = 8
    ragged_groups: Annotated[
        int, typer.Option(help="Groups of the second table: Dirichlet(0.5) sizes, one of them empty.")
    ] = 128
    recipes: Annotated[
        str,
        typer.Option(help="delayed, current, row, block, mxfp8, nvfp4, or presets, with commas.", show_default="all"),
    ] = ""
    dtype: Annotated[str, typer.Option(help="Of the input: bf16, fp16 or fp32.")] = "bf16"
    quick: Annotated[bool, typer.Option("--quick", help="One shape, few repeats, nothing compiled: seconds.")] = False

    def check(self) -> None:
        """See `Options`; what is missing too."""
        chosen_cases(self.recipes)
        check_counts(groups=self.groups, ragged_groups=self.ragged_groups)
        if self.shapes is not None:
            parse_shapes(self.shapes)
        one_of("--dtype", self.dtype, tuple(_DTYPES), InputError)
        super().check()
        check_installed(self.command, _NEEDED, "octavo-torch-native")

    @cached_property
    def chosen_device(self) -> str:
        """The device; a GPU where octavo-native has kernels for it."""
        import octavo_native

        if octavo_native.HAS_CUDA:
            return device_of_all(self.command, self.chosen_frameworks, self.device)
        if self.device == "cuda" and device_of_all(self.command, self.chosen_frameworks, "cuda"):
            raise InputError("--device is cuda and octavo-native was built without CUDA kernels; use --device cpu")
        return "cpu"

    @property
    def chosen_dtype(self) -> DType:
        """Of the input."""
        return _DTYPES[self.dtype]

    @property
    def rows_per_problem(self) -> int:
        """One for each case."""
        return len(self.cases)

    @property
    def cases(self) -> tuple[Case, ...]:
        """What is timed."""
        return chosen_cases(self.recipes)

    @property
    def chosen_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns."""
        return parse_shapes(self.shapes or _SHAPES[self.chosen_device, self.quick])


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """(rows, columns) pairs of `32768x7168,65536x4096`; `InputError` says which part does not fit."""
    shapes = []
    for part in (part.strip() for part in text.split(",")):
        sides = part.split("x")
        if len(sides) != 2 or not all(side.isdecimal() for side in sides):
            raise InputError(f"--shape holds {part!r}; give ROWSxCOLUMNS with commas between, such as 32768x7168")
        rows, cols = int(sides[0]), int(sides[1])
        if not (1 <= rows <= 1 << 30 and 16 <= cols <= 1 << 20 and cols % 16 == 0):
            raise InputError(f"--shape holds {part!r}; rows are 1 to 2^30, columns a multiple of 16 up to 2^20")
        shapes.append((rows, cols))
    repeated = next((shape for shape in shapes if shapes.count(shape) > 1), None)
    if repeated is not None:
        raise InputError(f"--shape names {repeated[0]}x{repeated[1]} twice; give each shape once")
    return tuple(shapes)


class Quantize(Benchmark[QuantizeOptions]):
    """Quantizers of every recipe against a copy of the same bytes.

    They are also compared with `torch.compile` of the same recipe. Every case is compared with the definition, bit
    for bit, before it is timed. The exit code is 1 if bits differ or a case fails. A missed goal is reported and is
    not a failure.
    """

    name = QuantizeOptions.command
    options = QuantizeOptions
    work = "octavo_bench.quantize.work:quantize_rows"

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """A table per shape and grouping; weights stand in the table of the rows that they go with."""
        copies = results.parts["copy_tb_per_s"]

        def title(row: QuantizeRow) -> str:
            *height, cols = row.sides
            rows = height[0] if len(height) == 1 else height[0] * height[1]
            rate = copies.get(f"{rows}x{cols}, {row.grouping}")
            copy = "" if rate is None else f", a copy moves {rate:.2f} TB/s"
            return f"{rows}x{cols}, {row.grouping} groups, {results.facts.dtype}{copy}"

        yield Table(QuantizeRow, title, _CUDA if results.facts.device == "cuda" else _CPU)

    def match(self, rows: Sequence[QuantizeRow]) -> Mapping[str, int]:
        """Of bits with the definition's."""
        return {
            "equal": sum(row.match == EQUAL for row in rows),
            "differs": sum(row.match.startswith(DIFFERS) for row in rows),
        }

    def closing(self, results: Results) -> Iterator[str]:
        """What the rows note, each once."""
        for note, count in Counter(note for row in results.rows for note in row.row.notes).items():
            yield f"note, {count} rows: {note}"

    def conclude(self, results: Results) -> None:
        """RunError where bits differ or a case failed."""
        differing = results.match["differs"]
        if differing or results.failures:
            raise RunError(
                f"{differing} rows differ from the definition and {len(results.failures)} failed; "
                "the match column and the lines with FAILED say which"
            )


def _per_element(row: QuantizeRow) -> str:
    return "-" if row.case == "plan" else f"{row.bytes_total / row.elements:.3f}"


def _median(times: Times | None, form: str) -> str:
    return number(None if times is None else times.median, form)


def _goal(row: Judged[QuantizeRow]) -> str:
    return next((f"{goal.needed:.2f} {'pass' if goal.passed else 'MISS'}" for goal in row.goals), "-")


_CASE: Column[QuantizeRow] = Column("case", lambda row: row.row.case)
_ELEMENT: Column[QuantizeRow] = Column("B/element", lambda row: _per_element(row.row))
_GOAL: Column[QuantizeRow] = Column("goal", _goal)
_MATCH: Column[QuantizeRow] = Column(
    "match", lambda row: row.row.match.upper() if row.row.match.startswith(DIFFERS) else row.row.match
)
_CUDA: tuple[Column[QuantizeRow], ...] = (
    _CASE,
    _ELEMENT,
    Column("us (10-90 %)", lambda row: spread(row.row.times, milliseconds=False), f"{SPREAD}, in microseconds"),
    Column("TB/s", lambda row: f"{row.row.tb_per_s:.2f}"),
    Column("predicted", lambda row: number(row.row.predicted_us, ".1f"), "us for its bytes at the copy's rate"),
    Column("ratio", lambda row: number(row.row.ratio), "predicted over measured time"),
    _GOAL,
    Column("host us", lambda row: _median(row.row.host, ".1f")),
    Column("compile", lambda row: number(row.row.peer_ratio, ".2f", "x"), "how many times as fast as torch.compile's"),
    Column(
        "codes", lambda row: number(row.row.peer_codes_equal, ".4%"), "of torch.compile's, equal to the definition's"
    ),
    _MATCH,
)
_CPU: tuple[Column[QuantizeRow], ...] = (
    _CASE,
    _ELEMENT,
    Column("us, 1 core (10-90 %)", lambda row: spread(row.row.times, milliseconds=False), f"{SPREAD}, in microseconds"),
    Column("GB/s in", lambda row: f"{row.row.input_gb_per_s:.2f}"),
    Column("GB/s moved", lambda row: f"{1e3 * row.row.tb_per_s:.2f}"),
    _GOAL,
    Column("us, all", lambda row: number(row.row.all_cores_us, ".0f")),
    Column("host us", lambda row: _median(row.row.host, ".0f")),
    _MATCH,
)
