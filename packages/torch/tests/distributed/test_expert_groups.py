"""Process groups of experts: what is left of them, and calls in which they have nothing to do."""

from __future__ import annotations

import secrets

import pytest
from experts_work.groups import NOTHING, is_freed, without_tokens
from ranks import WORLD, Ranks


@pytest.mark.parametrize("route", ["collective", "peer"])
def test_a_group_is_freed_with_its_layers(route: str, ranks: Ranks) -> None:
    """What its static exchanges have agreed on does not keep it: its connections and threads end."""
    assert ranks(is_freed, route) == [True] * WORLD


@pytest.mark.parametrize("route", ["collective", "peer"])
def test_static_buffers_of_no_tokens(route: str, ranks: Ranks) -> None:
    """The last batch may have none, on every rank: an empty result, and gradients of zero."""
    assert ranks(without_tokens, route, secrets.randbits(24)) == [NOTHING] * WORLD
