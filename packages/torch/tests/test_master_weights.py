"""MasterWeights: an optimizer trains weights that are codes, and the codes are those of its rounded values."""

from __future__ import annotations

import copy
import gc
import io
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from code_planes import planes
from master_layers import SIZES, F, G, K, M, codes_of_values, make
from torch import Tensor, nn

from octavo_torch import (
    CodedWeight,
    MasterWeights,
)


@pytest.mark.parametrize("main_grad", [None, "accumulate"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-block", "nvfp4"])
def test_training_is_that_of_fp32_masters_kept_by_hand(recipe: str, main_grad: Any, rng: np.random.Generator) -> None:
    """Two microbatches per step, clipped gradients, AdamW: masters and codes bit for bit, in every step.

    By hand: a layer of bf16 values, whose gradients are added up in fp32, and that are overwritten after each step.
    Moving the layer, as libraries do to where it is, takes nothing from it that its masters or a user have set.
    """
    ours, theirs = make(recipe, main_grad=main_grad), make(recipe, coded=False)
    values = {name: torch.randn(getattr(theirs, name).shape) / 8 for name in ("weight1", "weight2")}
    hand = {name: value.clone().requires_grad_() for name, value in values.items()}
    masters = MasterWeights(ours, values=values)
    optimizers = [torch.optim.AdamW(masters.all_parameters(), lr=1e-2), torch.optim.AdamW(hand.values(), lr=1e-2)]
    undo = masters.follow(optimizers[0])
    ours.weight1.of_experts = True  # type: ignore[assignment]  # as Megatron marks parameters
    for _ in range(3):
        ours.to("cpu")
        assert ours.weight1.of_experts
        for name, value in hand.items():
            theirs.get_parameter(name).data.copy_(value.detach())
            value.grad = torch.zeros_like(value)
        for _ in range(2):
            x, dy = torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16()
            seeds = [module.seed_counter.clone() for module in (ours, theirs) if hasattr(module, "seed_counter")]
            assert all(seed == seeds[0] for seed in seeds)
            ours(x, SIZES).backward(dy)
            theirs(x, SIZES).backward(dy)
            for name, value in hand.items():
                grad = theirs.get_parameter(name).grad
                assert grad is not None
                assert value.grad is not None
                value.grad += grad
                theirs.get_parameter(name).grad = None
            if main_grad is None:
                masters.collect()  # each microbatch's gradient is added in fp32
        masters.collect()
        for parameters in (list(masters.parameters()), list(hand.values())):
            nn.utils.clip_grad_norm_(parameters, 0.5)
        if main_grad is None:
            assert all(map(torch.equal, (p.grad for p in masters.parameters()), (p.grad for p in hand.values())))
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].zero_grad()
        for name, master in zip(("weight1", "weight2"), masters.parameters(), strict=True):
            if main_grad is None:  # else its sums are fp32 products', which were never rounded to bf16
                assert torch.equal(master, hand[name])
            weight = ours.get_parameter(name)
            assert isinstance(weight, CodedWeight)
            assert weight.grad is None
            assert all(map(torch.equal, planes(weight), codes_of_values(master.detach(), recipe)))
    undo()
    before = [plane.clone() for plane in planes(ours.weight1)]
    for master in masters.parameters():
        master.grad = torch.ones_like(master)
    optimizers[0].step()
    assert all(map(torch.equal, planes(ours.weight1), before))


@pytest.mark.parametrize("main_grad", [None, "accumulate"])
def test_gradients_of_a_closure_are_collected(main_grad: Any, rng: np.random.Generator) -> None:
    """They come within the step: masters that were collected before it would never train."""
    batches = [(torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16()) for _ in range(3)]
    found = []
    for within, by_name in ((False, False), (True, False), (True, True)):
        torch.manual_seed(1)
        model = make("fp8-block", main_grad=main_grad)
        masters = MasterWeights(model)
        optimizer = torch.optim.AdamW(masters.all_parameters(), lr=1e-2)
        masters.follow(optimizer)
        for x, dy in batches:

            def closure(x: Tensor = x, dy: Tensor = dy) -> Tensor:
                optimizer.zero_grad()  # noqa: B023  # it is called before the loop goes on
                y: Tensor = model(x, SIZES)  # noqa: B023
                y.backward(dy)
                return y.detach()

            if within:
                y = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            else:
                y = closure()
                optimizer.step()
        assert isinstance(y, Tensor)
        found.append([y, *(master.detach() for master in masters.values()), *planes(model.weight1)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_closure_finds_the_codes_of_the_masters(rng: np.random.Generator) -> None:
    """LBFGS calls it several times in a step, each time with other masters."""
    model = make("fp8-block")
    masters = MasterWeights(model)
    optimizer = torch.optim.LBFGS(masters.all_parameters(), lr=1e-2, max_iter=3)
    masters.follow(optimizer)
    x, seen = torch.randn(M, K).bfloat16(), list[Tensor]()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x, SIZES).float().square().mean()
        loss.backward()
        assert all(map(torch.equal, planes(model.weight1), codes_of_values(masters["weight1"].detach(), "fp8-block")))
        seen.append(masters["weight1"].detach().clone())
        return loss

    optimizer.step(closure)
    assert len(seen) > 1
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("followed", [True, False])
def test_zero_grad_clears_gradients_that_no_step_has_taken(followed: bool, rng: np.random.Generator) -> None:
    """Of a batch that a training loop leaves out: the next step is as if it had never been."""
    left_out, x, dy = (torch.randn(M, K).bfloat16() for _ in range(3))
    stepped = []
    for leaves_out in (False, True):
        torch.manual_seed(1)
        model = make("fp8-block")
        masters = MasterWeights(model)
        optimizer = torch.optim.AdamW(masters.all_parameters(), lr=1e-2)
        undo = masters.follow(optimizer) if followed else None
        if leaves_out:
            model(left_out, SIZES).backward(dy)
            optimizer.zero_grad() if followed else masters.zero_grad()
        model(x, SIZES).backward(dy)
        masters.collect()
        optimizer.step()
        stepped.append([master.detach() for master in masters.values()])
        if undo is not None:
            undo()
            optimizer.zero_grad()
            model(x, SIZES).backward(dy)
            optimizer.zero_grad(set_to_none=False)
            assert model.weight1.grad is not None  # followed no longer
            assert all(master.grad is None for master in masters.values())
    assert all(map(torch.equal, *stepped))


def test_gradients_that_a_step_has_taken_are_not_added_to(rng: np.random.Generator) -> None:
    """Where the module's zero_grad is called in the place of the optimizer's, which clears the masters'."""
    model = make("mxfp8")
    masters = MasterWeights(model)
    optimizer = torch.optim.SGD(masters.all_parameters(), lr=1e-2)
    masters.follow(optimizer)
    for clear in (optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False), masters.zero_grad):
        for _ in range(2):  # microbatches
            model(torch.randn(M, K).bfloat16(), SIZES).sum().backward()
            masters.collect()
        optimizer.step()
        clear()
    model(torch.randn(M, K).bfloat16(), SIZES).sum().backward()
    optimizer.step()
    model.zero_grad()
    model(torch.randn(M, K).bfloat16(), SIZES).sum().backward()
    before = [master.detach().clone() for master in masters.values()]
    with pytest.raises(ValueError, match=r"the master of weight1 has the gradient .* call optimizer.zero_grad\(\)"):
        optimizer.step()
    assert all(map(torch.equal, before, masters.values()))


@pytest.mark.parametrize("recipe", ["fp8-block", "nvfp4"])
@pytest.mark.parametrize("closure", [False, True])
def test_values_that_a_step_would_undo(recipe: str, closure: bool, rng: np.random.Generator) -> None:
    """A state dict that is loaded into the module alone: a step says so before anything changes, until its values are
    in the masters, too; what masters stand for may come again."""
    model = make(recipe)
    masters = MasterWeights(model)
    optimizer = torch.optim.SGD(masters.all_parameters(), lr=1e-2)
    masters.follow(optimizer)

    def loss() -> Tensor:
        optimizer.zero_grad()
        y = model(torch.randn(M, K).bfloat16(), SIZES).sum()
        y.backward()
        return y

    def step() -> None:
        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()

    step()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    step()
    values = {name: torch.randn(getattr(model, name).shape).bfloat16() for name in ("weight1", "weight2")}
    before = [master.detach().clone() for master in masters.values()]
    model.load_state_dict({**model.state_dict(), **values})
    with pytest.raises(ValueError, match=r"weight1 was changed after .* Create the MasterWeights after values"):
        step()
    assert all(map(torch.equal, before, masters.values()))
    with torch.no_grad():
        for name, value in values.items():
            masters[name].copy_(value)
    step()


@pytest.mark.parametrize("main_grad", [None, "accumulate"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler_sees_every_gradient(enabled: bool, main_grad: Any, rng: np.random.Generator) -> None:
    """Scaled by a power of two, steps have the bits of steps without. A gradient that nobody has collected is refused:
    it would be stepped with as it is, 1024 times too large."""

    def trained(scale: float | None, collect: bool) -> list[Tensor]:
        torch.manual_seed(seed)
        layer, other = make("fp8-block", main_grad=main_grad), nn.Linear(K, K)  # another, which the scaler does see
        masters = MasterWeights(nn.ModuleList([layer, other]))
        optimizer = torch.optim.SGD(masters.all_parameters(), lr=0.1)
        masters.follow(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for _ in range(2):
            y = other(layer(torch.randn(M, K).bfloat16(), SIZES).float())
            scaler.scale(y[: sum(SIZES)].square().mean()).backward()
            if collect:
                masters.collect()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [value.detach() for value in masters.parameters()]

    seed = int(rng.integers(1 << 31))
    scale = 1024.0 if enabled else None
    wanted = trained(None, collect=True)
    assert all(map(torch.equal, trained(scale, collect=True), wanted))
    if enabled and main_grad is None:
        with pytest.raises(ValueError, match=r"a GradScaler steps the optimizer and has not seen the gradient of 0\."):
            trained(scale, collect=False)
    else:
        assert all(map(torch.equal, trained(scale, collect=False), wanted))


def test_what_does_not_fit_is_refused() -> None:
    """Before anything is written, naming the argument."""
    model = make("mxfp8")
    before = [plane.clone() for plane in planes(model.weight1)]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"module": nn.Linear(2, 2)}, "module is a Linear without a CodedWeight"),
        ({"module": 3}, "module"),
        ({"dtype": torch.int8}, "dtype"),
        ({"values": [1]}, "values is"),
        ({"values": {"weight": torch.zeros(2)}}, "values has 'weight'; give values of weight1, weight2 alone"),
        (
            {"values": {"weight1": torch.zeros(G, 2 * F, K), "weight2": torch.zeros(2)}},
            r"values of weight2 is float32 \[2\]; give floating-point \[3, 64, 48\]",
        ),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            MasterWeights(**{"module": model, **changed})
    assert all(map(torch.equal, planes(model.weight1), before))
    masters = MasterWeights(model)
    with pytest.raises(ValueError, match="optimizer is"):
        masters.follow(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer does not step the master of weight1"):
        masters.follow(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(ValueError, match="assign is True"):
        masters.load_state_dict(masters.state_dict(), assign=True)


def _pickled(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("way", [copy.deepcopy, _pickled])
@pytest.mark.parametrize("main_grad", [None, "accumulate"])
def test_copies_made_together_follow_one_another(
    main_grad: Any, way: Any, order: tuple[int, ...], rng: np.random.Generator
) -> None:
    """Whatever comes first in the copy: it trains on as the original does, bit for bit, and each by its own steps."""
    model = make("fp8-block", main_grad=main_grad)
    masters = MasterWeights(model)
    optimizer = torch.optim.AdamW(masters.all_parameters(), lr=1e-2)
    masters.follow(optimizer)
    batches = [(torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16()) for _ in range(3)]

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> list[Tensor]:
        found = []
        for x, dy in batches:
            optimizer.zero_grad()
            y = model(x, SIZES)
            y.backward(dy)
            optimizer.step()
            found.append(y.detach())
        return found

    steps(model, optimizer, batches[:1])
    whole = (model, masters, optimizer)
    copied = dict(zip(order, way([whole[number] for number in order]), strict=True))
    before = model(batches[2][0], SIZES)
    theirs = steps(copied[0], copied[2], batches[1:])
    assert torch.equal(model(batches[2][0], SIZES), before)
    ours = steps(model, optimizer, batches[1:])
    assert not torch.equal(before, ours[1])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for name, master in masters.items():
        assert torch.equal(copied[1][name], master)


def test_what_is_followed_no_longer_is_not_followed_by_a_copy() -> None:
    """Undone, or an optimizer that nobody has: a copy holds no state of one, and takes a new one."""
    model = make("mxfp8")
    masters = MasterWeights(model)
    first, second = (torch.optim.AdamW(masters.all_parameters()) for _ in range(2))
    undo, _ = masters.follow(first), masters.follow(second)
    undo()
    undo()
    own, copied, theirs = copy.deepcopy((masters, first, second))
    assert not copied._optimizer_step_pre_hooks
    assert len(theirs._optimizer_step_pre_hooks) == 1
    del second, theirs
    gc.collect()
    assert masters.__getstate__()["_followed"] == own.__getstate__()["_followed"] == []
    own.follow(torch.optim.SGD(own.all_parameters(), lr=0.1))
