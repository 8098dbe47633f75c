"""How long what was planned holds."""

from __future__ import annotations

import pytest

from octavo_registry import prefer
from octavo_registry.dispatch import preference
from octavo_torch.dispatch import memo
from octavo_torch.dispatch.memo import Kept


def test_a_value_is_kept_for_its_owner_and_the_registrys_state() -> None:
    """A value is made anew for another owner with a dead one's id, another preference, and plugins that came later."""
    kept: Kept[object] = Kept()
    first, second = object(), object()
    one = kept.get("key", object, first)
    assert kept.get("key", object, first) is one
    assert kept.get("key", object, second) is not one
    two = kept.get("key", object, first)
    with prefer("torch-reference"):
        assert kept.get("key", object, first) is not two
    three = kept.get("key", object, first)
    preference.renew_tokens()
    assert kept.get("key", object, first) is not three


def test_what_changes_while_a_value_is_made_makes_it_stale() -> None:
    """The state is that of before planning: plans of before and after a change are never mixed for good."""
    kept: Kept[object] = Kept()
    made = [object(), object()]

    def planned() -> object:
        preference.renew_tokens()
        return made[0]

    assert kept.get("key", planned) is made[0]
    assert kept.get("key", lambda: made[1]) is made[1]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of ever new shapes does not grow without end (faults.md 52)."""
    monkeypatch.setattr(memo, "_MOST", 3)
    kept: Kept[int] = Kept()
    for key in range(20):
        assert kept.get(key, lambda key=key: key) == key  # type: ignore[misc]
        assert len(kept._known) <= 3
