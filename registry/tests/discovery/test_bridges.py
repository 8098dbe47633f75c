"""Front ends by the entry-point group octavo.frameworks: found without imports, loaded in a guard."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from octavo import OctavoError
from octavo_registry import framework, framework_names, framework_record, framework_records, frameworks
from octavo_registry.discovery import bridges, entry_points

GOOD = "class Bridge:\n    name = 'test-good'\nBRIDGE = Bridge()\n"


@pytest.fixture(autouse=True)
def _only_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Front ends that are installed beside the tests are left out, and none is remembered."""
    found = entry_points.published
    monkeypatch.setattr(bridges, "_records", {})
    monkeypatch.setattr(
        bridges, "published", lambda group: [e for e in found(group) if e.distribution.startswith("test-")]
    )


def publish(install: Any, distribution: str, name: str, source: str) -> str:
    module = distribution.replace("-", "_") + "_bridge"
    install(distribution, {module: source}, {"octavo.frameworks": {name: f"{module}:BRIDGE"}})
    return module


def test_a_front_end_is_loaded_when_it_is_asked_for(install: Any) -> None:
    """Names cost no import; the object is kept."""
    module = publish(install, "test-good", "good", GOOD)
    assert framework_names() == ("good",)
    assert module not in sys.modules
    bridge = framework("good")
    assert bridge.name == "test-good"
    assert framework("good") is bridge
    assert frameworks() == {"good": bridge}


def test_a_broken_front_end_is_reported_and_hurts_nobody(install: Any) -> None:
    """octavo-torch without torch: the record says what is missing, the other front end lives."""
    publish(install, "test-good", "good", GOOD)
    publish(install, "test-bad", "bad", "import a_framework_that_is_not_there")
    assert list(frameworks()) == ["good"]
    reasons = {record.name: record.reason for record in framework_records()}
    assert reasons == {"good": "", "bad": "ModuleNotFoundError: No module named 'a_framework_that_is_not_there'"}
    with pytest.raises(OctavoError, match="'bad' of test-bad does not load: ModuleNotFoundError"):
        framework("bad")


def test_an_absent_front_end_names_what_to_install(install: Any) -> None:
    """Octavo's own come with a command; otherwise the known ones are listed."""
    publish(install, "test-good", "good", GOOD)
    with pytest.raises(
        OctavoError,
        match=r"no front end for 'torch' is installed; in a clone of Octavo run: pip install .*\./packages/torch$",
    ):
        framework("torch")
    with pytest.raises(OctavoError, match="known front ends are good"):
        framework("tf")
    assert framework_record("tf") is None


def test_a_front_end_is_not_shadowed(install: Any) -> None:
    """ "torch" belongs to octavo-torch; two strangers with one name get neither."""
    module = publish(install, "test-evil", "torch", GOOD)
    with pytest.raises(OctavoError, match="belongs to octavo-torch"):
        framework("torch")
    assert module not in sys.modules
    publish(install, "test-one", "same", GOOD)
    publish(install, "test-two", "same", GOOD)
    with pytest.raises(OctavoError, match=r"'same' is claimed by test-one .* and test-two"):
        framework("same")
