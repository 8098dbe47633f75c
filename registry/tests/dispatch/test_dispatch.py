"""From a request to a plan: order, rank, load, bind, verdicts, cache, log."""

from __future__ import annotations

import importlib
import itertools
import logging
import random
import threading
from dataclasses import dataclass
from typing import Any

import pytest

import octavo
from octavo import NoBackendError
from octavo_registry import Bound, Refused, Registry
from octavo_registry.contract.gemm import BoundDgrad, BoundFprop
from octavo_registry.contract.operations import OPERATIONS
from octavo_registry.dispatch.memo import Memo


def test_order_is_preference_then_priority_then_name(fakes: Any, rng: random.Random) -> None:
    """architecture.md, Dispatch 4, for random priorities and registration orders."""
    names = ["a", "b", "c", "d", "e"]
    priorities = {name: rng.choice([-100, 0, 100]) for name in names}
    shuffled = rng.sample(names, len(names))
    registry = fakes.registry(*(fakes.plugin(name, priority=priorities[name]) for name in shuffled))
    wanted = sorted(names, key=lambda name: (-priorities[name], name))
    assert [d.backend for d in registry.explain(fakes.request())] == wanted
    assert registry.plan(fakes.request()).backend == wanted[0]
    preferred = rng.sample(names, 3)
    decisions = registry.explain(fakes.request(), backend=preferred)
    assert [d.backend for d in decisions if d.verdict != "refused"] == preferred


def test_of_equal_priority_the_request_decides(fakes: Any) -> None:
    """architecture.md, Dispatch 4: a card of graph-safe rows alone is first for graph-safe requests, last for others;
    priority and preference come before that."""
    both = [fakes.row(), fakes.row(graph_safe=True)]
    for priority, eager, graph in ((0, "b", "a"), (1, "a", "a"), (-1, "b", "b")):
        registry = fakes.registry(fakes.plugin("a", rows=both[1:], priority=priority), fakes.plugin("b", rows=both))
        assert registry.plan(fakes.request()).backend == eager
        assert registry.plan(fakes.request(graph_safe=True)).backend == graph
        for order in (["a", "b"], ["b", "a"]):
            for safe in (False, True):
                assert registry.plan(fakes.request(graph_safe=safe), backend=order).backend == order[0]


def test_a_backend_is_loaded_at_the_first_bind_and_once(fakes: Any) -> None:
    """architecture.md: octavo_load may import a framework, so only the backend that is tried is loaded."""
    first, second = fakes.plugin("a", priority=1), fakes.plugin("b")
    registry = fakes.registry(first, second)
    assert (first.loads, second.loads) == (0, 0)
    registry.backends()
    assert (first.loads, second.loads) == (0, 0)
    for k in (32, 64):
        registry.plan(fakes.request(k=k))
    assert (first.loads, second.loads) == (1, 0)


def test_a_plan_is_bound_once_and_cached_by_request_and_preference(fakes: Any) -> None:
    """architecture.md, Dispatch 6; explain asks the same candidates and binds nothing twice."""
    plugin = fakes.plugin("a")
    registry = fakes.registry(plugin)
    plan = registry.plan(fakes.request())
    assert registry.plan(fakes.request()) is plan
    registry.explain(fakes.request())
    assert len(plugin.backend.binds) == 1
    assert registry.plan(fakes.request(), backend="a") is not plan
    registry.register(fakes.plugin("b", priority=5), "later")
    assert registry.plan(fakes.request()).backend == "b"


def test_a_plan_has_what_was_bound(fakes: Any) -> None:
    """Optional parts of each operation go from the answer to the plan as they are; no answer needs them."""

    def prepare(group_sizes: Any, rows: int, like: Any) -> Any:
        return group_sizes

    spec = octavo.MXFP8().quantizer("x")
    parts = {
        "fprop": {"prepare": prepare, "whole_layer": dict},
        "quantize": {
            "prepare": prepare,
            "with_amax": repr,
            "into": dict,
            "from_plain": abs,
            "to_plain": len,
            "update_scales": id,
        },
    }
    for op, optional in parts.items():
        request = fakes.request(op=op, **({"quantizer": spec} if op == "quantize" else {}))
        bound = OPERATIONS[op].bound(print, layouts={"x": "rows"}, note="n", **optional)
        backend = fakes.Backend(answer=bound)
        plan = fakes.registry(fakes.plugin("a", backend, rows=[fakes.row(ops={op})])).plan(request)
        assert (plan.run, dict(plan.layouts), plan.note) == (print, {"x": "rows"}, "n")
        assert {name: getattr(plan.bound, name) for name in optional} == optional
        assert plan.prepare is prepare
        bare = fakes.registry(fakes.plugin("a", rows=[fakes.row(ops={op})])).plan(request)
        assert {getattr(bare.bound, name) for name in optional} == {None}


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "refuses": ({"refusal": "needs the driver 580, 570 is installed"}, "refused", "needs the driver 580, 570"),
    "Refused": ({"answer": Refused("needs 4 GiB, 1 GiB is free")}, "refused", "needs 4 GiB, 1 GiB is free"),
    "bind raises": ({"answer": RuntimeError("no kernel")}, "broken", "RuntimeError: no kernel"),
    "bind exits": ({"answer": SystemExit(1)}, "broken", "SystemExit: 1"),
    "refuses raises": ({"refusal": OSError("libacme.so.2 not found")}, "broken", "OSError: libacme.so.2 not found"),
    "refuses says False": ({"refusal": False}, "broken", "refuses returned a bool; it returns None where it serves"),
    "refuses says nothing": ({"refusal": " "}, "broken", "refuses returned an empty text; it returns None where it"),
    "no Bound": ({"answer": "a string"}, "broken", "bind returned a str; it returns a BoundFprop with `run`"),
    "another operation's": (
        {"answer": BoundDgrad(print)},
        "broken",
        "returned a BoundDgrad; it returns a BoundFprop",
    ),
    "no layouts": (
        {"answer": BoundFprop(print, layouts=None)},  # type: ignore[arg-type]
        "broken",
        "a BoundFprop whose `layouts` is of type NoneType; give a mapping of operands in ('x', 'w', 'dy') to names of",
    ),
    "layout of no operand": (
        {"answer": BoundFprop(print, layouts={"x": "rows", "W": "rows"})},
        "broken",
        "whose `layouts` is {'x': 'rows', 'W': 'rows'}; give a mapping of operands in ('x', 'w', 'dy') to names of",
    ),
    "no name of a layout": (
        {"answer": BoundFprop(print, layouts={"x": ["rows"]})},  # type: ignore[dict-item]
        "broken",
        "a BoundFprop whose `layouts` is {'x': ['rows']}; give a mapping of operands in ('x', 'w', 'dy') to names of",
    ),
    "no text": (
        {"answer": BoundFprop(print, note=3)},  # type: ignore[arg-type]
        "broken",
        'a BoundFprop whose `note` is of type int; give a text, or ""',
    ),
    "no function": (
        {"answer": BoundFprop(print, prepare=3)},  # type: ignore[arg-type]
        "broken",
        "a BoundFprop whose `prepare` is of type int; give a function or None",
    ),
    "no layer": (
        {"answer": BoundFprop(print, whole_layer="x")},  # type: ignore[arg-type]
        "broken",
        "a BoundFprop whose `whole_layer` is of type str; give a function or None",
    ),
    "no tuple of operands": (
        {"answer": BoundFprop(print, takes_tokens="x")},  # type: ignore[arg-type]
        "broken",
        "a BoundFprop whose `takes_tokens` is of type str; give a tuple of operands in ('x',), or ()",
    ),
    "no rows of this GEMM": (
        {"answer": BoundFprop(print, takes_tokens=("x", "dy"))},
        "broken",
        "a BoundFprop whose `takes_tokens` is ('x', 'dy'); give a tuple of operands in ('x',), or ()",
    ),
    "no amax of level 4": (
        {"answer": Bound(run=print, run_with_amax=True)},  # type: ignore[arg-type]
        "broken",
        "a Bound whose `run_with_amax` is of type bool; give a function or None",
    ),
    "no run": (
        {"answer": BoundFprop(None)},  # type: ignore[type-var]
        "broken",
        "a BoundFprop whose `run` is of type NoneType; give a function",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_whatever_a_backend_answers_the_next_one_serves(fakes: Any, case: str) -> None:
    """architecture.md, Dispatch 5: Refused moves on and is recorded; anything else is the verdict broken."""
    answers, verdict, reason = REFUSALS[case]
    registry = fakes.registry(fakes.plugin("a", fakes.Backend(**answers), priority=9), fakes.plugin("b"))
    plan = registry.plan(fakes.request())
    assert plan.backend == "b"
    assert plan.decisions[0].backend == "a"
    assert plan.decisions[0].verdict == verdict
    assert reason in plan.decisions[0].reason
    assert registry.explain(fakes.request()) == plan.decisions


@dataclass
class _Compared:
    """A function of a class that compares its objects, which therefore have no hash."""

    tile: int

    def __call__(self, *operands: Any, **more: Any) -> None: ...


@pytest.mark.parametrize("part", ["run", "limited"])
def test_functions_for_jax_have_a_hash(fakes: Any, part: str) -> None:
    """JAX finds programs by the functions in them. Without a hash a call ended in a TypeError that named no backend;
    PyTorch needs none."""
    parts: dict[str, Any] = {"run": print, part: _Compared(128)}
    for framework, chosen in ("jax", "b"), ("torch", "a"):
        rows = [fakes.row(framework=framework)]
        first = fakes.plugin("a", fakes.Backend(BoundFprop(**parts)), priority=9, rows=rows)
        plan = fakes.registry(first, fakes.plugin("b", rows=rows)).plan(fakes.request(framework=framework))
        assert plan.backend == chosen
        if chosen == "b":
            assert plan.decisions[0].verdict == "broken"
            assert plan.decisions[0].reason == (
                f"bind returned a BoundFprop whose `{part}` is of type _Compared; give a function with a hash, by "
                "which JAX finds its programs: a class that defines __eq__ needs __hash__, too, and a dataclass "
                "eq=False or frozen=True"
            )


def test_a_backend_without_the_methods_is_broken(fakes: Any) -> None:
    """What octavo_load returns may be anything; a missing method is the backend's fault, not the caller's."""
    registry = fakes.registry(fakes.plugin("a", object(), priority=9), fakes.plugin("b"))
    plan = registry.plan(fakes.request())
    assert plan.backend == "b"
    assert plan.decisions[0].reason == "AttributeError: 'object' object has no attribute 'refuses'"


def test_a_class_in_the_place_of_its_object_is_said(fakes: Any) -> None:
    """Its methods would only complain of a missing argument."""
    plan = fakes.registry(fakes.plugin("a", fakes.Backend, priority=9), fakes.plugin("b")).plan(fakes.request())
    assert plan.backend == "b"
    assert (
        plan.decisions[0].reason == "octavo_load('a') returned the class FakeBackend; return an object, FakeBackend()"
    )


def test_a_card_that_was_built_around_its_validation(fakes: Any) -> None:
    """`model_construct` checks nothing: wrong fields break the plugin, wrong rows the backend, and others live."""
    wrong_field = fakes.plugin("a")
    wrong_field.card = type(wrong_field.card).model_construct(**{**dict(wrong_field.card), "priority": "high"})
    wrong_row = fakes.plugin("b")
    row = type(fakes.row()).model_construct(**{**dict(fakes.row()), "ops": 3})
    wrong_row.card = wrong_row.card.model_copy(update={"capabilities": (row,)})
    registry = Registry.from_plugins({"field": wrong_field, "row": wrong_row, "good": fakes.plugin("c")})
    plan = registry.plan(fakes.request())
    assert plan.backend == "c"
    reasons = {decision.backend: decision.reason for decision in plan.decisions}
    assert reasons["field"].startswith("RecipeError: BackendCard.priority: got 'high'")
    assert reasons["b"].startswith("its card cannot be read: TypeError")


@pytest.mark.parametrize("error", [ImportError("libacme.so.2 not found"), SystemExit(2), None])
def test_a_backend_that_does_not_load_is_broken_and_is_asked_once(fakes: Any, error: Any) -> None:
    """style-examples.md: `acme  broken  ImportError: libacme.so.2 not found`; None is no answer for one's own card."""
    plugin = fakes.plugin("a", error, priority=9)
    if error is None:
        plugin.backend = None
    registry = fakes.registry(plugin, fakes.plugin("b"))
    for k in (32, 64):
        verdict = registry.plan(fakes.request(k=k)).decisions[0]
        assert verdict.verdict == "broken"
        assert (type(error).__name__ if error is not None else "returned None") in verdict.reason
    assert plugin.loads == 1


def test_a_plugin_loads_only_its_own_backends(fakes: Any) -> None:
    """faults.md, "plugin loading": nobody answers octavo_load for another's card."""

    class Thief(fakes.Plugin):  # type: ignore[misc]
        def octavo_load(self, name: str) -> Any:
            self.loads += 1
            return self.backend

    thief = Thief(fakes.card("thief", priority=-5), fakes.Backend())
    honest = fakes.plugin("honest")
    assert fakes.registry(thief, honest).plan(fakes.request()).backend == "honest"
    assert (thief.loads, honest.loads) == (0, 1)
    assert thief.backend.binds == []


def test_nobody_serves(fakes: Any) -> None:
    """style-examples.md: one line a backend with verdict and reason; `decisions` holds the same."""
    registry = fakes.registry(
        fakes.plugin("a", rows=[fakes.row(device="cuda")]), fakes.plugin("b", fakes.Backend(answer=OSError("gone")))
    )
    with pytest.raises(NoBackendError) as caught:
        registry.plan(fakes.request())
    assert str(caught.value).splitlines() == [
        "nothing here runs fprop in mxfp8 for torch on cpu.",
        "  b  broken   OSError: gone",
        "  a  refused  serves cuda, the device is cpu",
        "  `octavo doctor --traceback`, or the logger 'octavo.plugins' at level DEBUG, shows where they broke",
    ]
    assert [(d.backend, d.verdict) for d in caught.value.decisions] == [("b", "broken"), ("a", "refused")]
    assert registry.explain(fakes.request()) == caught.value.decisions


@pytest.mark.parametrize(
    ("framework", "line"),
    [
        ("torch", "No backend for torch is installed; in a clone of Octavo run: pip install ./packages/torch"),
        ("jax", "No backend for jax is installed; in a clone of Octavo run: pip install ./packages/jax"),
        ("tf", "No installed package serves framework 'tf'; known ones are jax, torch"),
    ],
)
def test_nothing_is_installed_for_the_framework(fakes: Any, framework: str, line: str) -> None:
    """architecture.md, Dispatch 7: the install command where nothing is installed."""
    with pytest.raises(NoBackendError) as caught:
        fakes.registry().plan(fakes.request(framework=framework))
    assert line in str(caught.value)


def test_a_device_without_a_backend_names_its_capability(fakes: Any) -> None:
    """The first line says what was asked for, so that the table can be read alone."""
    with pytest.raises(NoBackendError, match=r"fprop in mxfp8 for torch on cuda \(sm_80\), graph-safe"):
        fakes.registry(fakes.plugin()).plan(fakes.request(device="cuda", arch=(8, 0), graph_safe=True))


def test_a_plan_prints(fakes: Any) -> None:
    """A plan is printable: what runs, how operands arrive, every verdict."""
    backend = fakes.Backend(answer=BoundFprop(print, layouts={"x": "panels"}))
    rows = [fakes.row(emulated="bf16 products")]
    plan = fakes.registry(fakes.plugin("a", backend, rows=rows, priority=1), fakes.plugin("b")).plan(fakes.request())
    assert str(plan).splitlines() == [
        "fprop in mxfp8 for torch on cpu: a (emulated: bf16 products)",
        "  layouts: x panels",
        "  a  chosen    ranks above b by priority, 1 over 0",
        "  b  eligible  declares that it serves this; a comes first",
    ]
    assert plan.capability == rows[0]
    with pytest.raises(TypeError):
        plan.layouts["x"] = "other"


def test_the_first_use_of_a_recipe_logs_one_line(fakes: Any, caplog: pytest.LogCaptureFixture) -> None:
    """contract.md, promise 4: once a recipe, operation, framework and device; a shape more is no new line."""
    registry = fakes.registry(fakes.plugin("a"))
    with caplog.at_level(logging.INFO, "octavo"):
        for k, op in itertools.product((32, 64), ("fprop", "dgrad")):
            registry.plan(fakes.request(op=op, k=k))
    lines = [record.getMessage() for record in caplog.records]
    fingerprint = octavo.MXFP8().fingerprint
    assert lines == [
        f"fprop in mxfp8 for torch on cpu (recipe {fingerprint}) runs on: a",
        f"dgrad in mxfp8 for torch on cpu (recipe {fingerprint}) runs on: a",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_registering_what_is_taken_or_broken_adds_nothing(fakes: Any) -> None:
    """A call that fails raises with the reason and leaves every plan valid."""
    registry = fakes.registry(fakes.plugin("a"))
    plan = registry.plan(fakes.request())
    with pytest.raises(octavo.OctavoError, match="has a plugin of that name"):
        registry.register(fakes.plugin("z"), "plugin-a")
    with pytest.raises(octavo.OctavoError, match="backend 'a' belongs to"):
        registry.register(fakes.plugin("a"), "other")
    with pytest.raises(octavo.OctavoError, match="belongs to octavo-torch-native"):
        Registry(tuple).register(fakes.plugin("torch-native"), "other")

    class Broken:
        def octavo_bakends(self) -> None: ...

    with pytest.raises(octavo.OctavoError, match="did you mean octavo_backends"):
        registry.register(Broken(), "broken")
    with pytest.raises(octavo.OctavoError, match="no plugin of that name"):
        registry.unregister("absent")
    assert registry.plan(fakes.request()) is plan
    assert len(registry.plugins()) == 1


def test_eight_threads_get_one_plan(fakes: Any) -> None:
    """faults.md, "races": concurrent first calls bind once and agree."""
    plugin = fakes.plugin("a")
    registry = fakes.registry(plugin)
    barrier = threading.Barrier(8)
    plans: list[Any] = []

    def ask() -> None:
        barrier.wait(10)
        plans.append(registry.plan(fakes.request()))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(plans) == 8
    assert all(plan is plans[0] for plan in plans)
    assert len(plugin.backend.binds) == 1


def test_a_plugin_that_asks_while_it_is_imported_sees_an_empty_registry(
    install: Any, discovered: Any, source: Any, fakes: Any, use: Any
) -> None:
    """Discovery is not re-entered, and what was answered meanwhile is forgotten."""
    registry = discovered()
    use(registry)
    extra = "\nimport octavo_registry\nSEEN = octavo_registry.backends()\n"
    install("test-good", {"oct_good": source("good", extra=extra)}, {"octavo.backends": {"good": "oct_good"}})
    assert registry.plan(fakes.request()).backend == "good"
    assert registry.backends()[0].name == "good"
    assert importlib.import_module("oct_good").SEEN == ()


def test_what_was_decided_is_bounded() -> None:
    """A process that plans for ever new shapes forgets the oldest."""
    memo: Memo[int, int] = Memo(limit=3)
    for number in range(5):
        memo[number] = number
    memo[2] = 7
    assert dict(memo) == {2: 7, 3: 3, 4: 4}


def test_the_reason_of_the_chosen_one_is_what_decided(fakes: Any) -> None:
    """command.md, Why: a priority alone decides nothing, and where it did not decide it is no reason."""

    def reasons(*plugins: Any, request: Any = None, backend: Any = None) -> dict[str, str]:
        registry = fakes.registry(*plugins)
        asked = fakes.request() if request is None else request
        verdicts = registry.explain(asked, backend=backend)
        supposed = registry.hypothesize(asked, backend=backend)
        chosen = {one.backend: one.reason for one in verdicts if one.verdict == "chosen"}
        assert {one.backend: one.reason for one in supposed if one.verdict == "chosen"} == chosen
        return chosen

    a, b, c = fakes.plugin("a", priority=5), fakes.plugin("b"), fakes.plugin("c", rows=[fakes.row(device="cuda")])
    assert reasons(a, c) == {"a": "the only one that serves this"}
    assert reasons(a, b, c) == {"a": "ranks above b by priority, 5 over 0"}
    assert reasons(a, b, backend="b") == {"b": "asked for by name"}
    assert reasons(a, b, backend=("b", "*")) == {"b": "asked for by name"}
    assert reasons(a, b, backend=("b", "a")) == {"b": "asked for before a"}
    assert reasons(a, b, c, backend=("c", "*")) == {"a": "ranks above b by priority, 5 over 0"}
    assert reasons(b, fakes.plugin("z")) == {"b": "has the priority of z, 0, and comes first by name"}
    captures = fakes.plugin("captures", rows=[fakes.row(graph_safe=True)])
    assert reasons(fakes.plugin("eager"), captures) == {
        "eager": "has the priority of captures, 0, and is made for eager calls, too"
    }
    b.octavo_rank = lambda request, eligible: ["b", "a"]
    assert reasons(a, b) == {"b": "a plugin's octavo_rank puts it before a"}


def test_one_that_refuses_is_no_rival(fakes: Any) -> None:
    """What was seen to refuse does not come after the one that serves: that is the only one."""
    layouts = fakes.Backend(answer=BoundFprop(print, layouts={"x": "panels"}))
    refusing = fakes.Backend(answer=Refused("no panels here"))
    registry = fakes.registry(fakes.plugin("a", refusing, priority=9), fakes.plugin("b", layouts))
    first, second = registry.explain(fakes.request())
    assert (first.backend, first.verdict, first.reason) == ("a", "refused", "no panels here")
    assert (second.backend, second.verdict, second.reason) == ("b", "chosen", "the only one that serves this")
