"""Whole layers, forward in one native call and backward in another, against the same layers composed of their plans.

With `out` a call is composed, so every comparison is of two public calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import MARKS
from torch import Tensor

from octavo import PRESETS, BlockScaling, DelayedScaling, MXFP4Weights, Recipe
from octavo_numerics import quantize, round_mxfp4, valid
from octavo_torch import DelayedState, GroupedLinear, convert_layout, grouped_linear, quantize_weight
from octavo_torch.bridge import BRIDGE
from octavo_torch.dispatch.layers import layer_for
from octavo_torch_native.linear import recorded_layer
from octavo_torch_native.linear.recorded_layer import RecordedLayer

M, K, N, G = 150, 144, 80, 5
SPLIT = [33, 0, 1, 70, 16]
SEED = 3
DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]


class Problem:
    """Fresh operands whose tails are NaN."""

    def __init__(self, recipe: Recipe, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.recipe, self.device = recipe, device
        tail = sum(SPLIT)
        self.x, self.dy = (torch.randn(M, side).to(device, dtype) for side in (K, N))
        self.x[tail:], self.dy[tail:] = torch.nan, torch.nan
        self.w, self.bias = torch.randn(G, N, K).to(device, dtype), torch.randn(G, N).to(device, dtype)
        self.sizes = torch.tensor(SPLIT, device=device)

    def step(
        self, needs: tuple[bool, bool, bool] = (True, True, True), *, composed: bool = False, **rest: Any
    ) -> list[Tensor | None]:
        """y, the gradients that are needed, and the state's history."""
        leaves = [
            value.clone().requires_grad_(need) for value, need in zip((self.x, self.w, self.bias), needs, strict=True)
        ]
        x, w, bias = leaves
        state = None
        if isinstance(self.recipe, DelayedScaling):
            state = DelayedState.create(self.recipe, G, self.device)
            state.scale.copy_(torch.arange(1, 3 * G + 1).view(3, G))
        if composed:
            rest["out"] = torch.empty(M, N, device=self.device, dtype=DTYPES.get(self.recipe.output_dtype, x.dtype))
        y = grouped_linear(
            x, w, rest.pop("sizes", self.sizes), recipe=self.recipe, bias=bias, seed=SEED, state=state,
            backend="torch-native", **rest,
        )  # fmt: skip
        if y.requires_grad:
            y.backward(self.dy.to(y.dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves), None if state is None else state.history]


DTYPES: dict[Any, torch.dtype] = {"float32": torch.float32}
OPTIONS = {
    "wgrad high": BlockScaling(wgrad="high_precision"),
    "dgrad high": BlockScaling(dgrad="high_precision"),
    "fprop high": DelayedScaling(history=4, fprop="high_precision"),
}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The launches of each sequence that runs from here on."""
    seen: list[int] = []
    real = recorded_layer.run
    monkeypatch.setattr(
        recorded_layer, "run", lambda sequence, *rest: (seen.append(len(sequence)), real(sequence, *rest))[1]
    )
    return seen


def assert_same(made: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(made, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*PRESETS, *OPTIONS])
def test_bits_of_the_composed_layer(name: str, device: str, rng: np.random.Generator, runs: list[int]) -> None:
    """y, dx, dw, dbias and recorded amax, for every set of wanted gradients, in a native call each way."""
    problem = Problem({**PRESETS, **OPTIONS}[name], device)
    for needs in ((True, True, True), (True, False, False), (False, True, False), (False, False, True), (False,) * 3):
        expected = problem.step(needs, composed=True)
        assert not runs
        assert_same(problem.step(needs), expected)
        assert len(runs) == 1 + any(needs[:2])
        runs.clear()


@pytest.mark.parametrize("device", DEVICES)
def test_the_number_of_the_first_group(device: str, rng: np.random.Generator, runs: list[int]) -> None:
    """group_offset is part of the position of random bits, in backward as in forward: ranks that hold some of the
    groups draw as one that holds all."""
    problem = Problem(PRESETS["nvfp4"], device)
    expected = problem.step(composed=True, group_offset=7)
    assert_same(problem.step(group_offset=7), expected)
    assert len(runs) == 2
    others = problem.step()
    for position in (1, 2):  # dx and dw: only gradients are rounded stochastically
        assert not torch.equal(others[position], expected[position])


@pytest.mark.parametrize("device", DEVICES)
def test_what_comes_in_other_forms(device: str, rng: np.random.Generator, runs: list[int]) -> None:
    """Host sizes, int32 sizes, rows in steps, a gradient in steps or of an expand, another number of rows."""
    problem = Problem(PRESETS["fp8-block"], device)
    expected = problem.step(composed=True)
    for sizes in (SPLIT, problem.sizes.int(), torch.stack([problem.sizes] * 2, 1)[:, 0]):
        assert_same(problem.step(sizes=sizes), expected)
    assert len(runs) == 6
    problem.dy = torch.stack([problem.dy] * 2, 2)[..., 0]
    assert_same(problem.step(), expected)
    wide = torch.zeros(M, K + 64, device=device, dtype=problem.x.dtype)
    wide[:, :K] = problem.x
    x, w = wide.requires_grad_(), problem.w.clone().requires_grad_()
    runs.clear()
    y = grouped_linear(x[:, :K], w, problem.sizes, recipe=problem.recipe, bias=problem.bias, backend="torch-native")
    assert not runs, "rows in steps are composed, without a copy"
    assert_same([y.detach()], expected[:1])


def test_gradients_that_are_asked_for(rng: np.random.Generator, runs: list[int]) -> None:
    """torch.autograd.grad of x alone multiplies no dw; a retained graph gives the same bits twice."""
    problem = Problem(PRESETS["mxfp8"], "cpu")
    x, w = problem.x.requires_grad_(), problem.w.requires_grad_()
    y = grouped_linear(x, w, problem.sizes, recipe=problem.recipe, backend="torch-native")
    (dx,) = torch.autograd.grad(y, (x,), problem.dy, retain_graph=True)
    both = torch.autograd.grad(y, (x, w), problem.dy)
    assert torch.equal(dx, both[0])
    assert runs == [4, 2, 3]  # plan, x, w, fprop; dy, dgrad; dy, dgrad, wgrad


def test_saved_tensors_may_leave_the_device(rng: np.random.Generator) -> None:
    """What autograd holds goes through its hooks, comes back elsewhere in memory, and is all that backward needs."""
    problem = Problem(PRESETS["fp8-current"], "cpu")
    expected = problem.step()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
        assert_same(problem.step(), expected)
    assert [tensor.dtype for tensor in packed] == [torch.uint8]


def test_shapes_that_never_repeat_are_not_all_kept() -> None:
    """A router gives another number of rows each step; what is recorded is bounded (fault 52)."""
    layer = GroupedLinear(1, 16, 16, dtype=torch.bfloat16, backend="torch-native")
    for rows in range(1, 1200):
        layer(torch.zeros(rows, 16, dtype=torch.bfloat16), [rows])
    made = next(iter(layer._layers.values())).whole
    assert isinstance(made, RecordedLayer)
    assert len(made._recordings) <= 1024


def test_a_tensor_that_left_a_transform(rng: np.random.Generator, runs: list[int]) -> None:
    """What torch.func.grad leaves behind has no memory of its own; such a call is composed."""
    left: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        left.append(x * 1)
        return x.sum()

    x, w = torch.randn(8, 16), torch.randn(2, 16, 16, requires_grad=True)
    torch.func.grad(loss)(x)
    expected = grouped_linear(x, w, [3, 5], recipe=None, backend="torch-native")
    runs.clear()
    assert torch.equal(grouped_linear(left[0], w, [3, 5], recipe=None, backend="torch-native"), expected)
    assert not runs


def test_a_backward_that_is_compiled(rng: np.random.Generator) -> None:
    """Compiled autograd over an eager forward runs the whole backward beside its graph, with the same bits."""
    from torch._dynamo import compiled_autograd

    problem = Problem(PRESETS["fp8-block"], "cpu")
    needs = (False, True, False)
    expected = problem.step(needs)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        assert_same(problem.step(needs), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_are_rounded_first(device: str, rng: np.random.Generator, runs: list[int]) -> None:
    """A whole layer's launches round to MXFP4, too, with the bits of blocks of the rounded weight. What the front end
    rounds, such as float16, is composed."""
    problem = Problem(MXFP4Weights(), device)
    with torch.no_grad():
        problem.w[:, 3:7, :32] *= 2.0**-18
    for dtype in (torch.bfloat16, torch.float16):
        leaf = problem.w.to(dtype, copy=True).requires_grad_()
        layer = layer_for(problem.recipe, problem.x.to(dtype), leaf, device == "cpu", True, True, "torch-native")
        assert (layer.whole is None) == (dtype is torch.float16)
    ours = problem.step()
    assert len(runs) == 2
    blocks = Problem(BlockScaling(), device)
    blocks.x, blocks.dy, blocks.bias = problem.x, problem.dy, problem.bias
    blocks.w = torch.from_numpy(round_mxfp4(problem.w.float().cpu().numpy())).to(device, problem.w.dtype)
    for one, other in zip(ours, blocks.step(), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_rounded_weights_in_the_kernels_layouts(device: str, rng: np.random.Generator) -> None:
    """Codes of rows and panels, made, written again and converted, are the definition's."""
    w = torch.randn(G, N, K, device=device).bfloat16().requires_grad_()
    handle = quantize_weight(w, "mxfp4", backend="torch-native")
    assert handle.codes is not None
    assert set(handle.layouts or ()) == {"rows", "panels"}
    with torch.no_grad():
        w.mul_(-2)
    again = quantize_weight(w, "mxfp4", backend="torch-native", out=handle)
    spec = MXFP4Weights().quantizer("w")
    assert spec is not None
    for codes in (again.codes, quantize_weight(w, "mxfp4", backend="torch-native").codes):
        assert codes is not None
        assert codes.spec.quantizer == spec
        plain = convert_layout(codes, ("plain", "plain"), backend="torch-native")
        assert plain.spec.quantizer == spec
        for name, wanted in valid(quantize(BRIDGE.to_numpy(w), spec)).items():
            assert BRIDGE.to_numpy(getattr(plain, name)).tobytes() == wanted.tobytes()
        back = convert_layout(plain, ("rows", "panels"), backend="torch-native")
        assert torch.equal(back.columnwise.view(torch.uint8), codes.columnwise.view(torch.uint8))  # type: ignore[union-attr]


def test_memory_that_was_freed_is_refused(rng: np.random.Generator) -> None:
    """FSDP frees gathered parameters, of which somebody may have kept one: reading it ended the process."""
    freed, x = torch.randn(G, N, K).bfloat16(), torch.randn(M, K).bfloat16()
    freed.untyped_storage().resize_(0)
    for recipe in ("bf16", "fp8-block", "mxfp8"):
        with pytest.raises(ValueError, match=rf"a tensor \[{G}, {N}, {K}\] in bfloat16 on cpu has no memory"):
            grouped_linear(x, freed, SPLIT, recipe=recipe, backend="torch-native")


def test_a_bias_that_was_freed_is_refused(rng: np.random.Generator) -> None:
    """Its address, 0, meant that there was none: results were those of a layer without a bias."""
    x, w, freed = torch.randn(M, K).bfloat16(), torch.randn(G, N, K).bfloat16(), torch.randn(G, N).bfloat16()
    freed.untyped_storage().resize_(0)
    for recipe in ("bf16", "fp8-block"):
        with pytest.raises(ValueError, match=rf"a tensor \[{G}, {N}\] in bfloat16 on cpu has no memory"):
            grouped_linear(x, w, SPLIT, recipe=recipe, bias=freed, backend="torch-native")
