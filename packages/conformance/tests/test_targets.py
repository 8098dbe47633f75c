"""Which frameworks and devices a backend is tested on, and what is said where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from octavo import OctavoError
from octavo_conformance.cards import targets
from octavo_registry.contract.cards import BackendCard, Capability


def _install(monkeypatch: pytest.MonkeyPatch, *served: tuple[str, str]) -> None:
    """The backend "acme" with these pairs of framework and device, where numpy is here, on a CPU, and jax broken."""
    what: dict[str, Any] = {"ops": {"fprop"}, "recipes": {"row"}}
    rows = [Capability(**what, framework=name, device=kind) for name, kind in served]
    card = BackendCard(name="acme", api_level=5, capabilities=tuple(rows))
    record = SimpleNamespace(name="acme", card=card, verdict=None, distribution="acme", version="1")
    numpy = SimpleNamespace(name="numpy", devices=lambda: [SimpleNamespace(kind="cpu")])

    def framework(name: str) -> Any:
        if name != "numpy":
            raise OctavoError(f"framework: {name} is absent or broken")
        return numpy

    monkeypatch.setattr(targets, "backends", lambda: [record])
    monkeypatch.setattr(targets, "framework", framework)
    installed = [SimpleNamespace(name="numpy"), SimpleNamespace(name="jax")]
    monkeypatch.setattr(targets, "framework_records", lambda: installed)


def test_a_framework_that_is_not_installed_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend for two frameworks is tested on a machine that has one of them."""
    _install(monkeypatch, ("numpy", "cpu"), ("torch", "cpu"))
    assert [target.id for target in targets.find_targets(["acme"])] == ["acme-numpy-cpu"]


@pytest.mark.parametrize(
    ("served", "reason"),
    [
        (("torch", "cpu"), "backend 'acme' cannot be tested here: framework: torch is absent or broken"),
        (("numpy", "gpu"), "backend 'acme' cannot be tested here: it serves numpy on gpu, and numpy sees cpu here"),
    ],
)
def test_nothing_to_test_on_is_said(monkeypatch: pytest.MonkeyPatch, served: tuple[str, str], reason: str) -> None:
    """With what is here, so that a misspelt device shows; never a traceback."""
    _install(monkeypatch, served)
    with pytest.raises(targets.UnknownBackend) as caught:
        targets.find_targets(["acme"])
    assert str(caught.value) == reason


def test_a_framework_that_is_broken_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a card would go untested without a word."""
    _install(monkeypatch, ("numpy", "cpu"), ("jax", "cpu"))
    with pytest.raises(targets.UnknownBackend, match="jax is absent or broken"):
        targets.find_targets(["acme"])
