"""What adapters add: values and gradients of float64, which groups train, dropout, and no value that is read."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from lora_modules import MODULES, REFERENCE, SIZES, USED, F, G, K, M, called, made, passed, randomize, rows
from low_rank_oracle import assert_near, oracle
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo import PRESETS, BlockScaling, DelayedScaling, NoBackendError, Recipe
from octavo_torch import GroupedLoRA, add_lora, grouped_linear
from octavo_torch.compiler.host_reads import watch_host_reads

RECIPES: dict[str, Recipe] = {
    **PRESETS,
    "fp8-delayed": DelayedScaling(history=4),
    "fp32 results": BlockScaling(output_dtype="float32"),
}


@pytest.mark.parametrize("rank", [5, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_are_those_of_float64(rank: int, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """delta and the gradients of x, A and B within the bounds of their GEMMs, whatever the rank is padded to; rows past
    the sum, of NaN, and a group without rows change nothing."""
    alpha = float(rng.choice([rank, 3.7, 64.0]))
    lora = GroupedLoRA(G, K, F, rank, alpha=alpha, rank_stabilized=bool(rng.random() < 0.5), dtype=dtype)
    assert not lora.lora_B.any()
    a, b = randomize(lora)
    x, dy = torch.randn(M, K).to(dtype), torch.randn(M, F).to(dtype)
    x[USED:], dy[USED:] = torch.nan, torch.nan
    leaf = x.clone().requires_grad_()
    y = lora(leaf, SIZES)
    dx, da, db = torch.autograd.grad(y, [leaf, a, b], dy)
    wanted = oracle(x[:USED], SIZES, a.detach(), b.detach(), lora.scale, dy[:USED])
    for actual, near in ((y[:USED], wanted.delta), (dx[:USED], wanted.x), (da, wanted.a), (db, wanted.b)):
        assert_near(actual, near)
        assert bool(actual.any())
    assert not y[USED:].any()
    assert not dx[USED:].any()
    assert not da[1].any()
    assert not db[1].any()
    assert lora.scale == alpha / (rank**0.5 if lora.rank_stabilized else rank)


def test_wide_factors_and_narrow_rows(rng: np.random.Generator) -> None:
    """fp32 adapters beside bf16 rows: products are bf16's, gradients have the parameters' dtype."""
    wide = GroupedLoRA(G, K, F, 8)
    randomize(wide)
    narrow = copy.deepcopy(wide).bfloat16()
    x = rows(poison=False)
    assert torch.equal(wide(x, SIZES), narrow(x, SIZES))
    wide(x, SIZES).float().square().sum().backward()
    narrow(x, SIZES).float().square().sum().backward()
    for ours, theirs in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype is torch.float32
        assert torch.equal(ours.grad, theirs.grad.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(wide(x.detach().float(), SIZES), narrow(x, SIZES))


def test_the_meta_device_is_refused_by_its_name() -> None:
    """torch's own sentence was "unknown device type for autocast"."""
    with pytest.raises(NoBackendError, match="on meta"):
        GroupedLoRA(G, K, F, 8, device="meta")(torch.empty(M, K, device="meta"), SIZES)


@pytest.mark.parametrize("name", MODULES)
def test_the_recipe_says_the_dtype_of_results(name: str) -> None:
    """y has the recipe's output_dtype beside adapters, too, whose products have x's: the sum is rounded once."""
    for dtype, output in ((torch.float32, "bfloat16"), (torch.bfloat16, "float16"), (torch.bfloat16, "float32")):
        module = made(name, recipe=BlockScaling(output_dtype=output), dtype=dtype)  # type: ignore[arg-type]
        x = torch.randn(M, K).to(dtype)
        before = called(module, x)
        add_lora(module, rank=4)
        y = called(module, x)
        assert y.dtype is before.dtype is getattr(torch, output)
        assert torch.equal(y, before)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_new_adapter_changes_no_bit(name: str, recipe: str, rng: np.random.Generator) -> None:
    """y, and where gradients are rounded to nearest x's gradient, are those of the module without adapters: the layers
    are the recipe's, one after the other."""
    module = made(name, recipe=RECIPES[recipe])
    x, dy = rows(name != "MoE"), torch.randn(M, K)
    before = passed(copy.deepcopy(module), x, dy, [x])
    names = add_lora(module, 8)
    assert names == {"GroupedLinear": ("lora",)}.get(name, ("lora1", "lora2"))
    after = passed(module, x, dy, [x])
    assert torch.equal(after[0], before[0])
    assert after[0].dtype is before[0].dtype
    if not RECIPES[recipe].stochastic:
        assert torch.equal(after[1], before[1])
    own = {key for key, value in module.named_parameters() if value.requires_grad}
    assert {key for key in own if key != "router"} == {f"{place}.lora_{part}" for place in names for part in "AB"}


def test_some_groups_train(rng: np.random.Generator) -> None:
    """Others get zeros as gradients, and add to the result as before; None trains all again."""
    module = made("GroupedMLP", recipe="fp8-block")
    add_lora(module, 8)
    own = randomize(module)
    x = rows()
    y = called(module, x)
    full = torch.autograd.grad(y.sum(), own)
    for key in ("lora1", "lora2"):
        module.get_submodule(key).train_groups([2])
    assert torch.equal(called(module, x), y)
    for some, all_of in zip(torch.autograd.grad(called(module, x).sum(), own), full, strict=True):
        assert torch.equal(some[2], all_of[2])
        assert bool(all_of[0].any())
        assert not some[:2].any()
    module.lora1.train_groups(None)
    assert torch.equal(torch.autograd.grad(called(module, x).sum(), own)[0], full[0])
    module.lora2.lora_A.requires_grad_(False)
    called(module, x).sum().backward()
    assert module.lora2.lora_A.grad is None
    assert bool(module.lora2.lora_B.grad[2].any())
    state = module.state_dict()
    with torch.device("meta"):
        loaded = made("GroupedMLP", recipe="fp8-block")
        add_lora(loaded, 8)
        loaded.lora2.train_groups([2])
    loaded.to_empty(device="cpu").load_state_dict(state)  # which holds values alone
    called(loaded, x).sum().backward()
    assert torch.equal(loaded.lora2.lora_B.grad, module.lora2.lora_B.grad)


def test_dropout_is_the_adapters_alone(rng: np.random.Generator) -> None:
    """In training the adapter reads some of x, the base all; in evaluation nothing is dropped; recomputing drops the
    same elements."""
    module = made("GroupedLinear", recipe=None)
    add_lora(module, 8, dropout=0.5)
    randomize(module)
    x = rows(poison=False)
    base = grouped_linear(x, module.weight, SIZES, recipe=None, bias=module.bias, backend=REFERENCE)
    torch.manual_seed(7)
    y = called(module, x)
    torch.manual_seed(7)
    kept = nn.functional.dropout(x, 0.5)
    assert torch.equal(y, base + copy.deepcopy(module.lora).eval()(kept, SIZES))
    module.eval()
    assert torch.equal(called(module, x), base + module.lora(x, SIZES))
    module.train()
    torch.manual_seed(7)
    again = checkpoint(module, x, SIZES, use_reentrant=False)
    inputs = [x, *module.lora.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(again.sum(), inputs), torch.autograd.grad(y.sum(), inputs), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_no_value_is_read(rng: np.random.Generator) -> None:
    """With sizes in a tensor, forward and backward read no value of it but the check of host sizes: on a GPU, where
    there is none, nothing waits, and a CUDA graph may hold the step."""
    module = made("GroupedMLP", recipe="fp8-block")
    add_lora(module, 8, alpha=3)
    own = randomize(module)
    x, sizes = rows(), torch.tensor(SIZES)
    module.lora1.train_groups([0])
    with watch_host_reads() as reads:
        torch.autograd.grad(module(x, sizes).sum(), [x, *own])
    adapted = set(reads)
    reads.clear()
    with watch_host_reads() as reads:
        for recipe in ("fp8-block", None):
            y = grouped_linear(x, module.weight1, sizes, recipe=recipe, backend=REFERENCE)
            torch.autograd.grad(y.sum(), x)
    assert adapted
    assert adapted <= set(reads)


def test_leading_axes(rng: np.random.Generator) -> None:
    """x [..., K] is rows in order, for every layer."""
    for name in MODULES:
        module = made(name, recipe="fp8-block")
        add_lora(module, 8)
        randomize(module)
        x = torch.randn(2, M // 2, K).bfloat16()
        assert torch.equal(called(module, x).flatten(0, 1), called(module, x.flatten(0, 1)))
