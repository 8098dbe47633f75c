"""The table of faults seen elsewhere says for each row what covers it here."""

from __future__ import annotations

import re

import pytest

from octavo_conformance.faults import faults, markdown, numbers_in


def test_every_row_has_tests_or_a_reason() -> None:
    """Rows 1 to 65, each with tests of the suite or with the reason why there is none, never both."""
    assert [row.number for row in faults()] == list(range(1, 66))
    for row in faults():
        assert bool(row.tests) != bool(row.reason), f"row {row.number}: tests {row.tests}, reason {row.reason!r}"


def test_rows_that_a_cpu_can_show_are_covered() -> None:
    """Empty groups, tails, tile edges, repeats, seeds, sizes, scale kinds: the rows that need no GPU to be seen."""
    covered = {row.number for row in faults() if row.tests}
    wanted = {*range(1, 26), 30, 32, 34, *range(36, 42), 44, 46, 52, 53, *range(56, 60), *range(61, 66)} - {18, 23}
    assert wanted <= covered, f"no test names rows {sorted(wanted - covered)}"


def test_the_table_is_markdown() -> None:
    """A line a row, a test or a sentence in the last column."""
    lines = markdown().splitlines()
    assert len(lines) == 67
    assert all(re.fullmatch(r"\| \d+ \|.*\| .+ \|", line) for line in lines[2:])


@pytest.mark.parametrize(
    ("docstring", "rows"),
    [
        ("Tails (fault 8).", (8,)),
        ("Empty groups (faults 1, 3 and\n7: they are zero), and (fault 34).", (1, 3, 7, 34)),
        ("Offsets (faults.md 26 to 29, 61).", (26, 27, 28, 29, 61)),
        ("2 faults, 3 fault lines, default 4", ()),
    ],
)
def test_rows_that_a_docstring_names(docstring: str, rows: tuple[int, ...]) -> None:
    assert numbers_in(docstring) == rows
