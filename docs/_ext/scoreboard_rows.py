"""The rows of the scoreboard: what was measured, from committed records, and whether its sources have changed since."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "docs" / "scoreboard.toml"
RESULTS = ROOT / "benchmarks" / "results"
MUTANTS = ROOT / "tests" / "mutants"
TESTS = ("packages/*/tests/**/test_*.py", "registry/tests/**/test_*.py", "native/tests/**/test_*.py")
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """One line of the scoreboard.

    claim     what is counted
    command   repeats it
    paths     the sources that it speaks of
    record    the file that has the result; None: nobody has measured it
    result    in words and numbers of the record
    date      of the record; "" without one
    commit    of the sources that were measured, where the record has it
    """

    section: str
    claim: str
    command: str
    paths: tuple[str, ...]
    record: Path | None
    result: str
    date: str
    commit: str

    @property
    def changes(self) -> int | None:
        """Commits since the record that change what it speaks of; None where git cannot say."""
        return None if self.record is None else commits_since(self.commit, self.date, self.paths)

    @property
    def state(self) -> str:
        """ "current", "stale" with the number of commits, or "not measured"."""
        if self.record is None:
            return NOT_MEASURED
        changes = self.changes
        if changes is None:
            return "unknown: no git history here"
        return "current" if changes == 0 else f"stale: {changes} later {'commit' if changes == 1 else 'commits'}"


def rows() -> list[Row]:
    """Every row of `scoreboard.toml`, then the planted bugs."""
    return [*map(_row, tomllib.loads(ROWS.read_text())["row"]), _mutants()]


def _row(entry: Mapping[str, Any]) -> Row:
    common = {name: entry[name] for name in ("section", "claim", "command")}
    files = RESULTS.glob(entry["record"]) if "record" in entry else ()
    found = {file: json.loads(file.read_text()) for file in files}
    if not found:
        return Row(**common, paths=tuple(entry["paths"]), record=None, result=NOT_MEASURED, date="", commit="")
    newest = max(found, key=lambda file: (str(found[file]["date"]), file.name))
    content = found[newest]
    result = filled(entry["result"], content)
    date, commit = content["date"][:10], content.get("commit", "")
    return Row(**common, paths=tuple(entry["paths"]), record=newest, result=result, date=date, commit=commit)


def _mutants() -> Row:
    """The planted bugs: a file per package, of which the oldest entry dates the row."""
    files = sorted((MUTANTS / "results").glob("*.json"))
    entries = [entry for file in files for entry in json.loads(file.read_text())["mutants"].values()]
    outcomes = Counter(entry["outcome"] for entry in entries)
    oldest = min(entries, key=lambda entry: entry["date"])
    share = 100 * outcomes["killed"] / len(entries)
    return Row(
        section="Tests",
        claim="Planted bugs that the default tests notice",
        command="nox -s mutants",
        paths=("packages/*/src", "registry/src", "native/lib/cpu", "native/include", "native/src"),
        record=files[0].parent,
        result=f"{outcomes['killed']} of {len(entries)} ({share:.1f} %); the others change nothing that a user sees",
        date=oldest["date"],
        commit=oldest["commit"],
    )


def filled(text: str, content: Any) -> str:
    """`text` with {a/b/0} replaced by the value at these keys, in the format behind a colon."""

    def value(match: re.Match[str]) -> str:
        found = content
        for key in match[1].split("/"):
            found = found[int(key)] if isinstance(found, list) else found[key]
        return format(found, match[2]) if match[2] else shown(found)

    return re.sub(r"\{([^{}:]+)(?::([^{}]+))?\}", value, text)


def shown(value: Any) -> str:
    """A value of a record in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {f'({shown(one)})' if isinstance(one, Mapping) else shown(one)}"
                         for name, one in value.items()) or "none"  # fmt: skip
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def commits_since(commit: str, date: str, paths: Iterable[str]) -> int | None:
    """Commits after `commit` that change `paths`; where a record has no commit of this history, those from its day on.

    None: there is no history, as in an archive of the sources.
    """
    known = commit and _git("cat-file", "-e", f"{commit}^{{commit}}") is not None
    since = (f"{commit}..HEAD",) if known else (f"--since={date}T00:00:00Z", "HEAD")
    count = _git("rev-list", "--count", *since, "--", *(f":(glob){path}/**" for path in _folders(paths)),
                 *(path for path in paths if path.endswith(".py")))  # fmt: skip
    return None if count is None else int(count)


def _folders(paths: Iterable[str]) -> Iterator[str]:
    return (path for path in paths if not path.endswith(".py"))


@cache
def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(("git", "-C", str(ROOT), *arguments), capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def markdown() -> str:
    """A table for each section."""
    lines: list[str] = []
    found = rows()
    for section in dict.fromkeys(row.section for row in found):
        lines += [f"## {section}", "", "| what | result | measured | state |", "|---|---|---|---|"]
        for row in (row for row in found if row.section == section):
            when = f"{row.date}{f' at {row.commit}' if row.commit else ''}" or "-"
            lines.append(f"| {row.claim}<br>`{row.command}` | {row.result} | {when} | {row.state} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def faults_markdown() -> str:
    """A line for each fault that was seen elsewhere, with the tests of every package that name it."""
    from octavo_conformance.faults import faults, named_by_tests

    files = sorted(file for pattern in TESTS for file in ROOT.glob(pattern))
    named = named_by_tests(files)
    lines = [
        "| # | fault | of the conformance suite | of the packages | where there is none |",
        "|---|---|---|---|---|",
    ]
    for row in faults():
        own = dict.fromkeys(f"`{file.relative_to(ROOT).as_posix()}`" for file, _ in named.get(row.number, ()))
        suite = ", ".join(f"`{test}`" for test in row.tests)
        reason = "" if suite or own else row.reason
        lines.append(f"| {row.number} | {row.fault} | {suite} | {', '.join(own)} | {reason} |")
    return "\n".join(lines) + "\n"
