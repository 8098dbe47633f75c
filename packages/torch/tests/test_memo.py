"""How long what was planned holds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import octavo_torch
from octavo import QuantizerSpec
from octavo_registry import prefer
from octavo_registry.dispatch import preference
from octavo_torch.memo import Bounded, Memo
from octavo_torch.quantizers.plans import quantizer_plan


def test_a_value_holds_for_its_owner_and_the_registrys_state() -> None:
    """It is computed again for another owner with a dead one's id, another preference, and plugins that came later."""
    memo: Memo[object] = Memo()
    first, second = object(), object()
    one = memo.get("key", object, first)
    assert memo.get("key", object, first) is one
    assert memo.get("key", object, second) is not one
    two = memo.get("key", object, first)
    with prefer("torch-reference"):
        assert memo.get("key", object, first) is not two
    three = memo.get("key", object, first)
    preference.renew_tokens()
    assert memo.get("key", object, first) is not three


def test_a_plan_is_of_the_matrices_that_it_was_asked_for() -> None:
    """A backend may refuse a number of rows, so a plan of others does not take the place of what it says."""
    spec = QuantizerSpec(scaling="mxfp8", format="e4m3")
    for rows in (32, 48):
        plan = quantizer_plan(spec, torch.empty(2, rows, 64), 64, 2, True, "torch-reference", ("plain", "plain"))
        assert plan.request.n == rows


def test_a_change_while_a_value_is_computed_makes_it_stale() -> None:
    """The state is that of before planning: plans of before and after a change are never mixed for good."""
    memo: Memo[object] = Memo()
    values = [object(), object()]

    def planned() -> object:
        preference.renew_tokens()
        return values[0]

    assert memo.get("key", planned) is values[0]
    assert memo.get("key", lambda: values[1]) is values[1]


def test_a_memo_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of ever new shapes does not grow without end (faults.md 52)."""
    monkeypatch.setattr(Bounded, "limit", 3)
    memo: Memo[int] = Memo()
    for key in range(20):
        assert memo.get(key, lambda key=key: key) == key  # type: ignore[misc]
        assert len(memo) <= 3


NOT_CACHES = {
    "compiler/operators.py:IMPLEMENTATIONS": "one entry per operator that a package defines",
    "compiler/status.py:_words": "one word per device, at an address that kernels know",
    "compiler/status.py:_disagreements": "one word per device, at an address that graphs know",
    "compiler/tracing.py:_registered": "one entry per class of recipes",
}
"""Module-level containers that begin empty and are bounded by what exists, not by what was called."""


def _containers(file: Path) -> list[str]:
    """Names of the module-level dictionaries, lists and sets that begin empty."""
    names = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = node.value
            empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
            called = isinstance(value, ast.Call) and not value.args and not value.keywords
            if empty or (called and ast.unparse(value.func) in ("dict", "list", "set", "defaultdict", "OrderedDict")):  # type: ignore[attr-defined]
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                names.append(ast.unparse(target))
    return names


def test_every_cache_of_the_package_is_bounded() -> None:
    """What a process remembers is a Memo, a Bounded dictionary or an lru_cache (faults.md 52)."""
    source = Path(octavo_torch.__file__).parent
    found = {f"{file.relative_to(source)}:{name}" for file in source.rglob("*.py") for name in _containers(file)}
    assert found == set(NOT_CACHES)
