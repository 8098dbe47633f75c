"""A MoE layer's calls after the first of their kind are written down and run again: the same bits, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import get_ident
from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import MARKS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import PRESETS, DelayedScaling, Recipe
from octavo_torch import DelayedState, MoE, Room, moe_mlp, quantize_weight
from octavo_torch.moe import passes
from octavo_torch.recording import calls, recorded_pass

T, C, G, K, F, N = 61, 3, 5, 144, 112, 80
NATIVE = "torch-native"
RECIPES: dict[str, Recipe] = {name: recipe for name, recipe in PRESETS.items() if not recipe.stochastic} | {
    "fp8-delayed": DelayedScaling(history=4)
}
LEAVES = ("x", "weights", "w1", "w2")
READ_AS_COPIES = ("x in rows apart",)
DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that Python composes, in their order."""
    seen: list[str] = []
    for name in ("_composed_forward", "_composed_backward"):
        real = getattr(passes, name)

        def noted(*given: Any, real: Any = real, name: str = name) -> Any:
            seen.append(name.removeprefix("_composed_"))
            return real(*given)

        monkeypatch.setattr(passes, name, noted)
    return seen


def draw(rng: np.random.Generator, device: str, experts: list[int] | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Leaves by their names in moe_mlp, and choices among `experts`; by default some go nowhere, and one gets none."""
    choices = torch.from_numpy(rng.choice([0, 2, 3, 4, -1] if experts is None else experts, (T, C)))
    made = {
        "x": torch.randn(T, K).bfloat16(),
        "weights": torch.rand(T, C),
        "w1": (torch.randn(G, 2 * F, K) / 8).bfloat16(),
        "w2": (torch.randn(G, N, F) / 8).bfloat16(),
    }
    return {name: value.to(device).requires_grad_() for name, value in made.items()}, choices.to(device)


def states_of(recipe: Recipe, device: str, groups: int = G) -> tuple[DelayedState, DelayedState] | None:
    if not isinstance(recipe, DelayedScaling):
        return None
    return DelayedState.create(recipe, groups, device), DelayedState.create(recipe, groups, device)


_kinds = count(1)


def of_a_new_kind() -> dict[str, int]:
    """An option that no call had before, and that changes no bit where nothing is rounded stochastically."""
    return {"group_offset": next(_kinds)}


def step(given: dict[str, Tensor], choices: Tensor, dy: Tensor, wanted: tuple[str, ...] = LEAVES, **call: Any) -> Any:
    """y and the gradients of what is wanted."""
    y = moe_mlp(choices=choices, backend=NATIVE, **given, **call)
    return [y, *torch.autograd.grad(y, [given[name] for name in wanted], dy)]


def assert_equal(left: list[Tensor], right: list[Tensor], what: object) -> None:
    for number, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(ours, theirs), (what, number)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["standard", "keep_all", "lean", "recompute"])
@pytest.mark.parametrize("name", RECIPES)
def test_later_calls_have_the_bits_of_the_first(
    name: str,
    form: str,
    device: str,
    rng: np.random.Generator,
    composed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fresh operands and another routing each time, among them all tokens on one expert, and none anywhere: beside
    calls each the first of its kind, and delayed scaling's states beside those of such calls."""
    # arrays share a block, or have memory of their own as large ones have
    monkeypatch.setattr(recorded_pass, "SMALL", int(rng.choice([1, 1 << 14, 1 << 20])))
    recipe = RECIPES[name]
    ours, theirs = states_of(recipe, device), states_of(recipe, device)
    kind = of_a_new_kind()
    for number, experts in enumerate((None, None, None, [3], [-1], None)):
        given, choices = draw(rng, device, experts)
        dy = torch.randn(T, N, device=device).bfloat16()
        how: dict[str, Any] = {"recipe": recipe, "form": form, "weight_codes": "remake" if number == 3 else "keep"}
        expected = step(given, choices, dy, **how, **of_a_new_kind(), state=theirs)
        versions = [state.history._version for state in ours or ()]
        composed.clear()
        assert_equal(step(given, choices, dy, **how, **kind, state=ours), expected, number)
        # the second call is composed, too, while it is written down; "remake" is a kind of its own
        assert (composed == []) == (number in (2, 4, 5)), number
        if ours is not None and theirs is not None:
            for mine, other in zip(ours, theirs, strict=True):
                assert torch.equal(mine.history, other.history)
                assert mine.history._version > versions.pop(0), "autograd would not see that it has changed"
                for state in (mine, other):
                    state.update()


@pytest.mark.parametrize("device", DEVICES)
def test_what_may_differ_between_calls(device: str, rng: np.random.Generator, composed: list[str]) -> None:
    """Fewer gradients, dtypes of choices and weights, a dy whose rows stand apart, codes that were made before, no
    gradients at all, a second backward: each call has the bits of the first of its kind."""
    recipe = PRESETS["fp8-block"]
    kind = of_a_new_kind()

    def cases() -> Iterator[tuple[str, dict[str, Tensor], Tensor, Tensor, tuple[str, ...]]]:
        given, choices = draw(rng, device)
        dy = torch.randn(T, N, device=device).bfloat16()
        yield "as always", given, choices, dy, LEAVES
        yield "x alone", given, choices, dy, ("x",)
        yield "experts alone", given, choices, dy, ("w1", "w2")
        yield "int32", given, choices.int(), dy, LEAVES
        narrow = given | {"weights": given["weights"].detach().bfloat16().requires_grad_()}
        yield "weights in bf16", narrow, choices, dy, LEAVES
        yield "rows apart", given, choices, torch.randn(T, 2 * N, device=device).bfloat16()[:, ::2], LEAVES
        yield "one row for all", given, choices, torch.randn(1, N, device=device).bfloat16().expand(T, N), LEAVES
        turned = {name: given[name].detach().mT.contiguous().mT.requires_grad_() for name in ("w1", "w2")}
        yield "weights that lie transposed", given | turned, choices, dy, LEAVES
        apart = torch.randn(T, K + 16, device=device).bfloat16()[:, :K].requires_grad_()
        yield "x in rows apart", given | {"x": apart}, choices, dy, LEAVES

    for turn in range(4):
        for what, given, choices, dy, wanted in cases():
            expected = step(given, choices, dy, wanted, recipe=recipe, **of_a_new_kind())
            composed.clear()
            assert_equal(step(given, choices, dy, wanted, recipe=recipe, **kind), expected, what)
            if turn > 1:
                assert (composed == []) == (what not in READ_AS_COPIES), what
            with torch.no_grad():
                y = moe_mlp(choices=choices, backend=NATIVE, recipe=recipe, **given, **kind)
            assert torch.equal(y, expected[0]), what
            y = moe_mlp(choices=choices, backend=NATIVE, recipe=recipe, **given, **kind)
            leaves = [given[name] for name in wanted]
            for retain in (True, True, False):
                assert_equal(list(torch.autograd.grad(y, leaves, dy, retain_graph=retain)), expected[1:], what)
            coded = given | {name: quantize_weight(given[name], recipe, backend=NATIVE) for name in ("w1", "w2")}
            y = moe_mlp(choices=choices, backend=NATIVE, recipe=recipe, **coded, **kind)
            assert_equal([y, *torch.autograd.grad(y, leaves, dy)], expected, f"codes, {what}")


@pytest.mark.parametrize("form", ["standard", "keep_all"])
def test_a_state_that_was_replaced_before_backward_is_refused(form: str, rng: np.random.Generator) -> None:
    """Kernels get addresses alone: a scale in another dtype, and a history of other shape, are refused by a backward
    that is composed, written down or run again."""
    recipe, kind = DelayedScaling(history=4), of_a_new_kind()
    wrong = {"scale": torch.ones(3, G).bfloat16(), "history": torch.zeros(3, 8, G)}
    for _ in range(3):
        for name, value in wrong.items():
            for right in (False, True):
                given, choices = draw(rng, "cpu")
                state = states_of(recipe, "cpu")
                assert state is not None  # of delayed scaling
                y = moe_mlp(choices=choices, backend=NATIVE, recipe=recipe, state=state, form=form, **given, **kind)
                if right:
                    y.sum().backward()
                    continue
                setattr(state[0], name, value)
                with pytest.raises(ValueError, match=r"give \[3, 4, G\] and \[3, G\], both in float32"):
                    y.sum().backward()


def test_data_of_x_that_was_replaced_before_backward(rng: np.random.Generator, composed: list[str]) -> None:
    """autograd saves x itself, with the .data that it has then. Launches get addresses, so a backward of fewer tokens
    is not the one of all that was written down: the first of its kind is composed."""
    kind = of_a_new_kind()
    for number in range(5):
        given, choices = draw(rng, "cpu")
        y = moe_mlp(choices=choices, backend=NATIVE, recipe="fp8-block", **given, **kind)  # type: ignore[arg-type]
        dy = torch.randn(T, N).bfloat16()
        composed.clear()
        torch.autograd.grad(y, given["w1"], dy, retain_graph=True)
        assert number < 3 or composed == []
        if number > 2:
            given["x"].data = given["x"].data[: T // 2].clone()
        torch.autograd.grad(y, given["w1"], dy)
        assert number != 3 or composed == ["backward"]


def test_an_amax_is_recorded_where_it_was_asked_for(rng: np.random.Generator) -> None:
    """A module records while it trains and not in evaluation, whichever of the two was written down first."""
    for first in (True, False):
        module = MoE(G, K, F, C, recipe=RECIPES["fp8-delayed"], dtype=torch.bfloat16, backend=NATIVE)
        states = [buffer for name, buffer in module.named_buffers() if "history" in name]
        assert states
        for _ in range(4):
            for training in (first, not first):
                module.train(training)
                for state in states:
                    state.zero_()
                module(torch.randn(T, K).bfloat16()).sum().backward()
                assert all(bool(state.any()) == training for state in states)


def test_calls_whose_sizes_never_repeat_are_not_written_down(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing down takes longer than composing, and pays from the third call of a kind on."""
    monkeypatch.setattr(passes, "Tape", None)
    given, choices = draw(rng, "cpu")
    kind = of_a_new_kind()
    for tokens in range(1, 9):
        part = given | {name: given[name][:tokens] for name in ("x", "weights")}
        moe_mlp(choices=choices[:tokens], backend=NATIVE, recipe="fp8-block", **part, **kind).sum().backward()


def test_another_thread_may_call_while_a_pass_is_written_down(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call of the same kind, made as soon as anything of the recording is there, has the bits of a composed one."""
    other, choices = draw(rng, "cpu")
    kind, recipe = of_a_new_kind(), PRESETS["fp8-block"]
    expected = step(other, choices, torch.ones(T, N).bfloat16(), recipe=recipe, **of_a_new_kind())
    found: list[Any] = []
    with ThreadPoolExecutor(1) as thread:

        class Watched(calls.RecordedCalls[Any]):
            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, value)
                if name != "backward" and get_ident() == main:
                    dy = torch.ones(T, N).bfloat16()
                    found.append(thread.submit(step, other, choices, dy, recipe=recipe, **kind).result())

        main = get_ident()
        monkeypatch.setattr(calls, "RecordedCalls", Watched)
        for _ in range(3):
            given, elsewhere = draw(rng, "cpu")
            step(given, elsewhere, torch.randn(T, N).bfloat16(), recipe=recipe, **kind)
    assert len(found) > 3
    for number, results in enumerate(found):
        assert_equal(results, expected, number)


def test_a_layer_inside_of_one_that_is_written_down(rng: np.random.Generator) -> None:
    """A dispatch mode may call a layer of its own for each operation of torch that it sees, among them those of another
    layer's pass that is being written down: the inner one is composed then, and both have the bits of every call."""
    name = "fp8-block"
    outer, (inner, choices) = draw(rng, "cpu"), draw(rng, "cpu")
    inner = {leaf: value.detach() for leaf, value in inner.items()}
    dy, kind_of_outer = torch.from_numpy(rng.standard_normal((T, N))).bfloat16(), of_a_new_kind()

    class Calls(TorchDispatchMode):
        inside = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not self.inside:
                self.inside = True
                results.append(moe_mlp(choices=choices, backend=NATIVE, recipe=name, **inner, **kind))
                self.inside = False
            return func(*args, **(kwargs or {}))

    expected = step(*outer, dy, recipe=name)
    of_inner = moe_mlp(choices=choices, backend=NATIVE, recipe=name, **inner)
    for number in range(4):
        kind: dict[str, int] = of_a_new_kind()
        results: list[Tensor] = []
        with Calls():
            assert_equal(step(*outer, dy, recipe=name, **kind_of_outer), expected, f"outer, call {number}")
        assert len(results) > 2 or number > 1  # more than one of a kind, while the outer one is written down
        for result in results:
            assert torch.equal(result, of_inner), f"inner, call {number}"


def test_a_backward_that_is_compiled(rng: np.random.Generator) -> None:
    """Compiled autograd traces the backward of each eager forward, of one that is written down and of one that is run
    again, too: it is composed there, with the same bits, whether or not an eager backward was written down before."""
    from torch._dynamo import compiled_autograd

    for eager_before in (0, 2):
        kind = of_a_new_kind()
        for number in range(eager_before + 3):
            given, choices = draw(rng, "cpu")
            dy = torch.randn(T, N).bfloat16()
            expected = step(given, choices, dy, recipe="fp8-block", **of_a_new_kind())
            y = moe_mlp(choices=choices, backend=NATIVE, recipe="fp8-block", **given, **kind)
            if number < eager_before:
                y.backward(dy)
            else:
                with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
                    y.backward(dy)
            assert_equal([y, *[given[name].grad for name in LEAVES]], expected, (eager_before, number))
    torch.compiler.reset()


@pytest.mark.parametrize("reason", ["room", "main_grad", "biases", "seeds"])
def test_what_is_more_than_launches_is_composed(
    reason: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, composed: list[str]
) -> None:
    """A layer that draws seeds, or whose gradients go into buffers, or are summed by torch's operations, is composed by
    every backward: nothing of it may be missing from what is run again."""
    given, choices = draw(rng, "cpu")
    dy = torch.randn(T, N).bfloat16()
    how: dict[str, Any] = {"recipe": PRESETS["nvfp4" if reason == "seeds" else "fp8-block"]}
    if reason == "seeds":
        how["seed"] = 7
    if reason == "biases":
        given |= {"bias1": torch.randn(G, 2 * F).bfloat16().requires_grad_(), "bias2": torch.randn(G, N).bfloat16()}
    if reason == "main_grad":
        for name in ("w1", "w2"):
            given[name].main_grad = torch.zeros_like(given[name], dtype=torch.float32)  # type: ignore[attr-defined]
        how["main_grad"] = "overwrite"
    if reason == "room":
        how["room"] = Room(gemms=4)
    leaves = [value for value in given.values() if value.requires_grad]
    kind = of_a_new_kind()
    expected: list[Tensor] | None = None
    for _ in range(4):
        composed.clear()
        y = moe_mlp(choices=choices, backend=NATIVE, **given, **how, **kind)
        found = [y, *torch.autograd.grad(y, leaves, dy)]
        if reason == "main_grad":
            found += [given[name].main_grad.clone() for name in ("w1", "w2")]  # type: ignore[attr-defined]
        assert "backward" in composed
        expected = found if expected is None else expected
        assert_equal(found, expected, reason)


@pytest.mark.parametrize("form", ["standard", "keep_all", "lean", "recompute"])
@pytest.mark.parametrize("name", ["bf16", "fp8-block", "fp8-delayed"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=MARKS)])
def test_the_peak_is_not_higher(name: str, form: str, device: str, rng: np.random.Generator) -> None:
    """Memory of a call that is composed, written down and run again, with arrays of many megabytes."""
    recipe = RECIPES[name]
    tokens, experts, k, f = 4096, 16, 1024, 512
    given = {
        "x": torch.randn(tokens, k, device=device).bfloat16(),
        "weights": torch.rand(tokens, 4, device=device),
        "w1": (torch.randn(experts, 2 * f, k, device=device) / 8).bfloat16(),
        "w2": (torch.randn(experts, k, f, device=device) / 8).bfloat16(),
    }
    given = {key: value.requires_grad_() for key, value in given.items()}
    choices = torch.from_numpy(rng.integers(0, experts, (tokens, 4))).to(device)
    state = states_of(recipe, device, experts)
    dy = torch.randn(tokens, k, device=device).bfloat16()
    kind, peaks = of_a_new_kind(), []
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = step(given, choices, dy, recipe=recipe, form=form, state=state, **kind)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del found
    first, *later = peaks
    assert max(later) <= first + (4 << 20), peaks
