"""`octavo conform`: the suite in a process of its own, for people who do not think in pytest options."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

PASSED, FAILED, BAD_INPUT = 0, 1, 2
_BY_PYTEST = {0: PASSED, 1: FAILED, 4: BAD_INPUT, 5: BAD_INPUT}
"""pytest's exit codes; 4 is a usage error, 5 no test selected. The others are faults of the run itself."""


def conform(
    backend: Annotated[str, typer.Argument(help="The backend to put through the suite.")],
    report: Annotated[
        list[Path] | None, typer.Option(help="Write a report: .json, or .xml for JUnit. Repeatable.")
    ] = None,
    gaps: Annotated[Path | None, typer.Option(help="TOML file of known gaps.")] = None,
    full: Annotated[bool, typer.Option("--full/--quick", help="Every combination, or a quick selection.")] = False,
    expression: Annotated[str | None, typer.Option("-k", help="Only tests whose ids match, as in pytest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every input; random by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON report and nothing else.")] = False,
) -> None:
    """Put a backend through the conformance suite.

    Exits with 0 when everything declared works, 1 when something fails, 2 when the input is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-conform-") as folder:
        printed = Path(folder) / "report.json"
        reports = [*(report or []), *([printed] if as_json else [])]
        run = subprocess.run(
            _arguments(backend, reports, gaps, full, expression, seed),
            check=False,
            stdout=subprocess.PIPE if as_json else None,
            stderr=subprocess.PIPE if as_json else None,
            text=True,
        )
        code = _BY_PYTEST.get(run.returncode, FAILED)
        if as_json and printed.exists():
            typer.echo(printed.read_text(encoding="utf-8"), nl=False)
        elif as_json:
            typer.echo((run.stdout + run.stderr).strip(), err=True)
            code = code or FAILED
        if run.returncode == 5:
            typer.echo(f"no test matches -k {expression!r}; leave -k out to run all", err=True)
    raise typer.Exit(code)


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
