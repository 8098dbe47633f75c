"""The work of `octavo bench quantize`: every case on every shape and grouping, checked first and then timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from octavo.formats import DType
from octavo_bench.harness.results import Failure, facts_of, told
from octavo_bench.harness.traffic import traffic
from octavo_bench.quantize.case import Case, Grouping, even, ragged
from octavo_bench.quantize.match import check_match
from octavo_bench.quantize.measure import copy_rate, measured_on_cpu, measured_on_cuda
from octavo_bench.quantize.problem import TORCH_DTYPES, Setting
from octavo_bench.quantize.row import Results, Row

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command line asked for, checked. peers: compile the torch versions and time them, too."""

    device: str
    shapes: tuple[tuple[int, int], ...]
    groups: int
    ragged_groups: int
    cases: tuple[Case, ...]
    dtype: DType
    repeats: int
    seed: int
    peers: bool


def bench_quantize(choices: Choices, command: str, say: Callable[[str], None]) -> Results:
    """Run everything; `say` hears where it is. A case that fails is kept as a `Failure`, and the others go on."""
    start = time.perf_counter()
    rows: list[Row] = []
    failures: list[Failure] = []
    copies: dict[str, float] = {}
    groupings: dict[str, list[int]] = {}
    matches = _matches(choices, failures)  # all at once: between timings they would let the GPU's clocks fall
    for (height, cols), grouping in _tables(choices):
        name = f"{height}x{cols}, {grouping.label}"
        say(f"{name} ...")
        groupings[name] = list(grouping.sizes)
        setting = Setting(height, cols, grouping.sizes, choices.dtype, choices.device, seed=choices.seed)
        if setting.cuda:
            copies[name] = copy_rate(setting, choices.repeats)
        for case in choices.cases:
            if case not in matches or (case.kind == "weights" and grouping.name != "even"):
                continue
            where = _stacked(setting) if case.kind == "weights" else setting
            shape: Shape = (len(where.sizes), where.matrix_rows, cols) if where.matrix_rows else (height, cols)
            try:
                rows.append(_row(case, where, grouping, shape, choices, copies.get(name), matches[case]))
            except Exception as error:  # the other rows are worth having, and the command fails at its end
                failures.append(Failure(case.label, shape, grouping.label, told(error)))
    return Results(
        **facts_of(choices, command, start, dtype=choices.dtype),
        copy_tb_per_s=copies,
        groupings=groupings,
        rows=rows,
        failures=failures,
    )


def _matches(choices: Choices, failures: list[Failure]) -> dict[Case, str]:
    """The match column; a case whose check fails is not timed."""
    matches: dict[Case, str] = {}
    for case in choices.cases:
        try:
            matches[case] = check_match(case, choices.dtype, choices.device, choices.seed)
        except Exception as error:  # as above
            failures.append(Failure(case.label, (), "match", told(error)))
    return matches


def _tables(choices: Choices) -> Iterator[tuple[tuple[int, int], Grouping]]:
    for rows, cols in choices.shapes:
        yield (rows, cols), even(rows, choices.groups)
        yield (rows, cols), ragged(rows, choices.ragged_groups, choices.seed)


def _stacked(setting: Setting) -> Setting:
    """The same rows as matrices: [G, N, K] with N the rows of a group."""
    each = max(1, setting.rows // len(setting.sizes))
    sizes = (each,) * len(setting.sizes)
    return Setting(sum(sizes), setting.cols, sizes, setting.dtype, setting.device, each, seed=setting.seed)


def _row(
    case: Case, setting: Setting, grouping: Grouping, shape: Shape, choices: Choices, rate: float | None, match: str
) -> Row:
    element = TORCH_DTYPES[choices.dtype].itemsize
    moved = traffic(case, setting.sizes, setting.cols, element)
    if setting.cuda:
        measured = measured_on_cuda(case, setting, grouping, choices.repeats, peers=choices.peers)
    else:
        measured = measured_on_cpu(case, setting, choices.repeats)
    return Row(
        case=case.label,
        shape=shape,
        grouping=grouping.label,
        bytes_read=moved.read,
        bytes_written=moved.written,
        input_bytes=moved.read // case.passes,
        copy_tb_per_s=rate,
        match=match,
        **measured,
    )
