"""A benchmark as a command: options, rows, goals, tables and file, in one form for all of them."""

from __future__ import annotations

import inspect
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.checks import check_output
from octavo_bench.harness.goals import Goals, Place, read_goals
from octavo_bench.harness.machine import machine, versions
from octavo_bench.harness.options import Options
from octavo_bench.harness.results import Facts, Judged, Results, Row, write_json
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import print_results
from octavo_registry.cli.output import print_json, print_line

_FILES = ("--output", "--goals")


def command_of(benchmark: Benchmark[Any]) -> Callable[..., None]:
    """The function that Typer makes a command of: its parameters are the fields of the benchmark's options."""

    def command(**values: Any) -> None:
        perform(benchmark, benchmark.options(**values))

    hints = get_type_hints(benchmark.options, include_extras=True)
    shared = {field.name for field in fields(Options)}
    ordered = sorted(
        fields(benchmark.options), key=lambda field: field.name in shared
    )  # its own come first in the help
    command.__name__ = benchmark.name
    command.__doc__ = inspect.getdoc(benchmark)
    command.__annotations__ = {field.name: hints[field.name] for field in ordered} | {"return": None}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in ordered
        ]
    )
    return command


def perform(benchmark: Benchmark[Any], options: Options) -> None:
    """Check the options, measure, judge, deliver; InputError and RunError as the command's exit codes have it."""
    options.check()
    check_output(options.output)
    goals = read_goals(options.goals)
    device, framework = options.chosen_device, options.chosen_frameworks[0]
    start = time.perf_counter()
    run: Run[Any] = Run(options, (lambda _: None) if options.as_json else print_line)
    rows = list(benchmark.rows(run))
    facts = Facts(
        command=recorded_command(sys.argv[1:]),
        device=device,
        framework=framework,
        dtype=options.chosen_dtype,
        seed=options.chosen_seed,
        repeats=options.chosen_repeats,
        machine=machine(device, framework),
        seconds=time.perf_counter() - start,
        versions=versions(),
    )
    results = results_of(benchmark, run, rows, facts, goals)
    if options.output is not None:
        write_json(results, options.output)
    if options.as_json:
        print_json(results.document())
    else:
        print_results(results, benchmark.tables(results), benchmark.closing(results))
    benchmark.conclude(results)


def results_of(
    benchmark: Benchmark[Any], run: Run[Any], rows: Sequence[Row], facts: Facts, goals: Goals | None
) -> Results:
    """The rows of a run with their measures, held to goals."""
    place = Place(facts.device, str(facts.machine.get("gpu", "")))
    judged = []
    for row in rows:
        measures = row.measures(rows)
        reached = () if goals is None else goals.judge(benchmark.name, row_fields(row), measures, place)
        judged.append(Judged(row, measures, reached))
    measured = [name for one in judged for name in one.measures]
    unread = () if goals is None else goals.unread(benchmark.name, measured, place)
    quoted = None if goals is None else goals.recorded.get(benchmark.name)
    return Results(
        facts=facts,
        rows=judged,
        sections=benchmark.sections,
        match=benchmark.match(rows),
        parts=run.parts,
        notes=list(dict.fromkeys([*run.notes, *unread])),
        failures=run.failures,
        recorded={} if quoted is None else quoted.figures,
        recorded_as=("", "") if goals is None or quoted is None else (f"{quoted.title}, {goals.label}", quoted.unit),
        judged=goals is not None,
    )


def row_fields(row: Row) -> dict[str, Any]:
    """What goals choose rows by: the row's fields, its shape as "G,K,N,M", its groups and rows per group."""
    fields = row.as_dict()
    if row.shape is not None:
        fields |= {"shape": row.shape.text, "groups": row.shape.groups}
        fields["rows_per_group"] = row.shape.rows / row.shape.groups
    return fields


def recorded_command(arguments: Sequence[str]) -> str:
    """The command line as a result file quotes it: files without the folders of one machine.

    arguments   after the program's name
    """
    quoted: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if quoted and quoted[-1] in _FILES:
            quoted.append(Path(argument).name)
        elif equals and option in _FILES:
            quoted.append(f"{option}={Path(value).name}")
        else:
            quoted.append(argument)
    return shlex.join(["octavo", *quoted])
