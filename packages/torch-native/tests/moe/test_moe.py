"""moe_mlp on the native kernels: the bits of the operations in a row, predicted bytes, no wait, graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cuda_device import MARKS, no_sync
from native_calls import watch_quantizers
from torch import Tensor

import octavo_native
from octavo import PRESETS, DelayedScaling, Recipe
from octavo_torch import DelayedState, Exchange, MoeShape, Room, bytes_kept, grouped_mlp, moe_mlp, permute, unpermute

T, C, G, K, F, N = 61, 3, 5, 144, 112, 80
NATIVE = "torch-native"
RECIPES: dict[str, Recipe] = {**PRESETS, "fp8-delayed": DelayedScaling(history=4)}
FORMS = ("standard", "keep_all", "recompute")
DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]


def draw(
    rng: np.random.Generator, device: str, tokens: int = T, biased: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    """Leaves by their names in moe_mlp, and choices: some go nowhere, and expert 1 gets none."""
    choices = torch.from_numpy(rng.choice([0, 2, 3, 4, -1], (tokens, C))).to(device)
    made = {
        "x": torch.randn(tokens, K).bfloat16(),
        "weights": torch.rand(tokens, C),
        "w1": (torch.randn(G, 2 * F, K) / 8).bfloat16(),
        "w2": (torch.randn(G, N, F) / 8).bfloat16(),
    }
    if biased:
        made |= {"bias1": torch.randn(G, 2 * F).bfloat16(), "bias2": torch.randn(G, N).bfloat16()}
    return {name: value.to(device).requires_grad_() for name, value in made.items()}, choices


def composed(given: dict[str, Tensor], choices: Tensor, call: dict[str, Any]) -> Tensor:
    rows, sizes, routing = permute(given["x"], choices, G, backend=NATIVE)
    probs = routing.to_rows(given["weights"], backend=NATIVE)
    rest: dict[str, Any] = {name: value for name, value in given.items() if name not in ("x", "weights")}
    rest["bias2_scales"] = probs if "bias2" in given else None
    y = grouped_mlp(rows, group_sizes=sizes, probs=probs, backend=NATIVE, **rest, **call)
    return unpermute(y, routing, backend=NATIVE)


def states_of(recipe: Recipe, device: str) -> tuple[DelayedState, ...] | None:
    if not isinstance(recipe, DelayedScaling):
        return None
    return tuple(DelayedState.create(recipe, G, device) for _ in range(2))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_the_operations_in_a_row(name: str, device: str, biased: bool, rng: np.random.Generator) -> None:
    """y and all gradients of every recipe and form that keeps values, with codes of weights made again; where fc2 has
    a bias, dy's rows are summed by expert, and otherwise nobody reads them."""
    recipe = RECIPES[name]
    given, choices = draw(rng, device, biased=biased)
    leaves, states = list(given.values()), states_of(recipe, device)
    call: dict[str, Any] = {"recipe": recipe, "seed": 7}
    expected = composed(given, choices, {**call, "state": copy.deepcopy(states)})
    dy = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, leaves, dy)]
    for form in (*FORMS, "lean"):
        more = {"form": form, "weight_codes": "remake", "state": copy.deepcopy(states), "backend": NATIVE}
        y = moe_mlp(choices=choices, **given, **call, **more)
        made = [y, *torch.autograd.grad(y, leaves, dy)]
        same = [torch.equal(ours, theirs) for ours, theirs in zip(made, wanted, strict=True)]
        assert all(same) if form != "lean" else same[0], (form, same)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["fp8-current", "fp8-row", "fp8-block", "nvfp4"])
def test_bits_of_uncommon_choices(name: str, device: str, rng: np.random.Generator) -> None:
    """No token, every choice nobody's, all tokens on one expert, one token on all of its experts."""
    for tokens, fill in ((0, 0), (9, -1), (200, 3), (1, None)):
        given, choices = draw(rng, device, tokens, biased=False)
        if fill is not None:
            choices = torch.full_like(choices, fill)
        leaves, call = list(given.values()), {"recipe": RECIPES[name], "seed": 7}
        expected = composed(given, choices, call)
        dy = torch.randn_like(expected)
        wanted = [expected, *torch.autograd.grad(expected, leaves, dy)]
        for form in FORMS:
            y = moe_mlp(choices=choices, form=form, backend=NATIVE, **given, **call)
            made = [y, *torch.autograd.grad(y, leaves, dy)]
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(made, wanted, strict=True)), (tokens, form)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=MARKS)])
@pytest.mark.parametrize("name", ["bf16", "fp8-current", "fp8-block", "fp8-block-wgrad-high-precision"])
def test_room_changes_no_bit_of_products_of_tokens(name: str, device: str, rng: np.random.Generator) -> None:
    """Two multiprocessors, or one, compute many tiles each of the products that gather tokens (faults.md 17, 19)."""
    hidden = 272
    choices = torch.from_numpy(rng.choice([0, 2, 3, 4, -1], (200, C), p=(0.5, 0.25, 0.1, 0.05, 0.1))).to(device)
    drawn = (torch.randn(200, 784), torch.rand(200, C), torch.randn(G, 2 * hidden, 784), torch.randn(G, 784, hidden))
    x, weights, w1, w2 = (
        value.to(device, torch.float32 if value.shape[-1] == C else torch.bfloat16).requires_grad_() for value in drawn
    )
    dy = torch.randn_like(x)
    most = torch.cuda.get_device_properties(0).multi_processor_count
    results = []
    for room in (None, Room(gemms=most - 2), Room(gemms=most - 1)):
        y = moe_mlp(x, choices, weights, w1, w2, recipe=RECIPES[name], seed=7, backend=NATIVE, room=room)
        results.append([y, *torch.autograd.grad(y, (x, weights, w1, w2), dy)])
    for made in results[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(made, results[0], strict=True))
        assert all(bool(value.isfinite().all()) for value in made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biases", [(), ("bias1",), ("bias1", "bias2")])
def test_bf16_has_a_pass_each_way_and_no_codes(
    biases: tuple[str, ...], device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between bf16 products nobody reads codes, so none are written; and backward's one pass over h makes its gradient
    and the activation again, where dy stands by token until both are there, and no bias wants sums of columns."""
    given, choices = draw(rng, device)
    given = {name: leaf for name, leaf in given.items() if not name.startswith("bias") or name in biases}
    specs = watch_quantizers(monkeypatch)
    moe_mlp(choices=choices, recipe="bf16", backend=NATIVE, **given).sum().backward()
    passes = [(spec.prologue, spec.forward) for spec in specs]
    apart = [("activation", False), ("activation_grad", False)]
    again = {0: [("activation_grad", True)], 1: apart[::-1], 2: apart}
    assert passes == [("activation", False), *again[len(biases)]]
    assert not any(spec.planes for spec in specs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECIPES)
def test_rows_that_no_product_reads_are_not_written(
    name: str, device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choices' weights are permuted; x and dy are quantized or multiplied where the tokens stand, even where one
    product reads codes of dy and the other one values."""
    recipe = RECIPES[name]
    given, choices = draw(rng, device, biased=False)
    permute_rows, columns = octavo_native.permute_rows, []

    def watched(**arguments: Any) -> None:
        columns.append(arguments["cols"])
        permute_rows(**arguments)

    monkeypatch.setattr(octavo_native, "permute_rows", watched)
    for form in (*FORMS, "lean"):
        columns.clear()
        how: dict[str, Any] = {"recipe": recipe, "seed": 7, "state": states_of(recipe, device), "form": form}
        moe_mlp(choices=choices, backend=NATIVE, **given, **how).sum().backward()
        assert set(columns) == {1}, form


@pytest.mark.parametrize("name", ["bf16", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=MARKS)])
def test_the_allocator_holds_what_is_predicted(name: str, device: str, rng: np.random.Generator) -> None:
    """memory_allocated between forward and backward, and no wait for the device."""
    recipe, shape = RECIPES[name], MoeShape(T, C, G, K, F, N)
    given, choices = draw(rng, device)
    for form in (*FORMS, "lean"):
        call: dict[str, Any] = {"recipe": recipe, "seed": 7, "form": form, "backend": NATIVE}
        moe_mlp(choices=choices, **given, **call).sum().backward()
        kept = bytes_kept(recipe, shape, form, device=device, backend=NATIVE)  # type: ignore[arg-type]
        callers: tuple[str, ...] = ("x", "choices", "weights")
        if form == "keep_all":  # which keeps the routing, and x by token for products of it
            callers = ("weights",) if recipe.quantizes("wgrad") else ("x", "weights")
        held = sum(-(-kept.tensors[own] // 512) * 512 for own in callers)
        torch.cuda.empty_cache()
        with no_sync():
            before = torch.cuda.memory_allocated()
            y = moe_mlp(choices=choices, **given, **call)
            after = torch.cuda.memory_allocated()
        results = -(-y.untyped_storage().nbytes() // 512) * 512
        assert after - before - results == kept.allocated - held
        del y


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone: everything is exchanged, with itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("choices_each", [1, 3])
@pytest.mark.parametrize("name", ["fp8-block", "nvfp4", "bf16"])
def test_fewer_rows_than_choices(
    name: str, choices_each: int, one_rank: dist.ProcessGroup, rng: np.random.Generator
) -> None:
    """A layer over ranks moves the rows that there are and a spare one, and the kernels follow: every choice routed,
    none, or some; sizes that are read and static buffers."""
    for some in (0.0, 0.5, 1.0):
        given, choices = draw(rng, "cpu", biased=some == 0.5)
        choices = choices[:, :choices_each].abs().where(torch.rand(T, choices_each) < some, -1)
        given["weights"] = given["weights"].detach()[:, :choices_each].contiguous().requires_grad_()
        rows = max(int((choices >= 0).sum()), 1)
        results = []
        for how in ({}, {"ep": one_rank}, {"ep": one_rank, "exchange": Exchange(rows=rows)}):
            y = moe_mlp(choices=choices, recipe=PRESETS[name], seed=3, backend=NATIVE, **given, **how)
            results.append((y, *torch.autograd.grad(y.float().square().sum(), list(given.values()))))
        for spread in results[1:]:
            for ours, theirs in zip(spread, results[0], strict=True):
                assert torch.equal(ours, theirs)
