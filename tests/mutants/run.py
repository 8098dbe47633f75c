"""Plant the bugs of `bugs/` one at a time and run the tests that have to notice each.

    nox -s "mutants(octavo-torch)"                    those that octavo-torch's tests have to notice
    nox -s "mutants(octavo-torch)" -- --only ID ...   some of them; results of the others are kept

Bugs are planted in copies of the working tree, which PYTHONPATH puts in front of what is installed. At the end those
tests that have noticed one run without a bug: a test that is red anyway notices nothing. Results go to
`results/PACKAGE.json`. Exit status 1: a bug survived that is not explained, or could not be planted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from planted import RESULTS, ROOT, Mutant, mutants

VERSIONS = ("torch", "jax", "numpy", "hypothesis")
LIMIT_S = 600
"""A test that takes longer hangs, and whoever runs it notices."""


_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", flags=re.MULTILINE)


class Copy:
    """A copy of the working tree, with the packages of this environment imported from it."""

    def __init__(self, folder: Path, *, compile_native: bool) -> None:
        self.folder = folder
        command = ("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self.compiles = compile_native
        sources = [file.parent / "src" for file in folder.glob("packages/*/pyproject.toml") if _is_installed(file)]
        sources += [folder / "registry/src"] if _is_installed(folder / "registry/pyproject.toml") else []
        sources += [folder / "native/src"] if compile_native else []
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
        if compile_native:
            options = ("-G", "Ninja", "-DOCTAVO_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}")
            where = subprocess.run(
                (sys.executable, "-m", "nanobind", "--cmake_dir"), capture_output=True, check=True, text=True
            ).stdout.strip()
            self._cmake("-S", str(folder / "native"), "-B", str(folder / "build"), f"-Dnanobind_DIR={where}", *options)
            self.build()

    def _cmake(self, *arguments: str) -> None:
        run = subprocess.run(("cmake", *arguments), capture_output=True, check=False, text=True)
        if run.returncode:
            raise RuntimeError(f"cmake {' '.join(arguments)} failed:\n{(run.stdout + run.stderr)[-4000:]}")

    def build(self) -> None:
        """Compile what has changed of octavo-native, without CUDA."""
        self._cmake("--build", str(self.folder / "build"))
        (module,) = (self.folder / "build").glob("_native*.so")
        shutil.copy2(module, self.folder / "native/src/octavo_native" / module.name)

    def write(self, name: str, text: str) -> None:
        """Replace a file and whatever was made from it."""
        file = self.folder / name
        file.write_text(text)
        if file.suffix == ".py":  # compiled files are found by size and second, and a bug may keep both
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        elif self.compiles:
            self.build()

    def pytest(self, tests: Iterable[str], *options: str, limit_s: int | None = None) -> tuple[int, str]:
        """Exit status and output; 1 where it takes longer than `limit_s`."""
        command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests)
        try:
            run = subprocess.run(
                command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return 1, f"FAILED {command[-1]} - takes more than {limit_s} s"
        return run.returncode, run.stdout + run.stderr

    def check_imports(self) -> None:
        """RuntimeError unless the packages are imported from here."""
        sources = [Path(source) for source in self.environment["PYTHONPATH"].split(os.pathsep)]
        names = [path.parent.name for source in sources for path in source.glob("*/__init__.py")]
        lines = "; ".join(f"import {name}; print({name}.__file__)" for name in names)
        run = subprocess.run(
            (sys.executable, "-c", lines), env=self.environment, capture_output=True, check=True, text=True
        )
        for place in run.stdout.split():
            if not Path(place).is_relative_to(self.folder):
                raise RuntimeError(f"{place} is imported, which is not in {self.folder}")

    def red_anyway(self, tests: Iterable[str]) -> set[str]:
        """Those of `tests` that fail without a bug."""
        chosen = sorted(set(tests))
        code, output = self.pytest(chosen) if chosen else (0, "")
        if code not in (0, 1):
            raise RuntimeError(f"without a bug pytest ends with {code}:\n{output[-3000:]}")
        return set(_FAILED.findall(output))

    def outcome(self, mutant: Mutant) -> dict[str, Any]:
        """Plant one bug, run its tests, and take it out again."""
        text = (self.folder / mutant.file).read_text()
        start = time.monotonic()
        try:
            self.write(mutant.file, mutant.planted(text))
            code, output = self.pytest(mutant.tests, "-x", limit_s=LIMIT_S)
        finally:
            self.write(mutant.file, text)
        if code not in (0, 1):
            raise RuntimeError(f"{mutant.id}: pytest ended with {code}; a bug leaves its file valid\n{output[-3000:]}")
        failed = _FAILED.search(output)
        return {
            "outcome": "killed" if code else "survived",
            "by": failed.group(1).strip() if code and failed else "",
            "seconds": round(time.monotonic() - start, 1),
        }


def _is_installed(pyproject: Path) -> bool:
    (name,) = re.findall(r'(?m)^name = "(.*)"$', pyproject.read_text())
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return name != "octavo-native"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(("git", "-C", str(ROOT), *arguments), capture_output=True, check=True, text=True).stdout


class Results:
    """The file of one package's outcomes, written anew after each, so that a run that is broken off keeps its part."""

    def __init__(self, package: str, known: set[str]) -> None:
        self.file = RESULTS / f"{package}.json"
        self._package = package
        self._stamp = {"date": datetime.now(UTC).date().isoformat()}
        self._stamp["commit"] = _git("rev-parse", "--short=10", "HEAD").strip()
        before = json.loads(self.file.read_text())["mutants"] if self.file.exists() else {}
        self._entries = {name: entry for name, entry in before.items() if name in known}
        self._writing = threading.Lock()

    def add(self, mutant: Mutant, outcome: dict[str, Any]) -> None:
        """Replace a bug's entry."""
        with self._writing:
            self._entries[mutant.id] = outcome | self._stamp | {"digest": mutant.digest}
            content = {
                "package": self._package,
                "versions": _versions(),
                "mutants": dict(sorted(self._entries.items())),
            }
            RESULTS.mkdir(exist_ok=True)
            self.file.write_text(json.dumps(content, indent=1) + "\n")
            print(mutant.id, outcome, flush=True)


def _run(chosen: list[Mutant], jobs: int, scratch: Path, results: Results) -> tuple[dict[str, Any], list[str]]:
    """Outcome of each bug by id, and what went wrong."""
    waiting = deque(chosen)
    compiled = any(mutant.file.startswith("native/") for mutant in chosen)
    found: dict[str, dict[str, Any]] = {}
    errors: list[str] = []

    def work(number: int) -> Copy:
        copy = Copy(scratch / str(number), compile_native=compiled)
        copy.check_imports()
        while (mutant := take()) is not None:
            plant(copy, mutant)
        return copy

    def take() -> Mutant | None:
        with suppress(IndexError):  # another copy has taken the last one
            return waiting.popleft()
        return None

    def plant(copy: Copy, mutant: Mutant) -> None:
        try:
            outcome = copy.outcome(mutant)
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
            return
        found[mutant.id] = outcome
        results.add(mutant, outcome)

    with ThreadPoolExecutor(jobs) as pool:
        copies = [future.result() for future in [pool.submit(work, number) for number in range(jobs)]]
    red = copies[0].red_anyway(outcome["by"] for outcome in found.values() if outcome["by"])
    errors += [f"{name}: {one['by']} fails without the bug, too" for name, one in found.items() if one["by"] in red]
    return found, errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="the distribution whose tests are asked")
    parser.add_argument("directory", help="its folder in the repository")
    parser.add_argument("--only", nargs="+", metavar="ID", help="run these bugs alone and keep the results of others")
    parser.add_argument("--jobs", type=int, default=1, help="how many bugs at a time, each in a copy of its own")
    options = parser.parse_args()

    chosen = [each for each in mutants().values() if each.directory == options.directory]
    known = {each.id for each in chosen}
    unknown = sorted(set(options.only or ()) - known)
    if unknown:
        parser.error(f"{options.package} has no bugs {unknown}; it has {sorted(known)}")
    chosen = [each for each in chosen if not options.only or each.id in options.only]
    if not chosen:
        print(f"no bug of the list is {options.package}'s to notice")
        return 0

    results = Results(options.package, known)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        found, errors = _run(chosen, options.jobs, Path(scratch), results)
    survived = [each for each in chosen if found.get(each.id, {}).get("outcome") == "survived"]
    for each in survived:
        print(f"{each.id} survived: {each.survives or 'NOT EXPLAINED; ' + each.promise}")
    print("\n".join(errors))
    print(f"{options.package}: {len(found) - len(survived)} of {len(chosen)} killed, {len(survived)} survived")
    return int(bool(errors) or any(not each.survives for each in survived))


if __name__ == "__main__":
    sys.exit(main())
