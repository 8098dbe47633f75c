"""Stiff constructions do not come back into the sources and the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
import words


@pytest.mark.parametrize("rule", words.offenders())
def test_the_words_of_the_house(rule: str) -> None:
    """A newcomer reads names and sentences of plain English; `python tests/words.py` lists all that are not."""
    places = [place for by_owner in words.offenders()[rule].values() for place in by_owner]
    if places:
        pytest.fail(f"{rule}; {len(places)} places:\n" + "\n".join(places), pytrace=False)


@pytest.mark.parametrize(
    ("text", "is_stiff"),
    [
        ("one scale a row", True),
        ("quantized once a step.", True),
        ("stored 4 bytes a group and operand", True),
        ("two a byte", True),
        ("a scale a row", True),
        ("one size a group", True),
        ("one row a choice", True),
        ("once a process", True),
        ("two bytes an element", True),
        ("int32, two a word", True),
        ("one scale per row", False),
        ("once a group is empty", False),
        ("two a step of the loop", False),
        ("the rows an expert got", False),
        ("gives one group a name", False),
    ],
)
def test_counts_are_per_group(text: str, is_stiff: bool) -> None:
    """The rule sees the construction and leaves sentences alone that only look like it."""
    assert bool(words.PER.search(text)) == is_stiff


@pytest.mark.parametrize(
    ("text", "is_stiff"),
    [
        ("format is no Format", True),
        ("which is no weight of a layer", True),
        ("these are no groups", True),
        ("there is no g++ here", False),
        ("it is no longer served", False),
        ("the bound is no greater than 2", False),
        ("x is not a tensor", False),
    ],
)
def test_negations_are_whole(text: str, is_stiff: bool) -> None:
    """'is no X' is seen in messages; comparisons and 'there is no' are plain English."""
    assert bool(words.NEGATED.search(text)) == is_stiff


def test_messages_are_found(tmp_path: Path) -> None:
    """Every literal of a raise counts, also one inside an f-string; other strings and comments do not."""
    python = 'x = "is no a"  # is no b\nraise ValueError(\n    f"{x} is no c; "\n    "give d"\n)\n'
    file = tmp_path / "a.py"
    file.write_text(python)
    assert "".join(text for _, text in words._messages(file, python)) == " is no c; give d"
    cpp = '// is no a\nfail("x is no b");\n'
    assert list(words._messages(Path("a.cpp"), cpp)) == [(2, '"x is no b"')]


def test_the_command_lists_them_by_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status says whether any of the named packages has one."""
    monkeypatch.setattr(words, "offenders", lambda: {"rule": {"octavo-core": ["a.py:1 ...once a step..."]}})
    assert words.main([]) == 1
    assert words.main(["octavo-torch"]) == 0
    assert "  octavo-core: 1\n    a.py:1 ...once a step...\n" in capsys.readouterr().out
