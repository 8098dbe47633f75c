"""Arguments that do not fit raise ValueError: what was given, what is needed, what to do, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import octavo
from octavo import MXFP8, NVFP4, PRESETS, DelayedScaling, NoBackendError, QuantizerSpec, RowScaling
from octavo_torch import (
    DelayedState,
    GroupedLinear,
    check_errors,
    dequantize,
    explain_mlp,
    grouped_linear,
    grouped_mlp,
    grouped_mm,
    quantize,
    quantize_input,
    quantize_weight,
)
from octavo_torch.arithmetic.groups import bounded_sizes
from octavo_torch.compiler.status import DeviceSizesError, flag_bad_sizes
from octavo_torch.linear.grouped import _layers as functional_layers

X, W = torch.zeros(8, 16), torch.zeros(2, 4, 16)
SPEC = QuantizerSpec(scaling="mxfp8", format="e4m3")


def linear(**changes: Any) -> Callable[[], Any]:
    given: dict[str, Any] = {"x": X, "weight": W, "group_sizes": [4, 4], "recipe": MXFP8(), **changes}
    return lambda: grouped_linear(**given)


def quantized(x: Any = X, spec: Any = SPEC, sizes: Any = None, **rest: Any) -> Callable[[], Any]:
    return lambda: quantize(x, spec, sizes, **rest)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "x rank": (linear(x=torch.zeros(2, 2, 17)), "x has 17 features and weight has shape"),
    "x scalar": (linear(x=torch.zeros(())), r"x has shape \[\]"),
    "x type": (linear(x=np.zeros((8, 16))), "x is a ndarray"),
    "x dtype": (linear(x=torch.zeros(8, 16, dtype=torch.float64)), "x has dtype float64; give bfloat16, float16 or"),
    "both dtypes": (linear(x=X.double(), weight=W.double()), "x has dtype float64; give bfloat16, float16 or"),
    "weight rank": (linear(weight=torch.zeros(4, 16)), r"weight has shape \[4, 16\]; give \[G, N, K\]"),
    "no groups": (linear(weight=torch.zeros(0, 4, 16)), "at least one group"),
    "features": (linear(weight=torch.zeros(2, 4, 17)), r"x has 16 features and weight has shape \[2, 4, 17\]"),
    "dtypes differ": (linear(x=X.bfloat16()), "x has dtype bfloat16 and weight float32"),
    "devices differ": (linear(weight=W.to("meta")), "x is on cpu and weight on meta"),
    "too few sizes": (linear(group_sizes=[8]), "group_sizes has 1 sizes and weight 2 groups"),
    "no sizes": (linear(group_sizes=[]), "group_sizes is empty"),
    "negative size": (linear(group_sizes=[9, -1]), r"group_sizes\[1\] is -1"),
    "sum past the rows": (linear(group_sizes=torch.tensor([4, 5])), "sum to 9 and the tensor has 8 rows"),
    "huge sizes": (linear(group_sizes=torch.tensor([1 << 62, 1 << 62])), "sum to 9223372036854775808"),
    "size type": (linear(group_sizes=[4, 4.0]), r"group_sizes\[1\] is 4.0; sizes are integers"),
    "sizes type": (linear(group_sizes=8), "group_sizes is a int"),
    "sizes dtype": (linear(group_sizes=torch.tensor([4.0, 4.0])), "group_sizes has dtype float32; give int32 or int64"),
    "sizes rank": (linear(group_sizes=torch.tensor([[4, 4]])), r"group_sizes has shape \[1, 2\]"),
    "numpy sizes": (linear(group_sizes=np.array([4.0])), "give integers"),
    "bias shape": (linear(bias=torch.zeros(2, 5)), r"bias has shape \[2, 5\]; give \[2, 4\]"),
    "bias flag": (linear(bias=True), r"bias is True; give a tensor \[2, 4\]"),
    "bias scales flag": (linear(bias=torch.zeros(2, 4), bias_scales=True), r"bias_scales is True; give a tensor \[8\]"),
    "bias dtype": (linear(bias=torch.zeros(2, 4, dtype=torch.int32)), "bias has dtype int32"),
    "bias scales alone": (linear(bias_scales=torch.zeros(8)), "bias_scales was given without a bias"),
    "bias scales shape": (linear(bias=torch.zeros(2, 4), bias_scales=torch.zeros(7)), r"bias_scales has shape \[7\]"),
    "no state": (linear(recipe=DelayedScaling()), "state is None and DelayedScaling"),
    "state unasked": (linear(state=DelayedState.create(DelayedScaling(history=4), 2)), "MXFP8 keeps none"),
    "state groups": (
        linear(recipe=DelayedScaling(history=4), state=DelayedState.create(DelayedScaling(history=4), 3)),
        "state holds 3 groups and the weight 2",
    ),
    "state of another recipe": (
        linear(
            recipe=DelayedScaling(history=4),
            state=DelayedState.create(DelayedScaling(history=4, forward_format="e5m2"), 2),
        ),
        "state was made for a recipe with forward_format='e5m2' and the call's recipe has 'e4m3'",
    ),
    "state of another history": (
        linear(recipe=DelayedScaling(history=4), state=DelayedState.create(DelayedScaling(history=5), 2)),
        "history=5 and the call's recipe has 4",
    ),
    "sizes on another device": (
        lambda: grouped_linear(X, W, torch.tensor([4, 4], device="meta"), recipe=None),
        "group_sizes is on meta and x on cpu; move group_sizes to the CPU$",
    ),
    "group_offset past 32 bits": (
        linear(group_offset=(1 << 32) - 1),
        r"group_offset is 4294967295 with 2 groups, whose numbers are 0 to .*; give a number from 0 to 2\^32 - 2",
    ),
    "group_offset below 0": (linear(group_offset=-1), "group_offset is -1"),
    "group_offset of a kind": (linear(group_offset=1.5), "group_offset is 1.5; give an integer"),
    "group_offset of an MLP": (
        lambda: grouped_mlp(X, W[:, :4], torch.zeros(2, 8, 2), [4, 4], recipe=None, group_offset=1 << 32),
        "group_offset is 4294967296 with 2 groups",
    ),
    "group_offset of quantized rows": (
        lambda: quantize_input(X, W, [4, 4], MXFP8(), group_offset=(1 << 32) - 1),
        "group_offset is 4294967295 with 2 groups",
    ),
    "out shape": (linear(out=torch.zeros(8, 5)), r"out is float32 \[8, 5\] on cpu; give float32 \[8, 4\]"),
    "out gradient": (linear(out=torch.zeros(8, 4, requires_grad=True)), "out requires a gradient"),
    "grad_input": (linear(grad_input=torch.zeros(8, 15)), "grad_input is float32"),
    "seed type": (linear(seed=1.5), "seed is 1.5"),
    "seed tensor": (linear(seed=torch.zeros(2)), r"seed is a float32 tensor of shape \[2\]"),
    "seed on meta": (linear(seed=torch.zeros((), dtype=torch.int64, device="meta")), "seed is on the meta device"),
    "backend name": (linear(backend="Not A Name"), "got 'Not A Name'"),
    "backend unknown": (linear(backend="absent"), "no backend 'absent'"),
    "quantize rank": (quantized(torch.zeros(8)), r"x has shape \[8\]"),
    "quantize dtype": (quantized(torch.zeros(8, 8, dtype=torch.int8)), "x has dtype int8"),
    "spec type": (quantized(spec=MXFP8()), "spec is a MXFP8"),
    "sizes for matrices": (quantized(W, sizes=[1, 1]), "each is a group"),
    "hadamard matrices": (
        quantized(W, QuantizerSpec(scaling="nvfp4", format="e2m1", hadamard=True)),
        "spec.hadamard is True",
    ),
    "no seed": (quantized(spec=NVFP4().quantizer("dy")), "seed is None"),
    "group offset": (quantized(group_offset=-1), "group_offset is -1"),
    "operand": (quantized(operand="z"), "operand is 'z'"),
    "no scale": (quantized(spec=QuantizerSpec(scaling="delayed", format="e4m3")), "scale is None"),
    "scale unasked": (quantized(scale=torch.ones(1)), "mxfp8 scaling makes its own"),
    "scale shape": (
        quantized(spec=QuantizerSpec(scaling="delayed", format="e4m3"), scale=torch.ones(2)),
        r"scale is float32 \[2\]; give float32 \[1\]",
    ),
    "absent direction": (
        lambda: dequantize(
            quantize(X, QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="rowwise")), "columnwise"
        ),
        "holds rowwise data only",
    ),
    "direction": (lambda: dequantize(quantize(X, SPEC), "up"), "direction is 'up'"),  # type: ignore[arg-type]
    "sizes of tensors": (
        linear(group_sizes=[torch.tensor(4), 4]),
        r"group_sizes\[0\] is int64 \[\]; sizes are integers",
    ),
    "sizes of arrays": (linear(group_sizes=[4, np.array([4])]), r"group_sizes\[1\] is a ndarray; sizes are integers"),
    "no GroupedTensor": (lambda: dequantize(X), "q is a Tensor"),  # type: ignore[arg-type]
    "offs": (lambda: grouped_mm(X, W.transpose(1, 2), torch.tensor([4.0, 8.0])), "offs is float32"),
    "offs past the rows": (
        lambda: grouped_mm(X, W.transpose(1, 2), torch.tensor([4, 9])),
        "offs ends at row 9 and a has 8 rows",
    ),
    "a device that torch lacks": (
        lambda: GroupedLinear(2, 8, 8, recipe=None, device="nowhere"),
        "device is 'nowhere', and torch makes no tensor there: .*nowhere; give a torch.device of this machine",
    ),
    "sizes as offs": (
        lambda: grouped_mm(X, W.transpose(1, 2), torch.tensor([5, 3])),
        r"offs\[1\] is 3, before offs\[0\], which is 5; give the cumulative end of each group",
    ),
    "a negative end": (
        lambda: grouped_mm(X, W.transpose(1, 2), torch.tensor([-1, 3])),
        r"offs\[0\] is -1; give the cumulative end",
    ),
    "offs of other groups": (
        lambda: grouped_mm(X, W.transpose(1, 2), torch.tensor([8])),
        r"offs has shape \[1\] and b 2 matrices; give one end per matrix",
    ),
    "b shape": (lambda: grouped_mm(X, W, torch.tensor([4, 8])), "a has 16 columns"),
    "grouped_mm's state": (
        lambda: grouped_mm(X, W.transpose(1, 2), torch.tensor([4, 8]), recipe="fp8-delayed"),
        "recipe is DelayedScaling, .* and grouped_mm has no place for a state; .* call grouped_linear",
    ),
    "module groups": (lambda: GroupedLinear(0, 4, 4), "num_groups is 0"),
    "module recipe": (lambda: GroupedLinear(1, 4, 4, recipe="mxpf8"), "got 'mxpf8'; did you mean mxfp8"),
    "module class": (
        lambda: GroupedLinear(1, 4, 4, recipe=MXFP8),  # type: ignore[arg-type]
        r"recipe is the class MXFP8; give a recipe, such as MXFP8\(\)",
    ),
    "module seed": (lambda: GroupedLinear(1, 4, 4, recipe=NVFP4(), seed=1.0), "seed is 1.0; give an integer"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_one_line_with_both_values(name: str) -> None:
    """A ValueError of one line, and nothing else."""
    call, pattern = WRONG[name]
    with pytest.raises(ValueError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize(("k", "n"), [(0, 8), (8, 0)])
def test_a_layer_without_a_side(recipe: str, k: int, n: int) -> None:
    """One sentence for every recipe and backend, of the layer and of the MLP."""
    x, w = torch.zeros(8, k), torch.zeros(2, n, k)
    with pytest.raises(ValueError, match=rf"weight has shape \[2, {n}, {k}\]; give N and K of at least 1"):
        grouped_linear(x, w, [4, 4], recipe=recipe, seed=1)
    with pytest.raises(ValueError, match=r"w1 has shape .*; give N and K of at least 1"):
        grouped_mlp(x, w, torch.zeros(2, 4, n), [4, 4], activation="silu", recipe=recipe, seed=1)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, lambda sizes: torch.tensor(sizes).int()])
@pytest.mark.parametrize("sizes", [[-1, 5], [5, -1], [4, 5]])
def test_sizes_on_the_host_are_checked_in_every_form(form: Any, sizes: list[int]) -> None:
    """A negative size whose neighbour makes the sum fit would shift the rows of every group behind it."""
    x, w = torch.ones(8, 16), torch.ones(2, 32, 16)
    with pytest.raises(ValueError, match=r"group_sizes\[\d\] is -1|group_sizes sum to 9"):
        grouped_linear(x, w, form(sizes), recipe=None)


def test_sizes_of_numpy_integers(rng: np.random.Generator) -> None:
    """A list of what `array.sum()` and `len` give."""
    x, w = torch.randn(8, 16), torch.randn(2, 4, 16)
    sizes = [np.int64(3), np.uint8(4)]
    assert torch.equal(grouped_linear(x, w, sizes, recipe=MXFP8()), grouped_linear(x, w, [3, 4], recipe=MXFP8()))


@pytest.mark.parametrize("recipe", PRESETS)
def test_a_default_device_does_not_move_a_call(recipe: str, rng: np.random.Generator) -> None:
    """Inside `with torch.device("meta")`, as models are built in, a call on a CPU is the same."""
    x, w, bias = torch.randn(8, 16), torch.randn(2, 4, 16), torch.randn(2, 4)
    results = []
    for device in ("cpu", "meta"):
        state = DelayedState.create(recipe, 2, "cpu") if octavo.recipe(recipe).stateful else None
        leaves = [value.clone().requires_grad_() for value in (x, w, bias)]
        with torch.device(device):
            y = grouped_linear(leaves[0], leaves[1], [3, 4], recipe=recipe, bias=leaves[2], seed=1, state=state)
            y.square().sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_recipe_by_its_name(rng: np.random.Generator) -> None:
    """In every function that takes a recipe, by preset and by kind; a name resolves a layer once."""
    x, w, w2 = torch.randn(8, 16), torch.randn(2, 8, 16), torch.randn(2, 4, 4)
    sizes, row = [3, 4], RowScaling()
    calls: list[Callable[[Any], Any]] = [
        lambda recipe: grouped_linear(x, w, sizes, recipe=recipe),
        lambda recipe: grouped_mlp(x, w, w2, sizes, recipe=recipe),
        lambda recipe: grouped_mm(x, w.transpose(1, 2), torch.tensor([3, 7]), recipe=recipe, out_dtype=torch.bfloat16),
        lambda recipe: grouped_linear(
            quantize_input(x, w, sizes, recipe), quantize_weight(w, recipe), None, recipe=recipe
        ),
        lambda recipe: GroupedLinear(2, 16, 8, recipe=recipe, seed=1).recipe.fingerprint,
        lambda recipe: str(explain_mlp(x, w, w2, sizes, recipe=recipe)),
    ]
    for call in calls:
        made, wanted = call("row"), call(row)
        assert torch.equal(made, wanted) if isinstance(wanted, torch.Tensor) else made == wanted
    held = len(functional_layers)
    for name in ("row", "mxfp8"):
        for _ in range(3):
            grouped_linear(x, w, sizes, recipe=name)
    assert len(functional_layers) <= held + 1
    assert DelayedState.create("fp8-delayed", 2).recipe == DelayedScaling()


def test_stochastic_gradients_need_a_seed_only_where_there_are_some() -> None:
    """NVFP4 forward needs none; with a gradient it does (faults.md 40)."""
    grouped_linear(X, W, [4, 4], recipe=NVFP4())
    with pytest.raises(ValueError, match="seed is None"):
        grouped_linear(X.clone().requires_grad_(), W, [4, 4], recipe=NVFP4())


def test_grouped_mm_takes_the_seed_that_it_asks_for(rng: np.random.Generator) -> None:
    """With it a stochastic recipe's gradients are those of grouped_linear with the same seed."""
    x, w = (torch.from_numpy(rng.standard_normal(shape, np.float32)) for shape in ((8, 16), (2, 32, 16)))
    ends, seed = torch.tensor([5, 8]), int(rng.integers(1 << 62))
    with pytest.raises(ValueError, match="seed is None"):
        grouped_mm(x.clone().requires_grad_(), w.mT, ends, recipe=NVFP4())
    gradients = []
    for seeded in (seed, seed, seed + 1):
        leaf = x.clone().requires_grad_()
        y = grouped_mm(leaf, w.mT, ends, recipe=NVFP4(), seed=seeded)
        gradients += torch.autograd.grad(y.square().sum(), leaf)
    other = x.clone().requires_grad_()
    grouped_linear(other, w, [5, 3], recipe=NVFP4(), seed=seed).square().sum().backward()
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], other.grad)
    assert not torch.equal(gradients[0], gradients[2])


def test_nothing_serves_a_meta_device() -> None:
    """NoBackendError names every backend's reason."""
    with pytest.raises(NoBackendError, match="torch-reference"):
        grouped_linear(X.to("meta"), W.to("meta"), [4, 4], recipe=None)


@pytest.mark.parametrize(
    ("sizes", "expected", "bad"),
    [
        ([3, 0, 5], [3, 0, 5], False),
        ([3, -2, 5], [3, 0, 5], True),
        ([6, 6, 6], [6, 4, 0], True),
        ([1 << 62, 1 << 62, 1 << 62], [10, 0, 0], True),
        ([-(1 << 63), 4, 7], [0, 4, 6], True),
    ],
)
def test_device_sizes_are_cut_to_bounds(sizes: list[int], expected: list[int], bad: bool) -> None:
    """What is done to sizes that nobody reads back: in bounds whatever they hold (faults.md 61, 62)."""
    bounded, changed = bounded_sizes(torch.tensor(sizes), 10)
    assert bounded.tolist() == expected
    assert bool(changed) == bad


def test_check_errors_reports_once() -> None:
    """The status word is raised and cleared."""
    check_errors()
    flag_bad_sizes(torch.tensor(False))
    check_errors()
    flag_bad_sizes(torch.tensor(True))
    with pytest.raises(DeviceSizesError, match="group_sizes on cpu"):
        check_errors()
    check_errors()
