"""MasterWeights: an optimizer trains weights that are codes, and the codes are those of its rounded values."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from code_planes import planes
from torch import Tensor, nn

from octavo_torch import (
    AdamW,
    CodedWeight,
    GroupedMLP,
    MasterWeights,
    dequantize,
    load_checkpoint,
    load_distributed,
    quantize_before_gather,
    quantize_weight,
    quantized_parameters,
    save_checkpoint,
    save_distributed,
)

REFERENCE = "torch-reference"
G, K, F, M = 3, 64, 48, 20
SIZES = [5, 0, 12]


def values_of(weight: Any) -> Tensor:
    """What codes stand for, in fp32."""
    return dequantize(weight.codes)


def make(recipe: str, coded: bool = True, **more: Any) -> GroupedMLP:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "backend": REFERENCE, "seed": 7, **more}
    if not coded:
        return GroupedMLP(G, K, F, recipe=recipe, **how)
    with quantized_parameters(recipe):
        return GroupedMLP(G, K, F, **how)


def codes_of_values(values: Tensor, recipe: str) -> list[Tensor]:
    """Of fp32 values as the definition has it: quantize(cast(master))."""
    return planes(quantize_weight(values.bfloat16().requires_grad_(), recipe, backend=REFERENCE))


@pytest.mark.parametrize("main_grad", [None, "accumulate"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-block", "nvfp4"])
def test_training_is_that_of_fp32_masters_kept_by_hand(recipe: str, main_grad: Any, rng: np.random.Generator) -> None:
    """Two microbatches per step, clipped gradients, AdamW: masters and codes bit for bit, in every step.

    By hand: a layer of bf16 values, whose gradients are added up in fp32, and that are overwritten after each step.
    """
    ours, theirs = make(recipe, main_grad=main_grad), make(recipe, coded=False)
    values = {name: torch.randn(getattr(theirs, name).shape) / 8 for name in ("weight1", "weight2")}
    hand = {name: value.clone().requires_grad_() for name, value in values.items()}
    masters = MasterWeights(ours, values=values)
    optimizers = [torch.optim.AdamW(masters.all_parameters(), lr=1e-2), torch.optim.AdamW(hand.values(), lr=1e-2)]
    undo = masters.follow(optimizers[0])
    for _ in range(3):
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


def test_masters_start_from_what_the_codes_stand_for(rng: np.random.Generator) -> None:
    """Without values: their rows as fprop reads them, in the order of the module's weight, where gate and up rows may
    take turns."""
    for recipe in ("mxfp8", "fp8-block", "fp8-row", "nvfp4"):
        model = make(recipe, interleave=16)
        first, second = MasterWeights(model).parameters()
        assert isinstance(model.weight1, CodedWeight)
        assert isinstance(model.weight2, CodedWeight)
        gate, up = dequantize(model.weight1.codes).chunk(2, dim=1)
        for block in range(F // 16):
            rows = slice(16 * block, 16 * block + 16)
            assert torch.equal(first[:, 32 * block : 32 * block + 16], gate[:, rows])
            assert torch.equal(first[:, 32 * block + 16 : 32 * block + 32], up[:, rows])
        assert first.dtype is torch.float32
        assert torch.equal(second, dequantize(model.weight2.codes))


def test_a_saved_run_goes_on_bit_for_bit(rng: np.random.Generator) -> None:
    """State dicts of model, masters and optimizer: the step after loading is the step without a pause."""

    def run(model: GroupedMLP, optimizer: torch.optim.Optimizer) -> None:
        model(x, SIZES).backward(dy)
        optimizer.step()
        optimizer.zero_grad()

    x, dy = torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16()
    made = []
    for _ in range(2):
        model = make("fp8-block", bias=True)
        masters = MasterWeights(model, torch.bfloat16)
        optimizer = torch.optim.AdamW(masters.all_parameters(), lr=1e-2)
        masters.follow(optimizer)
        made.append((model, masters, optimizer))
    (model, masters, optimizer), later = made
    run(model, optimizer)
    saved = [copy.deepcopy(part.state_dict()) for part in (model, masters, optimizer)]
    run(model, optimizer)
    for part, state in zip(later, saved, strict=True):
        part.load_state_dict(state)
    run(later[0], later[2])
    assert all(map(torch.equal, masters.parameters(), later[1].parameters()))
    assert all(map(torch.equal, planes(model.weight1), planes(later[0].weight1)))
    assert torch.equal(model.bias1, later[0].bias1)  # type: ignore[arg-type]


def test_checkpoints_hold_masters_or_codes(rng: np.random.Generator, tmp_path: Path) -> None:
    """Sharded checkpoints hold values, so the masters; files hold codes, too; each comes back bit for bit."""
    model, other = make("fp8-block"), make("fp8-block")
    masters, others = MasterWeights(model), MasterWeights(other)
    for refused in (save_distributed, load_distributed):
        with pytest.raises(ValueError, match="weight1 is codes of recipe block alone"):
            refused(model, tmp_path / "model")
    with pytest.raises(ValueError, match="weight1 is codes alone, and FSDP2 shards values"):
        quantize_before_gather(model)
    save_distributed(masters, tmp_path / "masters")
    load_distributed(others, tmp_path / "masters")
    others.write()
    assert all(map(torch.equal, masters.parameters(), others.parameters()))
    masters.write()
    assert all(map(torch.equal, planes(model.weight1), planes(other.weight1)))
    third = make("fp8-block")
    save_checkpoint(model, tmp_path / "codes", quantized=True)
    load_checkpoint(third, tmp_path / "codes")
    assert all(map(torch.equal, planes(model.weight1), planes(third.weight1)))


@pytest.mark.parametrize("follower", ["MasterWeights", "AdamW"])
def test_a_run_goes_on_from_a_checkpoint_of_codes(follower: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """load_checkpoint writes codes into the parameters that are there, tied ones, too: what steps them goes on bit for
    bit, and they still take a gradient."""

    def begin() -> tuple[nn.ModuleList, nn.Module, torch.optim.Optimizer]:
        layers = nn.ModuleList([make("fp8-block"), make("fp8-block")])
        layers[1].weight2 = layers[0].weight2
        if follower == "AdamW":
            return layers, nn.Module(), AdamW(layers.parameters(), lr=1e-2)
        masters = MasterWeights(layers)
        optimizer = torch.optim.AdamW(masters.all_parameters(), lr=1e-2)
        masters.follow(optimizer)
        return layers, masters, optimizer

    def run(layers: nn.ModuleList, optimizer: torch.optim.Optimizer) -> None:
        for layer in layers:
            layer(x, SIZES).backward(dy)
        optimizer.step()
        optimizer.zero_grad()

    x, dy = torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16()
    layers, masters, optimizer = begin()
    run(layers, optimizer)
    save_checkpoint(layers, tmp_path / "codes")
    state, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(masters.state_dict())
    run(layers, optimizer)
    others, other_masters, other_optimizer = begin()
    before = [*others.parameters()]
    load_checkpoint(others, tmp_path / "codes")
    assert all(map(operator.is_, before, others.parameters()))
    assert all(parameter.requires_grad for parameter in before)
    other_masters.load_state_dict(values)
    other_optimizer.load_state_dict(state)
    run(others, other_optimizer)
    for mine, theirs in zip(layers.parameters(), others.parameters(), strict=True):
        assert all(map(torch.equal, planes(mine), planes(theirs)))


@pytest.mark.parametrize("follower", ["MasterWeights", "AdamW"])
def test_codes_of_frozen_weights_stay(follower: str, rng: np.random.Generator) -> None:
    """Codes need not be those of the values that they stand for, such as a file's and MXFP8's columns: steps of other
    weights, saved states and given values that are these leave a frozen weight's as they are."""
    model, x = make("mxfp8", bias=True), torch.randn(M, K).bfloat16()
    model.weight2.requires_grad_(False)
    before, first = [plane.clone() for plane in planes(model.weight2)], planes(model.weight1)[0].clone()

    def step(optimizer: torch.optim.Optimizer) -> None:
        model(x, SIZES).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    values = {"weight2": values_of(model.weight2)}
    if follower == "AdamW":
        optimizer: torch.optim.Optimizer = AdamW(model.parameters(), 0.1, masters={model.weight2: values["weight2"]})
        step(optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        masters = MasterWeights(model, values=values)
        optimizer = torch.optim.AdamW(masters.all_parameters(), 0.1)
        masters.follow(optimizer)
        step(optimizer)
        masters.load_state_dict(copy.deepcopy(masters.state_dict()))
    step(optimizer)
    assert all(map(torch.equal, planes(model.weight2), before))
    assert not torch.equal(planes(model.weight1)[0], first)


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
