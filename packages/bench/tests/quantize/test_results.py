"""Ratios, verdicts, tables and the JSON form, from rows made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo_bench.harness.goals import Goal, Goals
from octavo_bench.harness.perform import results_of
from octavo_bench.harness.results import Facts, Failure, Results, write_json
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import print_results
from octavo_bench.harness.timing import Times
from octavo_bench.quantize.benchmark import Quantize
from octavo_bench.quantize.row import EQUAL, QuantizeRow

Judge = Callable[..., list[Goal]]


def _row(case: str = "block row", us: float = 100.0, **others: object) -> QuantizeRow:
    facts: dict[str, object] = {
        "sides": (1000, 100),
        "grouping": "8 even",
        "bytes_read": 200_000,
        "bytes_written": 103_000,
        "input_bytes": 200_000,
        "copy_tb_per_s": 0.00303 * 1.1,
        "times": Times(us, us - 1, us + 2),
        "match": EQUAL,
    }
    return QuantizeRow(case=case, **(facts | others))  # type: ignore[arg-type]


def _results(
    *rows: QuantizeRow, goals: Goals | None, device: str = "cuda", failures: tuple[Failure, ...] = ()
) -> Results:
    benchmark = Quantize()
    run: Run[Any] = Run(benchmark.options(), lambda _: None, failures=list(failures))
    run.parts["copy_tb_per_s"] = {"1000x100, 8 even": 0.003333} if device == "cuda" else {}
    run.parts["groupings"] = {"1000x100, 8 even": [125] * 8}
    facts = Facts(
        command="octavo bench quantize",
        device=device,
        framework="torch",
        dtype="bfloat16",
        seed=5,
        repeats=50,
        machine={"gpu": "NVIDIA H200"},
        seconds=1.5,
        versions={"torch": "2.11.0", "octavo-native": None},
    )
    return results_of(benchmark, run, rows, facts, goals)


def _print(results: Results) -> None:
    print_results(results, Quantize().tables(results), Quantize().closing(results))


def test_a_ratio_is_predicted_over_measured_time(judged: Judge) -> None:
    """303 000 bytes at 0.003333 TB/s are 90.9 us; measured 100 us, so 0.909, below 0.95."""
    row = _row()
    assert row.predicted_us == pytest.approx(303_000 / 3333, rel=1e-12)
    assert row.ratio == pytest.approx(1 / 1.1, rel=1e-12)
    assert [goal.passed for goal in judged("quantize", row, [row])] == [False]
    assert [goal.passed for goal in judged("quantize", _row(us=90.0), [])] == [True]
    assert judged("quantize", _row("nvfp4 row+col"), []) == []
    assert row.tb_per_s == pytest.approx(0.00303, rel=1e-12)


def test_on_a_cpu_the_goal_is_input_gigabytes_per_second(judged: Judge) -> None:
    """200 000 bytes in 100 us are 2 GB/s."""
    row = _row(copy_tb_per_s=None)
    assert row.ratio is None
    assert row.input_gb_per_s == pytest.approx(2.0, rel=1e-12)
    assert [goal.passed for goal in judged("quantize", row, [], device="cpu")] == [True]
    slow = _row(copy_tb_per_s=None, us=201.0)
    assert [goal.passed for goal in judged("quantize", slow, [], device="cpu")] == [False]


def test_the_plan_is_timed_and_not_compared_with_the_copy_rate(judged: Judge) -> None:
    """It is bound by latency."""
    assert _row("plan").ratio is None
    assert judged("quantize", _row("plan"), []) == []


def test_the_table_says_everything(capsys: pytest.CaptureFixture[str], h200: Goals) -> None:
    """Verdicts, the peer, what differs, notes once, failures by name."""
    rows = (
        _row(peer=Times(150.0, 149.0, 151.0), peer_codes_equal=1.0, host=Times(12.3, 12.0, 13.0)),
        _row("mxfp8 row", us=90.0, notes=("no bound plan: absent",)),
        _row("per-row row", match="differs: 3 of 9 bytes of rowwise codes", notes=("no bound plan: absent",)),
        _row("block weights row+col", sides=(8, 125, 100)),
    )
    failure = Failure("plan", (1000, 100), "8 even", "ValueError: no")
    _print(_results(*rows, goals=h200, failures=(failure,)))
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "1000x100, 8 even groups, bfloat16, a copy moves 0.00 TB/s"
    assert sum("8 even groups" in line for line in lines) == 1
    first = next(line for line in lines if line.lstrip().startswith("block row"))
    for cell in ("3.030", "100.0", "90.9", "0.909", "0.95 MISS", "12.3", "1.50x", "100.0000%", "equal"):
        assert cell in first
    assert "0.95 pass" in out
    assert "DIFFERS: 3 OF 9" in out
    assert "note, 2 rows: no bound plan: absent" in out
    assert "FAILED: plan, (1000, 100), 8 even: ValueError: no" in out
    assert "Goals reached: 1 of 2; seed 5; 2 s." in out


def test_without_a_goals_file_nothing_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """A user's machine is held to no figure of ours; the last line says how to give goals."""
    results = _results(_row(), goals=None)
    assert results.document()["goals"] == {"reached": 0, "of": 0}
    assert results.document()["rows"][0]["goal"] is None
    _print(results)
    assert "No goals: --goals FILE gives some; seed 5" in capsys.readouterr().out


def test_the_cpu_table(capsys: pytest.CaptureFixture[str], h200: Goals) -> None:
    """One core and all of them."""
    _print(_results(_row(copy_tb_per_s=None, all_cores_us=51.0), goals=h200, device="cpu"))
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.lstrip().startswith("block row"))
    for cell in ("100", "2.00", "3.03", "1.00 pass", "51", "equal"):
        assert cell in row


def test_the_json_holds_every_row(tmp_path: Path, h200: Goals) -> None:
    """Bytes, times, verdicts and what they are made from; no draft is left."""
    target = tmp_path / "quantize.json"
    failure = Failure("nvfp4 row", (1000, 100), "8 even", "ValueError: no")
    write_json(_results(_row(), _row("plan", match="-"), goals=h200, failures=(failure,)), target)
    assert list(tmp_path.iterdir()) == [target]
    content = json.loads(target.read_text())
    assert content["schema_version"] == 1
    assert content["goals"] == {"reached": 0, "of": 1}
    assert content["match"] == {"equal": 1, "differs": 0}
    assert content["machine"] == {"gpu": "NVIDIA H200"}
    assert content["groupings"]["1000x100, 8 even"] == [125] * 8
    assert content["failures"][0]["error"] == "ValueError: no"
    row = content["rows"][0]
    assert (row["case"], row["shape"], row["bytes_per_element"]) == ("block row", [1000, 100], 3.03)
    assert row["us"] == {"median": 100.0, "low": 99.0, "high": 102.0}
    assert (row["ratio"], row["goal"], row["passed"]) == (0.9091, 0.95, False)
    assert content["rows"][1]["ratio"] is None


def test_times_of_a_cpu_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Fast kernels for CPUs, too, are no GPU's; with one call each, a ratio of 88 is chance."""
    results = _results(_row(copy_tb_per_s=None, all_cores_us=51.0), goals=None, device="cpu")
    _print(results)
    assert "These are times of a CPU and say nothing about a GPU." in capsys.readouterr().out
    _print(replace(results, facts=replace(results.facts, repeats=1)))
    assert "Each row is a single call, so ratios mean little" in capsys.readouterr().out
    _print(_results(_row(), goals=None))
    assert "of a CPU" not in capsys.readouterr().out
