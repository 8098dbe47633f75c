"""quantized_parameters: weights that live as codes give the bits of weights that are quantized in every call."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from code_planes import planes
from fuzzing import judge, other_kinds
from torch import Tensor, nn

import octavo
import octavo_torch
from octavo_torch import CodedWeight, GroupedLinear, GroupedMLP, MoE, quantized_parameters

REFERENCE = "torch-reference"
RECIPES = ("mxfp8", "fp8-block", "fp8-row", "fp8-current", "nvfp4")
G, K, F, M = 3, 64, 48, 20
SIZES = [5, 0, 12]
MODULES: dict[str, Callable[..., Any]] = {
    "GroupedLinear": lambda **more: GroupedLinear(G, K, F, backend=REFERENCE, dtype=torch.bfloat16, **more),
    "GroupedMLP": lambda **more: GroupedMLP(
        G, K, F, interleave=16, bias=True, backend=REFERENCE, dtype=torch.bfloat16, **more
    ),
    "MoE": lambda **more: MoE(G, K, F, 2, backend=REFERENCE, dtype=torch.bfloat16, **more),
}


def both(name: str, recipe: str) -> tuple[Any, Any]:
    """The module with codes as weights, and with values, from the same draws."""
    made = MODULES[name]
    seed = int(torch.randint(1 << 31, ()))
    torch.manual_seed(seed)
    with quantized_parameters(recipe):
        coded = made(seed=seed)
    torch.manual_seed(seed)
    return coded, made(recipe=recipe, seed=seed)


def passed(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y and the gradients of x and of every parameter."""
    leaf = x.clone().requires_grad_()
    y = module(leaf) if isinstance(module, MoE) else module(leaf, SIZES)
    y.backward(dy[:, : y.shape[1]])
    grads = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return [y, leaf.grad, *grads]  # type: ignore[list-item]


def check_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_bits_are_those_of_weights_that_are_values(name: str, recipe: str, rng: np.random.Generator) -> None:
    """y and every gradient at the initial values, after copy_ of others, and after load_state_dict of others."""
    coded, valued = both(name, recipe)
    x, dy = torch.randn(M, K).bfloat16(), torch.randn(M, max(F, K)).bfloat16()
    for parameter in valued.parameters():
        assert not isinstance(parameter, CodedWeight)
    weights = [key for key, value in coded.named_parameters() if isinstance(value, CodedWeight)]
    assert weights == [key for key in dict(valued.named_parameters()) if key.startswith("weight")]
    check_equal(passed(coded, x, dy), passed(valued, x, dy))
    before = [plane.data_ptr() for key in weights for plane in planes(coded.get_parameter(key))]
    with torch.no_grad():
        for key in weights:
            values = torch.randn(coded.get_parameter(key).shape) * torch.logspace(
                -3, 1, coded.get_parameter(key).shape[2]
            )
            coded.get_parameter(key).copy_(values)  # fp32: cast to the weight's dtype first
            valued.get_parameter(key).copy_(values)
    check_equal(passed(coded, x, dy), passed(valued, x, dy))
    other = MODULES[name](recipe=recipe)
    for module in (coded, valued):
        module.load_state_dict(other.state_dict())
    check_equal(passed(coded, x, dy), passed(valued, x, dy))
    after = [plane.data_ptr() for key in weights for plane in planes(coded.get_parameter(key))]
    assert after == before  # in place: a captured graph reads these addresses


def test_initializers_and_copies(rng: np.random.Generator) -> None:
    """torch.nn.init quantizes what it draws; reset_parameters, deepcopy and torch.save keep codes as codes."""
    coded, _ = both("GroupedMLP", "fp8-block")
    for fill in (nn.init.uniform_, nn.init.normal_, nn.init.zeros_, lambda value: nn.init.constant_(value, 0.5)):
        seed = int(torch.randint(1 << 31, ()))
        torch.manual_seed(seed)
        fill(coded.weight2)
        torch.manual_seed(seed)
        values = torch.empty(coded.weight2.shape, dtype=torch.bfloat16)
        fill(values)
        wanted = octavo_torch.quantize_weight(values.requires_grad_(), "fp8-block", backend=REFERENCE)
        check_equal(planes(coded.weight2), planes(wanted))
    before = [plane.clone() for plane in planes(coded.weight1)]
    twin = copy.deepcopy(coded)
    coded.reset_parameters()
    assert isinstance(coded.weight1, CodedWeight)
    assert not all(map(torch.equal, before, planes(coded.weight1)))
    check_equal(planes(twin.weight1), before)
    file = io.BytesIO()
    torch.save(coded.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    check_equal(planes(twin.weight1), planes(coded.weight1))


def test_a_copy_shares_what_its_original_shares(rng: np.random.Generator) -> None:
    """Square blocks have one tensor of codes in both planes. A copy had two: twice the memory, and a quantizer that
    writes one of them refused it."""
    recipe = octavo.BlockScaling()
    spec = recipe.quantizer("w")
    assert spec is not None
    weight = CodedWeight(octavo_torch.quantize(torch.randn(G, F, K), spec, backend=REFERENCE), recipe, torch.bfloat16)
    assert weight.codes.rowwise is weight.codes.columnwise
    values = torch.randn(G, F, K).bfloat16()
    wanted = octavo_torch.quantize(values, spec)
    for made in (weight.clone(), weight.to(torch.float32), copy.deepcopy(weight)):
        assert isinstance(made, CodedWeight)
        assert made.codes.rowwise is made.codes.columnwise
        assert made.codes.nbytes() == weight.codes.nbytes()
        made.copy_(values)
        assert torch.equal(octavo_torch.dequantize(made.codes), octavo_torch.dequantize(wanted))


def test_hooks_stay_where_a_module_is_moved(rng: np.random.Generator) -> None:
    """Such as those that step a parameter as soon as its gradient is there: torch's exchange of tensors loses them."""
    layer, _ = both("GroupedLinear", "mxfp8")
    fired: list[str] = []
    handles = [
        layer.weight.register_hook(lambda _: fired.append("gradient")),
        layer.weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated")),
    ]
    for _ in range(2):
        layer(torch.randn(M, K).bfloat16(), SIZES).sum().backward()
        layer.to("cpu")
    assert fired == ["gradient", "accumulated"] * 2
    for handle in handles:
        handle.remove()
    layer(torch.randn(M, K).bfloat16(), SIZES).sum().backward()
    assert len(fired) == 4


def test_codes_that_backward_reads_must_not_change_before_it(rng: np.random.Generator) -> None:
    """An in-place write between forward and backward is an error of autograd, as with any weight."""
    coded, _ = both("GroupedLinear", "mxfp8")
    y = coded(torch.randn(M, K).bfloat16().requires_grad_(), SIZES)
    with torch.no_grad():
        coded.weight.copy_(torch.zeros(G, F, K))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_compiled_in_one_graph(rng: np.random.Generator) -> None:
    """torch.compile takes the planes as inputs and gives eager's bits."""
    coded, valued = both("GroupedLinear", "fp8-block")
    x, dy = torch.randn(M, K).bfloat16(), torch.randn(M, F).bfloat16()
    compiled = torch.compile(coded, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    y = compiled(leaf, torch.tensor(SIZES))
    y.backward(dy)
    wanted = passed(valued, x, dy)
    check_equal([y, leaf.grad, coded.weight.grad], wanted)


def test_memory_that_it_has_not_is_never_given_away(rng: np.random.Generator) -> None:
    """The planes are what processes share and what another weight's `data` replaces; values are refused, where torch
    read from no address or changed shape and dtype alone."""
    one, other = (both("GroupedLinear", "fp8-block")[0] for _ in range(2))
    x = torch.randn(M, K, dtype=torch.bfloat16)
    y = one(x, SIZES)
    assert not one.weight.is_shared()
    assert one.share_memory().weight.is_shared()
    assert torch.equal(one(x, SIZES), y)

    values, empty = torch.zeros(G * F * K), octavo_torch.dequantize(one.weight.codes)
    for attempt in (
        lambda: setattr(one.weight, "data", empty),
        lambda: nn.utils.vector_to_parameters(values, one.parameters()),
        lambda: one.to_empty(device="cpu"),
        lambda: np.from_dlpack(one.weight.detach()),
    ):
        with pytest.raises(ValueError, match=r"on a weight that is codes of recipe block alone; give it to a grouped"):
            attempt()
    assert torch.equal(one(x, SIZES), y)

    one.weight.data = other.half().weight.data
    assert one.weight.dtype is torch.float16
    assert torch.equal(one(x.half(), SIZES), other(x.half(), SIZES))


def test_modules_with_another_recipe_keep_values() -> None:
    """The context speaks of modules with its recipe alone; outside nothing has changed."""
    with quantized_parameters("mxfp8"):
        inner = GroupedLinear(G, K, F, recipe=octavo.MXFP8())
        plain = GroupedLinear(G, K, F, recipe=None)
        with quantized_parameters("fp8-row"):
            row = GroupedLinear(G, K, F)
    outside = GroupedLinear(G, K, F, recipe="mxfp8")
    assert isinstance(inner.weight, CodedWeight)
    assert isinstance(row.weight, CodedWeight)
    assert (row.recipe.kind, inner.recipe.kind) == ("row", "mxfp8")
    assert not isinstance(plain.weight, CodedWeight)
    assert not isinstance(outside.weight, CodedWeight)


def test_what_does_not_fit_is_refused() -> None:
    """One sentence each, with what was given and what to do, and the codes stay as they were."""
    for recipe, message in (
        ("fp8-delayed", "recipe is delayed, whose codes depend on earlier steps"),
        (octavo.MXFP8(dgrad="high_precision"), "recipe is mxfp8 with dgrad='high_precision'"),
        (None, "recipe"),
    ):
        with pytest.raises(ValueError, match=message), quantized_parameters(recipe):  # type: ignore[arg-type]
            pass
    with quantized_parameters("mxfp8"):
        with pytest.raises(ValueError, match="per_group_parameters is on for weights"):
            GroupedLinear(G, K, F, per_group_parameters=True)
        with pytest.raises(ValueError, match="device is meta"):
            GroupedLinear(G, K, F, device="meta")
        coded, copied = (GroupedLinear(G, K, F, backend=REFERENCE) for _ in range(2))
    with quantized_parameters("fp8-row"):
        other = GroupedLinear(G, K, F, backend=REFERENCE)
    before = [plane.clone() for plane in planes(coded.weight)]
    wrong: list[tuple[Any, str]] = [
        (torch.zeros(G, K, F), r"values has shape \[3, 64, 48\] and the weight is \[3, 48, 64\]"),
        (torch.zeros(G, F, K, dtype=torch.int64), "values has dtype int64"),
        (other.weight, "values is codes of recipe row"),
    ]
    with torch.no_grad():
        for values, message in wrong:
            with pytest.raises(ValueError, match=message):
                coded.weight.copy_(values)
        with pytest.raises(ValueError, match="have an optimizer step the values"):
            coded.weight.add_(1)
        with pytest.raises(ValueError, match="a weight that is codes of recipe mxfp8 alone"):
            torch.zeros(G, F, K).copy_(coded.weight)
        with pytest.raises(ValueError, match="a weight that is codes of recipe mxfp8 alone"):
            torch.cat([coded.weight, coded.weight])
        for kind, values in other_kinds(torch.ones(G, F, K)).items():
            if isinstance(values, Tensor) and kind != "subclass":  # else errors of torch's own
                try:
                    judge(copied.weight.copy_, {"other": values}, "values", values)
                except BaseException as error:
                    error.add_note(kind)
                    raise
    with pytest.raises(ValueError, match=r"recipe is row .* and weight is codes of mxfp8"):
        octavo_torch.convert(coded, "fp8-row")
    assert octavo_torch.convert(coded, "mxfp8") == ("",)
    check_equal(planes(coded.weight), before)
