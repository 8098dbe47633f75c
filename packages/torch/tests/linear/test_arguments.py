"""Arguments that do not fit raise ValueError: what was given, what is needed, what to do, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo import MXFP8, NVFP4, DelayedScaling, NoBackendError, QuantizerSpec
from octavo_torch import DelayedState, GroupedLinear, check_errors, dequantize, grouped_linear, grouped_mm, quantize
from octavo_torch.arithmetic.groups import bounded_sizes
from octavo_torch.compiler.status import DeviceSizesError, flag_bad_sizes

X, W = torch.zeros(8, 16), torch.zeros(2, 4, 16)
SPEC = QuantizerSpec(scaling="mxfp8", format="e4m3")


def linear(**changes: Any) -> Callable[[], Any]:
    given: dict[str, Any] = {"x": X, "weight": W, "group_sizes": [4, 4], "recipe": MXFP8(), **changes}
    return lambda: grouped_linear(**given)


def quantized(x: Any = X, spec: Any = SPEC, sizes: Any = None, **rest: Any) -> Callable[[], Any]:
    return lambda: quantize(x, spec, sizes, **rest)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "x rank": (linear(x=torch.zeros(2, 2, 16)), r"x has shape \[2, 2, 16\]; give \[M, K\]"),
    "x scalar": (linear(x=torch.zeros(())), r"x has shape \[\]"),
    "x type": (linear(x=np.zeros((8, 16))), "x is a ndarray"),
    "x dtype": (linear(x=torch.zeros(8, 16, dtype=torch.float64)), "x has dtype float64; give bfloat16, float16 or"),
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
    "bias dtype": (linear(bias=torch.zeros(2, 4, dtype=torch.int32)), "bias has dtype int32"),
    "bias scales alone": (linear(bias_scales=torch.zeros(8)), "bias_scales was given without a bias"),
    "bias scales shape": (linear(bias=torch.zeros(2, 4), bias_scales=torch.zeros(7)), r"bias_scales has shape \[7\]"),
    "no state": (linear(recipe=DelayedScaling()), "state is None and DelayedScaling"),
    "state unasked": (linear(state=DelayedState.create(DelayedScaling(history=4), 2)), "MXFP8 keeps none"),
    "state groups": (
        linear(recipe=DelayedScaling(history=4), state=DelayedState.create(DelayedScaling(history=4), 3)),
        "state holds 3 groups and the weight 2",
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
    "no GroupedTensor": (lambda: dequantize(X), "q is a Tensor"),  # type: ignore[arg-type]
    "offs": (lambda: grouped_mm(X, W.transpose(1, 2), torch.tensor([4.0, 8.0])), "offs is float32"),
    "offs past the rows": (lambda: grouped_mm(X, W.transpose(1, 2), torch.tensor([4, 9])), "sum to 9"),
    "b shape": (lambda: grouped_mm(X, W, torch.tensor([4, 8])), "a has 16 columns"),
    "module groups": (lambda: GroupedLinear(0, 4, 4), "num_groups is 0"),
    "module recipe": (lambda: GroupedLinear(1, 4, 4, recipe="mxfp8"), "octavo.recipe"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_one_line_with_both_values(name: str) -> None:
    """A ValueError of one line, and nothing else."""
    call, pattern = WRONG[name]
    with pytest.raises(ValueError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_stochastic_gradients_need_a_seed_only_where_there_are_some() -> None:
    """NVFP4 forward needs none; with a gradient it does (faults.md 40)."""
    grouped_linear(X, W, [4, 4], recipe=NVFP4())
    with pytest.raises(ValueError, match="seed is None"):
        grouped_linear(X.clone().requires_grad_(), W, [4, 4], recipe=NVFP4())


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
