"""The contract with third parties changes only with its level."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo_registry import API_LEVEL, Capability, HookSpecs
from octavo_registry.api_level import contract, document

GOLDEN = Path(__file__).parents[2] / "api-levels"


def test_the_contract_is_that_of_its_level() -> None:
    """architecture.md, Versions: where this fails, raise API_LEVEL and write the new level's file beside the old."""
    golden = json.loads((GOLDEN / f"{API_LEVEL}.json").read_text())
    assert contract() == golden, (
        f"the contract is not that of level {API_LEVEL}: raise octavo_registry.contract.hookspecs.API_LEVEL and write "
        f"`python -m octavo_registry.api_level` to api-levels/{API_LEVEL + 1}.json"
    )


def test_every_level_has_its_file() -> None:
    """Files of older levels stay, so that what was promised can be read."""
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(f"{n}.json" for n in range(1, API_LEVEL + 1))


@pytest.mark.parametrize("change", ["hook", "argument", "field"])
def test_a_change_without_a_bump_is_seen(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """The document holds hook names, their arguments, and the fields of what crosses the border."""
    before = document()
    if change == "hook":
        monkeypatch.setattr(HookSpecs, "octavo_new", lambda self: None, raising=False)
    elif change == "argument":
        monkeypatch.setattr(HookSpecs, "octavo_load", lambda self, name, device: None)
    else:

        def schema(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return Capability.model_json_schema()

        monkeypatch.setattr("octavo_registry.api_level.BackendCard.model_json_schema", schema)
    assert document() != before


def test_the_module_prints_the_document() -> None:
    """Stable under hash randomization: sets stand in alphabetical order."""
    command = [sys.executable, "-m", "octavo_registry.api_level"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}).stdout
    assert printed == document() == (GOLDEN / f"{API_LEVEL}.json").read_text()
