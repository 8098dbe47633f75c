"""What a card needs is read from metadata: versions are compared, nothing is imported."""

from __future__ import annotations

import platform
import sys
from typing import Any

import pytest

from octavo import NoBackendError
from octavo_registry import API_LEVEL
from octavo_registry.discovery.install import installed_version
from octavo_registry.discovery.needs import check_requirement, unmet
from octavo_registry.discovery.records import OLDEST_API_LEVEL, api_level_refusal


def test_a_need_that_is_too_old_names_both_versions(install: Any) -> None:
    """architecture.md: needs are checked by metadata; the sentence has what is needed and what is there."""
    install("test-dep", {"test_dep": "raise AssertionError('imported')"}, {}, version="2.9")
    assert unmet(["test-dep>=2.11"]) == "needs test-dep>=2.11, test-dep 2.9 is installed; pip install 'test-dep>=2.11'"
    assert "test_dep" not in sys.modules


def test_a_need_that_is_absent_says_so() -> None:
    """The way on is in the sentence."""
    assert unmet(["test-absent>=1"]) == "needs test-absent>=1, which is not installed; pip install 'test-absent>=1'"
    assert installed_version("test-absent") is None


@pytest.mark.parametrize("version", ["2.11", "2.11.0+cu130", "2.12.0.dev20260101", "3.0a0+gitabc"])
def test_nightlies_and_local_builds_count(install: Any, version: str) -> None:
    """torch's own wheels carry local versions, and its nightlies are pre-releases."""
    install("test-dep", {}, {}, version=version)
    assert unmet(["test-dep>=2.11"]) is None


def test_the_interpreter_is_named_where_it_is_what_lacks() -> None:
    """ "pip install" of something that has no version for this Python would send a user the wrong way."""
    here = platform.python_version()
    assert unmet(["python>=3.99", "test-absent>=1"]) == f"needs python>=3.99, this is Python {here}"
    assert unmet([f"python=={here}"]) is None


def test_markers_are_read(install: Any) -> None:
    """A need of another platform or Python is none here."""
    assert unmet(["test-absent>=1; python_version < '3'"]) is None
    assert unmet(["test-absent>=1; python_version > '3'"]) is not None


def test_a_version_that_is_none(install: Any) -> None:
    """Damaged metadata refuse the backend that needs them, and hurt nobody else."""
    install("test-dep", {}, {}, version="broken")
    assert unmet(["test-dep>=2"]) == (
        "needs test-dep>=2, and the version of test-dep is 'broken', which is none; reinstall it"
    )


def test_text_that_is_no_requirement() -> None:
    """The message quotes what was given."""
    with pytest.raises(ValueError, match=r"needs 'torch>>2', which is not a requirement"):
        check_requirement("torch>>2")


def test_a_plugin_without_what_it_needs_says_what(install: Any, discovered: Any) -> None:
    """Not "No module named": the requirement, and the command that installs it; of its own family's needs, too."""
    points = {"octavo.backends": {"acme": "oct_acme"}}
    install("test-acme", {"oct_acme": "import test_kernels"}, points, requires=["test-kernels>=2"])
    sentence = "needs test-kernels>=2, which is not installed; pip install 'test-kernels>=2'"
    (record,) = discovered().plugins()
    assert (record.status, record.reason) == ("broken", sentence)
    install("test-kernels", {"test_kernels": "import absent_runtime"}, {}, "2.1", requires=["absent-runtime>=1"])
    (record,) = discovered().plugins()
    assert record.reason == "needs absent-runtime>=1, which is not installed; pip install 'absent-runtime>=1'"


def test_needs_are_followed_in_the_family_alone(install: Any, discovered: Any) -> None:
    """What a package of somebody else needs is its own affair, and two of a family may need each other."""
    points = {"octavo.backends": {"acme": "oct_acme"}}
    install("test-acme", {"oct_acme": "import oct_misspelt"}, points, requires=["test-kernels", "other-library"])
    install("test-kernels", {}, {}, requires=["test-acme"])
    install("other-library", {}, {}, requires=["absent-runtime>=1"])
    assert "ModuleNotFoundError: No module named 'oct_misspelt'" in discovered().plugins()[0].reason


def test_an_import_that_fails_for_another_reason_keeps_its_error(install: Any, discovered: Any) -> None:
    """All that is declared is there, an extra's needs do not count, and a fault of the code is none of the imports."""
    points = {"octavo.backends": {"acme": "oct_acme"}}
    requires = ["packaging", "absent-runtime>=1; extra == 'more'"]
    install("test-acme", {"oct_acme": "import oct_misspelt"}, points, requires=requires)
    assert "ModuleNotFoundError: No module named 'oct_misspelt'" in discovered().plugins()[0].reason
    install("test-wrong", {"oct_wrong": "1 / 0"}, {"octavo.backends": {"wrong": "oct_wrong"}}, requires=["absent>=1"])
    assert "ZeroDivisionError" in discovered().plugins()[1].reason


def test_a_backend_that_loads_late_says_what_it_needs(install: Any, discovered: Any, source: Any, fakes: Any) -> None:
    """A card is read without its libraries; they are missed when the backend is asked."""
    late = source("acme").replace("def octavo_load(name):", "def octavo_load(name):\n    import test_kernels")
    install("test-acme", {"oct_acme": late}, {"octavo.backends": {"acme": "oct_acme"}}, requires=["test-kernels>=2"])
    (decision,) = discovered().explain(fakes.request())
    assert (decision.verdict, decision.reason) == (
        "broken",
        "needs test-kernels>=2, which is not installed; pip install 'test-kernels>=2'",
    )


def test_an_unmet_need_is_a_refusal_and_nothing_is_loaded(fakes: Any) -> None:
    """A refusal, not an ImportError: the backend's code is not reached."""
    plugin = fakes.plugin("a", needs=("test-absent>=1",))
    with pytest.raises(NoBackendError, match="which is not installed") as caught:
        fakes.registry(plugin).plan(fakes.request())
    assert caught.value.decisions[0].verdict == "refused"
    assert plugin.loads == 0


@pytest.mark.parametrize(
    ("level", "current", "refused"),
    [(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, False), (1, 3, True), (2, 3, False), (4, 3, True)],
)
def test_the_last_two_api_levels_are_honoured(
    fakes: Any, monkeypatch: pytest.MonkeyPatch, level: int, current: int, refused: bool
) -> None:
    """architecture.md, Versions: another level is a refusal with both numbers."""
    monkeypatch.setattr("octavo_registry.discovery.records.API_LEVEL", current)
    monkeypatch.setattr("octavo_registry.discovery.records.OLDEST_API_LEVEL", max(1, current - 1))
    reason = api_level_refusal(fakes.card(api_level=level), "test-acme")
    assert (reason is not None) == refused
    if reason is not None:
        assert f"API level {level}" in reason
        assert str(current) in reason
        assert ("upgrade octavo-registry" if level > current else "upgrade test-acme") in reason


def test_a_foreign_api_level_is_a_refusal_and_others_live(
    install: Any, discovered: Any, source: Any, fakes: Any
) -> None:
    """A plugin of tomorrow is refused, not broken, and is not loaded."""
    future = "\ndef octavo_load(name):\n    raise AssertionError('loaded')\n"
    points = {"octavo.backends": {"future": "oct_future"}}
    install("test-future", {"oct_future": source("future", api_level=7, extra=future)}, points)
    install("test-good", {"oct_good": source("good")}, {"octavo.backends": {"good": "oct_good"}})
    plan = discovered().plan(fakes.request())
    assert plan.backend == "good"
    verdict = next(d for d in plan.decisions if d.backend == "future")
    assert verdict.verdict == "refused"
    assert f"API level 7, this octavo-registry honours {OLDEST_API_LEVEL} and {API_LEVEL}" in verdict.reason
    assert OLDEST_API_LEVEL == API_LEVEL - 1
