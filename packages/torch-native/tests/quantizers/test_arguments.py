"""Arguments that do not fit raise ValueError: what was given, what is needed, what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import native_calls as native
import pytest
import torch

import octavo_native
import octavo_torch
from octavo import GroupedTensorSpec, NoBackendError, QuantizerSpec
from octavo_torch import GroupedTensor
from octavo_torch.plugin_api import PLANES
from octavo_torch_native.gemm.gemm import Fprop
from octavo_torch_native.quantizers.dequantizer import Dequantizer, converted

X = torch.zeros(8, 32)
SPEC = QuantizerSpec(scaling="mxfp8", format="e4m3")
NVFP4 = QuantizerSpec(scaling="nvfp4", format="e2m1", rounding="stochastic")
DELAYED = QuantizerSpec(scaling="delayed", format="e4m3")
COLUMNS = QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="columnwise")


def quantize(x: Any = X, spec: Any = SPEC, sizes: Any = (4, 4), **rest: Any) -> Callable[[], Any]:
    return lambda: native.quantize(x, spec, sizes, **rest)


def act(x: Any = X, **rest: Any) -> Callable[[], Any]:
    return lambda: native.act_quantize(x, SPEC, [4, 4], **rest)


def dact(dy: Any, x: Any = X, **rest: Any) -> Callable[[], Any]:
    return lambda: native.dact_quantize(dy, x, SPEC, [4, 4], **rest)


def norm(gamma: Any, beta: Any = None, **rest: Any) -> Callable[[], Any]:
    return lambda: native.norm_quantize(X, gamma, beta, SPEC, [4, 4], **rest)


def foreign() -> GroupedTensor:
    spec = GroupedTensorSpec(shape=(8, 32), groups=1, quantizer=SPEC, rowwise_layout="acme-tiles")
    return GroupedTensor(spec, torch.tensor([8]), rowwise=X, rowwise_scale=X)


ONES = torch.ones(32)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "x type": (quantize([1.0]), "x is a list; give a tensor"),
    "x dtype": (quantize(X.double()), "x has dtype float64; give bfloat16, float16 or float32"),
    "x rank": (quantize(torch.zeros(8)), r"x has shape \[8\]"),
    "spec": (quantize(spec="mxfp8"), "spec is 'mxfp8'; give a QuantizerSpec"),
    "sum": (quantize(sizes=[4, 5]), "sum to 9 and the tensor has 8 rows"),
    "negative": (quantize(sizes=torch.tensor([9, -1])), r"group_sizes\[1\] is -1"),
    "huge": (quantize(sizes=torch.tensor([1 << 62, 1 << 62])), "sum to 9223372036854775808"),
    "sizes dtype": (quantize(sizes=torch.tensor([4.0, 4.0])), "group_sizes has dtype float32"),
    "sizes of matrices": (quantize(torch.zeros(2, 4, 8)), "group_sizes was given with stacked matrices"),
    "seed": (quantize(spec=NVFP4), "seed is None and the recipe rounds stochastically"),
    "seed type": (quantize(spec=NVFP4, seed=1.5), "seed is 1.5; give an integer"),
    "scale missing": (quantize(spec=DELAYED), "scale is None and delayed scaling"),
    "scale shape": (quantize(spec=DELAYED, scale=torch.ones(3)), r"scale is float32 \[3\]; give float32 \[2\]"),
    "scale unasked": (quantize(scale=torch.ones(2)), "scale was given and mxfp8 scaling makes its own"),
    "scale elsewhere": (quantize(spec=DELAYED, scale=torch.ones(2, device="meta")), "scale is on meta and x on cpu"),
    "operand": (quantize(operand="y"), "operand is 'y'; give 'x', 'w' or 'dy'"),
    "group_offset": (quantize(group_offset=-1), "group_offset is -1"),
    "layouts": (quantize(layouts="panels"), "layouts is 'panels'; give two names"),
    "copy of columns": (
        lambda: native.act_quantize(X, COLUMNS, [4, 4], dequantized=True),
        "wanted holds 'dequantized', which copies row data, and spec.orientation is 'columnwise'",
    ),
    "extras": (
        lambda: octavo_torch.act_quantize(X, SPEC, [4, 4], activation="silu", wanted=["dbias"]),
        r"wanted is \['dbias'\]; give a list of names out of activated, amax, dequantized",
    ),
    "extras, one name": (
        lambda: octavo_torch.act_quantize(X, SPEC, [4, 4], activation="silu", wanted="amax"),
        "wanted is 'amax'; give a list of names",
    ),
    "unchanged alone": (quantize(unchanged=torch.zeros(1, dtype=torch.int32)), "unchanged was given without out"),
    "unchanged dtype": (
        lambda: native.quantize(X, SPEC, [8], out=native.quantize(X, SPEC, [8]), unchanged=torch.zeros(1)),
        r"unchanged is float32 \[1\]; give an int32 tensor",
    ),
    "activation": (act(activation="tanh"), "activation is 'tanh'; give one of silu, gelu"),
    "odd columns": (act(torch.zeros(8, 31)), "x has 31 columns and swiglu reads a gate and an up projection"),
    "activation of matrices": (act(torch.zeros(2, 4, 8)), r"x has shape \[2, 4, 8\]; give \[M, K\]"),
    "probs shape": (act(probs=torch.ones(7)), r"probs is float32 \[7\]; give float32 \[8\]"),
    "probs dtype": (act(probs=torch.ones(8).half()), r"probs is float16 \[8\]; give float32 \[8\]"),
    "dy width": (dact(torch.zeros(8, 32)), r"dy is float32 \[8, 32\]; give float32 \[8, 16\]"),
    "dy dtype": (dact(torch.zeros(8, 16).bfloat16()), r"dy is bfloat16 \[8, 16\]; give float32 \[8, 16\]"),
    "dy elsewhere": (dact(torch.zeros(8, 16, device="meta")), "dy is on meta and x on cpu"),
    "norm": (norm(ONES, norm="batch"), "norm is 'batch'; give 'rms' or 'layer'"),
    "beta of rms": (norm(ONES, ONES), "beta was given and RMSNorm has no shift"),
    "gamma missing": (norm(None), r"gamma is None; give the weight of the normalization, \[32\]"),
    "gamma shape": (norm(torch.ones(8)), r"gamma is float32 \[8\]; give float32 \[32\]"),
    "gamma dtype": (norm(ONES.bfloat16()), r"gamma is bfloat16 \[32\]; give float32 \[32\]"),
    "beta shape": (norm(ONES, torch.ones(8), norm="layer"), r"beta is float32 \[8\]"),
    "epsilon": (norm(ONES, epsilon=-1.0), "epsilon is -1.0; give a finite number of zero or more"),
    "epsilon NaN": (norm(ONES, epsilon=float("nan")), "epsilon is nan"),
    "sizes of an index": (lambda: native.plan([5, 5], 8), "sum to 10 and the tensor has 8 rows"),
    "negative sizes of an index": (lambda: native.plan([5, -5], 8), r"group_sizes\[1\] is -5"),
    "no sizes": (quantize(sizes=[]), "group_sizes is empty"),
    "dequantize type": (lambda: native.dequantize(X), "q is a Tensor; give the GroupedTensor"),  # type: ignore[arg-type]
    "dequantize dtype": (
        lambda: native.dequantize(native.quantize(X, SPEC).codes, dtype=torch.float64),
        "dtype is torch.float64; give torch.float32",
    ),
    "direction": (
        lambda: native.dequantize(native.quantize(X, SPEC).codes, "diagonal"),  # type: ignore[arg-type]
        "direction is 'diagonal'",
    ),
    "direction not made": (
        lambda: native.dequantize(native.quantize(X, COLUMNS).codes, "rowwise"),
        "this tensor holds columnwise data only",
    ),
    "foreign layout": (lambda: Dequantizer()(foreign()), "rowwise data are in layout 'acme-tiles'; torch-native"),
    "convert": (
        lambda: converted(native.quantize(X, SPEC).codes, ("panels", "plain")),
        "layouts has 'panels' for rowwise data; give 'plain' or 'rows'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    """One line each: the argument, its value, the fix."""
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_layout_that_is_not_made_is_refused_by_the_registry() -> None:
    """NoBackendError with the backend's own sentence."""
    with pytest.raises(NoBackendError, match="panels was requested"):
        native.quantize(X, SPEC, [8], layouts=("panels", "plain"))
    with pytest.raises(NoBackendError, match="makes layouts panels, plain, rows"):
        native.quantize(X, SPEC, [8], layouts=("acme-tiles", "plain"))
    with pytest.raises(NoBackendError, match="produces rowwise data in layouts plain or rows; panels was requested"):
        native.convert(native.quantize(X, SPEC).codes, ("panels", "plain"))
    with pytest.raises(NoBackendError, match="reads layouts panels, plain, rows, the data are in acme-tiles, plain"):
        native.dequantize(foreign())


def test_the_kernels_check_again() -> None:
    """A wrong address or shape comes back as ValueError, whoever calls; nothing aborts."""
    plan = native.plan([8], 8)
    codes, scales = torch.empty(8, 32, dtype=torch.uint8), torch.empty(8, 1, dtype=torch.uint8)
    quantizer = octavo_native.Quantizer(format=octavo_native.FORMATS["e4m3"], scaling=octavo_native.SCALINGS["mxfp8"])
    good: dict[str, Any] = {
        "x": X.data_ptr(),
        "dtype": octavo_native.DTYPES["float32"],
        "rows": 8,
        "cols": 32,
        "row_stride": 32,
        "groups": 1,
        "plan": plan.words.data_ptr(),
    }
    plane = {"codes": codes.data_ptr(), "scales": scales.data_ptr()}

    def run(**changes: int) -> None:
        quantizer.run(
            cuda=False,
            input=octavo_native.InputArgs(**{**good, **{name: changes[name] for name in changes if name in good}}),
            rowwise=octavo_native.PlaneArgs(
                **{**plane, **{name: changes[name] for name in changes if name not in good}}
            ),
        )

    run()
    wrong = {"x": 0, "dtype": 7, "rows": -1, "row_stride": 31, "groups": 0, "plan": 8, "scales": 0, "layout": 5}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=r"; "):
            run(**{name: value})


@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4", "block"])
def test_planes_that_are_not_what_the_spec_says(scaling: str) -> None:
    """Kernels are given addresses: tensors that are too short, or of another dtype, are refused in either layout."""
    form = "e2m1" if scaling == "nvfp4" else "e4m3"
    spec = QuantizerSpec(scaling=scaling, format=form, orientation="rowwise")  # type: ignore[arg-type]
    group_sizes, gemm = torch.tensor([4, 4]), Fprop("float32")
    for layouts in (("plain", "plain"), ("rows", "plain")):
        x = native.quantize(torch.randn(8, 64), spec, group_sizes, layouts=layouts).codes
        w = native.quantize(torch.randn(2, 32, 64), spec, layouts=layouts).codes
        gemm(x, w, group_sizes)
        for plane in ("rowwise", "rowwise_scale"):
            short = replace(x, **{plane: getattr(x, plane).reshape(-1)[:-1].clone()})
            with pytest.raises(ValueError, match=r"x has codes .* its spec says .*; give the tensors"):
                gemm(short, w, group_sizes)
            with pytest.raises(ValueError, match=r"q's rowwise plane has codes"):
                Dequantizer()(short)
            with pytest.raises(ValueError, match=r"q's rowwise plane has codes"):
                converted(short, layouts)
            short = replace(w, **{plane: getattr(w, plane).reshape(-1)[:-1].clone()})
            with pytest.raises(ValueError, match=r"w has codes .* its spec says"):
                gemm(x, short, group_sizes)
        wide = replace(x, rowwise_scale=x.rowwise_scale.to(torch.float16))  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="scales float16"):
            gemm(wide, w, group_sizes)
        for number in (1, 3):
            other = replace(x, group_sizes=torch.ones(number, dtype=torch.int64))
            with pytest.raises(ValueError, match=f"there are {number} group sizes"):
                gemm(other, w, group_sizes)
            with pytest.raises(ValueError, match=f"q has {number} group sizes and 2 groups"):
                Dequantizer()(other)


@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4"])
def test_planes_that_were_cast_or_moved(scaling: str) -> None:
    """As many elements are not the same bytes: codes in fp32 and sizes in int16 were read as what the spec says."""
    form = "e2m1" if scaling == "nvfp4" else "e4m3"
    spec = QuantizerSpec(scaling=scaling, format=form, orientation="rowwise")  # type: ignore[arg-type]
    group_sizes, gemm, dequantizer = torch.tensor([4, 4]), Fprop("float32"), Dequantizer()
    x = native.quantize(torch.randn(8, 64), spec, group_sizes).codes
    w = native.quantize(torch.randn(2, 32, 64), spec).codes
    calls: list[Callable[[GroupedTensor], Any]] = [
        lambda q: gemm(q, w, group_sizes), dequantizer, lambda q: converted(q, ("rows", "plain"))
    ]  # fmt: skip
    there = {name: plane for name in PLANES if (plane := getattr(x, name)) is not None}
    changes = {("rowwise", "codes float32"): there["rowwise"].float()}
    for name, plane in there.items():
        if name != "rowwise":
            changes[name, " on meta"] = plane.to("meta")
        if name == "rowwise_global":
            changes[name, "factors float64"] = plane.double()
    for (name, said), plane in changes.items():
        for call in calls:
            with pytest.raises(ValueError, match=f"{said}.*, all on one device; give the tensors"):
                call(replace(x, **{name: plane}))
    elsewhere = {name: plane.to("meta") for name in PLANES if (plane := getattr(w, name)) is not None}
    with pytest.raises(ValueError, match="x's codes are on cpu and w's on meta; quantize both on one device"):
        gemm(x, replace(w, **elsewhere), group_sizes)
    for dtype in (torch.float32, torch.int16):
        with pytest.raises(ValueError, match=r"group_sizes is \w+ \[2\] on cpu; give int32 or int64 \[G\]"):
            dequantizer(replace(x, group_sizes=group_sizes.to(dtype)))
