"""Rows of a run and the files they are written to: JSON for machines, JUnit for CI."""

from __future__ import annotations

import json
import platform
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pytest

from octavo_conformance.cards.targets import Target
from octavo_conformance.reports.gaps import Gap
from octavo_registry.cli.files import write_whole

Outcome = Literal["passed", "failed", "skipped", "gap", "undeclared"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "skipped", "gap", "undeclared")

SCHEMA_VERSION = 1
COVERAGE = "coverage"
"""The part of rows that stand for what a card declares and of which no test ran."""

_METRIC = "octavo_metric:"
_UNDECLARED = "octavo_undeclared"
_MEASURED = "measured."
_NEVER_RAN = " is declared, and no test of it ran: "
_OURS = ("octavo-core", "octavo-numerics", "octavo-registry", "octavo-conformance")


@dataclass
class Row:
    """One test of one case. `metrics` holds maxima, such as the error of a GEMM as a share of its bound."""

    id: str
    part: str
    backend: str
    capability: dict[str, str]
    outcome: Outcome = "passed"
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def begin(cls, identity: dict[str, str]) -> Row:
        """A row that has no result yet."""
        rest = {key: value for key, value in identity.items() if key not in ("id", "part", "backend")}
        return cls(identity["id"], identity["part"], identity["backend"], rest)

    def add(self, report: pytest.TestReport) -> None:
        """Takes in one phase (setup, call, teardown) of the test."""
        for name, value in report.user_properties:
            if name.startswith(_METRIC):
                assert isinstance(value, float)
                self.metrics[name.removeprefix(_METRIC)] = value
            elif name == _UNDECLARED:
                self.outcome, self.reason = "undeclared", str(value)
        if report.failed:
            self.outcome, self.reason = "failed", _last_line(report)
        elif report.skipped and self.outcome != "failed":
            expected = getattr(report, "wasxfail", None)
            self.outcome = "skipped" if expected is None else "gap"
            self.reason = _skip_reason(report) if expected is None else str(expected).removeprefix("reason: ")


def never_ran_row(target: Target, what: str, capability: dict[str, str], reason: str) -> Row:
    """The failed row of a capability that is declared and of which no test ran.

    what     the capability in words; `which_never_ran` reads it back
    reason   why no test of it ran
    """
    facts = {"framework": target.bridge.name, "device": target.device.kind}
    identity = f"{COVERAGE}::{target.id}: {what}"
    return Row(identity, COVERAGE, target.name, facts | capability, "failed", f"{what}{_NEVER_RAN}{reason}")


def which_never_ran(row: Row) -> tuple[str, str]:
    """The capability in words, and the reason, of a `never_ran_row`."""
    what, _, reason = row.reason.partition(_NEVER_RAN)
    return what, reason


def undeclared(properties: list[tuple[str, object]], what: str) -> None:
    """Marks the row of a probe that found a capability which the card does not declare."""
    properties.append((_UNDECLARED, what))


@dataclass(frozen=True)
class Report:
    """One run: what ran, on which target, and one row per test. Rows hold no times, so that two reports compare."""

    backends: list[dict[str, Any]]
    versions: dict[str, str]
    seed: int
    level: str
    rows: list[Row]
    unused_gaps: list[str]

    @classmethod
    def of(cls, targets: Sequence[Target], seed: int, full: bool, gaps: Sequence[Gap], rows: Sequence[Row]) -> Report:
        """The report of these targets and rows."""
        versions = {"python": platform.python_version()}
        versions |= {name: metadata.version(name) for name in _OURS}
        versions |= {target.bridge.name: target.bridge.version() for target in targets}
        tested = [
            {
                "backend": target.name,
                "distribution": target.distribution,
                "version": target.version,
                "framework": target.bridge.name,
                "device": target.device.kind,
                "arch": target.device.arch,
                "label": target.device.label,
            }
            for target in targets
        ]
        unused = [
            str(gap)
            for gap in gaps
            if not any(gap.matches(row.id, {"backend": row.backend, **row.capability}) for row in rows)
        ]
        return cls(tested, versions, seed, "full" if full else "quick", list(rows), unused)

    def counts(self) -> dict[str, int]:
        """Rows by outcome."""
        counted = Counter(row.outcome for row in self.rows)
        return {outcome: counted[outcome] for outcome in OUTCOMES}

    def maxima(self) -> dict[str, dict[str, float]]:
        """The largest value of each metric, by backend; times, whose names begin with "measured.", aside."""
        return self._largest(measured=False)

    def measurements(self) -> dict[str, dict[str, float]]:
        """Times and other values of this machine, by backend."""
        return self._largest(measured=True)

    def _largest(self, *, measured: bool) -> dict[str, dict[str, float]]:
        largest: dict[str, dict[str, float]] = {}
        for row in self.rows:
            for name, value in row.metrics.items():
                if name.startswith(_MEASURED) == measured:
                    mine = largest.setdefault(row.backend, {})
                    mine[name] = max(value, mine.get(name, float("-inf")))
        return {backend: dict(sorted(values.items())) for backend, values in sorted(largest.items())}

    def as_json(self) -> str:
        """The JSON document; keys sorted, rows in order of their ids."""
        rows = []
        for row in self.rows:
            content = asdict(row)
            content["metrics"] = {k: v for k, v in sorted(row.metrics.items()) if not k.startswith(_MEASURED)}
            rows.append(content)
        document = {
            "schema_version": SCHEMA_VERSION,
            "backends": self.backends,
            "versions": self.versions,
            "seed": self.seed,
            "level": self.level,
            "counts": self.counts(),
            "maxima": self.maxima(),
            "measurements": self.measurements(),
            "unused_gaps": self.unused_gaps,
            "rows": rows,
        }
        return json.dumps(document, indent=1, sort_keys=True) + "\n"

    def as_junit(self) -> str:
        """JUnit XML: one suite a part, gaps and undeclared capabilities as skipped and passed with a property."""
        root = ElementTree.Element("testsuites", name="octavo-conformance")
        for part in dict.fromkeys(row.part for row in self.rows):
            rows = [row for row in self.rows if row.part == part]
            suite = ElementTree.SubElement(
                root,
                "testsuite",
                name=part,
                tests=str(len(rows)),
                failures=str(sum(row.outcome == "failed" for row in rows)),
                skipped=str(sum(row.outcome in ("skipped", "gap") for row in rows)),
            )
            properties = ElementTree.SubElement(suite, "properties")
            for name, value in {"seed": str(self.seed), "level": self.level, **self.versions}.items():
                ElementTree.SubElement(properties, "property", name=name, value=value)
            for row in rows:
                _junit_case(suite, row)
        ElementTree.indent(root, " ")
        return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _junit_case(suite: ElementTree.Element, row: Row) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=f"{row.backend}.{row.part}", name=row.id)
    if row.metrics or row.outcome == "undeclared":
        properties = ElementTree.SubElement(case, "properties")
        for name, value in sorted(row.metrics.items()):
            ElementTree.SubElement(properties, "property", name=name, value=repr(value))
        if row.outcome == "undeclared":
            ElementTree.SubElement(properties, "property", name="undeclared", value=row.reason)
    if row.outcome == "failed":
        ElementTree.SubElement(case, "failure", message=_printable(row.reason))
    elif row.outcome in ("skipped", "gap"):
        ElementTree.SubElement(case, "skipped", message=_printable(row.reason))


def write(path: Path, report: Report) -> None:
    """Writes the report in the format of the suffix, whole or not at all."""
    text = report.as_json() if path.suffix == ".json" else report.as_junit()
    write_whole(path, text)


def _printable(text: str) -> str:
    """XML 1.0 has no place for control characters."""
    return "".join(char if char.isprintable() else " " for char in text)


def _last_line(report: pytest.TestReport) -> str:
    """The line that says what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "failed"


def _skip_reason(report: pytest.TestReport) -> str:
    """The reason without pytest's file and line."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
