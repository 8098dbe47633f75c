"""The install lines that users are given work: nothing is missing from a command, and every extra is what it says."""

from __future__ import annotations

import re
from itertools import chain

import pytest
from install_lines import install_lines
from workspace import ROOT, packages

PAGES = (
    "README.md",
    "docs/guide/quickstart.md",
    "docs/start/install.md",
    "docs/start/jax.md",
    "docs/guide/backends.md",
    "docs/guide/native.md",
    "docs/guide/cuda-graphs.md",
)
COMMANDS = {
    (page, line)
    for page in PAGES
    for line in re.findall(
        r"^\$ pip install (\./(?:packages|registry|native)[^#\n]*)", (ROOT / page).read_text(), flags=re.MULTILINE
    )
}


def _ours(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0] for line in requirements} & set(packages())


@pytest.mark.parametrize(("page", "command"), sorted(COMMANDS))
def test_an_install_from_the_clone_names_all_that_it_needs(page: str, command: str) -> None:
    """pip seeks what a command leaves out on an index, where our names are not (or, worse, are somebody else's)."""
    by_folder = {package.directory: package for package in packages().values()}
    named = [by_folder[(ROOT / folder).resolve()] for folder in command.split() if folder.startswith("./")]
    needed = set(chain.from_iterable(_ours(package.project.get("dependencies", [])) for package in named))
    assert needed <= {package.distribution for package in named}, page


def test_every_page_has_install_lines() -> None:
    """A page whose line was reworded would otherwise have nothing to test."""
    assert {page for page, _ in COMMANDS} == set(PAGES)


def test_a_release_runs_the_lines_of_the_readme() -> None:
    """Those from the clone, from dist/ and from an index, each whole and without its comment."""
    lines = install_lines((ROOT / "README.md").read_text())
    assert set(lines) >= {f"pip install {line.strip()}" for page, line in COMMANDS if page == "README.md"}
    assert any("--find-links dist" in line for line in lines)
    assert 'pip install "octavo[torch]"' in lines
    assert not any("#" in line or "zenith" in line for line in lines)


def test_extras_bring_every_backend() -> None:
    """octavo[all] gives users of both frameworks the compiled kernels; each extra that the README names is there."""
    extras = packages()["octavo"].project["optional-dependencies"]
    (sentence,) = re.findall(r"Extras: (.*?)\. ", (ROOT / "README.md").read_text().replace("\n", " "))
    assert set(re.findall(r"`([a-z-]+)`", sentence)) == set(extras)
    (everything,) = extras["all"]
    assert set(re.findall(r"[a-z-]+", everything.partition("[")[2])) == set(extras) - {"all"}
    for plugin in ("torch-native", "torch-cudagraph", "torch-triton", "jax-native", "jax-triton"):
        assert f"octavo-{plugin}" in _ours(extras[plugin])


def test_the_table_of_packages_names_what_each_needs() -> None:
    """A reader who takes a row's folders, core and the registry has a command that pip can install."""
    by_folder = {package.directory: package for package in packages().values()}
    table = (ROOT / "docs" / "start" / "install.md").read_text().partition("## Which packages\n")[2]
    rows = re.findall(r"^\|[^|]*\| `([\w-]+)` \| `(\S+)`[^|]*\|([^|]*)\|$", table, re.MULTILINE)
    assert len(rows) >= 12
    for name, folder, needs in rows:
        package = by_folder[(ROOT / folder).resolve()]
        assert package.distribution == name
        named = {by_folder[(ROOT / each).resolve()].distribution for each in re.findall(r"`(\S+)`", needs)}
        assert _ours(package.project.get("dependencies", [])) - {"octavo-core", "octavo-registry"} == named, name
