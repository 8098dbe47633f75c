"""Room: what it refuses, that it changes no bit, and w2's quantizer beside fc1's product in the order of events.

A machine without a device has no streams. Here two stand-ins say what is asked of them; the kernels themselves are run
on a device by octavo-torch-native's tests.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import octavo_registry
from octavo import PRESETS, BlockScaling, DelayedScaling, OctavoError
from octavo_registry.contract import GemmRequest
from octavo_torch import (
    Activation,
    DelayedState,
    GroupedLinear,
    GroupedMLP,
    MoE,
    Room,
    Sequential,
    grouped_linear,
    grouped_mlp,
    moe_mlp,
    quantize_weight,
)
from octavo_torch.dispatch.room import within
from octavo_torch.linear import autograd
from octavo_torch.mlp import concurrent_quantizer as concurrent
from octavo_torch.mlp import forward

G, M, K, F, N = 3, 70, 64, 48, 80
SIZES = torch.tensor([20, 0, 40])
RECIPES = {"block": BlockScaling(), "delayed": DelayedScaling(history=4), "mxfp8": PRESETS["mxfp8"]}


class Stream:
    """A stream that runs nothing beside anything, and tells a log what it is asked for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"{self.name}'s event"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to streams, and between them, in order."""
    said: list[str] = []

    def told(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            said.append(what)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(concurrent, "has_streams", lambda tensor: type(tensor) in (Tensor, torch.nn.Parameter))
    monkeypatch.setattr(concurrent, "streams", lambda device: (Stream("main", said), Stream("side", said)))
    monkeypatch.setattr(concurrent, "read_operands", told("x and w1 quantized", autograd.read_operands))
    monkeypatch.setattr(concurrent, "product", told("fc1's product", autograd.product))
    monkeypatch.setattr(concurrent, "quantize_operand", told("w2 quantized", autograd.quantize_operand))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: said.append(f"memory kept for {stream.name}"))
    return said


BESIDE = [
    "x and w1 quantized", "main records", "fc1's product", "side waits for main's event", "w2 quantized",
    "side records", "main waits for side's event",
]  # fmt: skip


def steps(log: list[str]) -> list[str]:
    """What the log says but for memory, of which there is at least some; the log is then empty."""
    kept = [entry for entry in log if not entry.startswith("memory")]
    assert {*log} - {*kept} == {"memory kept for main"}
    log.clear()
    return kept


def operands() -> dict[str, Any]:
    made = {"x": torch.randn(M, K), "w1": torch.randn(G, 2 * F, K) / 8, "w2": torch.randn(G, N, F) / 8}
    made |= {"bias1": torch.randn(G, 2 * F), "bias2": torch.randn(G, N)}
    return {name: value.bfloat16().requires_grad_() for name, value in made.items()}


def states_of(recipe: Any) -> Any:
    return tuple(DelayedState.create(recipe, G) for _ in range(2)) if recipe.stateful else None


def results(given: dict[str, Any], recipe: Any, dy: Tensor, **more: Any) -> list[Tensor]:
    """y, every gradient, and the histories of delayed scaling."""
    states = states_of(recipe)
    y = grouped_mlp(group_sizes=SIZES, recipe=recipe, state=states, **given, **more)
    grads = torch.autograd.grad(y, list(given.values()), dy)
    return [y.detach(), *grads, *[state.history for state in states or ()]]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_w2_is_quantized_beside_the_product_with_the_same_bits(name: str, log: list[str]) -> None:
    """The product is launched before the quantizer that takes what is left; the caller's stream waits before w2 is
    read. Gradients find the same codes, and delayed scaling the same amax."""
    given, recipe = operands(), RECIPES[name]
    dy = torch.randn(M, N).bfloat16()
    plain = results(given, recipe, dy)
    assert log == []
    beside = results(given, recipe, dy, room=Room(w2=16))
    assert steps(log) == BESIDE
    assert same(beside, plain)


@pytest.mark.parametrize("form", ["keep_all", "standard", "lean", "recompute"])
@pytest.mark.parametrize("weight_codes", ["keep", "remake"])
def test_a_moe_layer_does_so_too(form: Any, weight_codes: Any, log: list[str]) -> None:
    """In each form; what backward computes again runs in turn."""
    tokens, choices = torch.randn(30, K).bfloat16(), torch.randint(0, G, (30, 2))
    weights, dy = torch.rand(30, 2), torch.randn(30, N).bfloat16()
    given = operands()
    w1, w2, bias1, bias2 = given["w1"], given["w2"], given["bias1"], given["bias2"]
    leaves = [tokens.requires_grad_(), w1, w2, bias1, bias2]

    def run(room: Room | None) -> list[Tensor]:
        y = moe_mlp(
            tokens, choices, weights, w1, w2, bias1=bias1, bias2=bias2, recipe=RECIPES["block"], form=form,
            weight_codes=weight_codes, room=room,
        )  # fmt: skip
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    plain = run(None)
    beside = run(Room(w2=16))
    assert steps(log) == BESIDE
    assert same(beside, plain)


def test_modules_and_fused_rows_of_operations_pass_it_on(log: list[str]) -> None:
    """GroupedMLP, MoE, and Sequential of layers that agree; of layers that do not, nothing is fused."""
    room = Room(gemms=8, w2=16)
    how: dict[str, Any] = {"recipe": "block", "dtype": torch.bfloat16, "room": room}
    mlp = GroupedMLP(G, K, F, N, **how)
    assert "room=Room(gemms=8, w2=16)" in repr(mlp)
    x = torch.randn(M, K).bfloat16()
    mlp(x, SIZES)
    assert steps(log) == BESIDE
    MoE(G, K, F, 2, **how)(x)
    assert steps(log) == BESIDE
    first, second = (GroupedLinear(G, *sides, **how | {"room": Room(gemms=8)}) for sides in ((K, F), (F, N)))
    fused = Sequential(first, Activation("silu"), second)
    assert "not fused" not in fused.explain(x, SIZES)
    second.room = None
    assert "room is Room(gemms=8, w2=None) and None" in fused.explain(x, SIZES)


def test_what_is_not_quantized_in_the_call_runs_in_turn(log: list[str]) -> None:
    """Codes that are given, high precision, and a call that no stream is beside: nothing is asked of a stream."""
    given, recipe = operands(), RECIPES["block"]
    codes = quantize_weight(given["w2"], recipe)
    grouped_mlp(group_sizes=SIZES, recipe=recipe, room=Room(w2=16), **given | {"w2": codes})
    grouped_mlp(group_sizes=SIZES, recipe=None, room=Room(w2=16), **given)
    grouped_mlp(group_sizes=SIZES, recipe=recipe, room=Room(gemms=16), **given)
    assert log == []


def test_a_call_that_raises_waits_before_memory_is_given_back(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantizer beside still reads w2, which may be the call's own copy."""

    def fails(*args: Any) -> Any:
        raise OctavoError("no memory")

    monkeypatch.setattr(forward, "activation_of", fails)
    with pytest.raises(OctavoError, match="no memory") as error:
        grouped_mlp(group_sizes=SIZES, recipe=RECIPES["block"], room=Room(w2=16), **operands())
    error.value.__traceback__ = None
    del error
    assert log == BESIDE


def test_on_a_cpu_nothing_changes() -> None:
    """There are no multiprocessors and no streams; one program runs on both."""
    given, recipe = operands(), RECIPES["block"]
    dy = torch.randn(M, N).bfloat16()
    assert same(results(given, recipe, dy, room=Room(gemms=16, w2=16)), results(given, recipe, dy))
    x, w = given["x"], given["w1"]
    assert torch.equal(
        grouped_linear(x, w, SIZES, recipe=recipe, room=Room(gemms=16)), grouped_linear(x, w, SIZES, recipe=recipe)
    )


def test_in_one_graph() -> None:
    """A room is a constant of torch.compile's: of a function, of modules, and of a call that is traced twice."""
    given, room, how = operands(), Room(gemms=16, w2=16), {"recipe": RECIPES["block"], "dtype": torch.bfloat16}
    layer, moe = GroupedLinear(G, K, K, room=Room(gemms=8), **how), MoE(G, K, F, 2, room=room, **how)  # type: ignore[arg-type]
    recipe, x = RECIPES["block"], given.pop("x")

    def block(x: Tensor) -> Tensor:
        for _ in range(2):
            x = moe(layer(x, SIZES))
        return grouped_mlp(x, group_sizes=SIZES, recipe=recipe, room=room, **given)

    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), block(x))


def test_a_room_stays_as_it_is() -> None:
    """It is a value, equal to its copies, in a module's copy, too."""
    room = Room(gemms=8, w2=16)
    with pytest.raises(AttributeError, match=r"gemms of Room\(gemms=8, w2=16\) cannot be set; make another Room"):
        room.gemms = 4
    for again in (copy.deepcopy(room), pickle.loads(pickle.dumps(room)), Room(8, 16)):
        assert (again, hash(again), repr(again)) == (room, hash(room), "Room(gemms=8, w2=16)")
    assert room not in (Room(8), Room(w2=16), (8, 16))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gemms": -1}, "Room's gemms is -1; give a number of multiprocessors, 0 or more"),
        ({"gemms": None}, "Room's gemms is None"),
        ({"gemms": True}, "Room's gemms is True"),
        ({"w2": 0}, "Room's w2 is 0; give a number of multiprocessors, 1 or more"),
        ({"w2": 1.5}, "Room's w2 is 1.5"),
    ],
)
def test_rooms_that_mean_nothing_are_refused(fields: dict[str, Any], reason: str) -> None:
    """A number that is none, or that leaves nothing."""
    with pytest.raises(ValueError, match=reason):
        Room(**fields)


def test_what_is_no_room_is_refused() -> None:
    """At the call, and where a module is made."""
    given = operands()
    with pytest.raises(ValueError, match=r"room is 16; give an octavo_torch\.Room"):
        grouped_mlp(group_sizes=SIZES, recipe="block", room=16, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"room is 16; give an octavo_torch\.Room"):
        grouped_linear(given["x"], given["w1"], SIZES, recipe="block", room=16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one layer has no w2; give Room"):
        grouped_linear(given["x"], given["w1"], SIZES, recipe="block", room=Room(w2=4))
    with pytest.raises(ValueError, match="one layer has no w2; give Room"):
        GroupedLinear(G, K, N, recipe="block", room=Room(w2=4))


def test_a_limit_comes_from_the_backend_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ignores one: the reference has none, and no device has fewer than one multiprocessor to work on."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(multi_processor_count=132))
    request = GemmRequest("fprop", "torch", "cpu", "bfloat16", "bfloat16", recipe=RECIPES["block"])
    plan: Any = octavo_registry.plan(request, backend="torch-reference")
    with pytest.raises(OctavoError, match="torch-reference has no limit for its fprop"):
        within(plan, device, 16)
    limited = replace(plan, bound=replace(plan.bound, limited={116: plan.run}.__getitem__))
    assert within(limited, device, 16) is plan.run
    with pytest.raises(ValueError, match="room leaves 132 multiprocessors to others and cuda:0 has 132; leave fewer"):
        within(limited, device, 132)
