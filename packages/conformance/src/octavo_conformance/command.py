"""`octavo conform`: the suite in a process of its own, for people who do not think in pytest options."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

PASSED, FAILED, BAD_INPUT = 0, 1, 2
_USAGE_ERROR, _NO_TEST = 4, 5
_BY_USAGE_ERROR = "ERROR: "
_BY_PYTEST = {0: PASSED, 1: FAILED, _USAGE_ERROR: BAD_INPUT}
"""pytest's exit codes of a run in which a test was selected. The others are faults of the run itself."""


def conform(
    backend: Annotated[str, typer.Argument(help="The backend to put through the suite.")],
    report: Annotated[
        list[Path] | None, typer.Option(help="Write a report: .json, or .xml for JUnit. Repeatable.")
    ] = None,
    gaps: Annotated[Path | None, typer.Option(help="TOML file of known gaps.")] = None,
    skips: Annotated[bool, typer.Option("--skips", help="List why tests were skipped.")] = False,
    full: Annotated[bool, typer.Option("--full/--quick", help="Every combination, or a quick selection.")] = False,
    expression: Annotated[str | None, typer.Option("-k", help="Only tests whose ids match, as in pytest.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", "--octavo-seed", help="Seed of every input; random by default.")
    ] = None,
    exit_first: Annotated[bool, typer.Option("--exitfirst", "-x", help="Stop at the first failure.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for each test.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The table and what failed, nothing else.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON report and nothing else.")] = False,
) -> None:
    """Put a backend through the conformance suite.

    Exits with 0 when everything declared has run and works, 1 when something fails or never ran, 2 when the input is
    wrong.
    """
    from octavo_registry.cli.errors import BadInput  # here: `octavo --help` imports this module
    from octavo_registry.cli.files import check_writable

    for path in report or ():
        check_writable("--report", path, f"report{path.suffix or '.json'}")
    with tempfile.TemporaryDirectory(prefix="octavo-conform-") as folder:
        printed = Path(folder) / "report.json"
        reports = [*(report or []), *([printed] if as_json else [])]
        run = subprocess.run(
            [*_arguments(backend, reports, gaps, full, expression, seed), *_shown(skips, exit_first, verbose, quiet)],
            check=False,
            stdout=subprocess.PIPE if as_json else None,
            stderr=subprocess.PIPE,
            text=True,
        )
        code = _BY_PYTEST.get(run.returncode, FAILED)
        if run.returncode == _NO_TEST:
            raise BadInput(f"-k is {expression!r}, which no test matches; leave it out to run all")
        wrong = _wrong_input(run.returncode, run.stderr)
        if wrong is not None:
            raise BadInput(wrong)
        if as_json and printed.exists():
            typer.echo(printed.read_text(encoding="utf-8"), nl=False)
        elif as_json:
            typer.echo(run.stdout.strip(), err=True, nl=bool(run.stdout.strip()))
            code = code or FAILED
        typer.echo(run.stderr, err=True, nl=False)
    raise typer.Exit(code)


def _wrong_input(returncode: int, text: str) -> str | None:
    """What pytest has written of wrong input, with the command's options for its own; None where it is no sentence."""
    sentence = text.strip()
    if returncode != _USAGE_ERROR or not sentence.startswith(_BY_USAGE_ERROR) or "\n" in sentence:
        return None
    return re.sub("^--octavo-", "--", sentence.removeprefix(_BY_USAGE_ERROR))


def _shown(skips: bool, exit_first: bool, verbose: bool, quiet: bool) -> list[str]:
    """pytest's arguments for what is printed and when to stop."""
    asked = {
        "--octavo-skips": skips,
        "-x": exit_first,
        "-vv": verbose,  # once for pytest's, once against the command's own -q
        "-q": quiet,
        "--tb=short": quiet,
    }
    return [argument for argument, wanted in asked.items() if wanted]


def _arguments(
    backend: str, reports: list[Path], gaps: Path | None, full: bool, expression: str | None, seed: int | None
) -> list[str]:
    """The suite's own settings file, so that those of the folder the user stands in play no part."""
    settings = Path(__file__).parent / "suite" / "pytest.ini"
    arguments = [sys.executable, "-m", "pytest", "-c", str(settings), "-q", "--pyargs", "octavo_conformance.suite"]
    arguments += ["--octavo-backend", backend]
    for path in reports:
        arguments += ["--octavo-report", str(path.absolute())]
    if gaps is not None:
        arguments += ["--octavo-gaps", str(gaps.absolute())]
    if full:
        arguments.append("--octavo-full")
    if expression is not None:
        arguments += ["-k", expression]
    if seed is not None:
        arguments += ["--octavo-seed", str(seed)]
    return arguments
