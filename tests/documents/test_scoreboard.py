"""The scoreboard: made from records, with commands that there are, and stale where the sources have moved on."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from test_noxfile import constant, sessions
from workspace import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import scoreboard_rows
from scoreboard_rows import NOT_MEASURED, Row, commits_since, faults_markdown, filled, markdown, rows

ROWS = rows()
SESSIONS = set(sessions())


def _text(path: str) -> str:
    file = ROOT / path
    assert file.is_file(), f"{path} is not there"
    return file.read_text()


def _exists(command: str) -> None:
    """AssertionError where `command` runs something that this repository does not have."""
    program, *arguments = shlex.split(command)
    if program == "nox":
        name, _, package = arguments[1].rstrip(")").partition("(")
        assert name in SESSIONS
        assert not package or package in constant("BACKENDS") or package in constant("DIRECTORIES")
    elif program == "compute-sanitizer":
        assert arguments[1] in constant("SANITIZERS")
        _text(arguments[3])
    elif program == "pytest":
        chosen = arguments[2].split(" or ") if arguments[1:2] == ["-k"] else [""]
        names = re.findall(r"^def (test_\w+)", _text(arguments[0]), flags=re.MULTILINE)
        assert all(any(part in name for name in names) for part in chosen)
    elif arguments[:1] == ["-m"]:
        module = arguments[1].replace(".", "/")
        assert list(ROOT.glob(f"packages/*/src/{module}.py")), f"{module} is not there"
    elif program == "python":
        measures = re.search(r"^MEASURES = (\(.*\))$", _text(f"{arguments[0]}/__main__.py"), flags=re.MULTILINE)
        assert measures is not None
        assert arguments[1] in ast.literal_eval(measures[1])
        _text(f"{arguments[0]}/{arguments[1]}.py")
    else:
        assert (program, arguments[0]) == ("octavo", "bench")
        assert (ROOT / "packages/bench/src/octavo_bench" / arguments[1]).is_dir()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.claim)
def test_a_row_can_be_repeated(row: Row) -> None:
    """Its command is there, its sources are, and what it shows comes from a record or is called not measured."""
    _exists(row.command)
    for path in row.paths:
        assert list(ROOT.glob(path)), f"{path} is not there"
    if row.record is None:
        assert (row.result, row.date, row.commit) == (NOT_MEASURED, "", "")
    else:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date)
        assert row.result
        assert "{" not in row.result


def test_a_record_that_is_named_is_there() -> None:
    """A record that was renamed or deleted would turn a result that somebody measured into "not measured"."""
    for entry in tomllib.loads((ROOT / "docs" / "scoreboard.toml").read_text())["row"]:
        if "record" in entry:
            assert list((ROOT / "benchmarks" / "results").glob(entry["record"])), entry["claim"]


def test_the_page_has_every_row() -> None:
    """And a row for each tool of compute-sanitizer, and for each fault that was seen elsewhere."""
    page = markdown()
    for row in ROWS:
        assert row.claim in page
        assert f"`{row.command}`" in page
    for tool in constant("SANITIZERS"):
        assert f"compute-sanitizer, {tool}" in page
    text = _text("docs/scoreboard.md")
    assert "{scoreboard}" in text
    assert "{faults-and-tests}" in text
    lines = faults_markdown().splitlines()[2:]
    assert [int(line.split("|")[1]) for line in lines] == list(range(1, 66))
    for line in lines:
        assert any(cell.strip() for cell in line.split("|")[3:6]), f"neither a test nor a reason: {line}"


def test_the_newest_record_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its date, whatever the name says of the machine: "h200" comes behind "h100" in order."""
    monkeypatch.setattr(scoreboard_rows, "RESULTS", tmp_path)
    for name, date in (("gpu-h100-b", "2026-01-03"), ("gpu-h200-a", "2026-01-02"), ("other", "2026-01-04")):
        (tmp_path / f"{name}.json").write_text(f'{{"date": "{date}", "commit": "0123", "errors": 0}}')
    entry = {"section": "a", "claim": "b", "command": "c", "paths": ["src"], "result": "{errors} errors"}
    found = scoreboard_rows._row({**entry, "record": "gpu-h*.json"})
    assert (found.record, found.date, found.result) == (tmp_path / "gpu-h100-b.json", "2026-01-03", "0 errors")
    assert scoreboard_rows._row(entry).record is None


def test_results_are_filled_in_from_records() -> None:
    """A key that a record does not have is an error of the build, and no empty cell."""
    record = {"a": {"b": [1.5, {"x": 2, "y": []}]}, "count": 12345, "good": True}
    assert filled("{a/b/0:.3f} {a/b/1} {count} {good}", record) == "1.500 x 2, y none 12 345 yes"
    with pytest.raises(KeyError):
        filled("{a/missing}", record)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits of 2026-01-01 and 2026-01-03, of which the second changes src/a.py."""
    monkeypatch.setattr(scoreboard_rows, "ROOT", tmp_path)
    scoreboard_rows._git.cache_clear()
    (tmp_path / "src").mkdir()
    for day, file in (("01", "b.py"), ("03", "a.py")):
        (tmp_path / "src" / file).write_text(day)
        date = f"2026-01-{day}T12:00:00Z"
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "core.hooksPath=/dev/null")
        for command in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", day)):
            dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
            subprocess.run(("git", "-C", str(tmp_path), *command), check=True, env=dates)
    return tmp_path


@pytest.mark.parametrize(
    ("date", "path", "changes"),
    [
        ("2026-01-02", "src", 1),
        ("2026-01-03", "src/a.py", 1),  # on the day of the record: nobody knows which came first
        ("2026-01-04", "src", 0),
        ("2026-01-02", "src/b.py", 0),
    ],
)
def test_a_record_is_stale_where_its_sources_changed_later(history: Path, date: str, path: str, changes: int) -> None:
    """By its day, where the record names no commit of this history."""
    assert commits_since("", date, [path]) == changes
    assert commits_since("0123456789", date, [path]) == changes


def test_a_record_with_a_commit_is_compared_with_it(history: Path) -> None:
    """Whatever the days say; without a history nothing is claimed."""
    first = subprocess.run(("git", "-C", str(history), "rev-list", "--max-parents=0", "HEAD"), capture_output=True,
                           check=True, text=True).stdout.strip()  # fmt: skip
    assert commits_since(first, "2026-01-09", ["src"]) == 1
    assert commits_since("HEAD", "2026-01-01", ["src"]) == 0
    scoreboard_rows._git.cache_clear()
    (history / ".git").rename(history / "gone")
    assert commits_since(first, "2026-01-09", ["src"]) is None
