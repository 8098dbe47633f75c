"""What a user is told to run for a package of Octavo's that is not installed."""

from __future__ import annotations

import pytest

from octavo_registry.discovery import install
from octavo_registry.discovery.install import how_to_install
from octavo_registry.discovery.needs import unmet


def test_the_command_has_what_is_missing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of a clone, all in one command, without what is there: an index has none of them."""
    here = {"octavo-core", "octavo-registry"}
    monkeypatch.setattr(install, "installed_version", lambda name: "0.2.0" if name in here else None)
    assert how_to_install("octavo-torch") == "in a clone of Octavo run: pip install ./packages/torch"
    fast = "in a clone of Octavo run: pip install ./native ./packages/torch ./packages/torch-native"
    assert how_to_install("octavo-torch-native") == fast
    here.add("octavo-torch")
    assert how_to_install("octavo-torch-native") == fast.replace(" ./packages/torch ", " ")
    assert how_to_install("acme-octavo") == "pip install acme-octavo"


def test_a_need_of_ours_names_its_folder() -> None:
    """Also where the installed one is too old."""
    assert str(unmet(["octavo-core>=99"])).endswith(
        "is installed; in a clone of Octavo run: pip install ./packages/core"
    )
