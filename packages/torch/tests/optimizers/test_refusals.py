"""AdamW refuses what does not fit with its name and a reason, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo_torch import AdamW, GroupedLinear, dequantize, quantized_parameters


def stepped(state_bits: int = 8, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Parameter, AdamW]:
    parameter = nn.Parameter(torch.randn(3, 130).to(dtype))
    optimizer = AdamW([parameter], state_bits=state_bits)
    parameter.grad = torch.randn(3, 130).to(dtype)
    optimizer.step()
    return parameter, optimizer


def entry(state_dict: Any) -> Any:
    return state_dict["state"][0]


def replaced(name: str, value: Any) -> Callable[[Any], None]:
    return lambda state_dict: entry(state_dict).update({name: value})


def group(name: str, value: Any) -> Callable[[Any], None]:
    return lambda state_dict: state_dict["param_groups"][0].update({name: value})


HOSTILE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda s: s.pop("state"), "without state and param_groups"),
    (lambda s: s["param_groups"].append({}), "state_dict has 2 groups and this optimizer 1"),
    (lambda s: s["param_groups"].__setitem__(0, 3), "state_dict's group 0 is 3"),
    (group("params", [0, 1]), "state_dict's group 0 has 2 parameters and this optimizer's 1"),
    (group("lr", -1.0), "lr is -1.0"),
    (group("lr", torch.tensor(float("nan"))), "lr is nan"),
    (group("lr", torch.zeros(2)), r"lr is float32 \[2\]"),
    (group("lr", "fast"), "lr is 'fast'"),
    (group("betas", (0.9, 1.5)), r"betas is \(0.9, 1.5\)"),
    (group("seed", 0.5), "seed is 0.5"),
    (group("amsgrad", True), "amsgrad=True, an option of torch.optim.AdamW that this step does not have"),
    (group("decoupled_weight_decay", False), r"group 0 is torch.optim.Adam's with weight_decay=0.01"),
    (lambda s: s["state"].update({7: {}}), "state_dict has a state of 7"),
    (lambda s: s["state"].update({0: [1]}), r"state_dict's state of params\[0\]\[0\] is a list"),
    (lambda s: entry(s).pop("master"), "this optimizer keeps exp_avg, exp_avg_sq, exp_avg_sq_tops, .* master, step"),
    (lambda s: entry(s).update(more=torch.zeros(1)), "create it with the master_dtype and state_bits of the saved one"),
    (replaced("exp_avg", torch.zeros(3, 131, dtype=torch.uint8)), r"exp_avg of .* is uint8 \[3, 131\] and needs to be"),
    (replaced("exp_avg", torch.zeros(3, 130)), r"is float32 \[3, 130\] and needs to be uint8 \[3, 130\]"),
    (replaced("exp_avg_sq_tops", torch.full((3, 2), 0x7F8, dtype=torch.int32)), "exp_avg_sq_tops of .* outside of -1"),
    (replaced("exp_avg_tops", torch.full((3, 2), -2, dtype=torch.int32)), "exp_avg_tops of .* outside of -1"),
    (replaced("master", torch.zeros(3, 130, dtype=torch.bfloat16)), r"master of .* is bfloat16 .* needs to be float32"),
    (replaced("master", "x"), "master of .* is 'x'"),
    (replaced("step", -1), "step of .* is -1.0; give a whole number"),
    (replaced("step", float("nan")), "step of .* is nan"),
    (replaced("step", 1.5), "step of .* is 1.5"),
    (replaced("step", torch.zeros(2)), r"step of .* is float32 \[2\]"),
    (replaced("step", 1e30), r"step of .* is 1.0.*e\+30"),
]


@pytest.mark.parametrize(("spoil", "message"), HOSTILE, ids=[str(number) for number in range(len(HOSTILE))])
def test_a_hostile_state_is_refused_as_a_whole(spoil: Callable[[Any], Any], message: str) -> None:
    """Half a load would train on: nothing moves before everything is checked."""
    parameter, optimizer = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    before = copy.deepcopy((optimizer.state_dict(), parameter.detach()))
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert torch.equal(before[1], parameter)
    assert before[0]["param_groups"] == optimizer.state_dict()["param_groups"]
    present = optimizer.state_dict()["state"][0]
    assert all(torch.equal(value, present[name]) for name, value in before[0]["state"][0].items())


def test_a_negative_second_moment_is_refused() -> None:
    """Its root would make every weight NaN."""
    _, optimizer = stepped(32, torch.float32)
    saved = copy.deepcopy(optimizer.state_dict())
    entry(saved)["exp_avg_sq"][1, 5] = -1e-9
    with pytest.raises(ValueError, match=r"exp_avg_sq of .* holds -"):
        optimizer.load_state_dict(saved)


def test_an_empty_state_is_a_new_one() -> None:
    """Such as torch.optim.AdamW saves of a parameter without a gradient."""
    parameter, optimizer = stepped()
    saved = optimizer.state_dict()
    saved["state"] = {}
    optimizer.load_state_dict(saved)
    assert optimizer.state[parameter]["step"] == 0
    assert torch.equal(optimizer.state[parameter]["master"], parameter.float())
    assert not optimizer.state[parameter]["exp_avg"].any()


def bare(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=value.is_floating_point())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params": torch.zeros(2)}, r"params is float32 \[2\]; give an iterable"),
        ({"params": 3}, "params is 3"),
        ({"params": ["a"]}, "params holds what is not a parameter"),
        ({"params": []}, "params is empty; give parameters"),
        ({"params": [bare(torch.zeros(2, dtype=torch.int32))]}, r"params\[0\]\[0\] is int32 \[2\]"),
        ({"params": [bare(torch.zeros(2, dtype=torch.float64))]}, r"params\[0\]\[0\] is float64 \[2\]"),
        ({"params": [bare(torch.zeros(2, device="meta"))]}, "is on the meta device; create the optimizer when"),
        (
            {"params": [bare(torch.zeros(2).half())], "master_dtype": torch.bfloat16},
            "is float16, whose values bfloat16",
        ),
        ({"lr": -1}, "lr is -1; give a finite number"),
        ({"lr": torch.zeros(2)}, r"lr is float32 \[2\] on cpu; give a dense floating-point tensor of one element"),
        ({"lr": torch.zeros((), device="meta"), "capturable": True}, "lr is float32 .* on meta"),
        ({"betas": 0.9}, "betas is 0.9"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"master_dtype": torch.float16}, "master_dtype is torch.float16; give torch.float32 or torch.bfloat16"),
        ({"state_bits": 16}, "state_bits is 16; give 32 or 8"),
        ({"seed": None}, "seed is None; give an integer"),
        ({"capturable": 1}, "capturable is 1; give True or False"),
        ({"masters": [1]}, "masters is a list"),
        (
            {"params": [{"params": [bare(torch.zeros(2))], "maximize": True}]},
            "maximize is True, an option of torch.optim",
        ),
        (
            {"params": [{"params": [bare(torch.zeros(2))], "amsgrad": True}]},
            "amsgrad is True, an option of torch.optim",
        ),
        ({"masters": {bare(torch.zeros(2)): torch.zeros(2)}}, "which is not one of params"),
    ],
)
def test_arguments_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(**{"params": [nn.Parameter(torch.zeros(3))], **changed})


def test_masters_that_do_not_fit() -> None:
    """Of a parameter that is its own master, and of another shape; no parameter has been written."""
    own, half = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).bfloat16())
    with pytest.raises(ValueError, match="is its own master; copy them into it"):
        AdamW([own], masters={own: torch.zeros(3)})
    with pytest.raises(ValueError, match=r"masters has float32 \[4\] for a parameter \[3\]"):
        AdamW([half, own], masters={half: torch.zeros(4)})
    assert half.sum() == 3


def test_a_group_that_is_refused_is_not_there() -> None:
    _, optimizer = stepped()
    for wrong in (
        {"params": [nn.Parameter(torch.zeros(2))], "state_bits": 4},
        {"params": [bare(torch.ones(2, dtype=torch.int8))]},
    ):
        with pytest.raises(ValueError, match=r"state_bits is 4|params\[1\]\[0\] is int8"):
            optimizer.add_param_group(wrong)
    assert len(optimizer.param_groups) == 1
    later = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [later], "lr": 0.25, "weight_decay": 0.0})
    later.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(later, torch.full((2,), 0.75))


def test_gradients_and_options_that_do_not_fit_change_nothing() -> None:
    """Not even the parameters and the counts before the one that does not fit."""
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = AdamW([first, second])
    first.grad = torch.ones(3)
    second.grad = torch.ones(3).to_sparse()
    with pytest.raises(ValueError, match=r"params\[0\]\[1\].grad is float32 \[3\] torch.sparse_coo; give a dense"):
        optimizer.step()
    second.grad = torch.ones(3)
    for wrong in (torch.ones(4), torch.ones(1, 3), torch.ones(6)[::2].view(3, 1), torch.ones(3, device="meta"), [1.0]):
        second.main_grad = wrong  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"params\[0\]\[1\].main_grad is"):
            optimizer.step()
    del second.main_grad
    for option, wrong in (("lr", float("inf")), ("maximize", True)):
        optimizer.param_groups[0][option] = wrong
        with pytest.raises(ValueError, match=f"{option} is {wrong}"):
            optimizer.step()
    for norm in (0.0, -1.0, float("nan"), "x"):
        with pytest.raises(ValueError, match="max_norm is"):
            optimizer.clip_grad_norm_(norm)  # type: ignore[arg-type]
    assert torch.equal(torch.stack([first, second]), torch.ones(2, 3))
    assert not any(state["step"] for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_that_was_cast_has_no_master(dtype: torch.dtype) -> None:
    """It would be stepped in the narrow dtype, although masters are float32; of bf16 masters it may be one."""
    for master_dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(8, 4)
        optimizer = AdamW(layer.parameters(), master_dtype=master_dtype)
        layer.to(dtype)
        before = copy.deepcopy(layer.state_dict())
        layer(torch.ones(2, 8, dtype=dtype)).sum().backward()
        if dtype is master_dtype:
            optimizer.step()
            continue
        with pytest.raises(ValueError, match=r"params\[0\]\[0\] was cast to b?float16 after"):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


CHANGES: dict[str, tuple[Callable[[Tensor, Any], object], str]] = {
    "states moved": (lambda _, state: state.update(exp_avg=state["exp_avg"].to("meta")), "exp_avg .* on meta, and the"),
    "states cast": (lambda _, state: state.update(exp_avg_sq=state["exp_avg_sq"].bfloat16()), "exp_avg_sq .* bfloat16"),
    "a master cast": (lambda _, state: state.update(master=state["master"].double()), "master .* float64"),
    "a shorter parameter": (
        lambda own, _: setattr(own, "data", own.data[:2].clone()),
        r"exp_avg .* needs float32 \[2, 130\]",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_no_longer_fits(name: str, rng: np.random.Generator) -> None:
    """A kernel would read beyond it, or memory of another device; torch's operations stopped between two parameters."""
    change, said = CHANGES[name]
    first, second = (nn.Parameter(torch.randn(3, 130).bfloat16()) for _ in range(2))
    optimizer, before = AdamW([first, second]), first.detach().clone()
    change(second, optimizer.state[second])
    for parameter in (first, second):
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=rf"the state's {said}.*; bring back what was cast or moved"):
        optimizer.step()
    assert torch.equal(first, before)


def written(parameter: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)


def test_a_float32_parameter_needs_no_master_of_any_dtype() -> None:
    """It is its own, bit for bit alike, whatever dtype others' masters have."""
    values = []
    for master_dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(torch.linspace(-1, 1, 40).view(5, 8))
        optimizer = AdamW([parameter], lr=0.1, master_dtype=master_dtype)
        parameter.square().sum().backward()
        optimizer.step()
        assert "master" not in optimizer.state[parameter]
        values.append(parameter.detach())
    assert torch.equal(*values)
    assert not torch.equal(values[0], torch.linspace(-1, 1, 40).view(5, 8))


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "codes"])
@pytest.mark.parametrize("before", ["the first step", "a later one"])
def test_values_that_a_step_would_undo(kind: str, before: str, rng: np.random.Generator) -> None:
    """A checkpoint that is loaded into the model alone, after the optimizer was created: the step, which writes the
    parameter from its master, says so; with the values in the master, too, it goes on."""
    if kind == "codes":
        with quantized_parameters("fp8-block"):
            layer = GroupedLinear(2, 32, 16, dtype=torch.bfloat16)
    else:
        layer = GroupedLinear(2, 32, 16, recipe=None, dtype=getattr(torch, kind))
    optimizer = AdamW(layer.named_parameters())
    layer.weight.grad = torch.randn(2, 16, 32).to(layer.weight.dtype)
    if before == "a later one":
        optimizer.step()
    state = copy.deepcopy(optimizer.state[layer.weight])
    values = torch.randn(2, 16, 32).to(layer.weight.dtype)
    layer.load_state_dict({"weight": values})
    with pytest.raises(ValueError, match=r"weight was changed after this optimizer had written it, .*masters"):
        optimizer.step()
    assert all(torch.equal(value, state[name]) for name, value in optimizer.state[layer.weight].items())
    optimizer.state[layer.weight]["master"].copy_(values)
    optimizer.step()
    assert optimizer.state[layer.weight]["step"] == state["step"] + 1


@pytest.mark.parametrize("recipe", [None, "fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_values_that_a_master_stands_for_may_come_again(recipe: str | None, rng: np.random.Generator) -> None:
    """A state dict of the same run, loaded into the model after the optimizer's, or broadcast to other ranks."""
    layers = []
    for _ in range(2):
        if recipe is None:
            layers.append(GroupedLinear(2, 32, 16, recipe=None, dtype=torch.bfloat16))
            continue
        with quantized_parameters(recipe):
            layers.append(GroupedLinear(2, 32, 16, dtype=torch.bfloat16))
    optimizers = [AdamW(layer.parameters()) for layer in layers]
    for layer in layers:
        layer.weight.grad = torch.randn(2, 16, 32).bfloat16()
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    layers[1].load_state_dict(layers[0].state_dict())
    layers[0].load_state_dict(layers[0].state_dict())
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        values = layers[0].weight if recipe is None else dequantize(layers[0].weight.codes)
    written(layers[0].weight, values.bfloat16())  # as of a state dict of values
    optimizers[0].step()


def test_a_copy_of_an_optimizer_notes_versions_anew() -> None:
    """Its parameters count from zero, and may have been given values before the copy's first step."""
    parameter, optimizer = stepped()
    for steps in (1, 0):
        copied, other = copy.deepcopy((parameter, optimizer))
        copied.grad = torch.ones_like(copied)
        for _ in range(steps):
            other.step()
        written(copied, torch.randn(3, 130))
        with pytest.raises(ValueError, match="was changed"):
            other.step()
        optimizer.step()
