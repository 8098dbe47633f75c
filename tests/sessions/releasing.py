"""The session that prepares a release: versions, changelogs, wheels and sdists, and what was built under test."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import zipfile
from pathlib import Path

import nox
from install_lines import install_lines
from workspace import ROOT, tracked

from sessions.distributions import DIRECTORIES, NATIVE, closure, needed_by_tests, ours
from sessions.environment import effort_of, run_pytest
from sessions.native_wheel import Kernels
from sessions.packaging import build, empty_environment

TEMPLATES = ("docs/examples/acme-octavo", "docs/examples/acme-octavo-jax")
FLOOR = re.compile(r'("octavo[a-z-]*(?:\[[a-z,-]*\])?>=)[\d.]+')
DOCTOR = ("-m", "octavo_registry", "doctor")


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Prepare a release: `nox -s release -- 0.3.0` writes versions and changelogs, builds dist/ and tests it.

    Every package gets the version and asks for the others at that version or newer, its fragments become a section of
    its changelog, and dist/ holds its wheel and its sdist. Each sdist must make the same wheel, the README's install
    lines run, each package's tests run on the wheels alone, and the session `minimums` follows. Nothing is committed,
    tagged or uploaded. For a rehearsal, `nox -s release -- 0.3.0 --without-cuda` builds octavo-native without CUDA
    kernels, in half a minute.
    """
    versions = [argument for argument in session.posargs if argument != "--without-cuda"]
    if len(versions) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", versions[0]):
        session.error(f"a release has one version, as 0.3.0; given were {session.posargs}")
    session.install("uv", "towncrier", "virtualenv")
    (version,) = versions
    kernels: Kernels = "optimized" if "--without-cuda" not in session.posargs else "none"
    _set_versions(version)
    _write_changelogs(session, version)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name, directory in DIRECTORIES.items():
        build(session, dist, directory, kernels=kernels)
        session.run("uv", "build", "--sdist", "--out-dir", str(dist), directory, silent=True)
        if name != NATIVE:
            _check_sdist(session, dist, name.replace("-", "_"), version)
    _run_install_lines(session, dist)
    for name in DIRECTORIES:
        _test_wheels(session, dist, name, version)
    session.notify("minimums", ("--without-cuda",) if kernels == "none" else ())


def _set_versions(version: str) -> None:
    """Write a version into every package, and the floors of what they, their cards and the templates ask of ours."""
    floor = version.rpartition(".")[0]
    for name, directory in DIRECTORIES.items():
        pyproject = ROOT / directory / "pyproject.toml"
        text = pyproject.read_text()
        pyproject.write_text(re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', text, count=1))
        module = "octavo_cli" if name == "octavo" else name.removesuffix("-core").replace("-", "_")
        source = ROOT / directory / "src" / module / "__init__.py"
        source.write_text(re.sub(r'(?m)^__version__ = ".*"$', f'__version__ = "{version}"', source.read_text()))
    for directory in (*DIRECTORIES.values(), *TEMPLATES):
        for file in (ROOT / directory / "pyproject.toml", *(ROOT / directory).glob("src/*/plugin.py")):
            file.write_text(FLOOR.sub(rf"\g<1>{floor}", file.read_text()))
    citation = ROOT / "CITATION.cff"
    citation.write_text(re.sub(r"(?m)^version: .*$", f"version: {version}", citation.read_text()))


def _write_changelogs(session: nox.Session, version: str) -> None:
    """The fragments of each package as a section of its changelog; towncrier looks for its template in the package."""
    config = Path(session.create_tmp()).resolve() / "towncrier.toml"
    template = '"changes.md.jinja"'
    config.write_text((ROOT / "pyproject.toml").read_text().replace(template, f"'{ROOT / template.strip(chr(34))}'"))
    for name, directory in DIRECTORIES.items():
        where = ("--config", str(config), "--dir", str(ROOT / directory))
        session.run("towncrier", "build", *where, "--name", name, "--version", version, "--yes", silent=True)


def _check_sdist(session: nox.Session, dist: Path, stem: str, version: str) -> None:
    """Fail unless an sdist, alone in an empty folder, becomes a wheel with the files of the one in dist/."""
    folder = Path(session.create_tmp()).resolve() / "sdist"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.unpack_archive(dist / f"{stem}-{version}.tar.gz", folder)
    source = str(folder / f"{stem}-{version}")
    session.run("uv", "build", "--wheel", "--out-dir", str(folder), source, silent=True)
    wheel = f"{stem}-{version}-py3-none-any.whl"
    ours, theirs = (set(zipfile.ZipFile(path / wheel).namelist()) for path in (dist, folder))
    if ours != theirs:
        session.error(f"the sdist of {stem} makes another wheel; only one of them has {sorted(ours ^ theirs)}")


def _run_install_lines(session: nox.Session, dist: Path) -> None:
    """Each install command of the README in an empty environment, whose doctor must then find nothing broken.

    A folder of links stands for the index, which has no such version yet. Kernels that a command compiles from the
    clone are those for the CPU.
    """
    links = " ".join(filter(None, (str(dist), os.environ.get("PIP_FIND_LINKS"))))
    settings = {"PIP_FIND_LINKS": links, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    settings |= {"SKBUILD_CMAKE_DEFINE": "OCTAVO_CUDA=OFF", "PIP_QUIET": "1"}
    commands = install_lines((ROOT / "README.md").read_text())
    if not commands:
        session.error("README.md has no install line that tests/install_lines.py finds")
    for command in commands:
        python, _ = empty_environment(session, sys.executable)
        session.run(python, "-m", *shlex.split(command), external=True, env=settings)
        session.run(python, *DOCTOR, external=True)


def _test_wheels(session: nox.Session, dist: Path, name: str, version: str) -> None:
    """One package's tests on wheels of dist/ alone, after its golden files of this release were written by it."""
    directory = DIRECTORIES[name]
    needed = needed_by_tests(name)
    exact = [f"{each}=={version}" for each in closure([name, *ours(list(needed))])]
    theirs = [requirement for requirement in needed if not ours([requirement])]
    python, pip = empty_environment(session, sys.executable)
    wheels = ("-c", "constraints.txt", "--find-links", str(dist))
    installer: tuple[str, ...] = pip
    if session.venv_backend == "uv":  # its cache may have a wheel of this name that a rehearsal built
        refreshed = (part for each in DIRECTORIES for part in ("--refresh-package", each))
        installer = ("uv", "pip", "install", "--python", python, *refreshed)
    session.run(*installer, *wheels, *exact, *theirs, "pytest-xdist", external=True)
    for writer in tracked("tests/golden/write.py", root=ROOT / directory):
        if not list(writer.parent.glob(f"{version}*")):
            session.run(python, str(writer), external=True)
    run_pytest(session, "-q", directory, xla=effort_of(name), python=python)
