"""Commands that other packages add to `octavo`."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import octavo_registry
from octavo_registry.cli import commands

COMMANDS = """
import typer
app = typer.Typer(help="Several.")

@app.command()
def one(word: str = "x"):
    "The first."
    print("one", word)

@app.command()
def two():
    raise typer.Exit(7)

single = typer.Typer()

@single.command()
def whatever(count: int = 1):
    print("single", count)

def function(name: str, loud: bool = False):
    "A function."
    print("hello", name, loud)

def fails():
    from octavo import OctavoError
    raise OctavoError("disk 3 is full; free some")

def code():
    return 5

NUMBER = 3
"""


@pytest.fixture
def extended(install: Any) -> None:
    """A distribution with commands of every form, and broken ones."""
    names = {
        "several": "app",
        "single": "single",
        "function": "function",
        "fails": "fails",
        "code": "code",
        "number": "NUMBER",
        "absent": "gone",
        "why": "function",
        "train": "function",
    }
    points = {name: f"oct_commands:{target}" for name, target in names.items()}
    install("test-more", {"oct_commands": COMMANDS}, {"octavo.commands": points}, summary="More commands.")


@pytest.mark.usefixtures("extended")
def test_other_packages_add_commands(run: Any) -> None:
    """Entry-point group octavo.commands: a Typer app of any size, or a function."""
    assert run("several", "one", "--word", "y").out == "one y\n"
    assert run("several", "two").code == 7
    assert run("single", "--count", "3").out == "single 3\n"
    assert run("function", "you", "--loud").out == "hello you True\n"
    assert run("code").code == 5
    assert "--install-completion" not in run("single", "--help").out
    failed = run("fails")
    assert (failed.code, failed.err) == (1, "octavo: disk 3 is full; free some\n")


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("number", "TypeError: 3 is not a command; name a Typer app or a function"),
        ("absent", "AttributeError: module 'oct_commands' has no attribute 'gone'"),
        ("train", "'train' belongs to octavo; test-more 1.0 (plugin train) needs a name of its own"),
    ],
)
def test_a_broken_command_is_one_line_and_breaks_nothing(run: Any, name: str, reason: str) -> None:
    """It says which distribution brought it, and doctor lists it."""
    ran = run(name)
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert f"octavo: {name}: the command of test-more 1.0 is broken: {reason}" in ran.err
    listed = {row["name"]: row for row in run("doctor", "--json").json["commands"]}
    assert listed[name]["status"] == "broken"
    assert reason in listed[name]["reason"]
    assert run("recipes", "list").code == 0


@pytest.mark.parametrize(
    ("name", "owner", "install"),
    [
        ("bench", "octavo-bench", "./packages/bench"),
        ("conform", "octavo-conformance", "./packages/conformance"),
        ("train", "octavo", "./packages/cli"),
    ],
)
def test_an_absent_command_of_ours_says_which_distribution_has_it(
    run: Any, name: str, owner: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads of `octavo bench` and lacks it is told what to install, not that there is no such command."""
    monkeypatch.setattr(import_module("octavo_registry.cli.app"), "find_commands", dict)
    ran = run(name)
    assert ran.code == 2
    sentence = f"`octavo {name}` is a command of {owner}, which is not installed; in a clone of Octavo run: pip install"
    assert sentence in ran.err
    assert f" {install}; try" in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.usefixtures("extended")
def test_help_lists_commands_without_loading_them(run: Any) -> None:
    """Names and lines of help come from metadata, so that a slow or hostile package costs help nothing."""
    import sys

    ran = run("--help")
    assert ran.code == 0
    assert re.search(r"^  several +More commands. \(test-more\)$", ran.out, re.MULTILINE)
    assert "oct_commands" not in sys.modules
    assert run().out == ran.out


def test_help_lists_commands_of_packages_that_are_missing(run: Any) -> None:
    """The documents speak of `octavo bench` and `octavo conform`: who lacks them learns that they exist, and whose."""
    said = " ".join(run("--help").out.split())
    assert "conform Run the conformance suite on a backend. (octavo-conformance is not installed)" in said
    assert "octavo-conformance, which is not installed; " in run("conform", "a").err


def test_version(run: Any) -> None:
    """Every package of ours that is installed, a line each: reports of faults need all of them."""
    lines = run("--version").out.splitlines()
    assert f"octavo-registry {octavo_registry.__version__}" in lines
    assert {"octavo-core", "octavo-registry"} <= {line.split()[0] for line in lines}
    assert all(re.fullmatch(r"octavo[a-z-]* \d[\w.+]*", line) for line in lines)


def test_version_is_that_of_the_package_that_runs(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two on the path Python imports the first, such as a clone's in front of an installed one."""
    for version in ("2.0", "1.0"):
        info = tmp_path / version / f"octavo_twice-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: octavo-twice\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(info.parent))
    assert [line for line in run("--version").out.splitlines() if "twice" in line] == ["octavo-twice 1.0"]


def test_ctrl_c_is_a_line_and_its_exit_code(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a command, too, where typer ends without a word; a silent end looks as if everything had been done."""

    def stopped(command: commands.Command) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.Command, "load_or_fail", stopped)
    ran = run("doctor")
    assert (ran.code, ran.out, ran.err) == (130, "", "octavo: stopped\n")
