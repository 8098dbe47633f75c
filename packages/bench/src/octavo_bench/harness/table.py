"""The tables on the terminal, and the JSON file."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar

from octavo_bench.errors import InputError
from octavo_bench.harness.options import recorded_command
from octavo_bench.harness.results import Facts, Failure
from octavo_bench.harness.timing import Times
from octavo_bench.quantize.row import Results, Row
from octavo_registry.cli.output import print_json, print_line, print_table

_CUDA = ("case", "B/element", "us", "TB/s", "predicted", "ratio", "goal", "host us", "compile", "codes", "match")
_CPU = ("case", "B/element", "us, 1 core", "GB/s in", "GB/s moved", "goal", "us, all", "host us", "match")


class Written(Protocol):
    """What has a JSON form."""

    def as_dict(self) -> dict[str, Any]:
        """The content of the file."""


C = TypeVar("C")
W = TypeVar("W", bound=Written)


def perform(
    bench: Callable[[C, str, Callable[[str], None]], W],
    choices: C,
    output: Path | None,
    as_json: bool,
    show: Callable[[W], None],
) -> W:
    """`bench(choices, command line, say)`, delivered; where the terminal gets JSON, progress goes nowhere."""
    results = bench(choices, recorded_command(sys.argv[1:]), (lambda _: None) if as_json else print_line)
    deliver(results, output, as_json, show)
    return results


def deliver(results: W, output: Path | None, as_json: bool, show: Callable[[W], None]) -> None:
    """To the file that was asked for, and to the terminal: as JSON, or as `show` prints them."""
    if output is not None:
        write_json(results, output)
    if as_json:
        print_json(results.as_dict())
    else:
        show(results)


def print_failures(failures: Sequence[Failure]) -> None:
    """A line each."""
    for failure in failures:
        print_line(f"FAILED: {failure.case}, {failure.shape}, {failure.grouping}: {failure.error}")


def print_end(run: Facts, judged: Sequence[bool], what: str, none: str) -> None:
    """The last line: how many of `judged` are `what`, or `none` where nothing is judged; seed and seconds."""
    reached = f"{what}: {sum(judged)} of {len(judged)}" if judged else none
    print_line(f"{reached}; seed {run.seed}; {run.seconds:.0f} s.")


def print_results(results: Results) -> None:
    """A table a shape and grouping, then the notes and what did not work."""
    cuda = results.device == "cuda"
    for (shape, grouping), rows in groupby(results.rows, key=_table_of):
        rate = results.copy_tb_per_s.get(f"{shape}, {grouping}")
        copy = "" if rate is None else f", a copy moves {rate:.2f} TB/s"
        table = [_cuda_cells(row) if cuda else _cpu_cells(row) for row in rows]
        print_table(f"{shape}, {grouping} groups, {results.dtype}{copy}", _CUDA if cuda else _CPU, table)
        print_line()
    for note, count in Counter(note for row in results.rows for note in row.notes).items():
        print_line(f"note, {count} rows: {note}")
    for failure in results.failures:
        print_line(f"FAILED: {failure.case}, {failure.grouping}: {failure.error}")
    judged = [row.passed for row in results.rows if row.passed is not None]
    print_line(f"Goals reached: {sum(judged)} of {len(judged)}; seed {results.seed}; {results.seconds:.0f} s.")


def check_output(path: Path | None) -> None:
    """`InputError` before the work where the file could not be written after it."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"--output {path}: this is a folder; name a file such as {path / 'quantize.json'}")
    if not path.parent.is_dir():
        raise InputError(f"--output {path}: there is no folder {path.parent}; make it or name another")


def write_json(results: Written, path: Path) -> None:
    """The results beside their place, then moved there in one step."""
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(json.dumps(results.as_dict(), indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def _table_of(row: Row) -> tuple[str, str]:
    # weights stand in the table of the rows that they go with
    rows, cols = (row.shape[0] * row.shape[1], row.shape[2]) if len(row.shape) == 3 else row.shape
    return f"{rows}x{cols}", row.grouping


def _cuda_cells(row: Row) -> list[str]:
    return [
        row.case,
        _per_element(row),
        f"{row.times.median:.1f}",
        f"{row.tb_per_s:.2f}",
        _number(row.predicted_us, ".1f"),
        _number(row.ratio, ".3f"),
        _goal(row),
        _number(_median(row.host), ".1f"),
        _number(row.peer_ratio, ".2f", "x"),
        _number(row.peer_codes_equal, ".4%"),
        _match(row),
    ]


def _cpu_cells(row: Row) -> list[str]:
    return [
        row.case,
        _per_element(row),
        f"{row.times.median:.0f}",
        f"{row.input_gb_per_s:.2f}",
        f"{1e3 * row.tb_per_s:.2f}",
        _goal(row),
        _number(row.all_cores_us, ".0f"),
        _number(_median(row.host), ".0f"),
        _match(row),
    ]


def _per_element(row: Row) -> str:
    return "-" if row.case == "plan" else f"{row.bytes_total / row.elements:.3f}"


def _median(times: Times | None) -> float | None:
    return None if times is None else times.median


def _number(value: float | None, form: str, suffix: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{suffix}"


def _goal(row: Row) -> str:
    if row.goal is None:
        return "-"
    return f"{row.goal:.2f} {'pass' if row.passed else 'MISS'}"


def _match(row: Row) -> str:
    return row.match.upper() if row.match.startswith("differs") else row.match
