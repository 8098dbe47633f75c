"""Every code block of the READMEs and of the docs works: Python runs, commands exist with their options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from test_noxfile import sessions
from typer.testing import CliRunner
from workspace import ROOT, tracked

import octavo
from octavo_registry.cli import app

PATTERNS = ("*.md", "docs/**/*.md", "packages/*/README.md", "registry/README.md", "native/README.md")
DOCUMENTS = tracked(*PATTERNS)
QUICK = ("doctor", "why", "recipes")

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def _read_toml(example: object) -> None:
    octavo.Recipe.from_toml(example.parsed)  # type: ignore[attr-defined]


PYTHON = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"])
RECIPES = Sybil(parsers=[CodeBlockParser("toml", _read_toml)], patterns=["*.md"])


def _commands(path: Path) -> Iterator[list[str]]:
    for block in re.findall(r"```console\n(.*?)```", path.read_text(), flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


@every_document
def test_python_blocks_run(path: Path) -> None:
    """A reader pastes the blocks of a page in order, and they work."""
    for example in PYTHON.parse(path).examples():
        example.evaluate()


def test_the_readme_shows_what_its_first_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the compiled kernels are installed, as it says; and what it prints of a CPU is so on any CPU."""
    pytest.importorskip("octavo_torch_native")
    example, shown = re.findall(r"```(?:python|text)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:2]
    exec(example, {})
    assert capsys.readouterr().out == shown


@every_document
def test_toml_blocks_are_recipes(path: Path) -> None:
    """A recipe in the docs is one that Octavo reads; excerpts of other files begin with a table's header."""
    for example in RECIPES.parse(path).examples():
        if not example.parsed.lstrip().startswith("["):
            example.evaluate()


@every_document
def test_octavo_commands_exist(path: Path) -> None:
    """A command in the docs has that name and those options; the quick ones run."""
    for command in _commands(path):
        if command[0] != "octavo" or command[1].startswith("-"):
            continue
        arguments = command[1:] if command[1] in QUICK else [*command[1:], "--help"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{shlex.join(command)}: {result.stderr or result.stdout}"


@every_document
def test_nox_sessions_exist(path: Path) -> None:
    """A session in the docs is in the noxfile."""
    for command in _commands(path):
        if command[0] == "nox" and "-s" in command:
            asked = command[command.index("-s") + 1]
            assert asked.split("(")[0] in sessions(), f"{shlex.join(command)}: noxfile.py has {sorted(sessions())}"


@every_document
def test_links_to_files_lead_somewhere(path: Path) -> None:
    """A relative link in a page names a file of the repository."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


@every_document
def test_cards_lead_to_pages(path: Path) -> None:
    """Sphinx takes whatever follows `:link:` on its line for the link, and does not warn where that is no page."""
    for lines in re.findall(r"^:::\{grid-item-card\}.*\n((?::[a-z-]+:.*\n)*)", path.read_text(), flags=re.MULTILINE):
        options = dict(re.findall(r"^:([a-z-]+): (.*)$", lines, flags=re.MULTILINE))
        assert options["link-type"] == "doc", lines
        assert (path.parent / f"{options['link']}.md").is_file(), lines


@every_document
def test_tests_that_are_named_exist(path: Path) -> None:
    """A promise names the test behind it; a renamed test takes the page along."""
    for file, function in re.findall(r"`([\w/-]+\.py)::(test_\w+)`", path.read_text()):
        place = ROOT / file.replace("suite/", "packages/conformance/src/octavo_conformance/suite/", 1)
        assert re.search(rf"^def {function}\(", place.read_text(), flags=re.MULTILINE), f"{file} has no {function}"


def test_every_decision_is_in_the_index_under_its_title() -> None:
    """Who looks for a decision reads the index by subject; the sidebar has them by number alone."""
    folder = ROOT / "docs" / "decisions"
    titles = {path.name: path.read_text().partition("\n")[0].partition(": ")[2] for path in folder.glob("0*.md")}
    listed = re.findall(r"^- \[\d{4}\]\((\S+)\) (.*)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert len(listed) == len(titles)
    assert dict(listed) == titles
