"""A refusal never gets vaguer: whatever it said of what was given and what is needed, it says still."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from refusals import CASES, sentence
from workspace import ROOT

GOLDEN = json.loads((ROOT / "tests" / "golden" / "refusals.json").read_text())
"""The sentences of commit f220489, before its packages were rebuilt."""


def values(text: str) -> Counter[str]:
    """Shapes, numbers, dtypes and quoted names: what a caller compares with the own call."""
    return Counter(
        re.findall(r"\[[^\]]*\]|'[^']*'|\b(?:bfloat16|float16|float32|float64|int8)\b|-?\d+(?:\.\d+)?", text)
    )


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_what_it_named(name: str) -> None:
    """Words may change, the error's type and no value; a sentence with a way on keeps one."""
    before, now = GOLDEN[name], sentence(CASES[name])
    assert now.split(":")[0] == before.split(":")[0]
    assert not values(before) - values(now), f"before: {before}\nnow: {now}"
    assert ("; " in before) <= ("; " in now), f"before: {before}\nnow: {now}"


def test_no_sentence_lost_its_case() -> None:
    """A call that is refused no longer, or a case that was renamed, would be compared with nothing."""
    assert set(GOLDEN) == set(CASES)


def test_a_vaguer_sentence_is_seen() -> None:
    """The comparison can fail: a sentence without its values has lost them."""
    assert values("x is [8, 15]; give [8, 16]") - values("x has a wrong shape; give another")
