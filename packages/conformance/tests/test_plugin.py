"""The pytest plugin: silent until asked, clear about wrong input, the same rows with and without xdist."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from octavo_conformance.reports.gaps import Gap, GapsError, read_gaps


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    """Every pytest run of the machine loads it: no numpy, no hypothesis, no octavo."""
    code = (
        "import sys, octavo_conformance.plugin\n"
        "heavy = {'numpy', 'hypothesis', 'octavo', 'octavo_registry', 'octavo_numerics', 'pydantic', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_suite_without_a_backend_says_what_is_missing(suite: Any) -> None:
    """A usage error, not a page of fixture errors."""
    run = suite()
    assert run.code == 4
    assert "needs --octavo-backend NAME" in run.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--octavo-backend", "no-such"), "backend 'no-such' is not installed; installed backends: "),
        (("--octavo-backend", "numpy-honest", "--octavo-report", "r.txt"), "a report ends in .json, or in .xml"),
        (("--octavo-backend", "numpy-honest", "--octavo-report", "none/r.json"), "there is no folder"),
        (("--octavo-backend", "numpy-honest", "--octavo-gaps", "none.toml"), "none.toml: cannot be read"),
        (("--octavo-backend", "numpy-honest", "--octavo-seed", "-5"), "--octavo-seed -5: a seed is 0 or more"),
    ],
)
def test_bad_input_is_one_line(suite: Any, arguments: tuple[str, ...], text: str) -> None:
    """A wrong name or file ends the run before any test, with cause and fix."""
    run = suite(*arguments)
    assert run.code == 4
    assert text in run.output
    assert not run.report


def test_reports_and_seed(suite: Any, tmp_path: Path) -> None:
    """JSON and JUnit hold the same rows; the seed is in the header and gives the same maxima again; two workers of
    xdist report what one process does."""
    junit = tmp_path / "r.xml"
    chosen = ("--octavo-backend", "numpy-honest", "-k", "test_product_is_within_its_bound and (row or mxfp8)")
    first = suite(*chosen, "--octavo-report", str(junit), "--octavo-seed", "11", "-v")
    assert first.code == 0
    assert "--octavo-seed 11" in first.output
    rows = {row["id"]: row for row in first.report["rows"]}
    assert len(rows) == 6
    assert first.report["seed"] == 11
    assert first.report["counts"]["passed"] == 6
    assert 0 < first.report["maxima"]["numpy-honest"]["bound.fprop.T1"] <= 1
    assert {"octavo-numerics", "numpy", "python"} <= set(first.report["versions"])
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    assert {case.get("name") for case in cases} == set(rows)
    again = suite(*chosen, "--octavo-seed", "11", "-n", "2")
    assert {row["id"]: row for row in again.report["rows"]} == rows


def test_xdist_is_optional(suite: Any) -> None:
    """A third party installs the suite alone: its hooks for xdist must be unknown to pytest without harm."""
    run = suite("--octavo-backend", "numpy-honest", "-k", "test_the_card_is_plain_data", "-p", "no:xdist")
    assert run.code == 0
    assert [row["outcome"] for row in run.report["rows"]] == ["passed"]


def test_a_failure_names_the_seed_and_the_element(suite: Any) -> None:
    """What failed, where, both values, and how to see it again."""
    run = suite("--octavo-backend", "numpy-wrong-column-scale", "-k", "test_bits[ and block.e4m3.pow2", "--tb=short")
    assert run.code == 1
    (row,) = run.report["rows"]
    assert row["outcome"] == "failed"
    assert "columnwise_scale of block e4m3" in row["reason"]
    assert "first at [" in row["reason"]
    assert f"rerun with --octavo-seed {run.report['seed']}" in run.output


def test_gaps_are_strict(suite: Any, tmp_path: Path) -> None:
    """A gap that is none fails; `never` skips; one that meets no test is listed."""
    file = tmp_path / "gaps.toml"
    file.write_text(
        '[[gap]]\ntest = "quantizer::test_bits_of_stacked_weights[*row*"\nkind = "notyet"\nreason = "works, though"\n'
        '[[gap]]\ncapability = { op = "quantize", recipe = "current" }\nkind = "never"\nreason = "not planned"\n'
        '[[gap]]\ntest = "no::such"\nkind = "notimpl"\nreason = "nothing"\n'
    )
    run = suite(
        *("--octavo-backend", "numpy-honest", "--octavo-gaps", str(file)),
        *("-k", "test_bits_of_stacked_weights and (row or current or mxfp8)"),
    )
    assert run.code == 1
    outcomes = {row["id"].partition("cpu-")[2]: (row["outcome"], row["reason"]) for row in run.report["rows"]}
    assert outcomes["row.e4m3.pow2.stacked-bfloat16]"][0] == "failed"
    assert "works, though" in outcomes["row.e4m3.pow2.stacked-bfloat16]"][1]
    assert outcomes["current.e4m3.stacked-bfloat16]"] == ("skipped", "never: not planned")
    assert outcomes["mxfp8.e4m3.stacked-bfloat16]"][0] == "passed"
    assert run.report["unused_gaps"] == ["notimpl: nothing"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[gap]]\n", "kind is None; write one of notimpl, notyet, never"),
        ('[[gap]]\nkind = "never"\ntest = "x"\n', "reason is None; say why in a sentence"),
        ('[[gap]]\nkind = "never"\nreason = "r"\n', "names neither a test nor a capability"),
        ('[[gap]]\nkind = "never"\nreason = "r"\ncapability = { ops = "x" }\n', "its keys are"),
        ('[[gap]]\nkind = "never"\nreason = "r"\ntests = "x"\n', "unknown keys ['tests']"),
        ('[[gap]]\nkind = "never"\nreason = "r"\ntest = 8\n', "test is 8; write text in quotes"),
        (
            '[[gap]]\nkind = "never"\nreason = "r"\ntest = "x"\nbackend = 1\n',
            "backend is 1; write text in quotes",
        ),
        ("gaps = 1\n", "write one [[gap]] table per gap"),
        ("[[gap\n", "not TOML"),
    ],
)
def test_a_wrong_gaps_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    """The message names the file, the entry and the fix."""
    file = tmp_path / "gaps.toml"
    file.write_text(text)
    with pytest.raises(GapsError) as error:
        read_gaps(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_a_gap_matches_by_all_that_it_names() -> None:
    """Test id with wildcards, capability, and backend must all hold; brackets are letters."""
    gap = Gap("never", "r", test="gemm::*[a-*]", capability=(("op", "fprop"),), backend="a")
    assert gap.matches("gemm::test_x[a-1]", {"backend": "a", "op": "fprop"})
    assert not gap.matches("gemm::test_x[b-1]", {"backend": "a", "op": "fprop"})
    assert not gap.matches("gemm::test_x[a-1]", {"backend": "b", "op": "fprop"})
    assert not gap.matches("gemm::test_x[a-1]", {"backend": "a", "op": "dgrad"})


def test_the_suite_is_silent_in_other_runs(tmp_path: Path) -> None:
    """A run without the options has no header, no section and no fixture of ours."""
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 passed" in run.stdout
    assert "octavo:" not in run.stdout
    assert "octavo conformance" not in run.stdout
