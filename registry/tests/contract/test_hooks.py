"""One test for each hook, called `test_hook_<what follows octavo_>`; the last test checks that none is missing."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

import octavo
from octavo import OctavoError
from octavo_registry import HookSpecs, QuantizerCard, Registry
from octavo_registry.api_level import contract


def test_hook_backends(fakes: Any) -> None:
    """Any iterable of cards, read once at discovery."""

    class Lazy(fakes.Plugin):  # type: ignore[misc]
        calls = 0

        def octavo_backends(self) -> Any:
            self.calls += 1
            yield self.card

    plugin = Lazy(fakes.card("a"), fakes.Backend())
    registry = fakes.registry(plugin)
    for k in (32, 64):
        registry.plan(fakes.request(k=k))
    assert plugin.calls == 1
    assert [record.name for record in registry.backends()] == ["a"]


def test_hook_load(fakes: Any) -> None:
    """Called with the card's name; what it returns is asked and bound."""
    names = []

    class Loader(fakes.Plugin):  # type: ignore[misc]
        def octavo_load(self, name: str) -> Any:
            names.append(name)
            return self.backend

    plugin = Loader(fakes.card("a"), fakes.Backend())
    fakes.registry(plugin).plan(fakes.request())
    assert names == ["a"]
    assert len(plugin.backend.binds) == 1


def test_hook_recipes(install: Any, discovered: Any, source: Any) -> None:
    """A plugin's recipe is known by its kind, to files too; a kind of Octavo's own breaks the plugin, and says so."""
    kind = "acme-" + "x"
    extra = (
        "\nfrom typing import Literal\nfrom octavo import Recipe, MXFP8\n"
        f"class Acme(Recipe):\n    kind: Literal['{kind}'] = '{kind}'\n    fprop: Literal['high_precision'] = "
        "'high_precision'\n    dgrad: Literal['high_precision'] = 'high_precision'\n"
        "    wgrad: Literal['high_precision'] = 'high_precision'\n"
        "def octavo_recipes():\n    return [Acme()]\n"
    )
    clash = "\nfrom octavo import MXFP8\ndef octavo_recipes():\n    return [MXFP8(square_weights=True)]\n"
    install("test-acme", {"oct_acme": source("acme", extra=extra)}, {"octavo.backends": {"acme": "oct_acme"}})
    install("test-clash", {"oct_clash": source("clash", extra=clash)}, {"octavo.backends": {"clash": "oct_clash"}})
    registry = discovered()
    recipe = registry.recipe(kind)
    try:
        assert (type(recipe).__name__, recipe.kind) == ("Acme", kind)
        assert octavo.recipe(kind) == recipe
        assert octavo.Recipe.from_json(recipe.to_json()) == recipe
        assert registry.recipes() == (recipe,)
        assert registry.recipe("mxfp8") == octavo.MXFP8()
        reasons = {record.name: record.reason for record in registry.plugins()}
        assert reasons == {"acme": "", "clash": reasons["clash"]}
        assert "octavo_recipes gave kind 'mxfp8', which is Octavo's own" in reasons["clash"]
    finally:
        octavo.Recipe._kinds.pop(kind)


def test_hook_recipes_of_a_kind_that_is_taken(install: Any, discovered: Any, source: Any) -> None:
    """A class that takes a built-in kind cannot even be defined; the plugin is broken, with both owners named."""
    extra = (
        "\nfrom typing import Literal\nfrom octavo import Recipe\n"
        "class Mine(Recipe):\n    kind: Literal['mxfp8'] = 'mxfp8'\n"
    )
    install("test-clash", {"oct_clash": source("clash", extra=extra)}, {"octavo.backends": {"clash": "oct_clash"}})
    (record,) = discovered().plugins()
    assert record.status == "broken"
    assert "'mxfp8' belongs to octavo.recipes.MXFP8" in record.reason
    assert octavo.recipe("mxfp8") == octavo.MXFP8()


def test_hook_quantizers(fakes: Any) -> None:
    """A quantizer is asked for by name; a name that two plugins claim is neither's."""
    spec = octavo.MXFP8().quantizer("w")
    assert spec is not None

    class Quantizes:
        def __init__(self, *names: str) -> None:
            self.names = names

        def octavo_quantizers(self) -> list[QuantizerCard]:
            assert spec is not None
            return [QuantizerCard(name=name, spec=spec) for name in self.names]

    registry = Registry.from_plugins({"one": Quantizes("mine", "both"), "two": Quantizes("both")})
    assert registry.quantizer("mine") == spec
    assert [record.quantizers for record in registry.plugins()] == [("mine", "both"), ("both",)]
    with pytest.raises(OctavoError, match="'both' is claimed by"):
        registry.quantizer("both")
    with pytest.raises(OctavoError, match="quantizer: got 'absent'; known names are both, mine"):
        registry.quantizer("absent")
    with pytest.raises(OctavoError, match="none; no plugin names one"):
        fakes.registry().quantizer("absent")


class Ranks:
    """A plugin that only ranks; `answer` is returned, called or raised."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.seen: list[tuple[str, ...]] = []

    def octavo_rank(self, request: Any, eligible: Any) -> Any:
        self.seen.append(tuple(eligible))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer(eligible) if callable(self.answer) else self.answer


def test_hook_rank(fakes: Any) -> None:
    """A permutation of what is eligible, over priority and preference; None is no opinion."""
    ranks = Ranks(lambda eligible: tuple(reversed(eligible)))
    registry = Registry.from_plugins(
        {
            "silent": Ranks(None),
            "ranks": ranks,
            "a": fakes.plugin("a", priority=9),
            "b": fakes.plugin("b"),
            "c": fakes.plugin("c", rows=[fakes.row(device="cuda")]),
        }
    )
    assert registry.plan(fakes.request()).backend == "b"
    assert ranks.seen == [("a", "b")]
    assert registry.plan(fakes.request(), backend=["a", "b"]).backend == "b"


def test_hook_rank_reads_characters_alone(fakes: Any) -> None:
    """A subclass of str may compare as it likes: it names the backend whose characters it has, or none."""

    class Lie(str):
        def __eq__(self, other: object) -> bool:
            return True

        def __lt__(self, other: str) -> bool:
            return False

        __hash__ = str.__hash__

    plugins = {"a": fakes.plugin("a"), "b": fakes.plugin("b")}
    ranks = Registry.from_plugins(plugins | {"ranks": Ranks(lambda _: (Lie("b"), Lie("a")))})
    assert ranks.plan(fakes.request()).backend == "b"
    ranks = Registry.from_plugins(plugins | {"ranks": Ranks(lambda _: (Lie("x"), Lie("y")))})
    assert ranks.plan(fakes.request()).backend == "a"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (("b",), "no permutation of"),
        (("b", "a", "c"), "no permutation of"),
        (("b", "b"), "no permutation of"),
        (lambda eligible: ("closed", *eligible), "no permutation of"),
        (RuntimeError("tuner is down"), "raised RuntimeError: tuner is down"),
        (SystemExit(1), "raised SystemExit: 1"),
        (3, "raised TypeError"),
        ((object(), "a"), "gave ['a object', 'a'], no permutation of"),
    ],
)
def test_hook_rank_that_is_no_permutation(
    fakes: Any, caplog: pytest.LogCaptureFixture, answer: Any, words: str
) -> None:
    """It is ignored and logged once; it cannot widen a closed preference."""
    registry = Registry.from_plugins(
        {
            "ranks": Ranks(answer),
            "a": fakes.plugin("a", priority=9),
            "b": fakes.plugin("b"),
            "closed": fakes.plugin("closed", priority=99),
        }
    )
    with caplog.at_level(logging.WARNING, "octavo"):
        for k in (32, 64):
            assert registry.plan(fakes.request(k=k), backend=["a", "b"]).backend == "a"
    (record,) = caplog.records
    assert "octavo_rank of plugin ranks" in record.getMessage()
    assert words in record.getMessage()


def test_hook_plan_made(fakes: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Every observer is told of each plan once; what one raises is logged and changes nothing."""

    class Observes:
        def __init__(self, error: BaseException | None = None) -> None:
            self.seen: list[Any] = []
            self.error = error

        def octavo_plan_made(self, plan: Any, request: Any) -> None:
            self.seen.append((plan, request))
            if self.error is not None:
                raise self.error

    first, loud = Observes(), Observes(SystemExit(1))
    registry = Registry.from_plugins({"first": first, "loud": loud, "a": fakes.plugin("a")})
    with caplog.at_level(logging.WARNING, "octavo"):
        plan = registry.plan(fakes.request())
        registry.plan(fakes.request())
        registry.explain(fakes.request())
        assert first.seen == [(plan, fakes.request())]
        layer = registry.plan_layer(fakes.request())
    assert first.seen == loud.seen
    assert [seen[0] for seen in first.seen[1:]] == [
        layer.dgrad,
        layer.wgrad,
        layer.quantize_x,
        layer.quantize_w,
        layer.quantize_dy,
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "octavo_plan_made of plugin loud raised SystemExit: 1; the plan stands"
    ]


def test_every_hook_has_a_test() -> None:
    """A hook that nobody tests is no part of the surface: this module must hold a `test_hook_*` for each."""
    tests = {name for name in vars(sys.modules[__name__]) if name.startswith("test_hook_")}
    hooks = [name for name in vars(HookSpecs) if name.startswith("octavo_")]
    assert hooks
    missing = [hook for hook in hooks if f"test_hook_{hook.removeprefix('octavo_')}" not in tests]
    assert missing == []
    assert sorted(hooks) == sorted(contract()["hooks"])
    sentences = {hook: getattr(HookSpecs, hook).__doc__ for hook in hooks}
    assert all(text and text.strip().count("\n") == 0 for text in sentences.values()), "each docstring is one sentence"
