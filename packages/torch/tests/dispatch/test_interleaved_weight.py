"""Weights whose gate and up rows take turns, where the backend serves them as they lie.

Its functions are called wherever w1 is quantized and its gradient written, no bit depends on them, and blocks that it
does not serve are copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mlp_operands import RECIPES, SIZES, F, G, K, M, N, assert_equal, operands, states_of
from torch import Tensor

import octavo_registry
from octavo import BlockScaling, DelayedScaling, Recipe
from octavo_registry import BackendCard, Bound, Request
from octavo_registry.contract import BoundQuantize, BoundWgrad, GemmRequest, Weight, gemm_form
from octavo_torch import DelayedState, GroupedMLP, GroupedTensor, Room, grouped_mlp, moe_mlp, quantize_weight
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.grouped_tensor import PLANES
from octavo_torch.dispatch import interleaved_weight
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layers import layer_for
from octavo_torch.plugin import CARD
from octavo_torch.reference.backend import ReferenceBackend

CALLS: Counter[str] = Counter()
"""What was called since the test began: parts of backends, and the front end's copies."""

BLOCKS: dict[str, frozenset[int] | None] = {
    "copies": None,
    "turns": frozenset(range(1, F)),
    "turns-of-one": frozenset({1}),
}
"""The backends of these tests, and the blocks that each serves; None: it has no such parts."""


def exchanged(value: Tensor, block: int, axis: int, interleave: bool) -> Tensor:
    """`value` with the rows of this axis in turns, or back in halves: by their numbers."""
    rows = torch.arange(value.shape[axis]).view(2, -1, block).transpose(0, 1).flatten()
    return value.index_select(axis, rows if interleave else rows.argsort())


class InTurns(ReferenceBackend):
    """The reference, for weights that lie either way, with optional parts that are counted."""

    def __init__(self, blocks: frozenset[int] | None) -> None:
        self.blocks = blocks

    def bind(self, request: Request) -> Bound:
        if isinstance(request, GemmRequest):
            return self._gemm(request)
        bound = super().bind(request)
        if not isinstance(bound, BoundQuantize) or not request.stacked:
            return bound

        def interleaved(block: int, weight: Weight) -> Any:
            CALLS[f"quantizer asked for {block}, {weight}"] += 1
            axis = 1 if weight == "nk" else 2
            return quantizer(bound.run, block, axis) if block in self.blocks else None

        return replace(quantizer(bound.run), interleaved=None if self.blocks is None else interleaved)

    def _gemm(self, request: GemmRequest) -> Bound:
        kernel = gemm_form(request.op, request.weight).kernel
        bound: Any = super().bind(replace(request, op=kernel, weight="nk"))

        def run(left: Any, right: Any, sizes: Any, /, **how: Any) -> Any:
            if request.weight == "kn" and request.op == "wgrad":
                left, right = right, left
            # another form of fprop takes no bias
            return bound.run(left, right, sizes, **{name: value for name, value in how.items() if value is not None})

        def limited(most: int) -> Any:
            CALLS[f"{request.op} on {most}"] += 1
            return run

        own = type(super().bind(replace(request, weight="nk")))(run, limited=limited)
        return replace(own, interleaved=self._wgrad(run, request)) if isinstance(own, BoundWgrad) else own

    def _wgrad(self, run: Any, request: GemmRequest) -> Any:
        def interleaved(block: int) -> Any:
            CALLS[f"wgrad asked for {block}"] += 1
            axis = 1 if request.weight == "nk" else 2

            def turned(x: Any, dy: Any, sizes: Any, /, *, out: Any = None, accumulate: bool = False) -> Tensor:
                CALLS["wgrad"] += 1
                if out is None:
                    return exchanged(run(x, dy, sizes), block, axis, True)
                halves = exchanged(out, block, axis, False) if accumulate else torch.full_like(out, torch.nan)
                run(x, dy, sizes, out=halves, accumulate=accumulate)
                return out.copy_(exchanged(halves, block, axis, True))

            def limited(most: int) -> Any:
                CALLS[f"wgrad in turns on {most}"] += 1
                return turned

            return BoundWgrad(turned, limited=limited) if block in self.blocks else None

        return None if self.blocks is None else interleaved


def quantizer(run: Any, block: int = 0, axis: int = 1) -> BoundQuantize[Tensor, GroupedTensor]:
    """A quantizer of matrices with all that the contract says of weights; of matrices in turns it is counted."""

    def halves(w: Tensor, part: str) -> Tensor:
        if not block:
            return w
        CALLS[part] += 1
        return exchanged(w, block, axis, False)

    def quantize(w: Tensor, sizes: None = None, /, **how: Any) -> Any:
        return run(halves(w, "run"), None, **how)

    def with_amax(w: Tensor, sizes: None = None, /, **how: Any) -> Any:
        w = halves(w, "with_amax")
        return run(w, None, **how), operators.group_amax_of(w, None)

    def into(
        w: Tensor, sizes: None = None, /, *, out: Any, amax: Any = None, unchanged: Any = None, **how: Any
    ) -> None:
        w = halves(w, "into")
        if unchanged is not None and unchanged.item():
            return
        for name in PLANES:
            old, new = getattr(out, name), getattr(run(w, None, **how), name)
            if old is not None:
                old.copy_(new)
        if amax is not None:
            amax.copy_(operators.group_amax_of(w, None))

    return BoundQuantize(quantize, with_amax=with_amax, into=into)


class Plugin:
    """The backends of these tests."""

    def octavo_backends(self) -> list[BackendCard]:
        rows = [row for row in CARD.capabilities if row.device == "cpu"]
        either = [
            row.model_copy(update={"weights": frozenset({"nk", "kn"})}) if "wgrad" in row.ops else row for row in rows
        ]
        return [
            CARD.model_copy(update={"name": name, "priority": -1000, "capabilities": tuple(either)}) for name in BLOCKS
        ]

    def octavo_load(self, name: str) -> ReferenceBackend | None:
        return InTurns(BLOCKS[name]) if name in BLOCKS else None


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registers them, and counts the front end's copies of matrices."""
    octavo_registry.register(Plugin(), "test-turns")
    for name in ("to_halves", "from_halves"):
        copy = getattr(interleaved_weight, name)

        def counted(*arguments: Any, _name: str = name, _copy: Any = copy) -> Tensor:
            CALLS[_name] += 1
            made: Tensor = _copy(*arguments)
            return made

        monkeypatch.setattr(interleaved_weight, name, counted)
    CALLS.clear()
    yield
    octavo_registry.unregister("test-turns")


def taken() -> Counter[str]:
    """The calls so far, which are forgotten."""
    made = CALLS.copy()
    CALLS.clear()
    return made


def leaves_in(order: str) -> dict[str, Tensor]:
    """An MLP's operands, whose weights lie as `order` says, without biases where no product of the backend adds one."""
    given = {name: value.detach() for name, value in operands().items()}
    if order == "kn":
        given |= {name: given[name].mT.contiguous().mT for name in ("w1", "w2")}
        given = {name: value for name, value in given.items() if not name.startswith("bias")}
    return {name: value.requires_grad_() for name, value in given.items()}


def of_a_step(given: dict[str, Any], recipe: Recipe, dy: Tensor, backend: str, **call: Any) -> list[Tensor]:
    """y, every gradient, and the histories of delayed scaling."""
    torch.manual_seed(5)
    states = states_of(recipe)
    how: dict[str, Any] = {"recipe": recipe, "seed": 3, "state": states, "backend": backend, **call}
    y = grouped_mlp(group_sizes=SIZES, **given, **how)
    leaves = [value if isinstance(value, Tensor) else value.weight for value in given.values()]
    grads = torch.autograd.grad(y, leaves, dy)
    return [y.detach(), *grads, *[state.history for state in states or ()]]


@pytest.mark.parametrize("name", RECIPES)
def test_bits_and_calls(name: str, rng: np.random.Generator) -> None:
    """y, every gradient and the amax of a step are those of copies, for a block that is served and one that is not; w1
    given as codes, too. Copies are made where a product reads values alone. Of the weight's orders each run draws which
    has the block of one."""
    recipe, dy = RECIPES[name], torch.randn(M, N).bfloat16()
    sizes = 1, int(rng.choice([2, 3, 8, 16]))
    quantized = recipe.quantizes("fprop") or recipe.quantizes("dgrad")
    values = (not recipe.quantizes("fprop")) + (not recipe.quantizes("dgrad"))
    part = "with_amax" if recipe.stateful else "run"
    for size, order in zip(sizes, rng.permutation(["nk", "kn"]), strict=True):
        given = leaves_in(str(order))
        expected = of_a_step(given, recipe, dy, "copies", interleave=size)
        assert taken()["to_halves"] == values + quantized
        for backend in ("turns", "turns-of-one"):
            served = size in (BLOCKS[backend] or ())
            # of this package's rounding to MXFP4 the backend sees no weight
            read_in_turns = served and quantized and name != "mxfp4"
            assert_equal(of_a_step(given, recipe, dy, backend, interleave=size), expected)
            calls = taken()
            assert calls[part] == read_in_turns
            assert calls["wgrad"] == served
            assert calls["to_halves"] == values + (quantized and not read_in_turns)
            assert calls["from_halves"] == (not served)
            torch.manual_seed(5)
            states = states_of(recipe)
            state = None if states is None else states[0]
            codes = quantize_weight(given["w1"], recipe, seed=3, state=state, interleave=size, backend=backend)
            calls = taken()
            assert calls[part] == read_in_turns
            assert calls["to_halves"] == (quantized and not read_in_turns)
            results = len(given) + 1  # w's amax is in the other state
            made = of_a_step({**given, "w1": codes}, recipe, dy, backend, interleave=size)
            assert_equal(made[:results], expected[:results])
            assert taken()["to_halves"] == values


@pytest.mark.parametrize("name", ["block", "delayed"])
@pytest.mark.parametrize("form", ["keep_all", "standard", "lean", "recompute"])
@pytest.mark.parametrize("weight_codes", ["keep", "remake"])
def test_a_moe_layer(weight_codes: Any, form: Any, name: str, rng: np.random.Generator) -> None:
    """Forward quantizes w1 once, and backward again what is read again where codes are not kept; all as it lies."""
    del rng  # seeds torch
    recipe: Recipe = {"block": BlockScaling(), "delayed": DelayedScaling(history=4)}[name]
    given = operands()
    leaves = [given[part] for part in ("w1", "w2", "bias1", "bias2")]
    tokens, choices = torch.randn(30, K).bfloat16().requires_grad_(), torch.randint(0, G, (30, 2))
    weights, dy = torch.rand(30, 2), torch.randn(30, N).bfloat16()

    def step(backend: str) -> list[Tensor]:
        torch.manual_seed(5)
        states = states_of(recipe)
        y = moe_mlp(
            tokens, choices, weights, leaves[0], leaves[1], bias1=leaves[2], bias2=leaves[3], recipe=recipe, form=form,
            weight_codes=weight_codes, interleave=4, state=states, backend=backend,
        )  # fmt: skip
        return [y.detach(), *torch.autograd.grad(y, [tokens, *leaves], dy), *[s.history for s in states or ()]]

    expected = step("copies")
    quantized = 1 + (weight_codes == "remake") * (1 + (form == "recompute"))
    assert taken()["to_halves"] == quantized
    assert_equal(step("turns"), expected)
    calls = taken()
    assert calls["run"] + calls["with_amax"] == quantized
    assert calls["wgrad"] == 1
    assert calls["to_halves"] == calls["from_halves"] == 0
    assert_equal(step("turns-of-one"), expected)
    assert taken()["to_halves"] == quantized


@pytest.mark.parametrize("recipe", [BlockScaling(), DelayedScaling(history=4)], ids=["block", "delayed"])
def test_codes_that_are_written_again(recipe: Recipe, rng: np.random.Generator) -> None:
    """`out=` has the new weight's codes and amax, by `into`; `unchanged` leaves them as they are."""
    del rng  # seeds torch
    w1 = operands()["w1"]
    for backend, served in (("turns", True), ("turns-of-one", False), ("copies", False)):
        with torch.no_grad():
            w1.copy_(torch.randn(w1.shape) / 8)
        states = [states_of(recipe) for _ in range(2)]
        first, second = (None if pair is None else pair[0] for pair in states)
        if first is not None and second is not None:
            second.scale.copy_(first.scale)
        how: dict[str, Any] = {"interleave": 4, "backend": backend}
        handle = quantize_weight(w1, recipe, state=first, **how)
        with torch.no_grad():
            w1.copy_(torch.randn(w1.shape))
        old = planes_of(handle)
        taken()
        quantize_weight(w1, recipe, state=first, out=handle, unchanged=torch.ones(1, dtype=torch.int32), **how)
        assert_equal(planes_of(handle), old)
        quantize_weight(w1, recipe, state=first, out=handle, unchanged=torch.zeros(1, dtype=torch.int32), **how)
        calls = taken()
        assert calls["into"] == 2 * served
        assert calls["to_halves"] == 2 * (not served)
        assert_equal(
            planes_of(handle), planes_of(quantize_weight(w1, recipe, state=second, interleave=4, backend="copies"))
        )


def planes_of(handle: Any) -> list[Tensor]:
    planes = [handle.amax, *(getattr(handle.codes, name) for name in PLANES)]
    return [plane.clone().view(torch.uint8) for plane in planes if plane is not None]


@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
@pytest.mark.parametrize("later", [False, True], ids=["in backward", "postponed"])
def test_main_grad_is_written_in_turns(later: bool, mode: Any, rng: np.random.Generator) -> None:
    """The buffer has the bits of copies, an empty group's too, in backward and where the gradient is postponed."""
    del rng  # seeds torch
    given, start, x = operands(), torch.randn(G, 2 * F, K), torch.randn(M, K).bfloat16()
    start[1, 0, 0] = -0.0
    buffers = []
    for backend in ("copies", "turns", "turns-of-one"):
        with octavo_registry.prefer(backend):
            layer = GroupedMLP(
                G, K, F, N, recipe=BlockScaling(), dtype=torch.bfloat16, main_grad=mode, interleave=4, delay_wgrad=later
            )
            with torch.no_grad():
                layer.weight1.copy_(given["w1"])
                layer.weight2.copy_(given["w2"])
            layer.weight1.main_grad, layer.weight2.main_grad = start.clone(), torch.zeros(G, N, F)
            layer(x, torch.tensor(SIZES)).float().sum().backward()
            calls = taken()
            if later:
                assert calls["wgrad"] == calls["from_halves"] == 0
                layer.backward_dw()
                calls += taken()
        assert calls["wgrad"] == (backend == "turns")
        assert calls["from_halves"] == (backend != "turns")
        buffers.append(layer.weight1.main_grad.view(torch.int32))
    assert_equal(buffers[1:], buffers[:1] * 2)


def test_room_changes_nothing_on_a_cpu(rng: np.random.Generator) -> None:
    """There are no multiprocessors to leave, and the backend's functions are called all the same."""
    del rng  # seeds torch
    given, dy = operands(), torch.randn(M, N).bfloat16()
    expected = of_a_step(given, BlockScaling(), dy, "turns", interleave=4)
    taken()
    assert_equal(of_a_step(given, BlockScaling(), dy, "turns", interleave=4, room=Room(gemms=8, w2=16)), expected)
    calls = taken()
    assert (calls["run"], calls["wgrad"], calls["to_halves"]) == (1, 1, 0)


def on_a_gpu(layer: Layer) -> Layer:
    """`layer` as if its tensors were on one: only there multiprocessors are left to others."""
    request = layer.spec.request._replace(device=torch.device("cuda", 0))
    return Layer(replace(layer.spec, request=request))


@pytest.mark.parametrize("first", ["leaving", "interleaved"])
def test_a_limit_is_the_answers_own(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer that leaves multiprocessors to others the gradient in turns is limited, too; where a block is not
    served it is the halves' that is. Either may be said first, and neither is forgotten."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(multi_processor_count=132))
    given = operands()

    def layer_of(backend: str) -> Layer:
        layer = on_a_gpu(layer_for(BlockScaling(), given["x"], given["w1"], True, True, True, backend))
        both = layer.leaving(16).interleaved(4) if first == "leaving" else layer.interleaved(4).leaving(16)
        assert (both.spec.left_free, both.spec.block, both.whole) == (16, 4, None)
        narrow = both.with_planes({"w": (True, False)})
        assert (narrow.spec.left_free, narrow.spec.block) == (16, 4)
        assert layer.interleaved(0) is layer
        assert layer.interleaved(4) is layer.interleaved(4)
        return both

    layer_of("turns")
    calls = taken()
    assert calls["wgrad in turns on 116"] >= 1
    assert calls["fprop on 116"] >= 1
    assert calls["dgrad on 116"] >= 1
    layer_of("turns-of-one")
    calls = taken()
    assert calls["wgrad in turns on 116"] == 0
    assert calls["wgrad on 116"] >= 1


def test_an_answer_without_a_limit_or_a_part_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an answer lacks is composed of copies: `limited`, and the parts of a quantizer."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(multi_processor_count=132))
    bind = InTurns.bind

    def poorer(self: InTurns, request: Request) -> Bound:
        bound: Any = bind(self, request)
        if getattr(bound, "interleaved", None) is None:
            return bound
        absent: dict[str, None] = {"limited": None} if request.op == "wgrad" else {"with_amax": None, "into": None}
        own = bound.interleaved
        return replace(bound, interleaved=lambda *block: replace(own(*block), **absent))

    monkeypatch.setattr(InTurns, "bind", poorer)
    given, recipe = operands(), DelayedScaling(history=4)
    dy = torch.randn(M, N).bfloat16()
    expected = of_a_step(given, recipe, dy, "copies", interleave=4)
    taken()
    assert_equal(of_a_step(given, recipe, dy, "turns", interleave=4), expected)
    calls = taken()
    assert (calls["run"], calls["with_amax"], calls["to_halves"], calls["wgrad"]) == (0, 0, 1, 1)
    state = DelayedState.create(recipe, G)
    how: dict[str, Any] = {"state": state, "interleave": 4, "backend": "turns"}
    handle = quantize_weight(given["w1"], recipe, **how)
    quantize_weight(given["w1"], recipe, out=handle, **how)
    assert taken()["into"] == 0
    layer = layer_for(recipe, given["x"], given["w1"], True, True, True, "turns").interleaved(4)
    taken()
    on_a_gpu(layer).leaving(16)
    assert taken()["wgrad on 116"] == 1
