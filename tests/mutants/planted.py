"""Bugs that are planted one at a time, to see whether the tests notice them, and what a run of them has found.

A bug is data in `bugs/AREA.toml`: one replacement in one file, the promise that it breaks, and the tests that have to
notice. `run.py` plants them; `tests/test_mutants.py` holds list and results to today's sources.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).parent / "bugs"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    file      path in the repository
    before    text that stands in `file` exactly once; `after` takes its place
    promise   what the bug breaks, as users were promised it
    tests     pytest ids of default tests of one package, of which one has to fail
    survives  why no test can notice, for a bug that changes nothing a user sees; empty for every other
    """

    id: str
    area: str
    file: str
    before: str
    after: str
    promise: str
    tests: tuple[str, ...]
    survives: str = ""

    @property
    def digest(self) -> str:
        """Of what was planted and which tests were asked: a result of another digest is of another bug."""
        content = json.dumps([self.file, self.before, self.after, self.tests])
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def directory(self) -> str:
        """The folder of the package whose tests are asked, as `noxfile.py` has it in DIRECTORIES."""
        folders = {test.partition("/tests/")[0] for test in self.tests}
        if len(folders) != 1:
            raise ValueError(f"{self.id}: tests of one package are needed, not of {sorted(folders)}")
        return folders.pop()

    def planted(self, text: str) -> str:
        """`text` of the file with the bug; ValueError where `before` does not stand there exactly once."""
        count = text.count(self.before)
        if count != 1:
            raise ValueError(f"{self.id}: the text to replace is {count} times in {self.file}; it has to be there once")
        if self.before == self.after:
            raise ValueError(f"{self.id}: before and after are the same text")
        return text.replace(self.before, self.after)


def mutants(folder: Path = BUGS) -> dict[str, Mutant]:
    """Every bug of the list by id, area by area; ValueError where two have one id."""
    found: dict[str, Mutant] = {}
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["mutant"]:
            mutant = Mutant(area=file.stem, tests=tuple(entry.pop("tests")), **entry)
            if mutant.id in found:
                raise ValueError(f"{mutant.id} stands in the list twice")
            found[mutant.id] = mutant
    return found


def results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """What the last run of each bug found, by its id: see `run.py`."""
    return {
        name: entry | {"versions": run["versions"]}
        for file in sorted(folder.glob("*.json"))
        for run in [json.loads(file.read_text())]
        for name, entry in run["mutants"].items()
    }
