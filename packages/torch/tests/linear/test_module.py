"""GroupedLinear: checkpointing, copies and state dicts change no bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from octavo import MXFP8, NVFP4, PRESETS, DelayedScaling, Recipe
from octavo_registry import UnknownBackendError
from octavo_torch import (
    GroupedLinear,
    GroupedLoRA,
    GroupedMLP,
    MoE,
    grouped_linear,
    quantize_input,
    quantize_weight,
    update_scales,
)

G, K, N, M = 3, 64, 48, 70
SIZES = torch.tensor([20, 0, 40])
DELAYED = DelayedScaling(history=4)
RECIPES: dict[str, Recipe] = {**PRESETS, "fp8-delayed": DELAYED}

Forward = Callable[[GroupedLinear, Tensor], Tensor]

WAYS: dict[str, Forward] = {
    "plain": lambda layer, x: layer(x, SIZES),
    "reentrant": lambda layer, x: checkpoint(layer, x, SIZES, use_reentrant=True),
    "non-reentrant": lambda layer, x: checkpoint(layer, x, SIZES, use_reentrant=False),
}


def make(recipe: Recipe, seed: int = 3) -> GroupedLinear:
    return GroupedLinear(G, K, N, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=seed)


def train(layer: GroupedLinear, forward: Forward, inputs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """y, gradients and buffers of some steps, each of two microbatches."""
    seen: list[Tensor] = []
    for x, dy in inputs:
        layer.zero_grad()
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            y = forward(layer, leaf)
            y.backward(dy)
            assert leaf.grad is not None
            seen += [y.detach(), leaf.grad]
        update_scales(layer)
        seen += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        seen += [b.clone() for b in layer.buffers()]
    return seen


def inputs(steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(M, K, dtype=torch.bfloat16), torch.randn(M, N, dtype=torch.bfloat16)) for _ in range(steps)]


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", RECIPES)
def test_activation_checkpointing_changes_no_bit(name: str, way: str, rng: object) -> None:
    """Outputs, gradients, amax histories and seeds are those of a run without (faults.md 42)."""
    layer, data = make(RECIPES[name]), inputs()
    assert_equal(train(copy.deepcopy(layer), WAYS["plain"], data), train(layer, WAYS[way], data))


@pytest.mark.parametrize("name", RECIPES)
def test_save_and_load_resume_bit_for_bit(name: str, rng: object) -> None:
    """A state dict of plain tensors, loaded with weights_only, resumes exactly and does not grow (faults.md 47, 48)."""
    layer, data = make(RECIPES[name]), inputs(4)
    train(layer, WAYS["plain"], data[:2])
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    size = stream.tell()
    stream.seek(0)
    loaded = make(RECIPES[name], seed=99)
    loaded.load_state_dict(torch.load(stream, weights_only=True))
    assert_equal(train(layer, WAYS["plain"], data[2:]), train(loaded, WAYS["plain"], data[2:]))
    again = io.BytesIO()
    torch.save(layer.state_dict(), again)
    assert again.tell() == size


@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "nvfp4"])
def test_copies_are_independent(name: str, rng: object) -> None:
    """deepcopy and pickle after a forward give the same module, its bound functions left behind."""
    layer, data = make(RECIPES[name]), inputs(1)
    layer(data[0][0], SIZES)
    twin, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    first = train(layer, WAYS["plain"], data)
    assert_equal(first, train(twin, WAYS["plain"], data))
    assert_equal(first, train(pickled, WAYS["plain"], data))


def test_casting_leaves_scales_alone() -> None:
    """module.bfloat16() and .half() mean the parameters."""
    layer = GroupedLinear(G, K, N, recipe=DELAYED)
    layer.encode_scale.fill_(1.2345678)
    layer.bfloat16()
    assert layer.weight.dtype is torch.bfloat16
    assert layer.encode_scale.dtype is torch.float32
    assert layer.encode_scale[0, 0].item() == pytest.approx(1.2345678, abs=1e-7)
    assert layer.to("meta").amax_history.dtype is torch.float32


def test_meta_device_is_made_real_by_reset_parameters() -> None:
    """Deferred initialization: to_empty, then reset_parameters fills buffers, too."""
    layer = GroupedLinear(G, K, N, recipe=NVFP4(), device="meta", seed=5)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.seed_base.item() == 5
    assert layer.seed_counter.item() == 0
    assert layer.weight.abs().max() <= K**-0.5


def test_buffers_have_values_after_to_empty(rng: object) -> None:
    """A checkpoint of parameters alone, loaded into a module from the meta device: results are those of a module that
    was created here, and no scale or seed is whatever was in memory."""
    for recipe in (DELAYED, NVFP4()):
        here = GroupedLinear(G, K, N, recipe=recipe, dtype=torch.bfloat16, seed=5)
        layer = GroupedLinear(G, K, N, recipe=recipe, dtype=torch.bfloat16, seed=5, device="meta")
        memory = [torch.full_like(buffer, 77) for _, buffer in here.named_buffers()]
        del memory  # which to_empty may get
        layer.to_empty(device="cpu")
        layer.load_state_dict({"weight": here.weight.detach()}, strict=False)
        for name, buffer in here.named_buffers():
            assert torch.equal(layer.get_buffer(name), buffer), name


def test_every_backward_rounds_with_its_own_seed(rng: object) -> None:
    """The counter moves by one a backward, forward alone moves nothing (faults.md 40)."""
    layer = make(NVFP4())
    x, dy = inputs(1)[0]
    grads = []
    for step in range(3):
        assert layer.seed_counter.item() == step
        leaf = x.clone().requires_grad_()
        layer(leaf, SIZES).backward(dy)
        grads.append(leaf.grad)
    assert not torch.equal(grads[0], grads[1])
    with torch.no_grad():
        layer(x, SIZES)
    assert layer.seed_counter.item() == 3


def test_evaluation_records_nothing(rng: object) -> None:
    """eval() leaves the histories as they are."""
    layer = make(DELAYED).eval()
    layer(inputs(1)[0][0], SIZES)
    assert not layer.amax_history.any()
    layer.train()
    layer(inputs(1)[0][0], SIZES)
    assert layer.amax_history[:2, 0].any()


def test_weight_quantized_once_a_step(rng: object) -> None:
    """The module's quantize_weight serves its forwards, with the same bits; another module's is refused."""
    layer = make(PRESETS["mxfp8"])
    x = inputs(1)[0][0]
    assert torch.equal(layer(x, SIZES, weight=layer.quantize_weight()), layer(x, SIZES))
    with pytest.raises(ValueError, match="not made by this module"):
        layer(x, SIZES, weight=make(PRESETS["mxfp8"]).quantize_weight())


def saved_and_loaded(value: object) -> object:
    """What a file of `value` holds."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("parted", [False, True])
def test_copies_of_a_quantized_weight_know_their_age(copied: Any, parted: bool, rng: object) -> None:
    """A copy counts its weight's changes anew: it serves until that changes, and a copy of outdated codes never does,
    however many changes both have seen."""
    whole = torch.randn(2, 32, 64)
    weight: Any = tuple(part.clone().requires_grad_() for part in whole) if parted else whole.requires_grad_()
    x, sizes, how = torch.randn(9, 64), [4, 5], {"recipe": "mxfp8", "backend": "torch-reference"}

    def change(weight: Any) -> None:
        with torch.no_grad():
            (weight[0] if parted else weight).mul_(2)

    change(weight)
    codes = quantize_weight(weight, **how)
    other = copied(codes)
    assert torch.equal(grouped_linear(x, other, sizes, **how), grouped_linear(x, codes, sizes, **how))
    change(other.weight)
    for outdated in (other, copied(other)):
        for _ in range(3):
            with pytest.raises(ValueError, match="weight has changed in place"):
                grouped_linear(x, outdated, sizes, **how)
            change(outdated.weight)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_copies_of_a_quantized_input_know_their_age(copied: Any, rng: object) -> None:
    """As those of a weight: rows that have changed before they were quantized do not count, later changes do."""
    x, weight, sizes = torch.randn(9, 64), torch.randn(2, 32, 64), [4, 5]
    how: dict[str, Any] = {"recipe": "mxfp8", "backend": "torch-reference"}
    x.mul_(2)
    codes = quantize_input(x, weight, sizes, **how)
    other = copied(codes)
    assert torch.equal(grouped_linear(other, weight, None, **how), grouped_linear(codes, weight, None, **how))
    other.x.mul_(2)
    for outdated in (other, copied(other)):
        with pytest.raises(ValueError, match="x has changed in place"):
            grouped_linear(outdated, weight, None, **how)


def test_every_expert_with_rows_trains(rng: object) -> None:
    """Gradients of all experts with rows are there and not zero (faults.md 38)."""
    layer = make(PRESETS["fp8-block"])
    layer(inputs(1)[0][0], SIZES).sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias is not None
    assert layer.bias.grad is not None
    for grad in (layer.weight.grad, layer.bias.grad):
        assert [bool(group.any()) for group in grad] == [True, False, True]


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


@pytest.mark.parametrize("per_group", [False, True])
def test_parameters_in_another_place(per_group: bool) -> None:
    """Parametrizations, pruning, and wrappers that set tensors as attributes: a bias counts there as a weight does."""
    layer = GroupedLinear(2, 16, 32, bias=True, recipe=MXFP8(), per_group_parameters=per_group)
    x, sizes, doubled = torch.randn(5, 16), [2, 3], copy.deepcopy(layer)
    names = [name for name, _ in layer.named_parameters()]
    attributes = copy.deepcopy(layer)
    for name in names:
        with torch.no_grad():
            getattr(doubled, name).mul_(2)
        value = getattr(attributes, name).detach()
        delattr(attributes, name)
        setattr(attributes, name, 2 * value)
        register_parametrization(layer, name, Doubled())
    expected = doubled(x, sizes)
    assert torch.equal(layer(x, sizes), expected)
    assert torch.equal(attributes(x, sizes), expected)
    layer(x, sizes).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize(
    "construct",
    [
        lambda backend: GroupedLinear(2, 16, 16, recipe="mxfp8", backend=backend),
        lambda backend: GroupedMLP(2, 16, 16, recipe="mxfp8", backend=backend),
        lambda backend: MoE(2, 16, 16, k=1, recipe="mxfp8", backend=backend),
        lambda backend: GroupedLoRA(2, 16, 16, 4, backend=backend),
    ],
    ids=["linear", "mlp", "moe", "lora"],
)
def test_a_misspelt_backend_is_refused_when_a_module_is_constructed(construct: Callable[[Any], nn.Module]) -> None:
    """With the error of a call; copies of a module that was made where the backend is installed pass."""
    for misspelt in ("torch-nativ", ["torch-reference", "torch-nativ"]):
        with pytest.raises(UnknownBackendError, match="there is no backend 'torch-nativ'; known names are "):
            construct(misspelt)
    module = construct(["torch-native", "torch-reference"])
    module.backend = "of-another-machine"
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.backend == "of-another-machine"
