"""The `octavo` command as its own process: exit codes, pipes, colours, start-up time."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo_registry import __version__

START = "from octavo_registry.cli import main; main()"
SAME_LIBRARIES = """
import pluggy, pydantic, typer

class Model(pydantic.BaseModel):
    field: int = 0

app = typer.Typer(rich_markup_mode=None)

@app.command()
def command() -> None: ...

app()
"""
"""A command of the libraries that `octavo` is made of, with next to nothing of its own."""
HELP_RATIO = 1.5
"""Processor time of `octavo --help` in that of `SAME_LIBRARIES --help`; measured: 1.1 to 1.3, pydantic 2.10 to 2.14."""

MODULES = """
import sys
from octavo_registry.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
HEAVY = {"torch", "jax", "flax", "numpy", "ml_dtypes", "rich", "pytest", "hypothesis"}
LIGHT = {"octavo", "octavo_registry"}
"""Of this workspace, what `octavo --help` may import: it has names and lines of help of every other package's commands
from metadata."""
COMMANDS = {f"octavo_registry.cli.{name}" for name in ("doctor", "recipes", "selftest", "why")}


def octavo(
    *arguments: str, path: Path | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One run of the command."""
    clean = {k: v for k, v in os.environ.items() if k not in ("OCTAVO_BACKEND", "NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    if path is not None:
        clean["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", START, *arguments],
        capture_output=True,
        text=True,
        env={**clean, **(environment or {})},
        timeout=60,
        check=False,
    )


def test_exit_codes_reach_the_shell() -> None:
    """0 fine, 2 bad input; stdout and stderr are apart."""
    fine = octavo("recipes", "show", "mxfp8", "--json")
    assert (fine.returncode, fine.stderr) == (0, "")
    assert json.loads(fine.stdout)["kind"] == "mxfp8"
    bad = octavo("why", "fprop", "--recipe", "mxfp8", "--shape", "1,2", "--json")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert json.loads(bad.stderr)["error"]["type"] == "BadInput"
    assert f"octavo-registry {__version__}\n" in octavo("--version").stdout


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"COLUMNS": "20"}, {"TERM": "dumb"}])
def test_a_pipe_gets_plain_lines_that_do_not_wrap(environment: dict[str, str]) -> None:
    """However narrow the terminal is said to be, one row is one line, without an escape sequence."""
    done = octavo("recipes", "diff", "mxfp8", "nvfp4", environment=environment)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) == 26
    assert max(map(len, done.stdout.splitlines())) > 40


def test_a_closed_pipe_is_no_traceback() -> None:
    """`octavo recipes show mxfp8 | head -1` ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", START, "recipes", "show", "mxfp8"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert "Traceback" not in done.stderr


def test_completion_knows_the_commands() -> None:
    """Typer's completion: command names and recipe names, without loading a plugin."""
    complete = {"_OCTAVO_COMPLETE": "complete_bash", "COMP_WORDS": "octavo rec", "COMP_CWORD": "1"}
    assert octavo(environment=complete).stdout.split() == ["recipes"]
    complete |= {"COMP_WORDS": "octavo recipes show mxfp8-", "COMP_CWORD": "3"}
    assert octavo(environment=complete).stdout.split() == ["mxfp8-forward-only", "mxfp8-square"]


def test_a_broken_command_package_does_not_break_the_command(install: Any, tmp_path: Path) -> None:
    """A command whose module ends the interpreter is reported when it is called, and only then."""
    install("test-bad", {"oct_bad": "raise SystemExit(9)"}, {"octavo.commands": {"bad": "oct_bad:app"}})
    site = tmp_path / "site"
    assert octavo("--help", path=site).returncode == 0
    assert octavo("recipes", "show", "mxfp8", path=site).returncode == 0
    called = octavo("bad", path=site)
    assert called.returncode == 1
    assert called.stderr == (
        "octavo: bad: the command of test-bad 1.0 is broken: SystemExit: 9; upgrade or uninstall test-bad\n"
    )


def test_help_imports_nothing_that_it_does_not_show() -> None:
    """No framework, no array library, no package of another command, and of the registry's commands no module."""
    done = subprocess.run([sys.executable, "-c", MODULES, "--help"], capture_output=True, text=True, check=True)
    found = set(done.stderr.split())
    assert found >= LIGHT
    roots = {name.partition(".")[0] for name in found}
    assert sorted(roots & HEAVY) == []
    assert {root for root in roots if root.startswith("octavo")} == LIGHT
    assert sorted(found & COMMANDS) == []


def processor_time(code: str) -> float:
    """Seconds that a fresh interpreter spends on `code --help`, however many others share the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_quick() -> None:
    """What is ours adds little to the libraries' own start: a ratio, as a machine may be slow; the two take turns, as
    it may become slow; the best of each, as every disturbance adds."""
    libraries, ours = [], []
    for _ in range(10):
        libraries.append(processor_time(SAME_LIBRARIES))
        ours.append(processor_time(START))
        if min(ours) < HELP_RATIO * min(libraries):
            return
    raise AssertionError(
        f"octavo --help takes {min(ours):.3f} s at best, a bare command of the same libraries {min(libraries):.3f} s; "
        f"{min(ours) / min(libraries):.2f} times as long, at most {HELP_RATIO} is allowed"
    )
