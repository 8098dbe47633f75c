"""The suite's pytest plugin while a backend is tested: cases, seeds, gaps and the report's rows."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from octavo_conformance import SEED_KEY
from octavo_conformance.cards.declared import ANY, Declared, Ran, rest, stand_ins, uncovered, unknown_recipes, words
from octavo_conformance.cards.needs import Need
from octavo_conformance.cards.targets import Target, UnknownBackend, find_targets
from octavo_conformance.cards.variants import Variant
from octavo_conformance.problems.case import Case, Examples, Measure
from octavo_conformance.reports.gaps import Gap, GapsError, read_gaps
from octavo_conformance.reports.report import COVERAGE, Report, Row, never_ran_row, write
from octavo_conformance.reports.table import never_ran, render, skips
from octavo_registry.cli.errors import BadInput
from octavo_registry.cli.files import check_writable

ROW_KEY = "octavo_row"


def part_of(item: pytest.Item) -> str:
    """The part of the suite that a test belongs to: its module's name without "test_"."""
    return item.path.stem.removeprefix("test_")


def test_id(item: pytest.Item) -> str:
    """`gemm::test_name[case]`: the same from every folder and on every machine."""
    return f"{part_of(item)}::{item.name}"


class Session:
    """Registered when `--octavo-backend` is given; the controller of an xdist run collects the rows."""

    def __init__(self, config: pytest.Config, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.is_full: bool = config.getoption("octavo_full")
        self.is_worker = hasattr(config, "workerinput")
        try:
            self.targets: list[Target] = find_targets(config.getoption("octavo_backend"))
            gaps = config.getoption("octavo_gaps")
            self.gaps: tuple[Gap, ...] = read_gaps(Path(gaps)) if gaps else ()
        except (UnknownBackend, GapsError) as error:
            raise pytest.UsageError(str(error)) from None
        self.reports = [Path(name) for name in config.getoption("octavo_report")]
        for path in self.reports:
            if path.suffix not in (".json", ".xml"):
                raise pytest.UsageError(f"--octavo-report {path}: a report ends in .json, or in .xml for JUnit")
            try:
                check_writable("--octavo-report", path, f"report{path.suffix or '.json'}")
            except BadInput as error:
                raise pytest.UsageError(str(error)) from None
        self.rows: dict[str, Row] = {}

    # Collection

    def pytest_report_header(self) -> list[str]:
        """The seed and the targets."""
        level = "full" if self.is_full else "quick (--octavo-full runs every combination)"
        tested = ", ".join(f"{target.id} {target.version}" for target in self.targets)
        return [f"octavo: {tested}; {level}; rerun these inputs with --octavo-seed {self.seed}"]

    @pytest.hookimpl(optionalhook=True)  # xdist's hook: pytest knows it only where xdist is installed
    def pytest_configure_node(self, node: Any) -> None:
        """xdist: pass the seed on to a worker."""
        node.workerinput[SEED_KEY] = self.seed

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per target and variant, or one per target."""
        if "case" in metafunc.fixturenames:
            marker = metafunc.definition.get_closest_marker("octavo_needs")
            if marker is None:
                raise pytest.UsageError(f"{metafunc.function.__qualname__} takes `case` and has no @needs(...)")
            need: Need = marker.args[0]
            cases = [Case(target, need, variant) for target in self.targets for variant in self._over(target, need)]
            metafunc.parametrize("case", cases, ids=[case.id for case in cases], indirect=True)
        elif "target" in metafunc.fixturenames:
            metafunc.parametrize("target", self.targets, ids=[target.id for target in self.targets], indirect=True)

    def _over(self, target: Target, need: Need) -> Sequence[Variant]:
        return rest(target, need.op, self.is_full) if need.rest else stand_ins(target, need, self.is_full)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Marks the gaps: `never` skips, the others are strict expected failures."""
        items[:] = [item for item in items if not _is_empty(item)]
        for item in items:
            facts = _facts(item)
            if facts:
                # A backend's and its framework's warnings are theirs, whatever the settings of this pytest run.
                item.add_marker(pytest.mark.filterwarnings("default"))
            for gap in self.gaps:
                if facts and gap.matches(test_id(item), facts):
                    if gap.kind == "never":
                        item.add_marker(pytest.mark.skip(reason=str(gap)))
                    else:
                        item.add_marker(pytest.mark.xfail(strict=True, reason=str(gap)))
                    break

    def pytest_collection_finish(self) -> None:
        """Takes what was imported, which stays to the end, out of the garbage collector's way."""
        gc.collect()
        gc.freeze()

    # Fixtures

    @pytest.fixture
    def target(self, request: pytest.FixtureRequest) -> Target:
        """The backend, framework and device under test."""
        target: Target = request.param
        return target

    @pytest.fixture
    def case(self, request: pytest.FixtureRequest) -> Case:
        """A declared case; skips with the registry's own reason where the card does not declare it."""
        case: Case = request.param
        reason = case.refusal()
        if reason is not None:
            pytest.skip(reason)
        return case

    @pytest.fixture
    def rng(self, request: pytest.FixtureRequest) -> np.random.Generator:
        """A generator that depends on the seed and the test, and on nothing else: not on the backend, not on order."""
        case = request.node.callspec.params.get("case") if hasattr(request.node, "callspec") else None
        name = f"{part_of(request.node)}::{request.node.originalname}::{case.variant.id if case else ''}"
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    @pytest.fixture
    def full(self) -> bool:
        """True where every combination was requested."""
        return self.is_full

    @pytest.fixture
    def examples(self, rng: np.random.Generator) -> Examples:
        """Runs a hypothesis test with the session's seed: 4 examples in quick runs, 40 in full ones."""

        def run(test: Callable[..., None]) -> None:
            settings = hypothesis.settings(
                max_examples=40 if self.is_full else 4,
                deadline=None,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            hypothesis.seed(int(rng.integers(2**32)))(settings(test))()

        return run

    @pytest.fixture
    def measure(self, request: pytest.FixtureRequest) -> Iterator[Measure]:
        """Records the largest value of each metric of this test."""
        metrics: dict[str, float] = {}

        def keep(name: str, value: float) -> None:
            metrics[name] = max(metrics.get(name, float("-inf")), float(value))

        yield keep
        request.node.user_properties += [(f"octavo_metric:{name}", value) for name, value in metrics.items()]

    # Rows

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Adds the row's identity, and the seed to what failed."""
        report = yield
        facts = _facts(item)
        if facts:
            identity = {"id": test_id(item), "part": part_of(item), **facts}
            report.user_properties = [*item.user_properties, (ROW_KEY, identity)]
            if report.failed:
                report.sections.append(("octavo", f"rerun with --octavo-seed {self.seed}"))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In the controller too: xdist brings the workers' reports, so rows are collected here."""
        properties = dict(report.user_properties)
        identity: Any = properties.get(ROW_KEY)
        if identity is None:
            return
        row = self.rows.setdefault(identity["id"], Row.begin(identity))
        row.add(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails a run in which something declared never ran, then writes the requested reports."""
        if self.is_worker:
            return
        if self.is_whole and not session.shouldstop and not session.shouldfail:
            self._add_uncovered()
            if any(row.part == COVERAGE for row in self.rows.values()) and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for path in self.reports:
            write(path, self.report())

    @property
    def is_whole(self) -> bool:
        """Whether every test of the suite was asked for: a selection says nothing of what it leaves out."""
        option = self.config.option
        selected = (option.keyword, option.markexpr, getattr(option, "deselect", None), getattr(option, "lf", False))
        return not any(selected) and not any("::" in str(argument) for argument in self.config.args)

    def _add_uncovered(self) -> None:
        """A failed row for each declared capability of which no test ran."""
        for target in self.targets:
            facts = {"backend": target.name, "framework": target.bridge.name, "device": target.device.kind}
            mine = [row for row in self.rows.values() if _is_about(row, facts)]
            for members, reason in uncovered(target, self.is_full, map(_ran, mine)):
                capability = {"op": members[0].op, "recipe": members[0].recipe, "dtype": members[0].dtype}
                row = never_ran_row(target, words(members), capability, reason)
                self.rows[row.id] = row

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The table and the paths of the reports."""
        if not self.is_worker and self.rows:
            width = terminalreporter._tw.fullwidth
            terminalreporter.section("octavo conformance")
            terminalreporter.write_line(render(self.report(), width))
            for line in never_ran(self.report()):
                terminalreporter.write_line(line, red=True)
            if not self.is_whole:
                terminalreporter.write_line("a selection ran: whether all that is declared was tried is not known")
            for target in self.targets:
                for kind in unknown_recipes(target):
                    terminalreporter.write_line(f"{target.name}: recipe {kind!r} is not one that the suite has")
            if self.config.getoption("octavo_skips"):
                for line in skips(self.report()):
                    terminalreporter.write_line(line)
            for path in self.reports:
                terminalreporter.write_line(f"report: {path}")

    def report(self) -> Report:
        """Everything known so far."""
        return Report.of(
            self.targets, self.seed, self.is_full, self.gaps, sorted(self.rows.values(), key=lambda row: row.id)
        )


def _is_empty(item: pytest.Item) -> bool:
    """True for the place that pytest keeps where a test has no cases: everything declared is in other tests."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return "case" in params and not isinstance(params["case"], Case)


def _is_about(row: Row, facts: dict[str, str]) -> bool:
    return {"backend": row.backend, **row.capability}.items() >= facts.items()


def _ran(row: Row) -> Ran:
    """What became of a row; a gap that its authors declare counts as tried."""
    fact = row.capability.get
    dtype = ANY if fact("op") == "dequantize" else fact("dtype", "")
    known = row.outcome != "skipped" or row.reason.startswith("never: ")
    return Ran(Declared(fact("op", ""), fact("recipe", ""), dtype), known, row.reason)


def _facts(item: pytest.Item) -> dict[str, str]:
    """Facts about this item that a gap may name; empty for tests that are not the suite's."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    case, target = params.get("case"), params.get("target")
    if isinstance(case, Case):
        return case.facts()
    if isinstance(target, Target):
        return {"backend": target.name, "framework": target.bridge.name, "device": target.device.kind}
    return {}
