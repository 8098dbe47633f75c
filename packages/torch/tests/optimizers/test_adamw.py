"""AdamW: the definition's bits for every kind of parameter, and codes that are those of the rounded masters."""

from __future__ import annotations

import copy
import io
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from code_planes import planes
from torch import Tensor, nn

import octavo_numerics as on
from octavo_torch import (
    AdamW,
    CodedWeight,
    GroupedLinear,
    GroupedMLP,
    MasterWeights,
    dequantize,
    quantize_weight,
    quantized_parameters,
)
from octavo_torch.compiler.host_reads import watch_host_reads

REFERENCE = "torch-reference"
G, K, F, M = 3, 64, 48, 20
SIZES = [5, 0, 12]
STATES = ("exp_avg", "exp_avg_sq")


def to_numpy(tensor: Tensor) -> Any:
    tensor = tensor.detach().clone()
    return (
        tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    )


def equal_state(ours: dict[str, Tensor], defined: on.AdamWState) -> bool:
    """Bit for bit, moments in either form."""
    for name in STATES:
        moment = getattr(defined, name)
        if isinstance(moment, on.BlockState):
            same = np.array_equal(ours[name], moment.codes) and np.array_equal(ours[f"{name}_tops"], moment.tops)
        else:
            same = np.array_equal(ours[name], moment)
        if not same:
            return False
    return ours["step"] == defined.step


def model(recipe: str = "fp8-block", **more: Any) -> GroupedMLP:
    with quantized_parameters(recipe):
        return GroupedMLP(G, K, F, dtype=torch.bfloat16, backend=REFERENCE, seed=7, bias=True, **more)


def backward(layer: GroupedMLP) -> None:
    layer(torch.randn(M, K).bfloat16(), SIZES).backward(torch.randn(M, K).bfloat16())


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_the_definitions(
    dtype: torch.dtype, state_bits: int, capturable: bool, rng: np.random.Generator
) -> None:
    """Masters and moments bit for bit, also for learning rates and counts that stay on the device."""
    shapes = [(3, 200), (5,), (2, 3, 130)]
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    seed, rate = int(rng.integers(1 << 40)), float(10.0 ** rng.uniform(-4, -1))
    lr: Any = torch.tensor(rate, dtype=torch.float64) if capturable else rate
    how: dict[str, Any] = {"master_dtype": dtype, "state_bits": state_bits, "seed": seed, "capturable": capturable}
    optimizer = AdamW(parameters, lr=lr, weight_decay=0.1, **how)
    rule = on.AdamWRule(rate, (0.9, 0.999), 1e-8, 0.1)
    masters = [to_numpy(parameter) for parameter in parameters]
    states = [on.init_adamw(s, state_bits=state_bits if len(s) > 1 else 32) for s in shapes]
    for step in range(4):
        for number, parameter in enumerate(parameters):
            parameter.grad = None
            if number != step % 3:  # counts of the parameters differ
                parameter.grad = (torch.randn(parameter.shape) * 2.0 ** int(rng.integers(-12, 4))).to(dtype)
                grad = to_numpy(parameter.grad)
                masters[number], states[number] = on.adamw_step(
                    masters[number], grad, states[number], rule, seed=seed, tensor=number
                )
        with watch_host_reads() as reads:
            optimizer.step()
        assert not (capturable and reads), reads
        for parameter, master, state in zip(parameters, masters, states, strict=True):
            assert np.array_equal(to_numpy(parameter), master)
            assert equal_state(optimizer.state[parameter], state)


def test_a_step_is_torchs_within_twice_the_bound(rng: np.random.Generator) -> None:
    """From torch's own state each time, which `load_state_dict` takes: two implementations of one exact step."""
    ours, theirs = nn.Parameter(torch.randn(8, 70)), nn.Parameter(torch.zeros(8, 70))
    options: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.3}
    reference = torch.optim.AdamW([theirs], **options)
    optimizer, rule = AdamW([ours], lr=1.0), on.AdamWRule(0.02, (0.9, 0.99), 1e-6, 0.3)
    for _ in range(8):
        theirs.data.normal_()
        theirs.grad = torch.randn(8, 70) * torch.exp2(torch.randint(-8, 8, (8, 70)))
        if reference.state:
            optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
            ours.data.copy_(theirs.data)
            ours.grad = theirs.grad.clone()
            state = reference.state[theirs]
            before = on.AdamWState(int(state["step"]), to_numpy(state["exp_avg"]), to_numpy(state["exp_avg_sq"]))
            bound = on.adamw_bound(to_numpy(theirs), to_numpy(theirs.grad), before, rule)
            optimizer.step()
            reference.step()
            assert (np.abs(to_numpy(ours).astype(float) - to_numpy(theirs)) <= 2 * bound).all()
        else:
            reference.step()


@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-block", "fp8-row", "fp8-current", "nvfp4"])
def test_codes_are_those_of_the_cast_master(recipe: str, master_dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Two steps of a model whose weights are codes: both planes equal quantize(cast(master)), the master the
    definition's; a bias in bf16 is its fp32 master rounded to nearest."""
    layer = model(recipe)
    optimizer = AdamW(layer.named_parameters(), lr=1e-2, master_dtype=master_dtype, state_bits=8, seed=3)
    weights = [layer.weight1, layer.weight2]
    assert torch.equal(optimizer.state[weights[1]]["master"].float(), dequantize(weights[1].codes).to(master_dtype))  # type: ignore[union-attr]
    numbers = {name: number for number, (name, _) in enumerate(layer.named_parameters())}
    states = [on.init_adamw(tuple(weight.shape), state_bits=8) for weight in weights]
    for _ in range(2):
        masters = [to_numpy(optimizer.state[weight]["master"]) for weight in weights]
        backward(layer)
        grads = [to_numpy(weight.grad) for weight in weights]  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
        for index, weight in enumerate(weights):
            assert isinstance(weight, CodedWeight)
            master = optimizer.state[weight]["master"]
            defined, states[index] = on.adamw_step(
                masters[index], grads[index], states[index], on.AdamWRule(1e-2), seed=3,
                tensor=numbers[f"weight{index + 1}"],
            )  # fmt: skip
            assert np.array_equal(to_numpy(master), defined)
            assert equal_state(optimizer.state[weight], states[index])
            fresh = quantize_weight(master.bfloat16().requires_grad_(), recipe, backend=REFERENCE)
            assert all(map(torch.equal, planes(weight), planes(fresh)))
            assert weight.grad is None
    bias = layer.bias1
    assert bias is not None
    if master_dtype is torch.float32:
        assert torch.equal(bias, optimizer.state[bias]["master"].bfloat16())
    else:
        assert "master" not in optimizer.state[bias]


def test_it_trains_as_a_hook_over_masters_does(rng: np.random.Generator) -> None:
    """`AdamW(model)`, and `AdamW` over the masters of MasterWeights with its hook, end in the same codes."""
    direct, hooked = model(), model()
    hooked.load_state_dict(direct.state_dict())
    masters = MasterWeights(hooked)
    optimizers = [AdamW(direct.parameters(), lr=1e-2), AdamW(masters.all_parameters(), lr=1e-2)]
    masters.follow(optimizers[1])
    for _ in range(2):
        x, dy = torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16()
        for layer, optimizer in zip((direct, hooked), optimizers, strict=True):
            layer(x, SIZES).backward(dy)
            optimizer.step()
            optimizer.zero_grad()
    for name in ("weight1", "weight2"):
        assert all(map(torch.equal, planes(direct.get_parameter(name)), planes(hooked.get_parameter(name))))


@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
def test_a_saved_run_goes_on_bit_for_bit(master_dtype: torch.dtype, rng: np.random.Generator) -> None:
    """State dicts through torch.save and weights_only loading, into another model and optimizer, at their addresses;
    states are neither cast to the parameters' dtype nor is a stochastic stream repeated."""

    def make() -> tuple[GroupedMLP, AdamW]:
        layer = model()
        return layer, AdamW(layer.parameters(), lr=1e-2, master_dtype=master_dtype, state_bits=8)

    (layer, optimizer), (other, later) = make(), make()
    backward(layer)
    optimizer.step()
    file = io.BytesIO()
    torch.save([layer.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    addresses = [value.data_ptr() for state in later.state.values() for value in state.values()]
    other.load_state_dict(saved[0])
    later.load_state_dict(saved[1])
    assert addresses == [value.data_ptr() for state in later.state.values() for value in state.values()]
    assert all(map(torch.equal, planes(layer.weight1), planes(other.weight1)))
    optimizer.zero_grad()
    x, dy = torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16()
    for each, stepper in ((layer, optimizer), (other, later)):
        each.seed_counter.copy_(layer.seed_counter) if hasattr(each, "seed_counter") else None
        each(x, SIZES).backward(dy)
        stepper.step()
    for own, same in zip(layer.parameters(), other.parameters(), strict=True):
        assert all(torch.equal(v, later.state[same][k]) for k, v in optimizer.state[own].items())
        coded = isinstance(own, CodedWeight)
        assert all(map(torch.equal, planes(own), planes(same))) if coded else torch.equal(own, same)


def test_hooks_of_loading_are_torchs(rng: np.random.Generator) -> None:
    """A hook before loading may give other states, as where parameters are found by their names; one after it finds
    the loaded states and the parameters that are written from their masters."""
    layers = [GroupedLinear(2, 32, 16, bias=True, recipe=None, dtype=torch.bfloat16) for _ in range(2)]
    optimizer = AdamW(layers[0].named_parameters())
    later = AdamW(reversed([*layers[1].named_parameters()]))
    for parameter in layers[0].parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()

    def by_name(own: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        names = saved["param_groups"][0]["param_names"]
        order = [names.index(name) for name in own.param_groups[0]["param_names"]]
        return {**saved, "state": {place: saved["state"][number] for place, number in enumerate(order)}}

    found = []
    later.register_load_state_dict_pre_hook(by_name)
    later.register_load_state_dict_post_hook(lambda _: found.extend(p.clone() for p in layers[1].parameters()))
    later.load_state_dict(optimizer.state_dict())
    assert all(map(torch.equal, found, layers[0].parameters()))
    for own, same in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert all(torch.equal(value, later.state[same][key]) for key, value in optimizer.state[own].items())


def test_masters_start_from_given_values(rng: np.random.Generator) -> None:
    """A checkpoint's fp32 values become masters, and the parameters are written from them."""
    layer = model("mxfp8")
    values = torch.randn(layer.weight1.shape) / 8
    bias = torch.randn(F * 2 * G).view(G, 2 * F)
    assert layer.bias1 is not None
    optimizer = AdamW(layer.parameters(), masters={layer.weight1: values, layer.bias1: bias})
    assert torch.equal(optimizer.state[layer.weight1]["master"], values)
    fresh = quantize_weight(values.bfloat16().requires_grad_(), "mxfp8", backend=REFERENCE)
    assert all(map(torch.equal, planes(layer.weight1), planes(fresh)))
    assert torch.equal(layer.bias1, bias.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_the_gradient(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Two microbatches added by the layer, into a flat buffer, too; `.grad` of other parameters beside it; zero_grad
    zeroes the buffer where it is; clipping scales what the step reads."""
    layer = model(main_grad="accumulate")
    optimizer = AdamW(layer.parameters(), lr=1e-2)
    flat = torch.zeros(layer.weight1.numel(), dtype=dtype)
    layer.weight1.main_grad = flat  # type: ignore[assignment]
    layer.weight2.main_grad = torch.zeros(layer.weight2.shape, dtype=dtype)  # type: ignore[assignment]
    rule, state = on.AdamWRule(1e-2), on.init_adamw(tuple(layer.weight1.shape))
    master = to_numpy(optimizer.state[layer.weight1]["master"])
    for _ in range(2):
        for _ in range(2):
            backward(layer)
        assert layer.bias1 is not None
        assert layer.bias1.grad is not None
        gradients = optimizer.gradients()
        assert flat.data_ptr() in [grad.data_ptr() for grad in gradients]
        before = torch.cat([grad.flatten().float() for grad in gradients])
        norm = optimizer.clip_grad_norm_(0.5)
        after = torch.cat([grad.flatten().float() for grad in optimizer.gradients()])
        # an fp32 sum of squares, in any order: half of numel roundings of 2^-24 each, relative to the root
        assert torch.isclose(norm, before.double().norm().float(), rtol=before.numel() * 2.0**-25)
        slack = 2.0**-7  # of bf16's rounding of each clipped element, twice
        assert 0.5 * (1 - slack) <= after.norm() <= 0.5 * (1 + slack)
        master, state = on.adamw_step(master, to_numpy(flat).reshape(master.shape), state, rule)
        optimizer.step()
        assert np.array_equal(to_numpy(optimizer.state[layer.weight1]["master"]), master)
        optimizer.zero_grad()
        assert layer.weight1.main_grad is flat
        assert not flat.any()
        assert layer.weight1.grad_added_to_main_grad is False


def test_a_grad_that_no_layer_has_added_is_added(rng: np.random.Generator) -> None:
    """A parameter with a main_grad and no layer that writes it, as Megatron's own hook treats it."""
    parameter = nn.Parameter(torch.zeros(4, 5))
    optimizer = AdamW([parameter])
    buffer = parameter.main_grad = torch.randn(4, 5)  # type: ignore[attr-defined]
    parameter.grad = torch.randn(4, 5)
    expected = buffer + parameter.grad
    assert torch.equal(optimizer.gradients()[0], expected)
    assert parameter.grad is None
    parameter.grad, parameter.grad_added_to_main_grad = torch.ones(4, 5), True  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(buffer, expected)
    assert torch.equal(optimizer.state[parameter]["exp_avg"], expected * (1 - 0.9))


def test_a_frozen_parameter_with_main_grad_is_not_stepped(rng: np.random.Generator) -> None:
    """Its zeros are no gradient, for which the weight would decay; what was added before it was frozen is stepped with,
    as a `.grad` would be, and training goes on where it is thawed."""
    layer = GroupedMLP(G, K, F, recipe="fp8-block", dtype=torch.bfloat16, backend=REFERENCE, main_grad="accumulate")
    optimizer = AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    for one in (layer.weight1, layer.weight2):
        one.main_grad = torch.zeros_like(one, dtype=torch.float32)  # type: ignore[attr-defined]
    changed = []
    for frozen in (False, True, True, False):
        before = layer.weight1.detach().clone()
        layer.weight1.requires_grad_(not frozen)
        backward(layer)
        assert len(optimizer.gradients()) == 2 - frozen
        optimizer.step()
        optimizer.zero_grad()
        changed.append(not torch.equal(layer.weight1, before))
    assert changed == [True, False, False, True]
    assert optimizer.state[layer.weight1]["step"] == 2
    backward(layer)
    layer.weight1.requires_grad_(False)
    assert len(optimizer.gradients()) == 2


@pytest.mark.parametrize("order", ["together", "layer first", "layer last"])
def test_what_other_operations_add_beside_main_grad_counts(order: str, rng: np.random.Generator) -> None:
    """A penalty on a weight whose gradient a layer writes to main_grad: both are stepped with, once."""
    layer = GroupedMLP(G, K, F, recipe="fp8-block", dtype=torch.bfloat16, backend=REFERENCE, main_grad="accumulate")
    optimizer, weight = AdamW(layer.parameters()), layer.weight1
    for one in (weight, layer.weight2):
        one.main_grad = torch.zeros_like(one, dtype=torch.float32)  # type: ignore[attr-defined]
    x, factor = torch.randn(M, K).bfloat16(), torch.randn(weight.shape).bfloat16()
    alone = layer(x, SIZES).float().square().sum()
    alone.backward(retain_graph=True)
    expected = weight.main_grad + factor.float()  # type: ignore[attr-defined]
    optimizer.zero_grad()
    penalty = (weight * factor).sum()
    parts = {"together": [alone + penalty], "layer first": [alone, penalty], "layer last": [penalty, alone]}
    for loss in parts[order]:
        loss.backward()
    assert torch.equal(optimizer.gradients()[0], expected)
    assert torch.equal(optimizer.gradients()[0], expected)


def test_a_scheduler_goes_on_from_a_saved_state() -> None:
    """Schedulers keep numbers in groups: made with `last_epoch` they read them from the state that was loaded."""
    made = []
    for saved in (None, {}):
        optimizer = AdamW([nn.Parameter(torch.ones(3))], lr=0.5)
        if saved is not None:
            optimizer.load_state_dict(made[0].state_dict())
        last = -1 if saved is None else 2
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step), last_epoch=last)
        for _ in range(3 if saved is None else 1):
            optimizer.step()
            scheduler.step()
        made.append(optimizer)
    assert [optimizer.param_groups[0]["initial_lr"] for optimizer in made] == [0.5, 0.5]
    assert [optimizer.param_groups[0]["lr"] for optimizer in made] == [0.5 / 4, 0.5 / 5]


@pytest.mark.parametrize("capturable", [False, True])
def test_grad_scaler_unscales_and_skips(capturable: bool, rng: np.random.Generator) -> None:
    """As without a scaler for powers of two; an infinity changes no bit of parameter and state, and the count stays."""
    values = torch.randn(3, 140)
    ours, alone = (nn.Parameter(values.clone().bfloat16()) for _ in range(2))
    how: dict[str, Any] = {"master_dtype": torch.bfloat16, "state_bits": 8, "capturable": capturable}
    optimizer, plain = AdamW([ours], **how), AdamW([alone], **how)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(5):
        grad = torch.randn(3, 140)
        scaler.scale((ours * grad).sum()).backward()
        assert ours.grad is not None
        if step in (0, 3):  # the very first step, too
            ours.grad[1, 7] = torch.inf
            before = [ours.detach().clone(), *(value.clone() for value in optimizer.state[ours].values())]
        else:
            alone.grad = grad.bfloat16()
            plain.step()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if step in (0, 3):
            assert scaler.get_scale() == scale / 2
            assert all(map(torch.equal, before, [ours, *optimizer.state[ours].values()]))
        optimizer.zero_grad()
        assert torch.equal(ours, alone)
    ours.main_grad = torch.zeros(3, 140)  # type: ignore[attr-defined]
    scaler.scale(ours.sum()).backward()
    with pytest.raises(ValueError, match=r"the gradient of params\[0\]\[0\] is in main_grad, which a GradScaler"):
        scaler.step(optimizer)


def test_a_device_tensor_changes_the_learning_rate(rng: np.random.Generator) -> None:
    """Written between steps, as between replays of a CUDA graph; loading a state writes it in place."""
    rate = torch.tensor(0.5)
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = AdamW([parameter], lr=rate, weight_decay=0.0, capturable=True)
    saved = copy.deepcopy(optimizer.state_dict())
    for value in (0.5, 0.0):
        rate.fill_(value)
        parameter.grad = torch.ones(4)
        before = parameter.detach().clone()
        optimizer.step()
        assert torch.allclose(before - parameter, torch.tensor(value))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5
    assert optimizer.state[parameter]["step"] == 0


def test_groups_closures_names_and_schedulers(rng: np.random.Generator) -> None:
    """What else torch.optim.Optimizer promises: options by group, a closure's loss, names, a scheduler's rates."""
    weight, bias = nn.Parameter(torch.randn(4, 130)), nn.Parameter(torch.randn(4))
    optimizer = AdamW([{"params": [("w", weight)], "state_bits": 8}, {"params": [("b", bias)], "weight_decay": 0.0}])
    assert optimizer.state[weight]["exp_avg"].dtype is torch.uint8
    assert optimizer.state[bias]["exp_avg"].dtype is torch.float32
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = weight.square().sum() + bias.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    first = optimizer.step(closure)
    scheduler.step()
    assert optimizer.step(closure) < first
    assert optimizer.param_groups[0]["lr"] == 5e-4
    weight.main_grad = torch.ones(4, 131)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"w.main_grad is float32 \[4, 131\] on cpu and the parameter \[4, 130\]"):
        optimizer.step()


def test_counts_and_norms_are_fp32_whatever_torchs_default_dtype() -> None:
    """A saved count that is a number, and the norm of no gradients: in bf16 257 steps would be 256."""
    leaf = nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([leaf])
    leaf.grad = torch.ones(3)
    theirs.step()
    saved = theirs.state_dict()
    saved["state"][0]["step"] = 257
    ours = AdamW([leaf])
    leaf.grad = None
    torch.set_default_dtype(torch.bfloat16)
    try:
        ours.load_state_dict(saved)
        norm = ours.clip_grad_norm_(1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours.state[leaf]["step"].item() == 257
    assert norm.dtype is torch.float32


def test_gradients_that_are_not_finite_go_through(rng: np.random.Generator) -> None:
    """As in torch.optim.AdamW the element is NaN, with 8-bit moments its block of 128; nothing is hidden."""
    wide, narrow = nn.Parameter(torch.randn(2, 300)), nn.Parameter(torch.randn(2, 300))
    for parameter, bits, lost in ((wide, 32, 1), (narrow, 8, 128)):
        optimizer = AdamW([parameter], state_bits=bits)
        parameter.grad = torch.randn(2, 300)
        parameter.grad[1, 130] = torch.nan
        optimizer.step()
        parameter.grad = torch.randn(2, 300)
        optimizer.step()
        assert parameter.isnan().sum() == lost
        assert parameter[1, 130].isnan()


def test_fp16_parameters_and_what_is_left_alone() -> None:
    """fp16 is rounded from fp32 masters; a parameter without a gradient is not touched, weight decay included."""
    half, idle = nn.Parameter(torch.randn(3, 9).half()), nn.Parameter(torch.ones(3))
    optimizer = AdamW([half, idle])
    half.grad = torch.ones(3, 9).half()
    optimizer.step()
    assert torch.equal(half, optimizer.state[half]["master"].half())
    assert torch.equal(idle, torch.ones(3))
    assert optimizer.state[idle]["step"] == 0


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_leaves_empty_gradients_out(norm_type: float) -> None:
    """Of a rank without a share of a parameter, such as one without experts: torch has no largest of no values."""
    parameters = [nn.Parameter(torch.randn(size)) for size in (5, 0, 3)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    expected = [nn.Parameter(parameter.detach().clone()) for parameter in parameters if parameter.numel()]
    for ours, theirs in zip((p for p in parameters if p.numel()), expected, strict=True):
        assert ours.grad is not None
        theirs.grad = ours.grad.clone()
    norm = AdamW(parameters).clip_grad_norm_(0.5, norm_type)
    assert torch.equal(norm, AdamW(expected).clip_grad_norm_(0.5, norm_type))
    for ours, theirs in zip((p for p in parameters if p.numel()), expected, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
