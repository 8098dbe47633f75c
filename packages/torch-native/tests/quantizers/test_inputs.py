"""Inputs as they come (views, expanded, on odd addresses), plans used again, and outputs in the caller's tensors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import native_calls as native
import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_registry
import octavo_torch
from octavo import QuantizerSpec
from octavo_conformance.cards.variants import RAGGED, STACKED
from octavo_native import PrologueArgs
from octavo_registry.contract.request import Request
from octavo_torch import GroupedTensor
from octavo_torch.arrays.grouped_tensor import PLANES
from octavo_torch_native.gemm.gemm import Fprop
from octavo_torch_native.quantizers import launches

SPEC = RAGGED["block.e4m3.fp32"]
SIZES = [20, 0, 33]


def planes_of(q: GroupedTensor) -> dict[str, Tensor]:
    return {name: getattr(q, name).view(torch.uint8) for name in PLANES if getattr(q, name) is not None}


def assert_equal(a: GroupedTensor, b: GroupedTensor, rows: int = sum(SIZES)) -> None:
    """The same values and scales where rows belong to groups."""
    assert a.spec == b.spec
    for direction in a.spec.quantizer.directions:
        assert torch.equal(native.dequantize(a, direction)[:rows], native.dequantize(b, direction)[:rows])


def strided(x: Tensor) -> dict[str, Tensor]:
    """x [M, K] as views that hold its values."""
    rows, columns = x.shape
    wide = torch.full((rows, columns + 8), torch.nan, dtype=x.dtype)
    wide[:, :columns] = x
    odd = torch.full((rows, columns + 3), torch.nan, dtype=x.dtype)
    odd[:, :columns] = x
    late = torch.full((rows * columns + 1,), torch.nan, dtype=x.dtype)
    late[1:] = x.reshape(-1)
    every = torch.full((2 * rows, columns), torch.nan, dtype=x.dtype)
    every[::2] = x
    return {
        "transposed": x.T.contiguous().T,
        "wide rows": wide[:, :columns],
        "rows of odd stride": odd[:, :columns],
        "odd address": late[1:].view(rows, columns),
        "every other row": every[::2],
        "backwards": x.flip(1).as_strided(x.shape, x.stride()).flip(1),
        "every other column": torch.stack([x, x], 2).flatten(1)[:, ::2],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["block.e4m3.fp32", "nvfp4.hadamard", "current.e4m3"])
def test_strided_rows(name: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Any view holds the values that its contiguous copy holds (fault 44)."""
    x = torch.randn(60, 72).to(dtype)
    expected = native.quantize(x, RAGGED[name], SIZES).codes
    for what, view in strided(x).items():
        assert torch.equal(view, x), what
        assert_equal(native.quantize(view, RAGGED[name], SIZES).codes, expected)


def test_expanded_rows(rng: np.random.Generator) -> None:
    """Stride 0, as in gradients of loss.sum(): one row for all, one column for all, one element (fault 45)."""
    for view in (torch.randn(1, 72).expand(60, 72), torch.randn(60, 1).expand(60, 72), torch.ones(()).expand(60, 72)):
        expected = native.quantize(view.clone(memory_format=torch.contiguous_format), SPEC, SIZES).codes
        assert_equal(native.quantize(view, SPEC, SIZES).codes, expected)
        assert_equal(octavo_torch.quantize(view, SPEC, SIZES, backend="torch-native"), expected)


@pytest.mark.parametrize("name", ["block.e4m3.square", "mxfp8.e4m3", "row.e4m3.pow2"])
def test_strided_matrices(name: str, rng: np.random.Generator) -> None:
    """Weights that are transposed, cut out of more matrices, or one matrix for all groups."""
    w = torch.randn(3, 48, 40)
    more = torch.randn(6, 48, 40)
    more[::2] = w
    taller = torch.randn(3, 50, 40)
    taller[:, :48] = w
    wide = torch.randn(3, 48, 64)
    wide[:, :, :40] = w
    views = (w.transpose(1, 2).contiguous().transpose(1, 2), more[::2], taller[:, :48], wide[:, :, :40])
    expected = native.quantize(w, STACKED[name]).codes
    for view in views:
        assert torch.equal(view, w)
        assert_equal(native.quantize(view, STACKED[name]).codes, expected)
    one = w[:1].expand(3, 48, 40)
    assert_equal(native.quantize(one, STACKED[name]).codes, native.quantize(one.clone(), STACKED[name]).codes)


def test_rows_are_read_where_they_stand(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice whose rows begin at multiples of 16 bytes is not copied; its neighbours are not read."""
    wide = torch.full((60, 128), torch.nan)
    wide[:, 32:96] = torch.randn(60, 64)
    view = wide[:, 32:96]
    expected = native.quantize(view.clone(), SPEC, SIZES).codes
    plan = native.plan(SIZES, 60)
    monkeypatch.setattr(Tensor, "contiguous", lambda *_, **__: pytest.fail("a copy was made"))
    made = native.quantize(view, SPEC, plan).codes
    monkeypatch.undo()
    assert_equal(made, expected)


def test_strided_scales_of_the_second_level(rng: np.random.Generator) -> None:
    """NVFP4's factors of a step's layers may be columns of one array; products and values read what is meant."""
    sizes, spec = [16, 0, 40], RAGGED["nvfp4.hadamard"].model_copy(update={"hadamard": False, "orientation": "both"})
    x = torch.randn(56, 48) * torch.tensor([1.0, 300.0]).repeat_interleave(torch.tensor([16, 40]))[:, None]
    q = native.quantize(x, spec, sizes).codes
    w = native.quantize(torch.randn(3, 32, 48), spec).codes

    def spread(given: GroupedTensor) -> GroupedTensor:
        factors = torch.stack([given.rowwise_global, torch.full((3,), 7.0)], 1)
        return replace(given, rowwise_global=factors[:, 0])

    assert torch.equal(native.dequantize(spread(q), "rowwise"), native.dequantize(q, "rowwise"))
    run = Fprop("float32")
    assert torch.equal(run(spread(q), spread(w), q.group_sizes), run(q, w, q.group_sizes))


def test_weights_of_a_norm_begin_anywhere(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of one flat buffer, as FSDP's parameters are: kernels for aligned rows load weights in whole pieces, and
    those for other rows ask for more workspace than shapes alone tell.
    """
    given: list[int] = []

    def noted(**arguments: Any) -> Any:
        given.extend((arguments["gamma"], arguments["beta"]))
        return PrologueArgs(**arguments)

    monkeypatch.setattr(launches, "PrologueArgs", noted)
    flat, x = torch.randn(1 + 2 * 72), torch.randn(60, 72)
    gamma, beta = flat[1:73], flat[73:]
    made = native.norm_quantize(x, gamma, beta, SPEC, SIZES, norm="layer").codes
    assert_equal(made, native.norm_quantize(x, gamma.clone(), beta.clone(), SPEC, SIZES, norm="layer").codes)
    assert len(given) == 4
    assert not any(address % 16 for address in given)


def test_sizes_in_every_form(rng: np.random.Generator) -> None:
    """Lists, arrays, int32 and int64 tensors, strided ones, a plan of them, nothing at all."""
    x = torch.randn(60, 40)
    expected = native.quantize(x, SPEC, SIZES).codes
    twice = torch.tensor(SIZES).repeat_interleave(2)[::2]
    for form in (np.array(SIZES, np.int32), torch.tensor(SIZES, dtype=torch.int32), torch.tensor(SIZES), twice):
        made = native.quantize(x, SPEC, form).codes
        assert made.group_sizes.dtype is torch.int64
        assert made.group_sizes.tolist() == SIZES
        assert_equal(made, expected)
        assert_equal(native.quantize(x, SPEC, native.plan(form, 60)).codes, expected)
    assert_equal(native.quantize(x, SPEC).codes, native.quantize(x, SPEC, [60]).codes, 60)
    run = octavo_registry.plan(
        Request(
            op="quantize", framework="torch", device="cpu", in_dtype="float32", out_dtype="float32", quantizer=SPEC
        ),
        backend="torch-native",
    ).run
    assert_equal(run(x), native.quantize(x, SPEC, [60]).codes, 60)


def test_sizes_are_the_results_own(rng: np.random.Generator) -> None:
    """Sizes that change after the call do not change what the result says."""
    sizes = torch.tensor(SIZES)
    q = native.quantize(torch.randn(60, 40), SPEC, sizes).codes
    sizes.fill_(0)
    assert q.group_sizes.tolist() == SIZES


def test_one_plan_for_many_calls(rng: np.random.Generator) -> None:
    """A plan serves every recipe, width and dtype of its rows; another number of rows is refused."""
    plan = native.plan(SIZES, 60)
    for name, spec in RAGGED.items():
        x = torch.randn(60, 48, dtype=torch.float16)
        given: dict[str, Any] = {"seed": 3} if spec.stochastic else {}
        if spec.scaling == "delayed":
            given["scale"] = torch.rand(3) + 0.5
        made = native.quantize(x, spec, plan, **given).codes
        assert made.group_sizes is plan.group_sizes, name
        assert_equal(made, native.quantize(x, spec, SIZES, **given).codes)
        for direction in ("rowwise", "columnwise"):
            values = native.dequantize(native.quantize(x, spec, SIZES, **given).codes, direction)
            assert torch.equal(values, native.dequantize(made, direction))
    with pytest.raises(ValueError, match="a GroupIndex of 60 rows on cpu and the operand has 61 rows"):
        native.quantize(torch.randn(61, 48), SPEC, plan)


@pytest.mark.parametrize("layouts", [("plain", "plain"), ("rows", "panels")], ids="-".join)
@pytest.mark.parametrize("name", ["current.e4m3", "row.e4m3.fp32", "block.e4m3.square", "mxfp8.e5m2", "nvfp4.hadamard"])
def test_out_is_written(name: str, layouts: tuple[str, str], rng: np.random.Generator) -> None:
    """The caller's planes get the result, stay the caller's, and come back; sizes, too."""
    spec = RAGGED[name]
    x, y = torch.randn(60, 72), torch.randn(60, 72)
    expected = native.quantize(x, spec, SIZES, layouts=layouts).codes
    out = native.quantize(y, spec, [1, 2, 3], layouts=layouts).codes
    before = {plane: tensor.data_ptr() for plane, tensor in planes_of(out).items()}
    made = native.quantize(x, spec, SIZES, layouts=layouts, out=out)
    assert made.codes is out
    assert {plane: tensor.data_ptr() for plane, tensor in planes_of(out).items()} == before
    assert out.group_sizes.tolist() == SIZES
    assert_equal(out, expected)
    if layouts == ("plain", "plain"):
        again = copy.deepcopy(out)
        assert octavo_torch.quantize(x, spec, SIZES, backend="torch-native") is not again
        request = Request(
            op="quantize", framework="torch", device="cpu", in_dtype="float32", out_dtype="float32", quantizer=spec
        )
        into = octavo_registry.plan(request, backend="torch-native").bound.into
        into(y, torch.tensor(SIZES), out=again)
        assert_equal(again, native.quantize(y, spec, SIZES).codes)


def test_out_that_does_not_fit_is_named(rng: np.random.Generator) -> None:
    """Never a copy that is thrown away: the field, what it is, what it should be."""
    x = torch.randn(60, 72)
    fresh = lambda spec=SPEC, **kw: native.quantize(x, spec, SIZES, **kw).codes  # noqa: E731
    wrong = fresh()
    wrong.rowwise = torch.empty(72, 60, dtype=torch.float8_e4m3fn).T
    with pytest.raises(ValueError, match=r"out.rowwise is float8_e4m3fn \[60, 72\] of strides \[1, 60\] on cpu; give"):
        native.quantize(x, SPEC, SIZES, out=wrong)
    wrong = fresh()
    wrong.columnwise_scale = wrong.columnwise_scale[:-1]
    with pytest.raises(ValueError, match=r"out.columnwise_scale is float32 \[\d, 72\]"):
        native.quantize(x, SPEC, SIZES, out=wrong)
    wrong = fresh()
    wrong.columnwise = wrong.columnwise.view(torch.uint8)
    with pytest.raises(ValueError, match=r"out.columnwise is uint8 .* give contiguous float8_e4m3fn"):
        native.quantize(x, SPEC, SIZES, out=wrong)
    wrong = fresh()
    wrong.rowwise_scale = None
    with pytest.raises(ValueError, match=r"out.rowwise_scale is None; give float32 \[60, 1\]"):
        native.quantize(x, SPEC, SIZES, out=wrong)
    wrong = fresh()
    wrong.group_sizes = None
    with pytest.raises(ValueError, match=r"out.group_sizes is None"):
        native.quantize(x, SPEC, SIZES, out=wrong)
    with pytest.raises(ValueError, match=r"out.spec is .* give one of the same spec"):
        native.quantize(x, SPEC, SIZES, out=fresh(RAGGED["mxfp8.e4m3"]))
    with pytest.raises(ValueError, match=r"out.spec is .* give one of the same spec"):
        native.quantize(x, SPEC, SIZES, out=fresh(layouts=("rows", "panels")))
    apart = fresh(RAGGED["current.e4m3"])
    apart.columnwise = apart.columnwise.clone()
    with pytest.raises(ValueError, match=r"out.columnwise and out.rowwise are different tensors"):
        native.quantize(x, RAGGED["current.e4m3"], SIZES, out=apart)
    with pytest.raises(ValueError, match=r"out.amax is None; give float32 \[3\]"):
        native.quantize(x, SPEC, SIZES, amax=True, out=fresh())
    with pytest.raises(ValueError, match="out is a Tensor"):
        native.quantize(x, SPEC, SIZES, out=torch.empty(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, spec in STACKED.items() if not spec.mxfp4])
def test_unchanged_weights_are_left_alone(name: str, rng: np.random.Generator) -> None:
    """A flag on the device, not 0: every byte of every output stays; 0: all are made again (fault 37)."""
    spec = STACKED[name]
    given = {"scale": torch.rand(3) + 0.5} if spec.scaling == "delayed" else {}
    w, other = torch.randn(3, 144, 40), torch.randn(3, 144, 40)
    for layouts in (("plain", "plain"), ("rows", "panels")):
        made = native.quantize(w, spec, layouts=layouts, amax=True, dequantized=True, **given)
        before = {plane: tensor.clone() for plane, tensor in planes_of(made.codes).items()}
        held = made.amax.clone(), made.dequantized.clone()
        flag = torch.ones(1, dtype=torch.int32)
        call = {"layouts": layouts, "amax": True, "dequantized": True, "out": made, "unchanged": flag, **given}
        native.quantize(other, spec, **call)
        assert all(torch.equal(tensor, before[plane]) for plane, tensor in planes_of(made.codes).items())
        assert torch.equal(made.amax, held[0])
        assert torch.equal(made.dequantized, held[1])
        flag.zero_()
        native.quantize(other, spec, **call)
        fresh = native.quantize(other, spec, layouts=layouts, amax=True, dequantized=True, **given)
        for direction in spec.directions:
            assert torch.equal(native.dequantize(made.codes, direction), native.dequantize(fresh.codes, direction))
        assert torch.equal(made.amax, fresh.amax)
        assert torch.equal(made.dequantized, fresh.dequantized)


def test_results_pickle_and_copy(rng: np.random.Generator) -> None:
    """A GroupedTensor of native layouts is an ordinary one: deepcopy keeps planes and layouts."""
    q = native.quantize(
        torch.randn(60, 40), QuantizerSpec(scaling="nvfp4", format="e2m1"), SIZES, layouts=("rows", "panels")
    )
    twin = copy.deepcopy(q.codes)
    assert twin.spec == q.codes.spec
    assert_equal(twin, q.codes)
