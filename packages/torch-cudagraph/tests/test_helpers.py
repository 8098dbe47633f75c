"""capture, graphed_step and StaticWeight where there is no GPU: a graph that runs its function again stands for one."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import octavo_torch_cudagraph as graphs
from octavo import PRESETS, DelayedScaling
from octavo_torch import DelayedState, GroupedLinear, QuantizedWeight, grouped_linear, quantize_weight
from octavo_torch.plugin_api import ZeroGradient
from octavo_torch_cudagraph.held import Held, held_by

SIZES = torch.tensor([3, 0, 5])


class AgainGraph:
    """Replays by running the function again, into the tensors of the first run."""

    def __init__(self, function: Callable[[], Any], made: Any) -> None:
        self._function, self._made = function, made
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for ours, new in zip(pytree.tree_leaves(self._made), pytree.tree_leaves(self._function()), strict=True):
            if isinstance(ours, Tensor):
                ours.detach().copy_(new.detach())


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`record` and the check of devices replaced; the run that stands for a capture is undone like a warm-up."""

    def record(function: Callable[[], Any], device: torch.device, *, warmup: int, pool: Any) -> tuple[Any, Any]:
        for _ in range(warmup):
            function()
        made = function()
        return AgainGraph(function, made), made

    monkeypatch.setattr("octavo_torch_cudagraph.graphed.record_graph", record)
    monkeypatch.setattr("octavo_torch_cudagraph.arguments.on_host", lambda tensor: False)


def test_capture_copies_in_and_returns_the_graph_s_tensors(no_gpu: None) -> None:
    """The same tensors at each replay, detached; whoever fills `inputs` calls replay(); warm-up leaves no trace."""
    counter, weight = torch.zeros(()), torch.ones(3, requires_grad=True)

    def function(x: Tensor, pair: tuple[Tensor, str]) -> dict[str, Any]:
        counter.add_(1)
        return {"y": x * weight + pair[0], "name": pair[1]}

    captured = graphs.capture(function, torch.zeros(3), (torch.zeros(3), "n"), restore=[counter])
    assert counter.item() == 0
    first = captured(torch.full((3,), 2.0), (torch.ones(3), "n"))
    assert first["y"].tolist() == [3.0, 3.0, 3.0]
    assert not first["y"].requires_grad
    again = captured(torch.zeros(3), (torch.zeros(3), "n"))
    assert again is first
    assert first["y"].tolist() == [0.0, 0.0, 0.0]
    captured.inputs[0].fill_(7)
    assert captured.replay()["y"].tolist() == [7.0, 7.0, 7.0]
    assert counter.item() == 3
    with pytest.raises(ValueError, match="argument 0 is float32"):
        captured(torch.zeros(4), (torch.zeros(3), "n"))
    assert counter.item() == 3


def test_what_the_function_closes_over_lives_on(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads such tensors by address and holds none of them."""

    def record(function: Callable[[], Any], device: torch.device, *, warmup: int, pool: Any) -> tuple[Any, Any]:
        return SimpleNamespace(replay=lambda: None), function()

    monkeypatch.setattr("octavo_torch_cudagraph.graphed.record_graph", record)
    factor = torch.ones(3)
    watched = weakref.ref(factor)
    captured = graphs.capture(lambda x, factor=factor: x * factor, torch.zeros(3))
    del factor
    assert watched() is not None
    del captured
    assert watched() is None


def test_what_a_graph_holds_may_not_move() -> None:
    """Parameters, buffers and main_grad by address, values by equality; each with its name."""
    module = torch.nn.BatchNorm1d(3)
    module.weight.main_grad = torch.zeros(3)
    extra = {"lr": 0.1}
    held = Held(lambda: [*held_by(module), *extra.items()])
    with torch.no_grad():
        module.weight.fill_(2)
    held.check()
    for change, sentence in (
        (lambda: setattr(module.weight, "main_grad", torch.zeros(3)), r"weight\.main_grad is another tensor since"),
        (lambda: delattr(module.weight, "main_grad"), r"weight\.main_grad is gone since the capture"),
        (lambda: setattr(module.bias, "main_grad", torch.zeros(3)), r"bias\.main_grad is new since the capture"),
        (lambda: extra.update(lr=0.2), "lr is 0.2 and the graph was captured with 0.1, which it keeps"),
        (lambda: setattr(module, "running_mean", torch.zeros(3)), "running_mean is another tensor since"),
        (lambda: setattr(module.bias, "data", torch.zeros(3)), "bias is another tensor since the capture"),
    ):
        change()
        with pytest.raises(ValueError, match=sentence):
            held.check()
        held = Held(lambda: [*held_by(module), *extra.items()])
        held.check()


def loss_of(module: torch.nn.Module, x: Tensor) -> Tensor:
    value: Tensor = (module(x) ** 2).mean()
    return value


def test_a_warm_up_of_a_step_trains_nothing(no_gpu: None) -> None:
    """Parameters and the optimizer's state are as before the capture; a state that is not there is asked for."""
    module = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(5, 4)
    before = [value.clone() for value in module.parameters()]
    with pytest.raises(ValueError, match="run one eager step before graphed_step"):
        graphs.graphed_step(module, loss_of, x, optimizer=optimizer)
    assert not optimizer.state
    loss_of(module, x).backward()
    optimizer.step()
    eager = [value.clone() for value in module.parameters()]
    assert not torch.equal(eager[0], before[0])
    momentum = optimizer.state[module.weight]["momentum_buffer"].clone()
    graphs.graphed_step(module, loss_of, x, optimizer=optimizer)
    assert torch.equal(optimizer.state[module.weight]["momentum_buffer"], momentum)
    for ours, theirs in zip(module.parameters(), eager, strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_that_a_graph_would_get_wrong_is_refused(no_gpu: None) -> None:
    """Adam's count on the host; a rate that has changed since the capture; gradients that were dropped."""
    module, x = torch.nn.Linear(4, 2), torch.randn(5, 4)
    with pytest.raises(ValueError, match=r"\[0\] has capturable=False.*construct Adam with capturable=True"):
        graphs.graphed_step(module, loss_of, x, optimizer=torch.optim.Adam(module.parameters()))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = graphs.graphed_step(module, loss_of, x, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"\['lr'\] is 0\.2 and the graph was captured with 0\.1"):
        step.replay()
    optimizer.param_groups[0]["lr"] = 0.1
    module.zero_grad(set_to_none=True)
    with pytest.raises(ValueError, match=r"weight\.grad is gone since the capture"):
        step.replay()


def test_make_graphed_refuses_host_sizes_and_other_values() -> None:
    """Before torch's own capture, which takes tensors alone."""
    module = GroupedLinear(3, 32, 16)
    with pytest.raises(ValueError, match=r"argument 0 is float32 \[8, 32\] on cpu"):
        graphs.make_graphed(module, (torch.zeros(8, 32), SIZES))
    with pytest.raises(ValueError, match=r"argument 1\[0\] is the integer 3"):
        graphs.make_graphed(module, ({"x": None}, [3, 0, 5]))


@pytest.mark.usefixtures("no_gpu")
def test_make_graphed_refuses_a_module_elsewhere() -> None:
    """The parameters are on the arguments' device, and arguments are tensors."""
    module = GroupedLinear(3, 32, 16, device="meta")
    with pytest.raises(ValueError, match="weight is on meta and argument 0 on cpu; move the module"):
        graphs.make_graphed(module, (torch.zeros(8, 32), SIZES))
    with pytest.raises(ValueError, match="hold something else than tensors"):
        graphs.make_graphed(module, (torch.zeros(8, 32), None))


def leaves_of(weight: QuantizedWeight) -> list[Tensor]:
    return [] if weight.codes is None else pytree.tree_leaves(weight.codes)


@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_static_weights(name: str, rng: Any) -> None:
    """Codes stay at their addresses; `unchanged` leaves them, else they are those of quantize_weight (fault 37)."""
    recipe = PRESETS[name]
    w = torch.randn(3, 64, 32, dtype=torch.bfloat16).requires_grad_()
    state = DelayedState.create(recipe, 3) if isinstance(recipe, DelayedScaling) else None
    static = graphs.StaticWeight(w, recipe, state=state)
    planes = leaves_of(static.quantized)
    old = [plane.clone() for plane in planes]
    assert bool(planes) == (name != "bf16")
    x = torch.randn(10, 32, dtype=torch.bfloat16)
    for unchanged in (1, 0):
        with torch.no_grad():
            w.mul_(3)
        static.unchanged.fill_(unchanged)
        if state is not None:
            state.history.zero_()
        refreshed = static.refresh()
        assert refreshed is static.quantized
        now = leaves_of(refreshed)
        assert [plane.data_ptr() for plane in now] == [plane.data_ptr() for plane in planes]
        other = DelayedState.create(recipe, 3) if isinstance(recipe, DelayedScaling) else None
        fresh = quantize_weight(w, recipe, state=other)
        expected = old if unchanged else leaves_of(fresh)
        for ours, theirs in zip(now, expected, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        y = grouped_linear(x.clone().requires_grad_(), refreshed, SIZES, recipe=recipe, seed=1, state=state)
        assert y.isfinite().all()
        if state is not None and other is not None:
            assert state.history[1, 0].all()
            assert unchanged or torch.equal(state.history[1, 0], other.history[1, 0])


def test_a_static_weight_of_another_backend(rng: Any) -> None:
    """A backend without the flag makes the codes, and what stays is selected afterwards; a weight of many tensors."""
    import octavo_registry

    recipe, flag = PRESETS["mxfp8"], 1
    w = tuple(torch.randn(16, 32).requires_grad_() for _ in range(2))
    with octavo_registry.prefer("torch-reference"):
        static = graphs.StaticWeight(w, recipe)
        old = [plane.clone() for plane in leaves_of(static.quantized)]
        with torch.no_grad():
            w[1].mul_(3)
        for flag in (1, 0):
            static.unchanged.fill_(flag)
            expected = old if flag else leaves_of(quantize_weight(w, recipe))
            for ours, theirs in zip(leaves_of(static.refresh()), expected, strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_make_graphed_refuses_weight_gradients_that_come_later(no_gpu: None) -> None:
    """A replay runs no Python, so nothing would be left for backward_dw."""
    layer = torch.nn.Sequential(GroupedLinear(2, 8, 8, delay_wgrad=True))
    with pytest.raises(ValueError, match="0 has delay_wgrad=True, and a graph's backward leaves nothing out"):
        graphs.make_graphed(layer, (torch.randn(4, 8), torch.tensor([2, 2])))


def test_zeros_for_main_grad_stay_without_memory(no_gpu: None, rng: Any) -> None:
    """A step whose warm-up and checks find such a .grad neither copies nor addresses it; another .grad is told of."""
    layer = GroupedLinear(2, 64, 32, dtype=torch.bfloat16, main_grad="accumulate", bias=True)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)  # type: ignore[attr-defined]
    x, sizes = torch.randn(6, 64).bfloat16(), torch.tensor([2, 4])

    def loss(module: torch.nn.Module, x: Tensor, sizes: Tensor) -> Tensor:
        return module(x, sizes).float().square().mean()  # type: ignore[no-any-return]

    loss(layer, x, sizes).backward()  # type: ignore[no-untyped-call]
    step = graphs.graphed_step(layer, loss, x, sizes)
    step(x, sizes)
    grad = layer.weight.grad
    assert isinstance(grad, ZeroGradient)
    assert not grad.is_written
    assert grad.untyped_storage().nbytes() == 2
    held = Held(lambda: held_by(layer, grads=True))
    held.check()
    layer.weight.grad = grad.fresh()
    with pytest.raises(ValueError, match=r"weight\.grad is another tensor since"):
        held.check()


def test_a_graphed_step_knows_the_optimizers_states(no_gpu: None) -> None:
    """load_state_dict makes new ones, and the graph would go on with the old ones, whose memory was freed."""
    layer = GroupedLinear(3, 64, 32, recipe="bf16")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(8, 64)

    def loss(module: torch.nn.Module, x: Tensor, sizes: Tensor) -> Tensor:
        return module(x, sizes).square().mean()  # type: ignore[no-any-return]

    loss(layer, x, SIZES).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    step = graphs.graphed_step(layer, loss, x, SIZES, optimizer=optimizer)
    optimizer.load_state_dict(saved)
    with pytest.raises(
        ValueError, match=r"optimizer's state 0\['momentum_buffer'\] is another tensor since the capture"
    ):
        step(x, SIZES)
