"""A child that was forked while another thread was in the registry: it has a registry of its own, and does not wait."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from octavo_registry import Registry, prefer
from octavo_registry.discovery.entry_points import Published
from octavo_registry.dispatch import preference

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),  # what this file is about
]


def in_a_child(work: Callable[[], bool]) -> bool:
    """True where `work` does, in a forked child that is ended after twenty seconds."""
    child = os.fork()
    if not child:
        signal.alarm(20)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


class Held:
    """A block in which another thread is inside of `call`, which waits in this process for the block to end."""

    def __init__(self) -> None:
        self.owner, self.inside, self.leave = os.getpid(), threading.Event(), threading.Event()

    def wait(self) -> None:
        if os.getpid() == self.owner:
            self.inside.set()
            assert self.leave.wait(60)

    def __call__(self, call: Callable[[], object]) -> Held:
        self.thread = threading.Thread(target=call)
        return self

    def __enter__(self) -> None:
        self.thread.start()
        assert self.inside.wait(60)

    def __exit__(self, *_: object) -> None:
        self.leave.set()
        self.thread.join(60)


def test_while_plugins_are_discovered(fakes: Any) -> None:
    """A data loader's worker, forked while the first layer imports its backend: it discovers for itself."""
    held, plugin = Held(), fakes.plugin("a")

    def load() -> object:
        held.wait()
        return plugin

    point: Any = SimpleNamespace(load=load)
    registry = Registry(find=lambda: [Published("plugin", "module", "test-a", "1", point=point)])
    with held(registry.plugins):
        assert in_a_child(lambda: registry.plan(fakes.request()).backend == "a")
    assert registry.plan(fakes.request()).backend == "a"


def test_while_a_plugin_is_registered(fakes: Any) -> None:
    """The child has the plugins that were there before, all of them, and their hooks."""
    held, ranked = Held(), []

    class Slow(fakes.Plugin):  # type: ignore[misc]
        def octavo_backends(self) -> Any:
            held.wait()
            return super().octavo_backends()

    class Ranks:
        def octavo_rank(self, request: Any, eligible: Any) -> Any:
            ranked.append(eligible)

    registry = Registry.from_plugins({"a": fakes.plugin("a"), "b": fakes.plugin("b"), "ranks": Ranks()})
    slow = Slow(fakes.card("slow"), fakes.Backend())
    with held(lambda: registry.register(slow, "slow")):
        assert in_a_child(
            lambda: (
                [record.name for record in registry.backends()] == ["a", "b"]
                and registry.plan(fakes.request()).backend == "a"
                and ranked == [("a", "b")]
            )
        )
    assert [record.name for record in registry.backends()] == ["a", "b", "slow"]


def test_while_a_preference_is_made() -> None:
    """The lock of the process's preferences."""
    held = Held()

    def hold() -> None:
        with preference._lock:
            held.wait()

    def use() -> bool:
        with prefer("torch-native"):
            return preference.current() == ("torch-native",)

    with held(hold):
        assert in_a_child(use)


def test_a_thread_that_forks_inside_keeps_its_lock(fakes: Any) -> None:
    """A plugin that forks while it is loaded: in the child its own thread goes on where it was."""
    results: list[bool] = []

    class Module(ModuleType):
        pass

    module: Any = Module("forks")
    module.octavo_backends = fakes.plugin("a").octavo_backends
    module.octavo_load = fakes.plugin("a").octavo_load
    registry: Registry

    def load() -> object:
        if not results:
            results.append(in_a_child(lambda: registry.plugins() == ()))  # asked by the plugin itself: none so far
        return module

    point: Any = SimpleNamespace(load=load)
    registry = Registry(find=lambda: [Published("plugin", "module", "test-a", "1", point=point)])
    assert registry.plan(fakes.request()).backend == "a"
    assert results == [True]
