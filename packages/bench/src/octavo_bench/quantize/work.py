"""The work of `octavo bench quantize`: every case on every shape and grouping, checked first and then timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from octavo_bench.harness.results import Failure, in_one_line
from octavo_bench.harness.run import Run
from octavo_bench.harness.shapes import Grouping, even, ragged
from octavo_bench.quantize.benchmark import QuantizeOptions
from octavo_bench.quantize.case import Case, traffic
from octavo_bench.quantize.match import check_match
from octavo_bench.quantize.measure import copy_rate, measured_on_cpu, measured_on_cuda
from octavo_bench.quantize.problem import TORCH_DTYPES, Setting
from octavo_bench.quantize.row import QuantizeRow


def quantize_rows(run: Run[QuantizeOptions]) -> Iterator[QuantizeRow]:
    """A table per shape and grouping; weights go with even groups."""
    options = run.options
    copies: dict[str, float] = {}
    groupings: dict[str, list[int]] = {}
    run.parts |= {"copy_tb_per_s": copies, "groupings": groupings}
    tables = list(_tables(options))
    each = options.rows_per_problem
    run.begin(each * len(tables), each * sum(height * cols for (height, cols), _ in tables))
    matches = _matches(run)  # all at once: between timings they would let the GPU's clocks fall
    for (height, cols), grouping in tables:
        name = f"{height}x{cols}, {grouping.label}"
        run.say(f"{name} ...")
        groupings[name] = list(grouping.sizes)
        setting = Setting(
            height, cols, grouping.sizes, options.chosen_dtype, options.chosen_device, seed=options.chosen_seed
        )
        rate = copy_rate(setting, options.chosen_repeats) if setting.cuda else None
        if rate is not None:
            copies[name] = round(rate, 4)
        for case, match in matches.items():
            if case.kind == "weights" and grouping.name != "even":
                continue
            where = _stacked(setting) if case.kind == "weights" else setting
            sides = (len(where.sizes), where.matrix_rows, cols) if where.matrix_rows else (height, cols)
            try:
                row = _row(case, where, grouping, options)
            except Exception as error:  # the other rows are worth having, and the command fails at its end
                run.failures.append(Failure(case.label, sides, grouping.label, in_one_line(error)))
            else:
                run.advance(height * cols)
                yield QuantizeRow(sides=sides, copy_tb_per_s=rate, match=match, **row)


def _matches(run: Run[QuantizeOptions]) -> dict[Case, str]:
    """The match column; a case whose check fails is not timed."""
    options = run.options
    matches: dict[Case, str] = {}
    for case in options.cases:
        try:
            matches[case] = check_match(case, options.chosen_dtype, options.chosen_device, options.chosen_seed)
        except Exception as error:  # as above
            run.failures.append(Failure(case.label, (), "match", in_one_line(error)))
    return matches


def _tables(options: QuantizeOptions) -> Iterator[tuple[tuple[int, int], Grouping]]:
    for rows, cols in options.chosen_shapes:
        yield (rows, cols), even(rows, options.groups)
        yield (rows, cols), ragged(rows, options.ragged_groups, options.chosen_seed)


def _stacked(setting: Setting) -> Setting:
    """The same rows as matrices: [G, N, K] with N the rows of a group."""
    each = max(1, setting.rows // len(setting.sizes))
    sizes = (each,) * len(setting.sizes)
    return Setting(sum(sizes), setting.cols, sizes, setting.dtype, setting.device, each, seed=setting.seed)


def _row(case: Case, setting: Setting, grouping: Grouping, options: QuantizeOptions) -> dict[str, Any]:
    """Fields of a row: its bytes and times."""
    moved = traffic(case, setting.sizes, setting.cols, TORCH_DTYPES[options.chosen_dtype].itemsize)
    repeats = options.chosen_repeats
    if setting.cuda:
        measured = measured_on_cuda(case, setting, grouping, repeats, peers=not options.quick)
    else:
        measured = measured_on_cpu(case, setting, repeats)
    return {
        "case": case.label,
        "grouping": grouping.label,
        "bytes_read": moved.read,
        "bytes_written": moved.written,
        "input_bytes": moved.read // case.passes,
        **measured,
    }
