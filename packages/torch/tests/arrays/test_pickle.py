"""Quantized operands through pickle, which does not take torch's FP8 tensors, and to other processes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

import octavo_registry
from octavo import PRESETS, DelayedScaling
from octavo_torch import (
    CodedWeight,
    DelayedState,
    GroupedTensor,
    dequantize,
    grouped_linear,
    permute,
    quantize,
    quantize_input,
    quantize_weight,
    unpermute,
)
from octavo_torch.arrays.grouped_tensor import PLANES

G, M, K, N = 3, 40, 64, 48
SIZES = torch.tensor([10, 0, 20])
RECIPES = {**PRESETS, "fp8-delayed": DelayedScaling(history=3)}


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    """Whatever else is installed: other backends have tests of their own."""
    with octavo_registry.prefer("torch-reference"):
        yield


def same(left: GroupedTensor, right: GroupedTensor) -> bool:
    planes = [(getattr(left, name), getattr(right, name)) for name in (*PLANES, "group_sizes")]
    return left.spec == right.spec and all(
        a is b is None or (a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
        for a, b in planes
    )


@pytest.mark.parametrize("name", RECIPES)
def test_bits_and_what_is_one_tensor(name: str) -> None:
    """By pickle, to another process, and by torch.load of nothing but known classes: the same planes, in the same
    dtypes, of which those that are one stay one."""
    recipe = RECIPES[name]
    for operand, shape, sizes in (("x", (M, K), SIZES), ("w", (G, N, K), None)):
        spec = recipe.quantizer(operand)  # type: ignore[arg-type]
        if spec is None:
            continue
        q = quantize(torch.randn(shape), spec, sizes, seed=1, scale=torch.rand(G) if recipe.stateful else None)
        file = io.BytesIO()
        torch.save(q, file)
        file.seek(0)
        twins = pickle.loads(pickle.dumps(q)), pickle.loads(bytes(ForkingPickler.dumps(q))), torch.load(file)
        for twin in (*twins, copy.copy(q), copy.deepcopy(q)):
            assert same(twin, q)
            assert (twin.rowwise is twin.columnwise) is (q.rowwise is q.columnwise)
        memory = {"copied": twins[0], "deep": copy.deepcopy(q)}
        assert all(made.rowwise.data_ptr() != q.rowwise.data_ptr() for made in memory.values())  # type: ignore[union-attr]
        assert copy.copy(q).rowwise is q.rowwise


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4", "fp8-delayed"])
def test_operands_with_their_tensors(name: str) -> None:
    """A QuantizedInput and a QuantizedWeight go together with what they were made of: a call of them has the bits that
    one of the originals has. One that was outdated is refused as before."""
    recipe = RECIPES[name]
    state = DelayedState.create(recipe, G) if isinstance(recipe, DelayedScaling) else None
    w, x = nn.Parameter(torch.randn(G, N, K)), torch.randn(M, K)
    given: dict[str, Any] = {"recipe": recipe, "seed": 3, "state": state}
    rows, weight = quantize_input(x, w, SIZES, **given), quantize_weight(w, **given)
    expected = grouped_linear(rows, weight, None, **given)
    rows, weight, leaf = pickle.loads(pickle.dumps((rows, weight, w)))
    assert weight.weight is leaf
    y = grouped_linear(rows, weight, None, **given)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert leaf.grad is not None
    with torch.no_grad():
        leaf.zero_()
    with pytest.raises(ValueError, match="changed in place"):
        grouped_linear(rows, pickle.loads(pickle.dumps(weight)), None, **given)


def test_a_weight_of_codes_alone() -> None:
    """A parameter that is a CodedWeight, and files of torch.save that hold its planes as they are."""
    w, recipe = torch.randn(G, N, K).bfloat16(), RECIPES["fp8-block"]
    codes = quantize(w, recipe.quantizer("w"))  # type: ignore[arg-type]
    weight: Any = nn.Parameter(CodedWeight(codes, recipe, w.dtype), requires_grad=False)
    twin: Any = pickle.loads(pickle.dumps(weight))
    assert isinstance(twin, nn.Parameter)
    assert isinstance(twin, CodedWeight)
    assert (twin.dtype, twin.recipe) == (w.dtype, recipe)
    assert same(twin.codes, codes)
    rebuild, (planes, *rest) = weight.__reduce_ex__(2)
    before = {plane: getattr(codes, plane) for plane in planes}  # as releases before this one wrote them
    assert same(rebuild(before, *rest).codes, codes)


def test_states_and_routings_through_torch_load() -> None:
    """torch.load of nothing but known classes, which a state's recipe is none of."""
    state, choices = DelayedState.create(DelayedScaling(history=3), G), torch.randint(G, (M, 2))
    state.record("x", torch.rand(G))
    state.update()
    y, _, routing = permute(torch.randn(M, K), choices, G)
    file = io.BytesIO()
    torch.save((state, routing), file)
    file.seek(0)
    for twin, way in (torch.load(file, weights_only=True), copy.deepcopy((state, routing))):
        assert twin.recipe == state.recipe
        assert torch.equal(twin.history, state.history)
        assert torch.equal(twin.scale, state.scale)
        assert torch.equal(unpermute(y, way), unpermute(y, routing))


def test_planes_that_do_not_fit_are_refused() -> None:
    """A file, or a caller, whose tensors are not those of the spec: a kernel would read beyond them."""
    recipe = RECIPES["mxfp8"]
    q = quantize(torch.randn(M, K), recipe.quantizer("x"), SIZES)  # type: ignore[arg-type]
    assert q.rowwise is not None
    assert q.columnwise_scale is not None
    short = {"rowwise": q.rowwise[:1].clone(), "columnwise_scale": q.columnwise_scale[:1].clone()}
    for name, plane in short.items():
        wrong = replace(q, **{name: plane})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"codes and scales have shapes .* and its spec says .*; give"):
            pickle.loads(pickle.dumps(wrong))
        with pytest.raises(ValueError, match=r"q's .* codes and scales have shapes"):
            dequantize(wrong)
        with pytest.raises(ValueError, match=r"x's .* codes and scales have shapes"):
            grouped_linear(wrong, torch.randn(G, N, K), None, recipe=recipe)
    for name, plane in {"rowwise": q.rowwise.view(torch.uint8), "columnwise_scale": q.columnwise_scale.float()}.items():
        wrong = replace(q, **{name: plane})  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"codes and scales are .*, and its spec says float8_e4m3fn and uint8; view"
        ):
            dequantize(wrong, "rowwise" if name == "rowwise" else "columnwise")
    codes = quantize(torch.randn(G, N, K), recipe.quantizer("w"))  # type: ignore[arg-type]
    wrong = replace(codes, rowwise=codes.rowwise[:, :1].clone())  # type: ignore[index]
    with pytest.raises(ValueError, match="the pickled weight's rowwise codes"):
        pickle.loads(pickle.dumps(CodedWeight(wrong, recipe, torch.float32)))
