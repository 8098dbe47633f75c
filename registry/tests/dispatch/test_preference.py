"""Preferences: argument > prefer(...) > OCTAVO_BACKEND > none, closed unless "*"; and the state token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import octavo
from octavo import NoBackendError
from octavo_registry import Registry, UnknownBackendError, current_preference, mirror_preference, prefer, state_token
from octavo_registry.dispatch import preference


@pytest.fixture
def three(fakes: Any) -> Registry:
    """Backends a, b and c with priorities 30, 20 and 10."""
    made: Registry = fakes.registry(
        fakes.plugin("a", priority=30), fakes.plugin("b", priority=20), fakes.plugin("c", priority=10)
    )
    return made


def test_the_innermost_voice_wins(three: Registry, fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """architecture.md, Dispatch 2: argument > prefer > OCTAVO_BACKEND > none."""
    monkeypatch.setenv("OCTAVO_BACKEND", "b")
    assert three.plan(fakes.request()).backend == "b"
    with prefer("c"):
        assert three.plan(fakes.request()).backend == "c"
        with prefer("a"):
            assert three.plan(fakes.request()).backend == "a"
            assert three.plan(fakes.request(), backend="b").backend == "b"
            assert three.plan(fakes.request(), backend=["c", "a"]).backend == "c"
        assert three.plan(fakes.request()).backend == "c"
    assert three.plan(fakes.request()).backend == "b"


def test_the_environment_is_read_once(three: Registry, fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preference is the process's: a variable that changes later changes nothing half-way."""
    assert three.plan(fakes.request()).backend == "a"
    monkeypatch.setenv("OCTAVO_BACKEND", "b")
    assert three.plan(fakes.request()).backend == "a"


def test_a_refusal_names_the_variable_that_closed_the_list(
    three: Registry, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set in a shell long ago, it is in no line of the program that stops."""
    monkeypatch.setenv("OCTAVO_BACKEND", "b")
    reasons = {decision.backend: decision.reason for decision in three.explain(fakes.request())}
    assert reasons["a"] == "the preference is closed and names b, as OCTAVO_BACKEND says; name a or add '*'"
    with prefer("c"):
        reasons = {decision.backend: decision.reason for decision in three.explain(fakes.request())}
    assert reasons["a"] == "the preference is closed and names c; name a or add '*'"


def test_a_list_is_closed_and_the_star_opens_it(three: Registry, fakes: Any) -> None:
    """contract.md, promise 4: a preference is a closed list; each backend outside it says so."""
    mxfp8_only = fakes.plugin("d", rows=[fakes.row(recipes={"mxfp8"})])
    three.register(mxfp8_only, "fourth")
    with prefer("d"):
        assert three.plan(fakes.request()).backend == "d"
        high_precision = fakes.request(recipe=octavo.HighPrecision())
        with pytest.raises(NoBackendError) as caught:
            three.plan(high_precision)
    reasons = {d.backend: d.reason for d in caught.value.decisions}
    assert "the preference is closed and names d; name a or add '*'" in reasons["a"]
    assert "the recipe is high_precision" in reasons["d"]
    with prefer("c", "*"):
        decisions = three.explain(fakes.request())
    assert [d.backend for d in decisions] == ["c", "a", "b", "d"]
    with prefer("*", "a"):
        assert [d.backend for d in three.explain(fakes.request())] == ["b", "c", "d", "a"]


@pytest.mark.parametrize(
    "text",
    ["; rm -rf /", "../evil", "A", "$(id)", "a b", "a,,b", "a\nb", "torch-*", "*a", "", "-x", "é", "a" * 65],
)
def test_text_that_is_no_name_is_refused(
    three: Registry, fakes: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """faults.md, "env-var injection": only [a-z0-9._-] and "*"; the error quotes what was given and where."""
    with pytest.raises(UnknownBackendError, match="prefer: got"), prefer(text):
        pass
    with pytest.raises(UnknownBackendError, match="backend: got"):
        three.plan(fakes.request(), backend=text)
    if text.strip():
        monkeypatch.setenv("OCTAVO_BACKEND", text)
        for _ in range(2):
            with pytest.raises(UnknownBackendError, match="OCTAVO_BACKEND: "):
                three.plan(fakes.request())


@pytest.mark.parametrize("given", [5, True, b"a", object()])
def test_what_holds_no_names_is_quoted(three: Registry, fakes: Any, given: Any) -> None:
    """Instead of Python's word for what cannot be iterated over, or the number of the first byte."""
    for ask in (three.plan, three.explain, three.plan_layer):
        with pytest.raises(UnknownBackendError) as caught:
            ask(fakes.request(), backend=given)
        assert str(caught.value) == f"backend: got {given!r}; give a name, or several in order of preference"


def test_a_name_that_is_not_installed_lists_those_that_are(
    three: Registry, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typing error must not look like a refusal; Octavo's own names come with the install command."""
    with pytest.raises(UnknownBackendError, match="backend: there is no backend 'd'; known names are a, b, c"):
        three.plan(fakes.request(), backend=["a", "d"])
    with pytest.raises(ValueError, match=r"'torch-native' is not installed; .*: pip install .*/packages/torch-native$"):
        three.plan(fakes.request(), backend="torch-native")
    with prefer("typo"), pytest.raises(NoBackendError, match="prefer: there is no backend 'typo'"):
        three.explain(fakes.request())
    monkeypatch.setenv("OCTAVO_BACKEND", " a , typo")
    with pytest.raises(UnknownBackendError, match="OCTAVO_BACKEND: there is no backend 'typo'"):
        three.plan(fakes.request())


def test_a_module_asks_whether_anybody_has_a_name(three: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's error, without a plan; not for Octavo's own names, which another machine may have installed."""
    monkeypatch.setenv("OCTAVO_BACKEND", "typo")
    for known in (None, "a", ["a", "*"], "torch-native", ["torch-native", "a"]):
        three.check_backend(known)
    for unknown in ("torch-nativ", ["torch-native", "torch-nativ"], ["a", "torch-nativ", "*"]):
        with pytest.raises(UnknownBackendError, match="backend: there is no backend 'torch-nativ'; known names are a,"):
            three.check_backend(unknown)
    with pytest.raises(UnknownBackendError, match="backend: got 'Not A Name'"):
        three.check_backend("Not A Name")
    with pytest.raises(UnknownBackendError, match="backend: got no name"):
        three.check_backend([])


def test_no_name_at_all(three: Registry, fakes: Any) -> None:
    """An empty list would refuse everything; it is a mistake."""
    with pytest.raises(UnknownBackendError, match="backend: got no name"):
        three.plan(fakes.request(), backend=[])
    with pytest.raises(UnknownBackendError, match="prefer: got no name"), prefer():
        pass


def test_the_token_follows_the_preference() -> None:
    """A layer keeps its plan while the token is the same object: equal preferences share one."""
    outside = state_token()
    with prefer("a"):
        inside = state_token()
        assert inside is not outside
        with prefer("b"):
            assert state_token() not in (inside, outside)
        assert state_token() is inside
    assert state_token() is outside
    with prefer("a"):
        assert state_token() is inside


def test_the_token_follows_the_plugins(three: Registry, fakes: Any) -> None:
    """Registering and unregistering make every plan stale, those under a preference too."""
    outside = state_token()
    with prefer("a"):
        inside = state_token()
    three.register(fakes.plugin("d", priority=99), "late")
    assert state_token() is not outside
    with prefer("a"):
        assert state_token() is not inside
    assert three.plan(fakes.request()).backend == "d"
    token = state_token()
    three.unregister("late")
    assert state_token() is not token
    assert three.plan(fakes.request()).backend == "a"


def test_threads_do_not_see_each_others_preference() -> None:
    """The preference belongs to the context; a new thread starts without one."""
    seen: dict[str, Any] = {}
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        seen["first"] = (state_token(), current_preference())
        with prefer("b"):
            inside.set()
            leave.wait(10)

    outside = state_token()
    with prefer("a"):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
        assert current_preference() == ("a",)
        leave.set()
        thread.join()
    assert seen["first"] == (outside, None)
    assert state_token() is outside


def test_asyncio_tasks_do_not_see_each_others_preference() -> None:
    """Two tasks that interleave keep their own; a task inherits what was in force where it was made."""

    async def task(name: str) -> None:
        with prefer(name):
            token = state_token()
            for _ in range(3):
                await asyncio.sleep(0)
                assert current_preference() == (name,)
                assert state_token() is token

    async def inherits() -> tuple[str, ...] | None:
        return current_preference()

    async def run() -> None:
        await asyncio.gather(task("a"), task("b"), task("c"))
        with prefer("d"):
            assert await asyncio.create_task(inherits()) == ("d",)

    asyncio.run(run())
    assert current_preference() is None


def test_a_mirror_is_entered_and_left_with_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """octavo-jax mirrors the preference in jax's own context; a block that is open already is mirrored at once."""
    monkeypatch.setattr(preference, "_mirrors", [])
    log: list[tuple[str, Any]] = []

    @contextmanager
    def mirror(names: tuple[str, ...] | None) -> Iterator[None]:
        log.append(("in", names))
        try:
            yield
        finally:
            log.append(("out", names))

    with prefer("a"):
        with prefer("b", "*"):
            mirror_preference(mirror)
            assert log == [("in", ("a",)), ("in", ("b", "*"))]
        assert log[2:] == [("out", ("b", "*"))]
    assert log[3:] == [("out", ("a",))]
    log.clear()
    with pytest.raises(KeyError), prefer("c"):
        raise KeyError
    assert log == [("in", ("c",)), ("out", ("c",))]


def test_prefer_decorates() -> None:
    """A context manager of the standard library decorates functions as well."""

    @prefer("a")
    def function() -> Any:
        return current_preference()

    assert function() == ("a",)
    assert function() == ("a",)


def test_preferences_without_end_are_not_kept() -> None:
    """A process that invents names forgets the oldest scopes; a plan under a forgotten one still goes stale."""
    with prefer("first"):
        token = state_token()
        for number in range(2 * preference._MOST_SCOPES):
            with prefer(f"other-{number}"):
                assert state_token() is not token
        assert len(preference._scopes) <= preference._MOST_SCOPES
        assert state_token() is token
        preference.renew_tokens()
        assert state_token() is not token
