"""make_graphed and make_graphed_pipeline where there is no GPU: graphs that run their function again stand for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import octavo_registry
import octavo_torch_cudagraph as graphs
from octavo import NVFP4
from octavo_torch import Activation, GroupedLinear, Sequential
from octavo_torch_cudagraph.order import Step, steps_of

M, K, F, G = 12, 16, 16, 2


class AgainGraph:
    """Replays by running the function again, into the tensors of the first run."""

    def __init__(self, function: Callable[[], Any], made: Any) -> None:
        self._function, self._made = function, made

    def replay(self) -> None:
        with torch.enable_grad():
            new = self._function()
        with torch.no_grad():
            for ours, theirs in zip(pytree.tree_leaves(self._made), pytree.tree_leaves(new), strict=True):
                if type(ours) is Tensor:
                    ours.detach().copy_(theirs)


class AgainRecorder:
    """Stands for a Recorder."""

    def __init__(self, device: torch.device, pool: Any) -> None: ...

    def warm_up(self, function: Callable[[], object], count: int) -> None:
        for _ in range(count):
            function()

    def __call__(self, function: Callable[[], Any]) -> tuple[AgainGraph, Any]:
        made = function()
        return AgainGraph(function, made), made


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors, graphs that are none, and the reference's plans."""
    monkeypatch.setattr("octavo_torch_cudagraph.modules.Recorder", AgainRecorder)
    monkeypatch.setattr("octavo_torch_cudagraph.pipeline.Recorder", AgainRecorder)
    monkeypatch.setattr("octavo_torch_cudagraph.arguments.on_host", lambda tensor: False)
    with octavo_registry.prefer("torch-reference"):
        yield


def experts(main_grad: Any = None, recipe: Any = None) -> Sequential:
    rest: dict[str, Any] = {"main_grad": main_grad, "recipe": recipe, "dtype": torch.bfloat16, "bias": True, "seed": 3}
    model = Sequential(GroupedLinear(G, K, 2 * F, **rest), Activation(), GroupedLinear(G, F, K, **rest))
    for name, parameter in model.named_parameters():
        if main_grad is not None and "weight" in name:
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
    return model


def twin_of(model: nn.Module, main_grad: Any = None, recipe: Any = None) -> Sequential:
    twin = experts(main_grad, recipe)
    twin.load_state_dict(model.state_dict())
    return twin


def batch(rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """x, dy and sizes."""
    sizes = torch.tensor(rng.multinomial(M - 3, [1 / G] * G))
    return torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16(), sizes


def state(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers, gradients and main_grad."""
    found = [*model.parameters(), *model.buffers()]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return found + [p.main_grad for p in model.parameters() if hasattr(p, "main_grad")]  # type: ignore[misc]


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("main_grad", [None, "accumulate", "overwrite"])
def test_gradients_add_up_over_microbatches(main_grad: Any, rng: np.random.Generator) -> None:
    """Two backwards before zero_grad: autograd must not keep the graph's own tensor as .grad, which the second replay
    writes over (twice the second). Buffers, hooks and flags as in eager; zeros for main_grad take no memory."""
    recipe = NVFP4() if main_grad == "overwrite" else None
    model = experts(main_grad, recipe)
    twin = twin_of(model, main_grad, recipe)
    x, _, sizes = batch(rng)
    before = [value.clone() for value in state(model)]
    assert graphs.make_graphed(model, (x.requires_grad_(), sizes)) is model
    assert_equal(state(model), before)
    assert not any(hasattr(p, "grad_added_to_main_grad") for p in model.parameters())
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: called.append(name))  # type: ignore[misc]
    for step in range(2):
        model.zero_grad()
        twin.zero_grad()
        called.clear()
        for _ in range(3):
            x, dy, sizes = batch(rng)
            made = []
            for one in (model, twin):
                leaf = x.clone().requires_grad_()
                y = one(leaf, sizes)
                y.backward(dy)
                assert leaf.grad is not None
                made.append([y.detach().clone(), leaf.grad.clone(), *(value.clone() for value in state(one))])
            assert_equal(*made)
        assert len(called) == 3 * len([*model.parameters()]), step
    weights = [p for name, p in model.named_parameters() if "weight" in name]
    for weight in weights if main_grad else ():
        assert weight.grad_added_to_main_grad
        assert weight.grad.untyped_storage().nbytes() == weight.element_size()  # type: ignore[union-attr]


def test_a_backward_that_comes_too_late_is_refused(rng: np.random.Generator) -> None:
    """What it needs was written over; the one in time works, and so does a forward without a backward before it."""
    model = experts()
    x, dy, sizes = batch(rng)
    graphs.make_graphed(model, (x.requires_grad_(), sizes))
    first = model(x, sizes)
    second = model(x, sizes)
    with pytest.raises(ValueError, match=r"another forward of this graph has run .* make_graphed_pipeline"):
        first.backward(dy)
    second.backward(dy)
    assert x.grad is not None


ORDERS: dict[str, list[int]] = {
    "one": [1, -1],
    "all forwards first": [1, 1, 1, -1, -1, -1],
    "1F1B": [1, 1, -1, 1, -1, 1, -1, -1],
    "interleaved": [1, 1, 2, -2, 2, -1, -2, -1],
    "other numbers of microbatches": [2, 1, -2, 2, -2, -1],
}


@pytest.mark.parametrize("main_grad", [None, "accumulate"], ids=["grad", "main_grad"])
@pytest.mark.parametrize("name", ORDERS)
def test_a_pipeline_trains_as_eager(name: str, main_grad: Any, rng: np.random.Generator) -> None:
    """Several microbatches in flight, in the order given, two steps of it: outputs, gradients, main_grad and seeds are
    those of the same forwards and backwards in eager."""
    order = ORDERS[name]
    recipe = NVFP4() if (name, main_grad) == ("1F1B", None) else None
    chunks = [experts(main_grad, recipe) for _ in range(max(order))]
    twins = [twin_of(chunk, main_grad, recipe) for chunk in chunks]
    x, _, sizes = batch(rng)
    samples = [(x.requires_grad_(), sizes)] * len(chunks)
    pipeline = graphs.make_graphed_pipeline(chunks, samples, order, warmup=2)
    assert [len(forwards) for forwards in pipeline.forwards] == [order.count(c + 1) for c in range(len(chunks))]
    for _ in range(2):
        flying: dict[tuple[int, int], Any] = {}
        for step in steps_of(order, len(chunks)):
            at = step.chunk, step.microbatch
            if step.is_forward:
                x, dy, sizes = batch(rng)
                leaves = x.clone().requires_grad_(), x.clone().requires_grad_()
                calls = pipeline.forwards[step.chunk][step.microbatch], twins[step.chunk]
                flying[at] = [(call(leaf, sizes), leaf, dy) for call, leaf in zip(calls, leaves, strict=True)]
                continue
            made = []
            for y, leaf, dy in flying.pop(at):
                y.backward(dy)
                made.append([y.detach(), leaf.grad])
            assert_equal(*made)
        assert not flying
        for chunk, twin in zip(chunks, twins, strict=True):
            assert_equal(state(chunk), state(twin))


def test_another_order_is_refused(rng: np.random.Generator) -> None:
    """Calls that do not come next, by name and with what does; after restart() the first one comes again."""
    model = experts()
    x, dy, sizes = batch(rng)
    pipeline = graphs.make_graphed_pipeline([model], [(x.requires_grad_(), sizes)], [1, 1, -1, -1])
    first, second = pipeline.forwards[0]
    with pytest.raises(
        ValueError, match=r"forward of chunk 0's microbatch 1 was called and the forward .* 0 comes next"
    ):
        second(x, sizes)
    ys = first(x, sizes), second(x, sizes)
    with pytest.raises(ValueError, match=r"backward of chunk 0's microbatch 1 was called and the backward .* 0 comes"):
        ys[1].backward(dy)
    with pytest.raises(ValueError, match="restart"):
        first(x, sizes)
    pipeline.restart()
    for y in (first(x, sizes), second(x, sizes)):
        y.sum().backward()
    with pytest.raises(ValueError, match="weight_scales came by name"):
        first(x, sizes, weight_scales=1)
    model.eval()
    with pytest.raises(ValueError, match="training is False and it was captured with True"):
        first(x, sizes)
    # the module itself is no graph
    assert model(x, sizes).shape == x.shape


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (3, "order is a int; give a sequence"),
        ("1", "order is a str"),
        ([1, 3, -1], r"order\[1\] is 3; give c for a forward of chunk c and -c .* from 1 to 2"),
        ([1, 0], r"order\[1\] is 0"),
        ([1, 1.5], r"order\[1\] is 1.5"),
        ([True], r"order\[0\] is True"),
        ([1, -1, -1, 1], r"order\[2\] is -1, and every forward of chunk 1 before it has its backward"),
        ([1, 1, -1, 2, -2], "order has 2 forwards of chunk 1 and 1 backwards"),
        ([1, -1], "order has 0 forwards of chunk 2"),
    ],
    ids=str,
)
def test_orders_that_do_not_fit(order: Any, sentence: str) -> None:
    """In a sentence, before anything runs."""
    with pytest.raises(ValueError, match=sentence):
        steps_of(order, 2)
    assert steps_of((1, 2, -2, -1), 2)[1:3] == (Step(1, 0, True), Step(1, 0, False))


def test_what_cannot_be_captured_is_refused(rng: np.random.Generator) -> None:
    """Hooks, autocast's cache, chunks that are none, no gradient anywhere; nothing has changed then."""
    x, _, sizes = batch(rng)
    watched = experts()
    watched.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the module has hooks"):
        graphs.make_graphed(watched, (x, sizes))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="cache_enabled=False"):
        graphs.make_graphed(experts(), (x, sizes))
    frozen = experts().requires_grad_(False)
    for chunks, samples, order, sentence in (
        ([], [], [1, -1], "chunks is a list; give a list of modules"),
        ([frozen, 3], [(x, sizes)] * 2, [1, -1], "give a list of modules"),
        ([frozen], [], [1, -1], "sample_arguments is 0 and there are 1 chunks"),
        ([frozen], [(x, sizes)], [1, -1], "nothing in chunk 0 requires a gradient"),
    ):
        with pytest.raises(ValueError, match=sentence):
            graphs.make_graphed_pipeline(chunks, samples, order)  # type: ignore[arg-type]
    assert graphs.make_graphed(frozen, (x, sizes))(x, sizes).shape == x.shape
