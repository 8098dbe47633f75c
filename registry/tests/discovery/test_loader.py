"""The guarded loader: whatever a plugin does wrong is reported, and the others live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo import NoBackendError
from octavo_registry import PluginRecord, Registry, hookimpl
from octavo_registry.discovery.entry_points import Published
from octavo_registry.discovery.loader import HOOKS

Discovered = Callable[[], Registry]


def only_broken(registry: Registry, healthy: int = 1) -> PluginRecord:
    """The one broken plugin, beside `healthy` that work."""
    records = registry.plugins()
    broken = [record for record in records if record.status == "broken"]
    assert len(broken) == 1
    assert len(records) - len(broken) == healthy
    return broken[0]


def group(**points: str) -> dict[str, dict[str, str]]:
    return {"octavo.backends": points}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import libacme_that_is_not_there", "ModuleNotFoundError: No module named 'libacme_that_is_not_there'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Panic(BaseException): pass\nraise Panic('rust')", "Panic: rust"),
        ("def f(:", "SyntaxError"),
        ("raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
        (
            "class Mute(Exception):\n    def __str__(self):\n        raise SystemExit(3)\nraise Mute",
            "Mute: (its text cannot be shown)",
        ),
    ],
)
def test_a_plugin_that_fails_to_import_is_reported_and_hurts_nobody(
    install: Any, discovered: Discovered, source: Any, fakes: Any, module: str, reason: str
) -> None:
    """architecture.md, Dispatch 1: each plugin loads in its own guard; `sys.exit` at import is no exit of ours."""
    install("test-broken", {"oct_broken": module}, group(broken="oct_broken"), version="2.3")
    install("test-good", {"oct_good": source("good")}, group(good="oct_good"))
    registry = discovered()
    assert registry.plan(fakes.request()).backend == "good"
    record = only_broken(registry)
    assert (record.name, record.distribution, record.version) == ("broken", "test-broken", "2.3")
    assert reason in record.reason
    verdicts = {d.backend: d for d in registry.explain(fakes.request())}
    assert verdicts["broken"].verdict == "broken"
    assert verdicts["broken"].reason == record.reason


def test_a_keyboard_interrupt_during_an_import_is_the_users(install: Any, discovered: Discovered) -> None:
    """Ctrl-C while a plugin is imported ends the command; it is no fault of the plugin."""
    install("test-slow", {"oct_slow": "raise KeyboardInterrupt"}, group(slow="oct_slow"))
    with pytest.raises(KeyboardInterrupt):
        discovered().plugins()


@pytest.mark.parametrize("at", ["find", "load"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_discovery_that_was_interrupted_begins_again(error: type[BaseException], at: str, fakes: Any) -> None:
    """Discovery imports frameworks, so a notebook's user interrupts it easily; the registry may not stay empty."""
    errors = [error]

    class Point:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> Any:
            if at == "load" and errors and self.name == "b":
                raise errors.pop()
            return fakes.plugin(self.name)

    def find() -> list[Published]:
        if at == "find" and errors:
            raise errors.pop()
        points: list[Any] = [Point("a"), Point("b")]
        return [Published(point.name, "good", "test-good", "1.0", point=point) for point in points]

    registry = Registry(find=find)
    with pytest.raises(error):
        registry.plugins()
    assert [record.name for record in registry.plugins()] == ["a", "b"]
    assert registry.plan(fakes.request()).backend == "a"


def test_a_misspelt_hook_is_reported_and_the_plugin_is_not_half_registered(
    install: Any, discovered: Discovered, source: Any, fakes: Any
) -> None:
    """architecture.md, Dispatch 1: pluggy leaves such a plugin half registered; here none of its hooks is called."""
    spy = "\nCALLS = []\ndef octavo_plan_maed(plan):\n    pass\ndef octavo_plan_made(plan):\n    CALLS.append(plan)\n"
    install("test-typo", {"oct_typo": source("typo") + spy}, group(typo="oct_typo"))
    install("test-good", {"oct_good": source("good")}, group(good="oct_good"))
    registry = discovered()
    record = only_broken(registry)
    assert "octavo_plan_maed is not a hook" in record.reason
    assert "did you mean octavo_plan_made?" in record.reason
    assert registry.plan(fakes.request()).backend == "good"
    import oct_typo  # type: ignore[import-not-found]

    assert oct_typo.CALLS == []
    assert "typo" not in [r.name for r in registry.backends() if r.card is not None]


def test_a_hook_with_an_argument_that_there_is_not_is_reported(fakes: Any) -> None:
    """pluggy checks arguments; the plugin is broken whole, with the argument's name in the reason."""

    class Wrong:
        def octavo_load(self, nom: str) -> None: ...

    registry = Registry.from_plugins({"wrong": Wrong(), "good": fakes.plugin()})
    assert "nom" in only_broken(registry).reason


def test_a_wrapper_is_reported(fakes: Any) -> None:
    """Wrappers would run around other plugins' hooks, where no guard can hold them."""

    class Wraps:
        @hookimpl(wrapper=True)
        def octavo_load(self, name: str) -> Any:
            return (yield)

    registry = Registry.from_plugins({"wraps": Wraps(), "good": fakes.plugin()})
    assert "octavo_load is a wrapper" in only_broken(registry).reason


def test_plain_functions_and_hookimpl_both_declare(fakes: Any) -> None:
    """hookspecs.py: a plugin writes plain functions; the marker is for options."""

    class Marked(fakes.Plugin):  # type: ignore[misc]
        @hookimpl(specname="octavo_backends")
        def cards(self) -> Any:
            return [self.card]

        octavo_backends = None

    registry = fakes.registry(fakes.plugin("plain"), Marked(fakes.card("marked"), fakes.Backend()))
    assert [record.name for record in registry.backends()] == ["marked", "plain"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 3", "octavo_backends gave a int; it returns a list of BackendCard objects"),
        ("[CARD]", "octavo_backends gave None; it returns a list of BackendCard objects"),
        ("return [{'name': 'x'}]", "octavo_backends gave a dict; it gives BackendCard objects"),
        ("return CARD", "octavo_backends gave one BackendCard by itself; return a tuple of it, such as (CARD,)"),
        ("return 1 / 0", "octavo_backends raised ZeroDivisionError: division by zero"),
        ("yield CARD; raise SystemExit", "octavo_backends raised SystemExit"),
        ("return [CARD, CARD]", "octavo_backends gave 'bad' twice"),
        ("return [CARD.model_copy(update={'needs': ('torch>>2',)})]", "needs 'torch>>2', which is not a requirement"),
    ],
)
def test_cards_that_are_none_break_the_plugin(
    install: Any, discovered: Discovered, source: Any, body: str, reason: str
) -> None:
    """A hook that raises, gives something else or gives a name twice is reported with what it gave."""
    extra = f"\ndef octavo_backends():\n    {body}\n"
    install("test-bad", {"oct_bad": source("bad", extra=extra)}, group(bad="oct_bad"))
    install("test-good", {"oct_good": source("good")}, group(good="oct_good"))
    assert reason in only_broken(discovered()).reason


def test_an_entry_point_without_hooks_is_broken(install: Any, discovered: Discovered, source: Any) -> None:
    """One that names the card, and not the module around it, would declare nothing and be called fine."""
    install("test-bad", {"oct_bad": source("bad")}, group(bad="oct_bad:CARD"))
    install("test-good", {"oct_good": source("good")}, group(good="oct_good"))
    reason = only_broken(discovered()).reason
    assert reason.startswith("oct_bad:CARD has none of the hooks octavo_backends, ")
    assert reason.endswith("; name the module that defines them")


def test_a_card_that_does_not_validate_names_the_field(install: Any, discovered: Discovered, source: Any) -> None:
    """The card is made while the module is imported; the record names field, value and need on one line."""
    install("test-bad", {"oct_bad": source("Bad Name")}, group(bad="oct_bad"))
    reason = only_broken(discovered(), healthy=0).reason
    assert reason.startswith("RecipeError: BackendCard.name: got 'Bad Name'")
    assert "\n" not in reason


def test_cards_without_a_loader_are_reported(install: Any, discovered: Discovered, source: Any) -> None:
    """A backend that nobody loads would be refused at each request; the plugin says so once instead."""
    install("test-bad", {"oct_bad": source("bad", extra="\ndel octavo_load\n")}, group(bad="oct_bad"))
    assert "there is no octavo_load" in only_broken(discovered(), healthy=0).reason


def test_two_distributions_with_one_plugin_name(install: Any, discovered: Discovered, source: Any) -> None:
    """pluggy skips the second in silence; here both are named, neither is imported, and others live."""
    for dist in ("test-one", "test-two"):
        module = dist.replace("-", "_")
        install(dist, {module: "raise AssertionError('imported')"}, group(same=module), version="0.4")
    install("test-good", {"oct_good": source("good")}, group(good="oct_good"))
    records = discovered().plugins()
    same = [record for record in records if record.name == "same"]
    assert [record.status for record in same] == ["broken", "broken"]
    for record in same:
        assert "test-one 0.4" in record.reason
        assert "test-two 0.4" in record.reason
    assert [record.status for record in records if record.name == "good"] == ["ok"]


def test_two_backends_with_one_name(install: Any, discovered: Discovered, source: Any, fakes: Any) -> None:
    """Which of the two was meant cannot be told, so neither runs, and each verdict names both distributions."""
    install("test-one", {"oct_one": source("same")}, group(one="oct_one"))
    install("test-two", {"oct_two": source("same")}, group(two="oct_two"))
    install("test-good", {"oct_good": source("good")}, group(good="oct_good"))
    registry = discovered()
    assert registry.plan(fakes.request()).backend == "good"
    verdicts = [d for d in registry.explain(fakes.request()) if d.backend == "same"]
    assert [d.verdict for d in verdicts] == ["broken", "broken"]
    for decision in verdicts:
        assert "test-one" in decision.reason
        assert "test-two" in decision.reason
    with pytest.raises(NoBackendError, match="'same' is claimed by"):
        registry.plan(fakes.request(), backend="same")


@pytest.mark.parametrize("installed_first", [True, False])
def test_a_built_in_name_is_not_shadowed(
    install: Any, discovered: Discovered, source: Any, fakes: Any, installed_first: bool
) -> None:
    """faults.md, "plugin loading": torch-native belongs to octavo-torch-native, whether or not that is installed."""
    name = "test-aaa" if installed_first else "test-zzz"
    install(name, {"oct_evil": source("torch-native")}, group(evil="oct_evil"))
    install("test-plugin", {"oct_evil2": "raise AssertionError"}, {"octavo.backends": {"torch-reference": "oct_evil2"}})
    registry = discovered()
    assert "belongs to octavo-torch;" in only_broken(registry).reason
    with pytest.raises(NoBackendError) as caught:
        registry.plan(fakes.request())
    verdict = next(d for d in caught.value.decisions if d.backend == "torch-native")
    assert verdict.verdict == "broken"
    assert "belongs to octavo-torch-native" in verdict.reason
    assert name in verdict.reason


def test_one_module_behind_two_entry_points_registers_once(install: Any, discovered: Discovered, source: Any) -> None:
    """A template that was copied without renaming its module must not register twice."""
    install("test-one", {"oct_one": source("one")}, group(first="oct_one"))
    install("test-two", {}, group(second="oct_one"))
    assert "is the plugin first of test-one already" in only_broken(discovered()).reason


def test_a_damaged_entry_point_file_hurts_nobody(install: Any, discovered: Discovered, source: Any, fakes: Any) -> None:
    """importlib.metadata.entry_points raises for every distribution when the file of one has a bad line."""
    install("test-damaged", {}, "[octavo.backends]\nno equals sign here\n")
    install("test-good", {"oct_good": source("good")}, group(good="oct_good"))
    registry = discovered()
    assert registry.plan(fakes.request()).backend == "good"
    assert "entry_points.txt is damaged" in only_broken(registry).reason


def test_an_entry_point_that_names_no_module_is_said(install: Any, discovered: Discovered, source: Any) -> None:
    """A distribution's name with its hyphen, say, for that of its module."""
    install("test-acme", {}, group(acme="acme-octavo:plugin"))
    install("test-good", {"oct_good": source("good")}, group(good="oct_good"))
    assert only_broken(discovered()).reason == (
        "its entry point is 'acme-octavo:plugin'; name a module, such as acme_plugin, or what is in one, such as "
        "acme_plugin:f"
    )


def test_records_know_what_a_plugin_brings(install: Any, discovered: Discovered, source: Any) -> None:
    """`octavo doctor` shows name, distribution, version, module and backends of each plugin."""
    install("test-good", {"oct_good": source("good")}, group(nice="oct_good"), version="3.1")
    (record,) = discovered().plugins()
    assert record == PluginRecord("nice", "test-good", "3.1", "oct_good", "ok", backends=("good",))
    assert record.origin == "test-good 3.1"


def test_the_loader_knows_every_hook() -> None:
    """Six hooks are the whole surface (architecture.md, Declaring a backend)."""
    assert set(HOOKS) == {
        "octavo_backends",
        "octavo_load",
        "octavo_recipes",
        "octavo_quantizers",
        "octavo_rank",
        "octavo_plan_made",
    }


def test_two_copies_of_one_distribution_are_one(install: Any, discovered: Discovered, source: Any) -> None:
    """A stale dist-info that an upgrade left behind is no rival of its successor."""
    install("test-good", {"oct_good": source("good")}, group(good="oct_good"), version="1.0")
    install("test-good", {}, group(good="oct_good"), version="0.9")
    (record,) = discovered().plugins()
    assert record.status == "ok"
