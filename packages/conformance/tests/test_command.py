"""`octavo conform`: exit codes that mean something, JSON and nothing else on request, a light import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., "subprocess.CompletedProcess[str]"]

_RUN = "from octavo_registry.cli import main; main()"


@pytest.fixture
def command(plugins_environment: dict[str, str]) -> Command:
    """`command(*arguments)`: the command on the plugins of this folder."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _RUN, "conform", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=plugins_environment,
        )

    return run


def test_importing_the_command_is_light() -> None:
    """`octavo --help` must stay quick: typer and the standard library."""
    code = (
        "import sys, octavo_conformance.command\n"
        "print(sorted({'numpy', 'pytest', 'hypothesis', 'octavo', 'octavo_registry'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_pass_and_json(command: Command, tmp_path: Path) -> None:
    """Exit code 0, the JSON report alone on stdout, and the same in a file."""
    file = tmp_path / "r.json"
    run = command("numpy-honest", "--json", "--report", str(file), "-k", "test_all_groups_empty and row", "--seed", "3")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report == json.loads(file.read_text())
    assert report["seed"] == 3
    assert report["counts"] == {"passed": 3, "failed": 0, "skipped": 0, "gap": 0, "undeclared": 0}


def test_failure_is_1(command: Command) -> None:
    """A declared capability that fails."""
    run = command("numpy-empty-dw", "-k", "test_all_groups_empty and row.wgrad")
    assert run.returncode == 1
    assert "1 failed" in run.stdout


def test_quiet_names_each_failure_beside_its_message(command: Command) -> None:
    """Of several failures it is known which test says what."""
    run = command("numpy-empty-dw", "--quiet", "-k", "test_all_groups_empty and (row.wgrad or block.wgrad)")
    assert run.returncode == 1
    failures = run.stdout.partition("FAILURES")[2].partition("octavo conformance")[0].splitlines()
    told = [line for line in failures if line.startswith("E ") or "test_all_groups_empty[" in line]
    assert len(told) == 4
    for name, message in zip(told[::2], told[1::2], strict=True):
        assert "wgrad" in name
        assert "wgrad of groups without rows is not zero" in message


def test_bad_input_is_2(command: Command) -> None:
    """An unknown backend, a report of no known kind, and an expression that matches nothing."""
    unknown = command("no-such", "--json")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    error = json.loads(unknown.stderr)["error"]  # as every command says it, so that a script reads one format
    assert (error["type"], error["exit_code"]) == ("BadInput", 2)
    assert error["message"].startswith("backend 'no-such' is not installed; installed backends: ")
    report = command("numpy-honest", "--report", "r.txt")
    assert report.returncode == 2
    assert report.stderr.startswith("octavo: --report "), report.stderr  # the option as it was given
    nothing = command("numpy-honest", "-k", "no_such_test")
    assert nothing.returncode == 2
    assert nothing.stderr == "octavo: -k is 'no_such_test', which no test matches; leave it out to run all\n"


def test_a_report_that_cannot_be_written_is_one_line(command: Command) -> None:
    """Before any test runs, and not a traceback after all of them."""
    run = command("numpy-honest", "--report", "/proc/r.json")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("octavo: --report /proc/r.json: nothing can be written in /proc")
    assert run.stderr.count("\n") == 1
