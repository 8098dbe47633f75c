"""The `octavo` command as its own process: exit codes, pipes, colours, start-up time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo_registry import __version__

START = "from octavo_registry.cli import main; main()"
SAME_LIBRARIES = """
import pluggy, pydantic, pydantic.functional_serializers, typer

class Model(pydantic.BaseModel):
    field: int = 0

app = typer.Typer(rich_markup_mode=None)

@app.command()
def command() -> None: ...

app()
"""
"""A command of the libraries that `octavo` is made of, with next to nothing of its own."""
LISTED = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
"""
"""What makes a program list its modules when it ends."""
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
    assert len(done.stdout.splitlines()) == 27
    assert max(map(len, done.stdout.splitlines())) > 40


def test_a_closed_pipe_is_no_traceback() -> None:
    """`octavo recipes show mxfp8 | head -1` ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", START, "recipes", "show", "mxfp8"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs a shell that closes a stream")
@pytest.mark.parametrize(("arguments", "code"), [("recipes show mxfp8 >&-", 0), ("recipes show mxfp9 2>&-", 2)])
def test_a_closed_stream_gets_nothing(arguments: str, code: int) -> None:
    """A service without stdout or stderr, as some are started: the exit code is the answer, and no traceback."""
    line = f'exec "$0" -c "$1" {arguments}'
    done = subprocess.run(["sh", "-c", line, sys.executable, START], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_a_character_that_stdout_has_not_is_escaped(install: Any, tmp_path: Path) -> None:
    """Names of tensors and words of plugins, where stdout is ASCII or of one country; JSON stays JSON."""
    text = ascii("M\u00fcller \u2713")
    source = (
        f"from octavo_registry.cli.output import print_json\ndef say():\n    print({text})\n    print_json([{text}])\n"
    )
    install("test-say", {"oct_say": source}, {"octavo.commands": {"say": "oct_say:say"}})
    paths = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    done = octavo("say", environment={"PYTHONPATH": paths, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    line, document = done.stdout.split("\n", 1)
    assert line == r"M\xfcller \u2713"
    assert json.loads(document) == ["M\u00fcller \u2713"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_line() -> None:
    """With an exit code of Octavo's, not of the interpreter, which flushes once more when it ends."""
    command = [sys.executable, "-c", START, "recipes", "show", "mxfp8"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "octavo: there is no space left for the output; write it elsewhere\n"


def test_completion_knows_the_commands() -> None:
    """Typer's completion: command names and recipe names, without loading a plugin."""
    complete = {"_OCTAVO_COMPLETE": "complete_bash", "COMP_WORDS": "octavo rec", "COMP_CWORD": "1"}
    assert octavo(environment=complete).stdout.split() == ["recipes"]
    complete |= {"COMP_WORDS": "octavo recipes show mxfp8-", "COMP_CWORD": "3"}
    assert octavo(environment=complete).stdout.split() == ["mxfp8-forward-only", "mxfp8-folded", "mxfp8-square"]


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


def modules(code: str) -> set[str]:
    """What `code --help` has imported when it ends."""
    done = subprocess.run([sys.executable, "-c", LISTED + code, "--help"], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_imports_nothing_that_it_does_not_show() -> None:
    """Help and completion are quick: beside the libraries that a command is made of, the standard library alone, the
    schemas and the registry; no framework, no array library, no package of another command, and of the registry's
    commands no module."""
    own = modules(START)
    assert own >= LIGHT
    more = {name.partition(".")[0] for name in own - modules(SAME_LIBRARIES)}
    assert sorted(more - sys.stdlib_module_names - LIGHT) == []
    assert sorted(own & COMMANDS) == []
