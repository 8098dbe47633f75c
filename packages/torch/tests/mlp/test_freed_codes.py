"""A backward of an MLP frees what it has read, keeps what somebody else reads, and says where it was broken off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mlp_operands import REFERENCE, SIZES, F, G, K, M, N, assert_equal, operands
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from octavo import MXFP8, PRESETS, Recipe
from octavo_torch import GroupedMLP, grouped_mlp, moe_mlp, quantize_input, quantize_weight
from octavo_torch.arrays.grouped_tensor import PLANES
from octavo_torch.mlp import gradients as mlp_gradients
from octavo_torch.moe import kept_operands


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def watched(monkeypatch: pytest.MonkeyPatch, saved: list[Tensor]) -> list[tuple[str, int]]:
    """Bytes of `saved` when each quantizer and weight gradient of a backward begins, by operand."""
    seen: list[tuple[str, int]] = []
    quantize, wgrad = mlp_gradients.quantize_operand, mlp_gradients.weight_gradient

    def quantizing(call: Any, run: Any, operand: Any, value: Tensor, seed: Any) -> Any:
        seen.append(("quantize", bytes_of(saved)))
        return quantize(call, run, operand, value, seed)

    def multiplying(call: Any, run: Any, x: Any, *rest: Any) -> Any:
        seen.append(("wgrad", bytes_of(saved)))
        return wgrad(call, run, x, *rest)

    monkeypatch.setattr(mlp_gradients, "quantize_operand", quantizing)
    monkeypatch.setattr(mlp_gradients, "weight_gradient", multiplying)
    return seen


def planes_freed(recipe: Recipe, given: dict[str, Tensor], **rest: Any) -> tuple[list[Tensor], Tensor]:
    y = grouped_mlp(**given, group_sizes=SIZES, recipe=recipe, seed=1, backend=REFERENCE, **rest)
    return y.grad_fn.saved_tensors, y  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_codes_are_freed_as_soon_as_they_are_read(
    name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In backward fc2's weight goes after its dgrad, before its weight gradient is made, the activation's codes after
    that, fc1's result after the activation's gradient, fc1's weight after dx, though autograd holds the tensors to the
    end."""
    recipe, given = PRESETS[name], operands()
    saved, y = planes_freed(recipe, given)
    before = bytes_of(saved)
    seen = watched(monkeypatch, saved)
    y.backward(torch.ones_like(y))
    assert [what for what, _ in seen] == ["quantize", "wgrad", "quantize", "wgrad"]
    left = [count for _, count in seen]
    assert left[0] == before
    a, w2, w1, h = M * F, given["w2"].numel(), given["w1"].numel(), M * 2 * F * 2
    # the reference backend has a byte or more for each code
    assert left[1] <= before - w2
    assert left[2] <= before - a - w2
    assert left[3] <= before - a - w2 - w1 - h


@pytest.mark.parametrize("form", [None, "standard", "recompute"])
@pytest.mark.parametrize("name", ["fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_what_a_step_has_read_is_gone_before_the_next_array_is_made(
    name: str, form: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an MLP, and of an MoE layer in a form that keeps fc1's result or makes it again: dy's codes go before the
    activation's gradient is made, and that and fc1's result before fc1's weight gradient: the peak of a training step
    is there. Row data of either layer's dy, which dgrad reads, go before the weight gradient."""
    # a MoE layer quantizes dy from tokens, which is not seen here
    living: dict[str, list[StorageWeakRef]] = {"rows of dy": []}
    seen: list[str] = []

    def keep(what: str, *tensors: Tensor | None) -> None:
        living[what] = [StorageWeakRef(each.untyped_storage()) for each in tensors if each is not None]

    def gone(*names: str) -> bool:
        return all(reference.expired() for name in names for reference in living[name])

    quantize, activation, wgrad = (
        getattr(mlp_gradients, each) for each in ("quantize_operand", "activate_gradient", "weight_gradient")
    )

    def quantizing(call: Any, run: Any, operand: Any, value: Tensor, seed: Any) -> Any:
        codes = quantize(call, run, operand, value, seed)
        own_rows = codes.rowwise is not codes.columnwise  # else both directions share one tensor
        if "da" in living:
            keep("codes of dh", *(getattr(codes, plane) for plane in PLANES))
            keep("rows of dh", codes.rowwise if own_rows else None)
        else:
            keep("rows of dy", codes.rowwise if own_rows else None)
        return codes

    def activating(da: Tensor, h: Tensor, *rest: Any) -> Tensor:
        seen.append("activation")
        assert gone("codes of dy")
        keep("da", da)
        keep("h", h)
        return activation(da, h, *rest)  # type: ignore[no-any-return]

    def multiplying(call: Any, run: Any, x: Any, dy: Any, *rest: Any) -> Any:
        if "da" in living:
            seen.append("wgrad of fc1")
            assert gone("da", "h", "rows of dh")
            assert not gone("codes of dh")
        else:
            assert gone("rows of dy")
            keep("codes of dy", *(getattr(dy, plane) for plane in PLANES))
        return wgrad(call, run, x, dy, *rest)

    for name_of, function in (
        ("quantize_operand", quantizing), ("activate_gradient", activating), ("weight_gradient", multiplying),
    ):  # fmt: skip
        monkeypatch.setattr(mlp_gradients, name_of, function)
    given = operands()
    if form is None:
        _, y = planes_freed(PRESETS[name], given)
    else:
        x, w1, w2 = (given[each] for each in ("x", "w1", "w2"))
        choices, weights = torch.from_numpy(rng.integers(0, G, (M, 2))), torch.rand(M, 2)
        y = moe_mlp(x, choices, weights, w1, w2, recipe=PRESETS[name], form=form, seed=1, backend=REFERENCE)
    y.backward(torch.ones_like(y))
    assert seen == ["activation", "wgrad of fc1"]


@pytest.mark.parametrize("form", ["standard", "recompute"])
def test_fc1_runs_again_before_dy_is_quantized(
    form: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form that makes fc1's result again, planes of dy do not wait beside the rows of x that fc1 reads."""
    seen: list[str] = []
    for name in ("first_layer", "quantize_tokens"):
        real = getattr(kept_operands, name)

        def noted(*given: Any, real: Any = real, name: str = name) -> Any:
            seen.append(name if name == "first_layer" else given[2])
            return real(*given)

        monkeypatch.setattr(kept_operands, name, noted)
    given = operands()
    choices, weights = torch.from_numpy(rng.integers(0, G, (M, 2))), torch.rand(M, 2)
    y = moe_mlp(given["x"], choices, weights, given["w1"], given["w2"], recipe="mxfp8", form=form, backend=REFERENCE)
    y.backward(torch.ones_like(y))
    again = ["first_layer"] if form == "recompute" else []
    assert seen == [*again, "dy", "x"]


def test_what_somebody_else_reads_is_not_freed(rng: np.random.Generator) -> None:
    """A retained graph gives the same gradients again; codes of quantize_weight and quantize_input, operands of a
    high-precision slot and those of a postponed weight gradient stay."""
    given = operands()
    saved, y = planes_freed(MXFP8(), given)
    before = bytes_of(saved)
    dy = torch.randn(M, N).bfloat16()
    first = torch.autograd.grad(y, list(given.values()), dy, retain_graph=True)
    assert bytes_of(saved) == before
    assert_equal(list(first), list(torch.autograd.grad(y, list(given.values()), dy)))
    assert bytes_of(saved) < before
    handles = {name: quantize_weight(given[name], MXFP8(), backend=REFERENCE) for name in ("w1", "w2")}
    x = quantize_input(given["x"], given["w1"], SIZES, MXFP8(), backend=REFERENCE)
    for _ in range(2):
        again = grouped_mlp(
            **{**given, **handles, "x": x}, group_sizes=None, recipe=MXFP8(), backend=REFERENCE
        )  # fmt: skip
        assert_equal(list(first), list(torch.autograd.grad(again, list(given.values()), dy)))
    mixed = MXFP8(wgrad="high_precision", dgrad="high_precision")
    expected = None
    for _ in range(2):
        y = grouped_mlp(**given, group_sizes=SIZES, recipe=mixed, backend=REFERENCE)
        grads = list(torch.autograd.grad(y, list(given.values()), dy))
        expected = expected or grads
        assert_equal(grads, expected)
    made = []
    for delay in (False, True):
        layer = GroupedMLP(G, K, F, N, recipe=MXFP8(), dtype=torch.bfloat16, delay_wgrad=delay, backend=REFERENCE)
        with torch.no_grad():
            layer.weight1.copy_(given["w1"])
            layer.weight2.copy_(given["w2"])
        layer(given["x"].detach(), SIZES, given["probs"].detach()).backward(dy)
        if delay:
            layer.backward_dw()
        made.append([layer.weight1.grad, layer.weight2.grad])
    assert_equal(*made)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", ["mlp", "moe"])
def test_a_second_backward_is_refused_by_autograd(layer: str, rng: np.random.Generator) -> None:
    """Where the first was not to retain the graph, nothing says that an error has broken it off."""
    given = operands()
    if layer == "mlp":
        _, y = planes_freed(PRESETS["mxfp8"], given)
    else:
        choices, weights = torch.from_numpy(rng.integers(0, G, (M, 2))), torch.rand(M, 2)
        x, w1, w2 = (given[each] for each in ("x", "w1", "w2"))
        y = moe_mlp(x, choices, weights, w1, w2, recipe="mxfp8", backend=REFERENCE)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_a_backward_that_was_broken_off_says_so(rng: np.random.Generator) -> None:
    """Run again, it has nothing to read any more; a new forward works."""
    layer = GroupedMLP(G, K, F, N, recipe=MXFP8(), dtype=torch.bfloat16, main_grad="accumulate", backend=REFERENCE)
    for weight in (layer.weight1, layer.weight2):
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    x = operands()["x"]
    y = layer(x, SIZES)
    layer.weight1.get_main_grad = lambda: None  # type: ignore[attr-defined]
    for kind, sentence in ((ValueError, r"get_main_grad\(\) is None"), (RuntimeError, "was broken off by an error")):
        with pytest.raises(kind, match=sentence):
            y.sum().backward()
    layer.weight1.get_main_grad = lambda: layer.weight1.main_grad  # type: ignore[attr-defined]
    layer(x, SIZES).sum().backward()
    assert layer.weight1.main_grad.any()  # type: ignore[attr-defined]
